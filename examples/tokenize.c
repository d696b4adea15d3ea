/* tokenize.c - text to token ids, and back.

   build:   cc -O3 -march=native -o tokenize examples/tokenize.c -lm -lpthread
   run:     printf 'Once upon a time' | ./tokenize stories260K.gguf
   output:  403 407 261 378
            and   echo 403 407 261 378 | ./tokenize --decode stories260K.gguf   prints the text. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "tokenize"
#include "common.h"

typedef struct options {
  const char *path;
  unsigned flags;
  bool pieces, decode;
} options;

static const struct argp_option option_list[] = {
  {"special", 's', NULL, 0, "Add BOS and EOS as the tokenizer's template says", 0},
  {"parse-special", 'x', NULL, 0, "Read \"<|endoftext|>\" as that token; trusted text only", 0},
  {"pieces", 'p', NULL, 0, "One token per line: its id, a tab, its spelling in the vocabulary", 0},
  {"decode", 'd', NULL, 0, "The other way: ids from stdin, text to stdout", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 's': o->flags |= TFM_ENCODE_SPECIAL; return 0;
  case 'x': o->flags |= TFM_ENCODE_PARSE_SPECIAL; return 0;
  case 'p': o->pieces = true; return 0;
  case 'd': o->decode = true; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_NO_ARGS:
    argp_error(state, "expected a TOKENIZER: a model or a tokenizer file");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "TOKENIZER",
  "Turns all of stdin into token ids, on one line.\v"
  "TOKENIZER is tokenizer.json, vocab.json with merges.txt beside it, a SentencePiece BPE .model, "
  "a llama2.c tokenizer.bin, a GGUF file, or a folder or model file that has one of these beside "
  "it. Every byte of stdin counts, a final newline too.\n\n"
  "Exit status: 0, or 1 on failure, 2 on wrong usage.",
  NULL, NULL, NULL};

/* The vocabulary's spelling, control characters and backslashes as \xNN. */
static void print_piece(const tfm_tokenizer *t, int32_t id) {
  size_t bytes = 0, i;
  const char *text = tfm_token_text(t, id, &bytes);
  printf("%d\t", (int)id);
  for (i = 0; text && i < bytes; i++) {
    unsigned char c = (unsigned char)text[i];
    if (c < 0x20 || c == 0x7f || c == '\\') printf("\\x%02x", c);
    else putchar(c);
  }
  putchar('\n');
}

static void print_ids(const tfm_tokenizer *t, const int32_t *ids, size_t n, bool pieces) {
  size_t i;
  for (i = 0; i < n; i++)
    if (pieces) print_piece(t, ids[i]);
    else printf("%s%d", i ? " " : "", (int)ids[i]);
  if (!pieces) putchar('\n');
}

static int encode(const tfm_tokenizer *t, const options *o, const char *text, size_t bytes) {
  int64_t n = tfm_encode(t, text, bytes, o->flags, NULL, 0);
  int32_t *ids = n < 0 ? NULL : (int32_t *)malloc(((size_t)n + 1) * sizeof *ids);
  if (n < 0 || (ids && tfm_encode(t, text, bytes, o->flags, ids, (size_t)n) != n)) {
    free(ids);
    return tool_fail();
  }
  if (!ids) return fprintf(stderr, TOOL ": out of memory\n"), TOOL_FAILED;
  print_ids(t, ids, (size_t)n, o->pieces);
  free(ids);
  return 0;
}

static int decode(const tfm_tokenizer *t, const char *input) {
  size_t n = 0;
  int32_t *ids = tool_read_ids(input, &n);
  int64_t bytes = ids ? tfm_decode(t, ids, n, NULL, 0) : 0;
  char *text = ids && bytes >= 0 ? (char *)malloc((size_t)bytes + 1) : NULL;
  int status = text ? 0 : ids && bytes < 0 ? tool_fail() : TOOL_FAILED;
  if (text) {
    tfm_decode(t, ids, n, text, (size_t)bytes + 1);
    fwrite(text, 1, (size_t)bytes, stdout);
  }
  free(text);
  free(ids);
  return status;
}

int main(int argc, char **argv) {
  options o;
  tfm_tokenizer *t;
  char *input;
  size_t bytes = 0;
  int status;
  memset(&o, 0, sizeof o);
  tool_parse(&parser, argc, argv, &o);
  t = tfm_tokenizer_load(o.path, NULL);
  if (!t) return tool_fail();
  input = tool_read_all(stdin, &bytes);
  status = !input ? TOOL_FAILED : o.decode ? decode(t, input) : encode(t, &o, input, bytes);
  free(input);
  tfm_tokenizer_free(t);
  return tool_finish(status);
}
