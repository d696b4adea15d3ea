/* Tokenizers: golden ids and texts of the reference, bad files, awkward texts, failing memory. The
   goldens are made by make_tokenizer_goldens.py; ../shared/data is used where it is there. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include "files.h"
#include "test.h"

#define GOLDEN DATA "tokenizers/"

static void check_refused(const char *text, size_t bytes, int status, const char *part);

/* ---- Goldens ---- */

typedef struct lines {
  char *at, *end;
  char stop;
} lines;

/* The next record of a file, which `stop` ends; false at its end. */
static bool lines_next(lines *l, char **record, size_t *bytes) {
  char *stop = l->at < l->end ? (char *)memchr(l->at, l->stop, (size_t)(l->end - l->at)) : NULL;
  if (!stop) return false;
  *record = l->at;
  *bytes = (size_t)(stop - l->at);
  *stop = 0;
  l->at = stop + 1;
  return true;
}

static lines lines_open(blob b, char stop) {
  lines l;
  l.at = (char *)b.data;
  l.end = b.bytes ? l.at + b.bytes : l.at;
  l.stop = stop;
  return l;
}

static blob golden(const char *name, const char *end) {
  char path[256];
  snprintf(path, sizeof path, GOLDEN "%s.%s", name, end);
  return blob_read(path);
}

static size_t parse_ids(char *line, int32_t *ids, size_t cap) {
  size_t n = 0;
  char *end;
  for (; n < cap; line = end) {
    long id = strtol(line, &end, 10);
    if (end == line) break;
    ids[n++] = (int32_t)id;
  }
  return n;
}

static bool same_ids(const int32_t *a, int64_t n, const int32_t *b, size_t m) {
  return n == (int64_t)m && memcmp(a, b, m * sizeof *a) == 0;
}

/* Streaming must say what decoding at once says. */
static void check_streaming(const tfm_tokenizer *t, const int32_t *ids, size_t n, const char *whole,
                            size_t bytes) {
  size_t cap = tfm_decode_bound(t), used = 0, i;
  char *piece = (char *)malloc(cap);
  tfm_decoder state;
  memset(&state, 0, sizeof state);
  for (i = 0; i <= n; i++) {
    int64_t k = tfm_decode_next(t, &state, i < n ? ids[i] : -1, piece, cap);
    CHECK(k >= 0 && memcmp(piece, whole + used, (size_t)k) == 0);
    used += (size_t)k;
  }
  CHECK_EQ_INT(used, bytes);
  free(piece);
}

static void check_text(const tfm_tokenizer *t, const char *name, const char *text, size_t bytes,
                       unsigned flags, const int32_t *expected, size_t count) {
  static int32_t ids[4096];
  int64_t n = tfm_encode(t, text, bytes, flags, ids, 4096);
  CHECK(n <= 4096);
  if (same_ids(ids, n, expected, count)) return;
  fprintf(stderr, "%s: \"%.60s\": %lld ids, expected %lld\n", name, text, (long long)n,
          (long long)count);
  CHECK(!"ids differ");
}

/* NAME.MODE.ids against strings.txt, and NAME.MODE.decoded against decoding them. */
static void check_goldens(const tfm_tokenizer *t, const char *name, const char *mode,
                          unsigned flags) {
  static int32_t expected[4096];
  static char text[65536];
  char file[64];
  blob strings = blob_read(GOLDEN "strings.txt"), ids, decoded;
  lines s = lines_open(strings, 0x1e), i, d;
  char *string, *row, *said;
  size_t bytes, row_bytes, said_bytes, count;
  int compared = 0;
  snprintf(file, sizeof file, "%s.%s", name, mode);
  ids = golden(file, "ids");
  decoded = golden(file, "decoded");
  i = lines_open(ids, '\n');
  d = lines_open(decoded, 0x1e);
  while (lines_next(&s, &string, &bytes) && lines_next(&i, &row, &row_bytes) &&
         lines_next(&d, &said, &said_bytes)) {
    int64_t n;
    count = parse_ids(row, expected, 4096);
    check_text(t, file, string, bytes, flags, expected, count);
    n = tfm_decode(t, expected, count, text, sizeof text);
    CHECK(n == (int64_t)said_bytes && memcmp(text, said, said_bytes) == 0);
    check_streaming(t, expected, count, text, said_bytes);
    compared++;
  }
  CHECK(compared > 300);
  free(strings.data);
  free(ids.data);
  free(decoded.data);
}

static size_t unhex(const char *hex, char *out) {
  size_t n = 0;
  unsigned byte;
  for (; hex[0] && hex[1]; hex += 2) {
    sscanf(hex, "%2x", &byte);
    out[n++] = (char)byte;
  }
  out[n] = 0;
  return n;
}

/* NAME.random: any ids. Where bytes are told one by one, lists that give U+FFFD are left out: the
   reference then drops valid characters too (see >>tokenizer, decoding). SentencePiece says special
   tokens differently: lists with ids below `least` are left out. */
static void check_random(const tfm_tokenizer *t, const char *name, bool exact, int32_t least) {
  static int32_t ids[4096];
  static char text[65536], wanted[65536];
  char file[64], *row, *hex;
  blob a, b;
  lines i, h;
  size_t bytes, count, k;
  int compared = 0;
  snprintf(file, sizeof file, "%s.random", name);
  a = golden(file, "ids");
  b = golden(file, "hex");
  i = lines_open(a, '\n');
  h = lines_open(b, '\n');
  while (lines_next(&i, &row, &bytes) && lines_next(&h, &hex, &bytes)) {
    size_t n = unhex(hex, wanted);
    bool leave = !exact && strstr(hex, "efbfbd");
    count = parse_ids(row, ids, 4096);
    for (k = 0; k < count; k++) leave = leave || ids[k] < least;
    if (leave) continue;
    CHECK(tfm_decode(t, ids, count, text, sizeof text) == (int64_t)n && !memcmp(text, wanted, n));
    check_streaming(t, ids, count, text, n);
    compared++;
  }
  CHECK(compared > 20);
  free(a.data);
  free(b.data);
}

/* NAME.each.hex: every id alone. */
static void check_each(const tfm_tokenizer *t, const char *name, int32_t least) {
  static char text[4096], wanted[4096];
  blob b = golden(name, "each.hex");
  lines h = lines_open(b, '\n');
  char *hex;
  size_t bytes;
  int32_t id;
  for (id = 0; lines_next(&h, &hex, &bytes); id++) {
    size_t n = unhex(hex, wanted);
    if (id < least || (least && !strcmp(wanted, " "))) continue; /* it strips no blank byte */
    CHECK(tfm_decode(t, &id, 1, text, sizeof text) == (int64_t)n && !memcmp(text, wanted, n));
  }
  CHECK(id > 300);
  free(b.data);
}

static tfm_tokenizer *load(const char *path) {
  tfm_tokenizer *t = tfm_tokenizer_load(path, NULL);
  if (!t) CHECK_STR(tfm_error(), "");
  return t;
}

static bool is_there(const char *path) {
  FILE *f = fopen(path, "rb");
  if (f) fclose(f);
  return f != NULL;
}

static void check_hf(const char *path, const char *name, bool exact) {
  tfm_tokenizer *t = load(path);
  if (!t) return;
  check_goldens(t, name, "plain", 0);
  check_goldens(t, name, "special", TFM_ENCODE_PARSE_SPECIAL);
  check_random(t, name, exact, 0);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_llama3_kind) {
  tfm_tokenizer *t;
  check_hf(GOLDEN "llama3-kind/tokenizer.json", "llama3-kind", true);
  t = load(GOLDEN "llama3-kind");
  check_goldens(t, "llama3-kind", "bos", TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL);
  check_each(t, "llama3-kind", 0);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_sentencepiece) {
  tfm_tokenizer *t = load(GOLDEN "spm-bpe/tokenizer.model");
  check_goldens(t, "spm-bpe", "plain", 0);
  check_random(t, "spm-bpe", true, 3);
  check_each(t, "spm-bpe", 3);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_gpt2) {
  tfm_tokenizer *t;
  if (!is_there(SHARED "gpt2/tokenizer.json")) SKIP("no " SHARED "gpt2");
  check_hf(SHARED "gpt2/tokenizer.json", "gpt2", true);
  t = load(SHARED "gpt2/vocab.json");
  check_goldens(t, "gpt2", "plain", 0);
  check_goldens(t, "gpt2", "special", TFM_ENCODE_PARSE_SPECIAL);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_llama2) {
  if (!is_there(SHARED "tokenizers/llama2/tokenizer.json")) SKIP("no " SHARED "tokenizers/llama2");
  check_hf(SHARED "tokenizers/llama2/tokenizer.json", "llama2", false);
}

TEST(tokenizer_phi3) {
  if (!is_there(SHARED "tokenizers/phi-3/tokenizer.json")) SKIP("no " SHARED "tokenizers/phi-3");
  check_hf(SHARED "tokenizers/phi-3/tokenizer.json", "phi3", false);
}

/* NAME.MODE.ids only, and NAME.MODE.decoded where it is there. */
static void check_ids(const char *path, const char *name, unsigned flags) {
  static int32_t expected[4096];
  static char text[65536];
  blob strings = blob_read(GOLDEN "strings.txt"), ids = golden(name, "ids"), decoded;
  lines s = lines_open(strings, 0x1e), i = lines_open(ids, '\n'), d;
  char *string, *row, *said;
  size_t bytes, row_bytes, said_bytes;
  tfm_tokenizer *t = load(path);
  int compared = 0;
  decoded = golden(name, "decoded");
  d = lines_open(decoded, 0x1e);
  while (t && lines_next(&s, &string, &bytes) && lines_next(&i, &row, &row_bytes)) {
    size_t count = parse_ids(row, expected, 4096);
    check_text(t, name, string, bytes, flags, expected, count);
    compared++;
    if (!decoded.data || !lines_next(&d, &said, &said_bytes)) continue;
    CHECK(tfm_decode(t, expected, count, text, sizeof text) == (int64_t)said_bytes);
    CHECK(memcmp(text, said, said_bytes) == 0);
    check_streaming(t, expected, count, text, said_bytes);
  }
  CHECK(compared > 300);
  tfm_tokenizer_free(t);
  free(strings.data);
  free(ids.data);
  free(decoded.data);
}

TEST(tokenizer_folders) {
  static const struct {
    const char *path, *name;
    unsigned flags;
  } rows[] = {
    {"phi-2/tokenizer.json", "phi2.bos", TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL},
    {"roberta-base", "roberta.bos", TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL},
    {"t5-small", "t5.bos", TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL},
    {"qwen2", "qwen2.bos", TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL},
    {"mistral/tokenizer.model.v1", "mistral1.plain", 0},
    {"mistral/mistral_instruct_tokenizer_240323.model.v3", "mistral3.plain", 0},
  };
  char path[256];
  size_t i;
  if (!is_there(SHARED "tokenizers/t5-small/tokenizer.json")) SKIP("no " SHARED "tokenizers");
  for (i = 0; i < sizeof rows / sizeof *rows; i++) {
    snprintf(path, sizeof path, SHARED "tokenizers/%s", rows[i].path);
    check_ids(path, rows[i].name, rows[i].flags);
  }
}

TEST(tokenizer_llama2_model) {
  tfm_tokenizer *t;
  if (!is_there(SHARED "tokenizers/llama2/tokenizer.model")) SKIP("no " SHARED "tokenizers/llama2");
  t = load(SHARED "tokenizers/llama2/tokenizer.model");
  check_goldens(t, "llama2-spm", "plain", 0);
  check_random(t, "llama2-spm", true, 3);
  tfm_tokenizer_free(t);
}

/* Two files of one vocabulary give the same ids on all strings that `skip` is not part of. */
static void check_same(const char *path, const char *other, const char *skip) {
  static int32_t ids[4096], expected[4096];
  tfm_tokenizer *t = load(path), *u = load(other);
  blob strings = blob_read(GOLDEN "strings.txt");
  lines s = lines_open(strings, 0x1e);
  char *string;
  size_t bytes;
  while (t && u && lines_next(&s, &string, &bytes)) {
    int64_t n = tfm_encode(t, string, bytes, TFM_ENCODE_SPECIAL, ids, 4096);
    int64_t m = tfm_encode(u, string, bytes, TFM_ENCODE_SPECIAL, expected, 4096);
    if (skip && strstr(string, skip)) continue;
    if (!same_ids(ids, n, expected, (size_t)m)) CHECK_STR(string, other);
  }
  tfm_tokenizer_free(t);
  tfm_tokenizer_free(u);
  free(strings.data);
}

TEST(tokenizer_same_vocabulary) {
  const char *llama = SHARED "tokenizers/llama2/tokenizer.model";
  const char *low_line = "\xe2\x96\x81"; /* a blank to SentencePiece, a character to llama2.c */
  if (!is_there(llama)) SKIP("no " SHARED "tokenizers/llama2");
  check_same(llama, SHARED "llama-2-tiny-random.gguf", NULL);
  check_same(llama, SHARED "tokenizers/llama2/tokenizer.bin", low_line);
  check_same(SHARED "stories260K/stories260K.gguf", SHARED "stories260K/tok512.bin", low_line);
}

/* Texts and ids as llama.cpp keeps them: separated by a line of its own, ids line by line. */
static void check_vectors(const char *name) {
  static const char mark[] = "\n__ggml_vocab_test__\n";
  static int32_t expected[4096];
  char path[256], *row;
  blob in, out;
  tfm_tokenizer *t;
  lines o;
  char *text, *end;
  size_t bytes;
  snprintf(path, sizeof path, SHARED "vocab-vectors/ggml-vocab-%s.gguf", name);
  t = load(path);
  snprintf(path, sizeof path, SHARED "vocab-vectors/ggml-vocab-%s.gguf.inp", name);
  in = blob_read(path);
  snprintf(path, sizeof path, SHARED "vocab-vectors/ggml-vocab-%s.gguf.out", name);
  out = blob_read(path);
  o = lines_open(out, '\n');
  for (text = (char *)in.data; t && (end = strstr(text, mark)); text = end + sizeof mark - 1) {
    bool has_ids = lines_next(&o, &row, &bytes);
    CHECK(has_ids);
    if (!has_ids) break;
    check_text(t, name, text, (size_t)(end - text), 0, expected, parse_ids(row, expected, 4096));
  }
  CHECK(text != (char *)in.data);
  tfm_tokenizer_free(t);
  free(in.data);
  free(out.data);
}

TEST(tokenizer_vectors) {
  if (!is_there(SHARED "vocab-vectors/ggml-vocab-gpt-2.gguf")) SKIP("no " SHARED "vocab-vectors");
  check_vectors("gpt-2");
  check_vectors("llama-spm");
  check_vectors("phi-3");
  check_vectors("refact");
}

/* ---- tiktoken ---- */

static size_t put_base64(char *out, const uint8_t *p, size_t n) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  size_t i, size = 0;
  for (i = 0; i < n; i += 3) {
    uint32_t bits = (uint32_t)p[i] << 16 | (i + 1 < n ? (uint32_t)p[i + 1] << 8 : 0) |
                    (i + 2 < n ? p[i + 2] : 0);
    out[size++] = digits[bits >> 18];
    out[size++] = digits[bits >> 12 & 63];
    out[size++] = i + 1 < n ? digits[bits >> 6 & 63] : '=';
    out[size++] = i + 2 < n ? digits[bits & 63] : '=';
  }
  return size;
}

/* GPT-2's vocabulary in this form: its ids are its ranks. */
TEST(tokenizer_tiktoken) {
  tfm_tokenizer *t;
  tfm_tokenizer_config config;
  char *file, *at, said[1024];
  int32_t id;
  if (!is_there(SHARED "gpt2/tokenizer.json")) SKIP("no " SHARED "gpt2");
  t = load(SHARED "gpt2/tokenizer.json");
  file = at = (char *)malloc(4 << 20);
  for (id = 0; id < 50256; id++) {
    const tfmi_token *token = &t->token[id];
    at += put_base64(at, (const uint8_t *)t->arena + token->said_at, token->said_n);
    at += sprintf(at, " %d\n", (int)id);
  }
  tfm_tokenizer_free(t);
  check_refused(file, (size_t)(at - file), TFM_E_UNSUPPORTED, "splitting");
  memset(&config, 0, sizeof config);
  config.splitting = "gpt2";
  t = tfm_tokenizer_load_memory(file, (size_t)(at - file), &config);
  if (!t) CHECK_STR(tfm_error(), "");
  check_goldens(t, "gpt2", "plain", 0);
  check_goldens(t, "gpt2", "special", TFM_ENCODE_PARSE_SPECIAL);
  id = 50256;
  CHECK_EQ_INT(tfm_decode(t, &id, 1, said, sizeof said), 13);
  tfm_tokenizer_free(t);
  CHECK(!tfm_tokenizer_load_memory("YQ== 0\n", 7, &config));
  CHECK_STR_HAS(tfm_error(), "no token for the byte");
  CHECK(!tfm_tokenizer_load_memory("YQ== 0\nYg 1\n", 12, &config));
  CHECK_STR_HAS(tfm_error(), "byte 7");
  free(file);
}

static char *put_bytes(char *at) { /* a token each, in tiktoken's form */
  int i;
  for (i = 0; i < 256; i++) {
    uint8_t byte = (uint8_t)i;
    at += put_base64(at, &byte, 1);
    at += sprintf(at, " %d\n", i);
  }
  return at;
}

/* All bytes, then the pieces that a text is to be cut into: each must come out whole. */
static void check_pieces(const char *splitting, const char *const *piece, int n) {
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  char file[8192], text[256] = "", *at = put_bytes(file);
  int32_t ids[64];
  int i;
  for (i = 0; i < n; i++) {
    at += put_base64(at, (const uint8_t *)piece[i], strlen(piece[i]));
    at += sprintf(at, " %d\n", 256 + i);
    strcat(text, piece[i]);
  }
  memset(&config, 0, sizeof config);
  config.splitting = splitting;
  t = tfm_tokenizer_load_memory(file, (size_t)(at - file), &config);
  if (!t) CHECK_STR(tfm_error(), splitting);
  CHECK_EQ_INT(tfm_encode(t, text, strlen(text), 0, ids, 64), n);
  for (i = 0; i < n; i++) CHECK_EQ_INT(ids[i], 256 + i);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_tiktoken_splits) { /* as the package of that name does */
  static const char *const o200k[] = {"HELLOworld's", " can'T", "  \n", "123", "45",
                                      " \xe4\xb8\xad", "AAAA", " \xe4\xb8\xad" "ab", "/\n\n",
                                      "  ", " x", "#Foo", "!\n", "   "};
  static const char *const cl100k[] = {"HELLOworld", "'S", " can", "'t", "  \n", "123", "45",
                                       " \xe4\xb8\xad" "AAAA", " !/\n\n", "  ", " x", " \n  "};
  check_pieces("o200k_base", o200k, TFMI_COUNT(o200k));
  check_pieces("cl100k_base", cl100k, TFMI_COUNT(cl100k));
}

/* The ids of each splitting's special tokens: those that are easily taken for others. */
TEST(tokenizer_tiktoken_specials) {
  static const struct { const char *splitting, *text; int32_t id; } rows[] = {
    {"gpt2", "<|endoftext|>", 50256}, {"cl100k_base", "<|endofprompt|>", 100276},
    {"o200k_base", "<|endofprompt|>", 200018}, {"llama3", "<|end_of_text|>", 128001},
    {"llama3", "<|reserved_special_token_0|>", -1}, {"llama3", "<|eot_id|>", 128009},
    {"qwen", "<|im_end|>", 151645}, {"qwen", "<|extra_0|>", 151646},
    {"qwen", "<|extra_204|>", 151850}, {"qwen", "<|extra_205|>", -1}};
  char file[8192];
  size_t bytes = (size_t)(put_bytes(file) - file);
  int i;
  for (i = 0; i < TFMI_COUNT(rows); i++) {
    tfm_tokenizer_config config;
    tfm_tokenizer *t;
    int32_t id = -1;
    memset(&config, 0, sizeof config);
    config.splitting = rows[i].splitting;
    t = tfm_tokenizer_load_memory(file, bytes, &config);
    if (!t) CHECK_STR(tfm_error(), rows[i].splitting);
    CHECK_EQ_INT(tfm_token_id(t, rows[i].text, strlen(rows[i].text)), rows[i].id);
    if (rows[i].id >= 0) {
      CHECK_EQ_INT(tfm_encode(t, rows[i].text, strlen(rows[i].text), TFM_ENCODE_PARSE_SPECIAL, &id,
                              1), 1);
      CHECK_EQ_INT(id, rows[i].id);
    }
    tfm_tokenizer_free(t);
  }
}

/* ---- Arguments ---- */

TEST(tokenizer_arguments) {
  tfm_tokenizer *t = load(GOLDEN "llama3-kind");
  int32_t ids[8] = {0}, bad;
  const char *spelled;
  char text[8];
  size_t bytes = 0;
  tfm_decoder state;
  memset(&state, 0, sizeof state);
  CHECK_EQ_INT(tfm_encode(t, NULL, 0, 0, NULL, 0), 0);
  CHECK_EQ_INT(tfm_encode(t, "", 0, TFM_ENCODE_SPECIAL, NULL, 0), 1);
  CHECK_EQ_INT(tfm_encode(t, NULL, 1, 0, NULL, 0), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode(t, "a", SIZE_MAX, 0, NULL, 0), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode(t, " ", 1, 0, NULL, 0), 1);
  CHECK_EQ_INT(tfm_encode(t, "\n\n\n", 3, 0, NULL, 0), 3);
  CHECK_EQ_INT(tfm_encode(t, "a", 1, 0, NULL, 1), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode(t, "a", 1, 4, ids, 1), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode(NULL, "a", 1, 0, ids, 1), TFM_E_ARG);
  CHECK(tfm_encode(t, "1 2 3", 5, 0, ids, 2) > 2); /* tells what it would take */
  CHECK_EQ_INT(ids[2], 0);
  bad = -1;
  CHECK_EQ_INT(tfm_decode(t, &bad, 1, text, sizeof text), TFM_E_ARG);
  bad = INT32_MAX;
  CHECK_EQ_INT(tfm_decode(t, &bad, 1, text, sizeof text), TFM_E_ARG);
  CHECK_EQ_INT(tfm_decode(t, NULL, 0, text, 1), 0);
  CHECK_EQ_INT(tfm_decode_next(t, &state, 0, text, 1), TFM_E_ARG);
  CHECK(tfm_token_text(t, -1, &bytes) == NULL);
  CHECK_EQ_INT(tfm_token_id(t, "no such token", 13), -1);
  spelled = tfm_token_text(t, 5, &bytes);
  CHECK_EQ_INT(tfm_token_id(t, spelled, bytes), 5);
  CHECK(!tfm_tokenizer_load(NULL, NULL) && !tfm_tokenizer_load_memory(NULL, 1, NULL));
  tfm_tokenizer_free(t);
  tfm_tokenizer_free(NULL);
}

TEST(tokenizer_decode_is_cut_like_snprintf) {
  tfm_tokenizer *t = load(GOLDEN "spm-bpe");
  int32_t ids[16];
  int64_t n = tfm_encode(t, "a word", 6, 0, ids, 16);
  char text[16];
  size_t cap;
  for (cap = 1; cap < 9; cap++) {
    memset(text, 'x', sizeof text);
    CHECK_EQ_INT(tfm_decode(t, ids, (size_t)n, text, cap), 6);
    CHECK_EQ_INT(strlen(text), cap - 1 < 6 ? cap - 1 : 6);
    CHECK(text[cap] == 'x');
  }
  tfm_tokenizer_free(t);
}

/* ---- Awkward text ---- */

static void check_round(const tfm_tokenizer *t, const char *text, size_t bytes,
                        const char *expected) {
  int32_t ids[256];
  char back[512];
  int64_t n = tfm_encode(t, text, bytes, 0, ids, 256);
  CHECK(n >= 0 && n <= 256);
  CHECK_EQ_INT(tfm_decode(t, ids, (size_t)n, back, sizeof back), strlen(expected));
  CHECK_STR(back, expected);
}

TEST(tokenizer_broken_utf8) {
  static const char *const paths[] = {GOLDEN "llama3-kind", GOLDEN "spm-bpe"};
  int i;
  for (i = 0; i < 2; i++) {
    tfm_tokenizer *t = load(paths[i]);
    check_round(t, "a\x80z", 3, "a\xef\xbf\xbdz");
    check_round(t, "a\xc0\x80z", 4, "a\xef\xbf\xbd\xef\xbf\xbdz");
    check_round(t, "\xf5", 1, "\xef\xbf\xbd");
    check_round(t, "\xed\xa0\x80", 3, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    check_round(t, "\xf4\x8f\xbf\xbf", 4, "\xf4\x8f\xbf\xbf");
    check_round(t, "x\xe2\x82", 3, i ? "x\xef\xbf\xbd\xef\xbf\xbd" : "x\xef\xbf\xbd");
    tfm_tokenizer_free(t);
  }
}

/* A million of each in a moment: near linear, whatever repeats. */
TEST(tokenizer_long_texts) {
  static const char *const units[] = {"a",  "_",            " ",        "\n", "ab",
                                      "1", "\xe4\xb8\xad", "\xcc\x81", "<s>"};
  static const char *const paths[] = {GOLDEN "llama3-kind", GOLDEN "spm-bpe"};
  size_t n = 1000000, i, k, m;
  char *text = (char *)malloc(n), *back = (char *)malloc(n + 1);
  int32_t *ids = (int32_t *)malloc((n + 1) * sizeof *ids);
  for (i = 0; i < 2; i++) {
    tfm_tokenizer *t = load(paths[i]);
    for (k = 0; k < sizeof units / sizeof *units; k++) {
      size_t unit = strlen(units[k]), whole = n / unit * unit;
      int64_t count;
      for (m = 0; m < whole; m += unit) memcpy(text + m, units[k], unit);
      count = tfm_encode(t, text, whole, 0, ids, n + 1);
      CHECK(count > 0 && count <= (int64_t)whole + 1);
      CHECK_EQ_INT(tfm_decode(t, ids, (size_t)count, back, n + 1), whole);
      CHECK(memcmp(back, text, whole) == 0);
    }
    tfm_tokenizer_free(t);
  }
  free(text);
  free(back);
  free(ids);
}

#if !defined(_WIN32) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* 2^31 bytes of newlines: the same 16 MiB again and again. */
static char *many_newlines(size_t bytes) {
  size_t part = 16 << 20, i;
  FILE *f = tmpfile();
  char *all = (char *)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                           0);
  if (!f || all == MAP_FAILED || ftruncate(fileno(f), (off_t)part) != 0) return NULL;
  for (i = 0; i < bytes; i += part)
    if (mmap(all + i, part, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fileno(f), 0) ==
        MAP_FAILED) return NULL;
  memset(all, '\n', part);
  fclose(f);
  return all;
}

/* Counts beyond 32 bits: a sentence, within the memory that was allowed, and no crash. Of bytes in
   pieces it takes half a minute, which is for LONG=1. */
TEST(tokenizer_text_of_2_GiB) {
  size_t bytes = (size_t)1 << 31;
  char *text = sizeof(size_t) > 4 ? many_newlines(bytes) : NULL;
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  if (!text) SKIP("so much cannot be mapped here");
  memset(&config, 0, sizeof config);
  config.host.memory_limit_bytes = 64 << 20;
  t = tfm_tokenizer_load(GOLDEN "spm-bpe", &config);
  CHECK_EQ_INT(tfm_encode(t, text, bytes, 0, NULL, 0), TFM_E_MEMORY);
  CHECK_STR_HAS(tfm_error(), "memory limit");
  tfm_tokenizer_free(t);
  if (getenv("LONG")) {
    t = tfm_tokenizer_load(GOLDEN "llama3-kind", &config);
    CHECK_EQ_INT(tfm_encode(t, text, bytes, 0, NULL, 0), TFM_E_ARG);
    CHECK_STR_HAS(tfm_error(), "2147483648 bytes in one piece");
    tfm_tokenizer_free(t);
  }
  munmap(text, bytes);
}
#endif

/* A million of two characters by turns: what they make in a normal form, and whether it is the same
   the other way round. */
static void check_turns(const tfm_tokenizer *t, const char *const unit[2], int64_t expected,
                        bool same, int32_t second) {
  size_t n = 1000000, i, k, bytes;
  char *text = (char *)malloc(3 * n + 1);
  int32_t *ids[2];
  for (i = 0; i < 2; i++) {
    ids[i] = (int32_t *)malloc(n * sizeof *ids[i]);
    for (bytes = k = 0; k < n; k++) bytes += (size_t)sprintf(text + bytes, "%s", unit[(k + i) & 1]);
    if (!i || same) CHECK_EQ_INT(tfm_encode(t, text, bytes, 0, ids[i], n), expected);
  }
  CHECK_EQ_INT(ids[0][1], second);
  CHECK(!same || memcmp(ids[0], ids[1], (size_t)expected * sizeof **ids) == 0);
  free(ids[0]);
  free(ids[1]);
  free(text);
}

TEST(tokenizer_many_marks) { /* sorted in linear time; syllables of Hangul made and taken apart */
  static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
  static const char *const marks[] = {"\xcc\x81", "\xcc\xa7"};
  static const char *const jamo[] = {"\xe1\x84\x80", "\xe1\x85\xa1"};
  char file[512];
  int i;
  for (i = 0; i < 4; i++) {
    tfm_tokenizer *t;
    snprintf(file, sizeof file,
             "{\"normalizer\":{\"type\":\"%s\"},\"decoder\":{\"type\":\"Fuse\"},\"model\":{"
             "\"type\":\"BPE\",\"unk_token\":\"?\",\"merges\":[],\"vocab\":{\"?\":0,\"\xcc\x81\":1,"
             "\"\xcc\xa7\":2,\"\xea\xb0\x80\":3,\"\xe1\x84\x80\":4,\"\xe1\x85\xa1\":5}}}",
             forms[i]);
    t = tfm_tokenizer_load_memory(file, strlen(file), NULL);
    if (!t) CHECK_STR(tfm_error(), forms[i]);
    check_turns(t, marks, 1000000, true, 2);
    check_turns(t, jamo, i & 1 ? 1000000 : 500000, false, i & 1 ? 5 : 3);
    tfm_tokenizer_free(t);
  }
}

/* A blank token that the one before it swallowed is not given, as in the reference. */
TEST(tokenizer_swallowed_blanks) {
  static const char json[] =
      "{\"added_tokens\":[{\"id\":1,\"content\":\"<r>\",\"rstrip\":true},"
      "{\"id\":2,\"content\":\"  \",\"lstrip\":true}],"
      "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
      "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}";
  tfm_tokenizer *t = tfm_tokenizer_load_memory(json, sizeof json - 1, NULL);
  int32_t ids[4] = {0};
  CHECK_EQ_INT(tfm_encode(t, "<r>  a", 6, 0, ids, 4), 2);
  CHECK(ids[0] == 1 && ids[1] == 0);
  CHECK_EQ_INT(tfm_encode(t, "a  a", 4, 0, ids, 4), 3);
  CHECK_EQ_INT(ids[1], 2);
  tfm_tokenizer_free(t);
}

/* An added token of one character is not one of the model's symbols. */
TEST(tokenizer_added_is_no_symbol) {
  static const char json[] =
      "{\"added_tokens\":[{\"id\":1,\"content\":\"\\t\",\"special\":true}],\"decoder\":{\"type\":"
      "\"Fuse\"},\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}";
  tfm_tokenizer *t = tfm_tokenizer_load_memory(json, sizeof json - 1, NULL);
  int32_t ids[4] = {0};
  CHECK_EQ_INT(tfm_encode(t, "a\ta", 3, 0, ids, 4), 2);
  CHECK_EQ_INT(tfm_encode(t, "a\ta", 3, TFM_ENCODE_PARSE_SPECIAL, ids, 4), 3);
  CHECK_EQ_INT(ids[1], 1);
  tfm_tokenizer_free(t);
}

static void count_warnings(void *user, tfm_log_level level, const char *line) {
  if (level == TFM_LOG_WARNING && strstr(line, "is not applied")) ++*(int *)user;
}

TEST(tokenizer_truncation_warns) {
  static const char json[] =
      "{\"truncation\":{\"max_length\":8},\"padding\":null,\"decoder\":{\"type\":\"Fuse\"},"
      "\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}";
  tfm_tokenizer_config config;
  int warnings = 0;
  memset(&config, 0, sizeof config);
  config.host.user = &warnings;
  config.host.log = count_warnings;
  tfm_tokenizer_free(tfm_tokenizer_load_memory(json, sizeof json - 1, &config));
  CHECK_EQ_INT(warnings, 1);
}

/* ---- Bad files ---- */

#define BYTES "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false}," \
  "\"decoder\":{\"type\":\"ByteLevel\"},"
#define MODEL(vocab, merges) \
  "{" BYTES "\"model\":{\"type\":\"BPE\",\"vocab\":" vocab ",\"merges\":" merges "}}"
#define ADDED(list) \
  "{\"added_tokens\":[" list "]," BYTES "\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}"
#define ADDED_TWO \
  "\"added_tokens\":[{\"id\":1,\"content\":\"<x>\",\"normalized\":true}," \
  "{\"id\":2,\"content\":\"<X>\",\"normalized\":true}]," BYTES \
  "\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}"
#define TEMPLATE(list) \
  "{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[" list "]," \
  "\"special_tokens\":{\"a\":{\"ids\":[0]}}}," BYTES \
  "\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}"
#define SPLIT(regex) \
  "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\"," \
  "\"pattern\":{\"Regex\":\"" regex "\"},\"behavior\":\"Isolated\",\"invert\":false}," \
  "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}," \
  "\"decoder\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}"

static const struct bad_file {
  const char *text;
  int status; /* TFM_OK: it loads */
  const char *part; /* of the sentence */
} bad_files[] = {
  {MODEL("{\"a\":0,\"b\":1,\"ab\":2}", "[\"a b\"]"), TFM_OK, ""},
  {MODEL("{\"a\":0,\"b\":9}", "[]"), TFM_OK, ""},
  {MODEL("{\"#\":0,\"##\":1}", "[\"# #\"]"), TFM_OK, ""},
  {MODEL("{\"a\":0,\" \":1,\"a \":2}", "[[\"a\",\" \"]]"), TFM_OK, ""},
  {ADDED("{\"id\":1,\"content\":\"\"}"), TFM_OK, ""},
  {ADDED("{\"id\":1,\"content\":\"<x>\",\"special\":true}"), TFM_OK, ""},
  {"", TFM_E_FORMAT, "no vocabulary"},
  {"{", TFM_E_FORMAT, "JSON"},
  {"{}", TFM_E_FORMAT, "model.vocab is missing"},
  {"\xef\xbb\xbf{}", TFM_E_FORMAT, "byte order mark"},
  {"neither this nor that", TFM_E_FORMAT, "no vocabulary known here; expected tokenizer.json"},
  {"{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}", TFM_OK, ""},
  {"{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}",
   TFM_E_UNSUPPORTED, "decoder of byte-level BPE is missing"},
  {"{\"model\":{\"vocab\":{\"a\":0},\"vocab\":{\"b\":1}}}", TFM_E_FORMAT, "\"vocab\" is"},
  {"{\"model\":{},\"x\":1,\"x\":2}", TFM_E_FORMAT, "\"x\" is there twice"},
  {TEMPLATE("{\"SpecialToken\":{\"id\":\"a\"}},{\"Sequence\":{\"id\":\"A\"}}"),
   TFM_OK, ""},
  {TEMPLATE("{\"SpecialToken\":{\"id\":\"a\"}},{\"SpecialToken\":{}},"
            "{\"Sequence\":{\"id\":\"A\"}}"),
   TFM_E_FORMAT, "has no id"},
  {TEMPLATE("{}"), TFM_E_FORMAT, "has no id"},
  {"{\"a\":0}", TFM_E_UNSUPPORTED, "merges.txt"},
  {MODEL("{}", "[]"), TFM_E_FORMAT, "empty"},
  {MODEL("{\"a\":0,\"b\":0}", "[]"), TFM_E_FORMAT, "same id"},
  {MODEL("{\"a\":0,\"a\":1}", "[]"), TFM_E_FORMAT, "twice"},
  {MODEL("{\"a\":-1}", "[]"), TFM_E_FORMAT, "found -1"},
  {MODEL("{\"a\":4294967296}", "[]"), TFM_E_FORMAT, "4294967296"},
  {MODEL("{\"a\":2147483647}", "[]"), TFM_E_UNSUPPORTED, "2147483647"},
  {MODEL("{\"a\":0}", "[\"a b\"]"), TFM_E_FORMAT, "right part"},
  {MODEL("{\"a\":0}", "[\"a a\"]"), TFM_E_FORMAT, "result"},
  {MODEL("{\"a\":0}", "[\"a a a\"]"), TFM_E_FORMAT, "two parts"},
  {MODEL("{\"a\":0}", "[\"\"]"), TFM_E_FORMAT, "two parts"},
  {MODEL("{\"a\":0}", "[[\"a\"]]"), TFM_E_FORMAT, "one part"},
  {MODEL("{\"a\":0}", "[[\"a\",\"a\",\"a\"]]"), TFM_E_FORMAT, "three parts"},
  {MODEL("[[\"a\",0.0]]", "[]"), TFM_E_FORMAT, "not one of SentencePiece BPE"},
  {ADDED("{\"id\":0,\"content\":\"<x>\"}"), TFM_E_FORMAT, "expected 1"},
  {ADDED("{\"id\":1,\"content\":\"<x>\"},{\"id\":2,\"content\":\"<x>\"}"), TFM_E_FORMAT, ""},
  {ADDED("{\"id\":1,\"content\":\"<x>\",\"single_word\":true}"), TFM_OK, ""},
  {"{\"normalizer\":{\"type\":\"Lowercase\"}," ADDED_TWO, TFM_E_UNSUPPORTED, "are the same when"},
  {"{" ADDED_TWO, TFM_OK, ""},
  {SPLIT("(a+)+$"), TFM_E_UNSUPPORTED, "(a+)+$"},
  {SPLIT("("), TFM_E_UNSUPPORTED, "no ) at its byte 1"},
  {SPLIT("a*b"), TFM_E_UNSUPPORTED, "linear time"},
  {SPLIT("a+b|a"), TFM_E_UNSUPPORTED, "linear time"},
  {SPLIT("[A-Z]*[a-z]+"), TFM_E_UNSUPPORTED, "linear time"},
  {SPLIT("[A-Z]*[a-z]+|[A-Z]+"), TFM_OK, ""}, /* the rest of a vain search is one piece */
  {SPLIT("\\\\s*\\\\n|\\\\s+"), TFM_OK, ""},
  {SPLIT("[a"), TFM_E_UNSUPPORTED, "its end"},
  {SPLIT("a*"), TFM_E_UNSUPPORTED, "a way to match nothing"},
  {SPLIT("(?:a|b?)+"), TFM_E_UNSUPPORTED, "a repetition of what can be empty"},
  {SPLIT("a++"), TFM_E_UNSUPPORTED, "possessive"},
  {SPLIT("(a)\\\\1"), TFM_E_UNSUPPORTED, "an escape"},
  {SPLIT("a)"), TFM_E_UNSUPPORTED, "an operator"},
  {SPLIT("(?<!a)b"), TFM_E_UNSUPPORTED, "a kind of group"},
  {SPLIT("(?<=a)b"), TFM_E_UNSUPPORTED, "a kind of group"},
  {SPLIT("(?i:ss)"), TFM_E_UNSUPPORTED, "one in another case"},
  {SPLIT("\\\\p{Han}"), TFM_E_UNSUPPORTED, "a property"},
  {SPLIT("[a-z]{2,3}|(?:b|c)+(?!\\\\S)"), TFM_OK, ""},
  {"{\"normalizer\":{\"type\":\"BertNormalizer\"},"
   "\"decoder\":{\"type\":\"Fuse\"},\"model\":{\"vocab\":{\"a\":0}}}",
   TFM_E_UNSUPPORTED, "BertNormalizer"},
  {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Sequence\","
   "\"normalizers\":[]}]},\"decoder\":{\"type\":\"Fuse\"},\"model\":{\"vocab\":{\"a\":0}}}",
   TFM_E_UNSUPPORTED, "Sequence"},
};

static void check_refused(const char *text, size_t bytes, int status, const char *part) {
  tfm_tokenizer *t = tfm_tokenizer_load_memory(text, bytes, NULL);
  if (status == TFM_OK) {
    if (!t) CHECK_STR(tfm_error(), text);
    tfm_tokenizer_free(t);
    return;
  }
  CHECK(t == NULL);
  if ((int)tfm_error_status() != status) CHECK_STR(tfm_error(), tfm_status_name(status));
  CHECK_STR_HAS(tfm_error(), part);
}

TEST(tokenizer_bad_json) {
  size_t i;
  for (i = 0; i < sizeof bad_files / sizeof *bad_files; i++)
    check_refused(bad_files[i].text, strlen(bad_files[i].text), bad_files[i].status,
                  bad_files[i].part);
}

/* ---- vocab.json and merges.txt, with what may lie beside them ---- */

typedef struct small_file {
  const char *name, *text;
} small_file;

static void *small_open(void *user, const char *path, uint64_t *bytes) {
  const small_file *f = (const small_file *)user;
  for (; f->name; f++)
    if (!strcmp(f->name, path)) break;
  *bytes = f->name ? strlen(f->text) : 0;
  return f->name ? (void *)(uintptr_t)f : NULL;
}

static bool small_read(void *user, void *file, uint64_t offset, void *dst, size_t bytes) {
  (void)user;
  memcpy(dst, ((const small_file *)file)->text + offset, bytes);
  return true;
}

static void small_close(void *user, void *file) { (void)user, (void)file; }

static void check_beside(const char *name, const char *text, int status, const char *part) {
  small_file files[] = {{"m/vocab.json", "{\"a\":0,\"<|endoftext|>\":1}"},
                        {"m/merges.txt", "#version: 0.2\n"}, {NULL, NULL}, {NULL, NULL}};
  tfm_io io = {NULL, small_open, small_read, NULL, small_close};
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  memset(&config, 0, sizeof config);
  config.host.io = &io;
  io.user = files;
  files[2].name = name;
  files[2].text = text;
  t = tfm_tokenizer_load("m/vocab.json", &config);
  CHECK((t != NULL) == (status == TFM_OK));
  if (!t) CHECK_EQ_INT(tfm_error_status(), status);
  if (!t) CHECK_STR_HAS(tfm_error(), part);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_beside_vocab_json) {
  static const struct {
    const char *text;
    int status;
    const char *part;
  } cases[] = {
    {"{}", TFM_OK, ""},
    {"{\"tokenizer_class\":\"GPT2Tokenizer\",\"add_prefix_space\":false}", TFM_OK, ""},
    {"{\"tokenizer_class\":\"Qwen2Tokenizer\"}", TFM_OK, ""},
    {"{\"tokenizer_class\":\"T5Tokenizer\"}", TFM_E_UNSUPPORTED, "names T5Tokenizer"},
    {"{\"add_prefix_space\":true}", TFM_E_UNSUPPORTED, "add_prefix_space is true"},
    {"{\"add_bos_token\":true}", TFM_E_UNSUPPORTED, "add_bos_token is true"},
    {"{\"add_eos_token\":true}", TFM_E_UNSUPPORTED, "add_eos_token is true"},
    {"{\"added_tokens_decoder\":{\"1\":{\"content\":\"<|endoftext|>\"}}}", TFM_OK, ""},
    {"{\"added_tokens_decoder\":{\"2\":{\"content\":\"<x>\"}}}", TFM_OK, ""},
    {"{\"added_tokens_decoder\":{\"3\":{\"content\":\"<x>\"}}}", TFM_E_FORMAT, "expected 2"},
    {"{\"added_tokens_decoder\":{\"x\":{\"content\":\"<x>\"}}}", TFM_E_FORMAT, "no id"},
  };
  size_t i;
  check_beside(NULL, NULL, TFM_OK, "");
  check_beside("m/added_tokens.json", "{}", TFM_E_UNSUPPORTED, "added_tokens.json");
  for (i = 0; i < sizeof cases / sizeof *cases; i++)
    check_beside("m/tokenizer_config.json", cases[i].text, cases[i].status, cases[i].part);
}

/* The first id of a text under a vocabulary with these merges; below 0: refused. */
static int32_t id_with_merges(const char *merges, const char *text, const char *sentence) {
  small_file files[] = {
    {"m/vocab.json", "{\"a\":0,\"b\":1,\"#\":2,\"##\":3,\"ab\":4,\"\xc4\xa0\":5,"
     "\"\xc4\xa0" "a\":6}"},
    {"m/merges.txt", merges}, {NULL, NULL}};
  tfm_io io = {files, small_open, small_read, NULL, small_close};
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  int32_t id = -1;
  memset(&config, 0, sizeof config);
  config.host.io = &io;
  t = tfm_tokenizer_load("m/vocab.json", &config);
  if (t) tfm_encode(t, text, strlen(text), 0, &id, 1);
  else CHECK_STR_HAS(tfm_error(), sentence);
  tfm_tokenizer_free(t);
  return id;
}

TEST(tokenizer_merges_txt) { /* only a line that begins with #version is no merge */
  CHECK_EQ_INT(id_with_merges("#version: 0.2\na b\n", "ab", ""), 4);
  CHECK_EQ_INT(id_with_merges("#version: 0.2\r\na b\r\n# #\r\n", "ab", ""), 4);
  CHECK_EQ_INT(id_with_merges("#version: 0.2\r\na b\r\n# #\r\n", "##", ""), 3);
  CHECK_EQ_INT(id_with_merges("# #\na b", "##", ""), 3);
  CHECK_EQ_INT(id_with_merges("\xc4\xa0 a\n", " a", ""), 6);
  CHECK_EQ_INT(id_with_merges("", "ab", ""), 0);
  CHECK_EQ_INT(id_with_merges("a b\n\n# #\n", "ab", "two parts"), -1);
  CHECK_EQ_INT(id_with_merges("a  b\n", "ab", "two parts"), -1);
  CHECK_EQ_INT(id_with_merges("a b #\n", "ab", "two parts"), -1);
  CHECK_EQ_INT(id_with_merges("a\n", "ab", "two parts"), -1);
  CHECK_EQ_INT(id_with_merges("a\xc2\x85 b\n", "ab", "left part"), -1); /* no end of a line */
  CHECK_EQ_INT(id_with_merges("a x\n", "ab", "right part"), -1);
  CHECK_EQ_INT(id_with_merges("b a\n", "ab", "result"), -1);
}

/* ---- SentencePiece's rules of normalisation ---- */

static void check_charsmap(const char *base64, int status, const char *part) {
  static const char json[] =
      "{\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"%s\"},"
      "\"decoder\":{\"type\":\"Fuse\"},\"model\":{\"type\":\"Unigram\",\"unk_id\":0,"
      "\"vocab\":[[\"?\",0.0],[\"a\",-1.0]]}}";
  char text[400];
  int32_t ids[8];
  tfm_tokenizer *t;
  snprintf(text, sizeof text, json, base64);
  check_refused(text, strlen(text), status, part);
  if (status != TFM_OK) return;
  t = tfm_tokenizer_load_memory(text, strlen(text), NULL);
  CHECK(tfm_encode(t, "a\xff\x01z", 4, 0, ids, 8) >= 0);
  tfm_tokenizer_free(t);
}

TEST(tokenizer_charsmap) { /* cut off, no base64, a trie that points outside itself */
  static const uint32_t wild[][2] = {
    {0xffffffff, 0xffffffff}, {0x7fffffff, 0x100}, {0x400, 0x80000100}, {0, 0}};
  uint8_t raw[12] = {8};
  char coded[32];
  int i;
  check_charsmap("", TFM_E_FORMAT, "precompiled_charsmap of 0 bytes");
  check_charsmap("BAAAAAAA", TFM_E_FORMAT, "precompiled_charsmap of 6 bytes");
  check_charsmap("/////wAAAAAA", TFM_E_FORMAT, "says that its trie has 4294967295");
  check_charsmap("BAA", TFM_E_FORMAT, "");
  check_charsmap("BA*A", TFM_E_FORMAT, "not base64");
  check_charsmap("BAAAAAAAAAD/", TFM_E_FORMAT, "not UTF-8");
  for (i = 0; i < TFMI_COUNT(wild); i++) {
    memcpy(raw + 4, wild[i], 8);
    coded[put_base64(coded, raw, sizeof raw)] = 0;
    check_charsmap(coded, TFM_OK, "");
  }
}

/* ---- Files that ask for more than they hold ---- */

static char *repeated(char c, size_t n) {
  char *text = (char *)calloc(1, n + 1);
  memset(text, c, n);
  return text;
}

static void check_refused_with(const char *format, char c, size_t n, const char *part) {
  char *middle = repeated(c, n), *text = (char *)malloc(strlen(format) + n + 1);
  sprintf(text, format, middle);
  check_refused(text, strlen(text), TFM_E_UNSUPPORTED, part);
  free(middle);
  free(text);
}

TEST(tokenizer_oversized) {
  const char *blank = "{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},"
                      "\"content\":\"%s\"},\"model\":{\"vocab\":{\"a\":0}}}";
  const char *prefix = "{\"normalizer\":{\"type\":\"Prepend\",\"prepend\":\"%s\"},"
                       "\"model\":{\"vocab\":{\"a\":0}}}";
  check_refused_with(ADDED("{\"id\":1,\"content\":\"%s\"}"), 'x', 513, "expected at most 512");
  check_refused_with(blank, 'x', 65, "normalizer \"Replace\"");
  check_refused_with(prefix, 'x', 65, "normalizer \"Prepend\"");
  check_refused_with(SPLIT("%s"), 'x', 1000000, "too many parts");
  check_refused_with(SPLIT("%s"), '(', 100000, "too deep");
}

TEST(tokenizer_deep_and_wide) {
  static const char open[] = "{\"type\":\"Sequence\",\"normalizers\":[";
  size_t n = 100000, i, at;
  char *text = (char *)malloc(n * 64), said[32];
  tfm_tokenizer *t;
  at = (size_t)sprintf(text, "{\"normalizer\":");
  for (i = 0; i < n; i++) at += (size_t)sprintf(text + at, "%s", open);
  for (i = 0; i < n; i++) at += (size_t)sprintf(text + at, "]}");
  sprintf(text + at, ",\"decoder\":{\"type\":\"Fuse\"},\"model\":{\"vocab\":{\"a\":0}}}");
  check_refused(text, strlen(text), TFM_E_FORMAT, "deep");
  at = (size_t)sprintf(text, "{\"added_tokens\":[");
  for (i = 0; i < n; i++)
    at += (size_t)sprintf(text + at, "%s{\"id\":%d,\"content\":\"<%d>\"}", i ? "," : "", (int)i + 1,
                          (int)i);
  sprintf(text + at, "]," BYTES "\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}");
  t = tfm_tokenizer_load_memory(text, strlen(text), NULL);
  if (!t) CHECK_STR(tfm_error(), "");
  for (i = 0; i < n; i += 9999) {
    int32_t id = -1;
    int k = snprintf(said, sizeof said, "<%d>", (int)i);
    CHECK_EQ_INT(tfm_encode(t, said, (size_t)k, TFM_ENCODE_PARSE_SPECIAL, &id, 1), 1);
    CHECK_EQ_INT(id, i + 1);
  }
  tfm_tokenizer_free(t);
  free(text);
}


TEST(tokenizer_flooded_table) { /* texts chosen to have the same hash */
  enum { WANTED = 3000, SLOTS = 8192 };
  char *text = (char *)malloc(64 * WANTED), piece[16];
  size_t n;
  uint64_t x;
  int found = 0;
  n = (size_t)sprintf(text, "{" BYTES "\"model\":{\"merges\":[],\"vocab\":{");
  for (x = 0; found < WANTED; x++) {
    size_t k = (size_t)snprintf(piece, sizeof piece, "%llx", (unsigned long long)x);
    if (tfmi_text_hash(piece, k) % SLOTS < 16)
      n += (size_t)sprintf(text + n, "%s\"%s\":%d", found ? "," : "", piece, found), found++;
  }
  sprintf(text + n, "}}}");
  check_refused(text, strlen(text), TFM_E_UNSUPPORTED, "the same hash");
  free(text);
}

/* Scored pieces that nothing merges to: the tables follow the merges, not the bytes. */
TEST(tokenizer_memory_follows_the_file) {
  enum { PIECES = 2000, LONG = 500 };
  size_t bytes = PIECES * (LONG + 16), n = 0, i, k;
  char *model = (char *)calloc(1, bytes);
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  failing f;
  memset(&f, 0, sizeof f);
  memset(&config, 0, sizeof config);
  config.host.user = &f;
  config.host.alloc = failing_alloc;
  memcpy(model, "\n\x05\n\x01?\x18\x02\x12\x02\x18\x02", 11); /* unk; trainer: BPE */
  for (n = 11, i = 0; i < PIECES; i++) {
    memcpy(model + n, "\n\xf7\x03\n\xf4\x03", 6);
    n += 6;
    for (k = 0; k < LONG; k++) model[n++] = (char)('a' + (i >> k % 11 & 1) + 2 * (k % 7));
  }
  t = tfm_tokenizer_load_memory(model, n, &config);
  if (!t) CHECK_STR(tfm_error(), "");
  CHECK(f.peak < 4 * n);
  tfm_tokenizer_free(t);
  CHECK_EQ_INT(f.live, 0);
  free(model);
}

TEST(tokenizer_bad_model) {
  static const char eleven[] = "\n\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff";
  static const char beyond[] = "\n\x7f\n\x01" "a";
  static const char wire[] = "\n\x05\n\x01" "a\x13\x01";
  static const char group[] = "\n\x03\n\x01" "a\x0b";
  static const char no_trainer[] = "\n\x03\n\x01" "a";
  static const char words[] = "\n\x05\n\x01" "a\x18\x02\x12\x02\x18\x03";
  static const char no_unk[] = "\n\x03\n\x01" "a\x12\x02\x18\x02";
  static const char charsmap[] = "\n\x05\n\x01" "a\x18\x02\x12\x02\x18\x02\x1a\x03\x12\x01x";
  static const char not_a_number[] =
      "\n\x05\n\x01" "a\x18\x02\n\x09\n\x02" "bc\x15\0\0\xc0\x7f\x12\x02\x18\x02";
  static const char extended[] =
      "\n\x05\n\x01" "a\x18\x02\x12\x02\x18\x02\xc2\x0c\x03xyz\xc8\x0c\x07";
  static const char with_nul[] = "\n\x05\n\x01?\x18\x02\n\x05\n\x03" "a\0b\x12\x02\x18\x02";
  check_refused(eleven, sizeof eleven - 1, TFM_E_FORMAT, "");
  check_refused(beyond, sizeof beyond - 1, TFM_E_FORMAT, "127 bytes");
  check_refused(wire, sizeof wire - 1, TFM_E_FORMAT, "wire type");
  check_refused(group, sizeof group - 1, TFM_E_FORMAT, "wire type");
  check_refused(no_trainer, sizeof no_trainer - 1, TFM_E_FORMAT, "trainer_spec");
  check_refused(words, sizeof words - 1, TFM_E_UNSUPPORTED, "is words");
  check_refused(no_unk, sizeof no_unk - 1, TFM_E_FORMAT, "unknown piece");
  check_refused(charsmap, sizeof charsmap - 1, TFM_E_FORMAT, "precompiled_charsmap of 1 bytes");
  check_refused(not_a_number, sizeof not_a_number - 1, TFM_E_FORMAT, "not a number");
  check_refused(extended, sizeof extended - 1, TFM_OK, ""); /* a field that nobody knows */
  check_refused(with_nul, sizeof with_nul - 1, TFM_OK, "");
}

TEST(tokenizer_long_piece) { /* 1 MB, by itself in a model */
  static const char begin[] = "\n\x05\n\x01?\x18\x02\x12\x02\x18\x02\n\xc4\x84\x3d\n\xc0\x84\x3d";
  size_t n = sizeof begin - 1, long_one = 1000000;
  char *model = (char *)malloc(n + long_one);
  memcpy(model, begin, n);
  memset(model + n, 'a', long_one);
  check_refused(model, n + long_one, TFM_E_UNSUPPORTED, "bytes");
  free(model);
}

TEST(tokenizer_bad_llama2c) {
  blob b = blob_read(SHARED "stories260K/tok512.bin");
  tfm_tokenizer_config config;
  size_t cut;
  if (!b.data) SKIP("no " SHARED "stories260K");
  memset(&config, 0, sizeof config);
  for (cut = 0; cut < b.bytes; cut += 7) {
    tfm_tokenizer *t = tfm_tokenizer_load_memory(b.data, cut, NULL);
    CHECK(!t || cut > 259 * 8); /* cut between two tokens: a smaller vocabulary */
    tfm_tokenizer_free(t);
  }
  config.vocabulary = 513;
  CHECK(!tfm_tokenizer_load_memory(b.data, b.bytes, &config));
  config.vocabulary = 511;
  CHECK(!tfm_tokenizer_load_memory(b.data, b.bytes, &config));
  config.vocabulary = 512;
  tfm_tokenizer_free(tfm_tokenizer_load_memory(b.data, b.bytes, &config));
  for (cut = 0; cut < 2; cut++) { /* a length of 2^31 - 1, of -1 */
    memset(b.data + 8, 0xff, 4);
    b.data[11] = cut ? 0xff : 0x7f;
    check_refused((const char *)b.data, b.bytes, TFM_E_FORMAT, "beyond the end");
  }
  free(b.data);
}

TEST(tokenizer_not_found) {
  CHECK(!tfm_tokenizer_load(GOLDEN "nothing.json", NULL));
  CHECK_EQ_INT(tfm_error_status(), TFM_E_IO);
  CHECK(!tfm_tokenizer_load("tests", NULL));
  CHECK_STR_HAS(tfm_error(), "tokenizer.json");
}

/* ---- Memory that fails ---- */

static void use(const tfm_tokenizer *t) {
  static char text[6000];
  static int32_t ids[6001];
  memset(text, 'a', sizeof text);
  tfm_encode(t, text, sizeof text, 0, ids, 6001);
}

TEST(tokenizer_failing_memory) {
  static const char *const paths[] = {GOLDEN "llama3-kind", GOLDEN "spm-bpe"};
  tfm_tokenizer_config config;
  failing f;
  int i, for_ever;
  memset(&config, 0, sizeof config);
  config.host.user = &f;
  config.host.alloc = failing_alloc;
  for (i = 0; i < 4; i++) {
    long fail_at = 0;
    for_ever = i & 1;
    do {
      tfm_tokenizer *t;
      memset(&f, 0, sizeof f);
      f.fail_at = ++fail_at;
      f.for_ever = for_ever != 0;
      t = tfm_tokenizer_load(paths[i / 2], &config);
      if (!t) CHECK_EQ_INT(tfm_error_status(), TFM_E_MEMORY);
      else use(t);
      tfm_tokenizer_free(t);
      CHECK_EQ_INT(f.live, 0);
      CHECK_EQ_INT(f.bytes, 0);
    } while (f.calls >= fail_at && fail_at < 100000);
    CHECK(fail_at > 20);
  }
}

TEST_MAIN
