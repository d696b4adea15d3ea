/* tokenize.c - text to token ids, and back.

   build:   cc -O3 -march=native -o tokenize examples/tokenize.c -lm -lpthread
   run:     printf 'Once upon a time' | ./tokenize stories260K.gguf
   output:  403 407 261 378
            and   echo 403 407 261 378 | ./tokenize --decode stories260K.gguf   prints the text;
            ./tokenize --train bpe:4096 book.txt -o tokenizer.json   builds a vocabulary. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "tokenize"
#include "common.h"

enum { SPECIAL_MAX = 64 };
enum { KEY_TRAIN = 256 + 32, KEY_PATTERN, KEY_LEAST, KEY_SPECIAL, KEY_BOS, KEY_EOS, KEY_FORCE };

typedef struct options {
  const char *path, *output, *special[SPECIAL_MAX];
  char **files; /* to learn from */
  int file_count;
  unsigned flags;
  bool pieces, decode, train, force;
  tfm_vocabulary_config vocabulary;
} options;

static const struct argp_option option_list[] = {
  {"special", 's', NULL, 0, "Add BOS and EOS as the tokenizer's template says", 0},
  {"parse-special", 'x', NULL, 0, "Read \"<|endoftext|>\" as that token; trusted text only", 0},
  {"pieces", 'p', NULL, 0, "One token per line: its id, a tab, its spelling in the vocabulary", 0},
  {"decode", 'd', NULL, 0, "The other way: ids from stdin, text to stdout", 0},
  {NULL, 0, NULL, 0, "Building a vocabulary from texts:", 1},
  {"train", KEY_TRAIN, "KIND:N", 0, "Of KIND bpe, word or char, with N tokens at most", 1},
  {"output", 'o', "FILE", 0, "Write it to FILE, a tokenizer.json; required", 1},
  {"special-token", KEY_SPECIAL, "TEXT", 0,
   "Reserve the next of the first ids for TEXT; default: <s>, </s>, <pad>, <unk>", 1},
  {"add-bos", KEY_BOS, NULL, 0, "Let --special begin texts with <s>", 1},
  {"add-eos", KEY_EOS, NULL, 0, "Let --special end texts with </s>", 1},
  {"pattern", KEY_PATTERN, "NAME", 0, "Cut text like gpt2 (default), llama3 or qwen2", 1},
  {"min-frequency", KEY_LEAST, "N", 0, "Learn what comes N times; default: 2 of bpe, else 1", 1},
  {"force", KEY_FORCE, NULL, 0, "Overwrite FILE", 1},
  {"threads", 'j', "N", 0, "Use N threads; 0, the default: one per core", 1},
  {NULL, 0, NULL, 0, NULL, 0}};

/* "bpe:4096", or a kind alone */
static void set_kind(options *o, struct argp_state *state, const char *arg) {
  static const char *const kinds[] = {"bpe", "word", "char"}; /* by tfm_vocabulary */
  size_t n = strcspn(arg, ":");
  int i;
  o->train = true;
  for (i = 0; i < 3; i++)
    if (strlen(kinds[i]) == n && !strncmp(arg, kinds[i], n)) break;
  if (i == 3) argp_error(state, "--train: expected bpe:N, word:N or char:N, found \"%s\"", arg);
  o->vocabulary.kind = (tfm_vocabulary)i;
  if (arg[n])
    o->vocabulary.size = (int32_t)tool_integer(state, "--train", arg + n + 1, 0, 1 << 22);
}

static void add_special(options *o, struct argp_state *state, const char *text) {
  if (o->vocabulary.special_count == SPECIAL_MAX)
    argp_error(state, "--special-token: at most %d times", SPECIAL_MAX);
  o->special[o->vocabulary.special_count++] = text;
}

static void check_options(options *o, struct argp_state *state) {
  static const char *const usual[] = {"<s>", "</s>", "<pad>", "<unk>"};
  int i;
  if (!o->file_count)
    argp_error(state, o->train ? "expected texts to learn from"
                               : "expected a TOKENIZER: a model or a tokenizer file");
  if (o->train && !o->output) argp_error(state, "--train needs the FILE of --output");
  if (o->train && o->output && !o->force && access(o->output, F_OK) == 0)
    argp_error(state, "%s exists; --force overwrites it", o->output);
  if (!o->train && o->file_count > 1)
    argp_error(state, "expected one TOKENIZER, found another: \"%s\"", o->files[1]);
  for (i = 0; i < 4 && !o->special[i] && (i || !o->vocabulary.special_count); i++)
    add_special(o, state, usual[i]);
  if (o->file_count) o->path = o->files[0];
}

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  tfm_vocabulary_config *v = &o->vocabulary;
  switch (key) {
  case 's': o->flags |= TFM_ENCODE_SPECIAL; return 0;
  case 'x': o->flags |= TFM_ENCODE_PARSE_SPECIAL; return 0;
  case 'p': o->pieces = true; return 0;
  case 'd': o->decode = true; return 0;
  case 'o': o->output = arg; return 0;
  case 'j': v->threads = (int32_t)tool_integer(state, "--threads", arg, 0, 1024); return 0;
  case KEY_TRAIN: set_kind(o, state, arg); return 0;
  case KEY_SPECIAL: add_special(o, state, arg); return 0;
  case KEY_BOS: v->adds_bos = true; return 0;
  case KEY_EOS: v->adds_eos = true; return 0;
  case KEY_PATTERN: v->pattern = arg; return 0;
  case KEY_LEAST:
    v->min_frequency = tool_integer(state, "--min-frequency", arg, 1, INT64_MAX);
    return 0;
  case KEY_FORCE: o->force = true; return 0;
  case ARGP_KEY_ARGS: /* all that are left */
    o->files = state->argv + state->next;
    o->file_count = state->argc - state->next;
    return 0;
  case ARGP_KEY_END: check_options(o, state); return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "TOKENIZER\n--train KIND:N -o FILE TEXT...",
  "Turns all of stdin into token ids, on one line; or builds a vocabulary.\v"
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

/* ---- Building ---- */

typedef struct texts {
  char **text;
  size_t *bytes;
  int count;
} texts;

static bool texts_read(texts *t, const options *o) {
  t->text = (char **)calloc((size_t)o->file_count, sizeof *t->text);
  t->bytes = (size_t *)calloc((size_t)o->file_count, sizeof *t->bytes);
  while (t->text && t->bytes && t->count < o->file_count) {
    const char *path = o->files[t->count];
    FILE *f = fopen(path, "rb");
    if (!f) return fprintf(stderr, TOOL ": %s cannot be opened\n", path), false;
    t->text[t->count] = tool_read_all(f, &t->bytes[t->count]);
    fclose(f);
    if (!t->text[t->count++]) return false;
  }
  return t->count == o->file_count;
}

static void texts_free(texts *t) {
  while (t->count) free(t->text[--t->count]);
  free(t->text);
  free(t->bytes);
}

static int train(options *o) {
  texts in = {NULL, NULL, 0};
  tfm_tokenizer *t = NULL;
  tfm_tokenizer_info info;
  int status = TOOL_FAILED;
  o->vocabulary.special = o->special;
  o->vocabulary.host.progress = tool_progress;
  if (texts_read(&in, o)) {
    t = tfm_tokenizer_train((const char *const *)in.text, in.bytes, (size_t)in.count,
                            &o->vocabulary);
    status = t && tfm_tokenizer_save(t, o->output) == TFM_OK ? 0 : tool_fail();
  }
  if (!status && tfm_tokenizer_describe(t, &info) == TFM_OK)
    fprintf(stderr, TOOL ": %s: %s, %d tokens\n", o->output, info.kind, (int)info.vocabulary);
  tfm_tokenizer_free(t);
  texts_free(&in);
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
  if (o.train) return train(&o);
  t = tfm_tokenizer_load(o.path, NULL);
  if (!t) return tool_fail();
  input = tool_read_all(stdin, &bytes);
  status = !input ? TOOL_FAILED : o.decode ? decode(t, input) : encode(t, &o, input, bytes);
  free(input);
  tfm_tokenizer_free(t);
  return tool_finish(status);
}
