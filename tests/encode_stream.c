/* The child that tokenizer_diff.py compares with the reference:

     encode_stream TOKENIZER [--special | --bos] [--decode]

   Reads records from stdin until its end and answers each on stdout; numbers are little-endian.
     encoding   u32 length, that many bytes of text    u32 count, count x i32 ids
     --decode   u32 count, count x i32 ids             u32 length, that many bytes of text
   --special reads special tokens in the text as such; --bos adds the tokenizer's own too.
     encode_stream TOKENIZER --speed
   tells instead how many seconds 10 MB of each awkward text take. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct stream {
  tfm_tokenizer *tokenizer;
  unsigned flags;
  char *in, *out; /* one record each, grown as needed */
  size_t in_cap, out_cap;
} stream;

static void die(const char *sentence) {
  fprintf(stderr, "encode_stream: %s\n", sentence);
  exit(1);
}

static char *grow(char *p, size_t *cap, size_t need) {
  if (need <= *cap) return p;
  p = (char *)realloc(p, *cap = 2 * need);
  if (!p) die("out of memory");
  return p;
}

/* One record of `count` elements into s->in; false at the end of stdin. */
static bool read_record(stream *s, size_t element, uint32_t *count) {
  if (fread(count, sizeof *count, 1, stdin) != 1) return false;
  s->in = grow(s->in, &s->in_cap, *count * element + 1);
  if (fread(s->in, element, *count, stdin) != *count) die("a record ends early");
  return true;
}

static void write_record(const stream *s, size_t element, int64_t count) {
  uint32_t n = (uint32_t)count;
  fwrite(&n, sizeof n, 1, stdout);
  fwrite(s->out, element, n, stdout);
}

static void encode(stream *s, uint32_t n) {
  int64_t count;
  s->out = grow(s->out, &s->out_cap, 4 * ((size_t)n + 8));
  count = tfm_encode(s->tokenizer, s->in, n, s->flags, (int32_t *)(void *)s->out, s->out_cap / 4);
  if (count < 0) die(tfm_error());
  if ((size_t)count > s->out_cap / 4) {
    s->out = grow(s->out, &s->out_cap, 4 * (size_t)count);
    tfm_encode(s->tokenizer, s->in, n, s->flags, (int32_t *)(void *)s->out, s->out_cap / 4);
  }
  write_record(s, 4, count);
}

static void decode(stream *s, uint32_t n) {
  const int32_t *ids = (const int32_t *)(void *)s->in;
  int64_t bytes = tfm_decode(s->tokenizer, ids, n, NULL, 0);
  if (bytes < 0) die(tfm_error());
  s->out = grow(s->out, &s->out_cap, (size_t)bytes + 1);
  tfm_decode(s->tokenizer, ids, n, s->out, s->out_cap);
  write_record(s, 1, bytes);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void speed(const tfm_tokenizer *t) {
  static const char *const rows[][2] = {
    {"a", "a"}, {"blanks", " "}, {"underscores", "_"}, {"CJK", "\xe4\xb8\xad"},
    {"CJK, several", "\xe4\xb8\xad\xe6\x96\x87\xe5\xad\x97\xe6\xbc\xa2"}, {"marks", "\xcc\x81"},
    {"marks, two", "\xcc\x81\xcc\xa7"}, {"newlines", "\n"}, {"digits", "1"}, {"words", "the cat "},
    {"emoji", "\xf0\x9f\x98\x80"}};
  size_t n = 10000000, i, m;
  char *text = (char *)malloc(n);
  int32_t *ids = (int32_t *)malloc(4 * (n + 1));
  if (!text || !ids) die("out of memory");
  for (i = 0; i < sizeof rows / sizeof *rows; i++) {
    size_t unit = strlen(rows[i][1]);
    double before;
    int64_t count;
    for (m = 0; m + unit <= n; m += unit) memcpy(text + m, rows[i][1], unit);
    before = now();
    count = tfm_encode(t, text, m, 0, ids, n + 1);
    if (count < 0) die(tfm_error());
    printf("%-14s %6.3f s  %lld tokens\n", rows[i][0], now() - before, (long long)count);
  }
  free(text);
  free(ids);
}

int main(int argc, char **argv) {
  stream s = {NULL, 0, NULL, NULL, 0, 0};
  bool decodes = false, speeds = false;
  uint32_t n;
  int i;
  if (argc < 2) die("usage: encode_stream TOKENIZER [--special | --bos] [--decode]");
  for (i = 2; i < argc; i++)
    if (strcmp(argv[i], "--special") == 0) s.flags |= TFM_ENCODE_PARSE_SPECIAL;
    else if (strcmp(argv[i], "--bos") == 0)
      s.flags |= TFM_ENCODE_PARSE_SPECIAL | TFM_ENCODE_SPECIAL;
    else if (strcmp(argv[i], "--decode") == 0) decodes = true;
    else if (strcmp(argv[i], "--speed") == 0) speeds = true;
    else die("unknown option");
  s.tokenizer = tfm_tokenizer_load(argv[1], NULL);
  if (!s.tokenizer) die(tfm_error());
  if (speeds) speed(s.tokenizer);
  while (!speeds && read_record(&s, decodes ? 4 : 1, &n))
    if (decodes) decode(&s, n);
    else encode(&s, n);
  tfm_tokenizer_free(s.tokenizer);
  free(s.in);
  free(s.out);
  return 0;
}
