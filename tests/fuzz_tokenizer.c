/* libFuzzer entry: bytes as a vocabulary of whatever kind they look like, then text through it both
   ways. The first byte says where the vocabulary ends and the text begins. 0xfe and 0xff there: the
   rest are choices, of the parts of a tokenizer.json or of the fields of a SentencePiece .model. */
#include "fuzz_choices.h"

#define METASPACE(blank, when, split) \
  "{\"type\":\"Metaspace\",\"replacement\":\"" blank "\",\"prepend_scheme\":\"" when \
  "\",\"split\":" split "}"

/* ---- tokenizer.json: any model behind any steps ---- */

static const char *const normalizers[] = {
  "null", "{\"type\":\"NFC\"}", "{\"type\":\"NFKD\"}", "{\"type\":\"Lowercase\"}",
  "{\"type\":\"Strip\",\"strip_left\":true,\"strip_right\":true}", "{\"type\":\"StripAccents\"}",
  "{\"type\":\"Prepend\",\"prepend\":\"\\u2581\"}", "{\"type\":\"Nmt\"}",
  "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\\u2581\"}",
  "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" {2,}\"},\"content\":\"\"}",
  "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"a\"}",
  "{\"type\":\"ByteLevel\"}",
  "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"BAAAAAAAAAAA\"}",
  "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"=AA\"}"};

static const char *const pre_tokenizers[] = {
  "null", "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}",
  "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"use_regex\":false}",
  METASPACE("\\u2581", "always", "true"),
  METASPACE("_", "first", "false"),
  "{\"type\":\"Digits\",\"individual_digits\":true}", "{\"type\":\"Whitespace\"}",
  "{\"type\":\"Punctuation\",\"behavior\":\"MergedWithNext\"}", "{\"type\":\"WhitespaceSplit\"}",
  "{\"type\":\"CharDelimiterSplit\",\"delimiter\":\"a\"}", "{\"type\":\"BertPreTokenizer\"}"};

static const char *const decoders[] = {
  "null", "{\"type\":\"ByteLevel\"}", "{\"type\":\"Fuse\"}", "{\"type\":\"ByteFallback\"}",
  "{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":9}",
  "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\\u2581\"},\"content\":\" \"}",
  METASPACE("\\u2581", "first", "true")};

static const char *const processors[] = {
  "null", "{\"type\":\"ByteLevel\",\"trim_offsets\":true}",
  "{\"type\":\"RobertaProcessing\",\"sep\":[\"b\",1],\"cls\":[\"a\",0]}",
  "{\"type\":\"BertProcessing\",\"sep\":[\"b\",1],\"cls\":[\"x\",900]}",
  ("{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"a\"}},"
   "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"a\":{\"ids\":[0]}}}")};

static const char *const pieces[] = { /* a, then what spells it, then more */
  "a", "b", "ab", "aab", "\\u0120", "\\u0120a", "\\u2581", "\\u2581a", "abab", "<unk>", "<0x41>",
  "\\u00e9", "e\\u0301", "c", "<s>", " ", "  ", "\\u00c3", "\\u00a9", "\\ud83d\\ude00", "\\n", "",
  "\\ud800", "<0xZZ>", "_", "1", "\\u65e5", "a b"};
enum { PIECES = COUNT(pieces) };

/* A pattern of a few signs: well formed as JSON, seldom as a pattern. */
static void put_pattern(choices *c) {
  static const char *const parts[] = {
    "a", "[ab]", "\\\\s", "\\\\p{L}", "+", "*", "?", "|", "(", ")", "(?:", "(?i:", "(?!\\\\S)",
    "\\\\d{1,3}", "[^\\\\r\\\\n\\\\p{L}]", "\\\\w", ".", "{2,}", "{3}", "(?=b)", "[", "]",
    "\\\\", "^"};
  unsigned n = choice(c) % 12;
  put_text(c, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a");
  for (; n; n--) put_one_of(c, parts, COUNT(parts));
  put_text(c, "\"},\"behavior\":\"");
  put_text(c, choice(c) & 1 ? "Removed" : "Isolated");
  put_text(c, choice(c) & 1 ? "\",\"invert\":true}" : "\",\"invert\":false}");
}

/* `"key":` one of the parts, or a sequence of them. */
static void put_steps(choices *c, const char *key, const char *inner, const char *const *parts,
                      unsigned n, bool patterns) {
  unsigned count = choice(c) % 4, i;
  put_text(c, key);
  if (count > 1) put_text(c, "{\"type\":\"Sequence\",\""), put_text(c, inner), put_text(c, "\":[");
  for (i = 0; i < (count ? count : 1); i++) {
    put_text(c, i ? "," : "");
    if (patterns && choice(c) % 4 == 3) put_pattern(c);
    else put_one_of(c, parts, n);
  }
  put_text(c, count > 1 ? "]}" : "");
}

static void put_added(choices *c) {
  static const char *const flags[] = {"lstrip", "rstrip", "normalized", "single_word", "special"};
  unsigned n = choice(c) % 4, i, k, bits;
  put_text(c, "\"added_tokens\":[");
  for (i = 0; i < n; i++) {
    put_text(c, i ? ",{\"id\":" : "{\"id\":");
    put_number(c, PIECES + i);
    put_text(c, ",\"content\":\"");
    put_one_of(c, pieces, PIECES);
    put_text(c, choice(c) & 1 ? "x\"" : "\"");
    for (k = 0, bits = choice(c); k < COUNT(flags); k++) {
      put_text(c, ",\"");
      put_text(c, flags[k]);
      put_text(c, bits >> k & 1 ? "\":true" : "\":false");
    }
    put_text(c, "}");
  }
  put_text(c, "],");
}

static void put_vocabulary(choices *c, bool scored) {
  unsigned i, skip = choice(c);
  put_text(c, scored ? "\"vocab\":[" : "\"vocab\":{");
  for (i = 0; i < PIECES; i++) {
    if (skip && i == skip % PIECES) continue;
    put_text(c, i ? "," : "");
    put_text(c, scored ? "[\"" : "\"");
    put_text(c, i == 22 && skip < 250 ? "y" : pieces[i]); /* half of a pair is no text */
    put_text(c, scored ? "\",-" : "\":");
    put_number(c, i);
    put_text(c, scored ? "]" : "");
  }
  put_text(c, scored ? "]" : "}");
}

static void put_merges(choices *c) {
  unsigned n = choice(c) % 8;
  put_text(c, ",\"merges\":[[\"a\",\"b\"]");
  for (; n; n--) {
    put_text(c, ",[\"");
    put_one_of(c, pieces, PIECES);
    put_text(c, "\",\"");
    put_one_of(c, pieces, PIECES);
    put_text(c, "\"]");
  }
  put_text(c, "]");
}

static void put_model(choices *c) {
  static const char *const types[] = {"BPE", "Unigram", "WordLevel", "WordPiece"};
  static const char *const flags[] = {",\"byte_fallback\":", ",\"fuse_unk\":",
                                      ",\"ignore_merges\":"};
  unsigned type = choice(c) % 4, k, bits = choice(c);
  put_text(c, "\"model\":{\"type\":\"");
  put_text(c, types[type]);
  put_text(c, "\",");
  put_vocabulary(c, type == 1);
  if (type == 0) put_merges(c);
  for (k = 0; k < 3 && type == 0; k++)
    put_text(c, flags[k]), put_text(c, bits >> k & 1 ? "true" : "false");
  if (type == 1) put_text(c, ",\"unk_id\":"), put_number(c, 9);
  else if (bits & 8 || type == 2) put_text(c, ",\"unk_token\":\"<unk>\"");
  put_text(c, "}}");
}

static void compose_json(choices *c) {
  put_text(c, "{\"version\":\"1.0\",");
  put_added(c);
  put_steps(c, "\"normalizer\":", "normalizers", normalizers, COUNT(normalizers), false);
  put_steps(c, ",\"pre_tokenizer\":", "pretokenizers", pre_tokenizers, COUNT(pre_tokenizers),
            true);
  put_steps(c, ",\"decoder\":", "decoders", decoders, COUNT(decoders), false);
  put_steps(c, ",\"post_processor\":", "processors", processors, COUNT(processors), false);
  put_text(c, ",");
  put_model(c);
}

/* ---- SentencePiece: fields of protocol buffers ---- */

static void put_varint(choices *c, uint64_t value) {
  for (; value > 127; value >>= 7) put(c, value | 128, 1);
  put(c, value, 1);
}

static void put_whole(choices *c, unsigned field, uint64_t value) {
  put_varint(c, field << 3);
  put_varint(c, number(c, value));
}

/* What was written from `from` on becomes a field with its length. */
static void wrap(choices *c, size_t from, unsigned field) {
  uint8_t inner[4096];
  size_t n = c->n - from < sizeof inner ? c->n - from : sizeof inner;
  memcpy(inner, c->file + from, n);
  c->n = from;
  put_varint(c, field << 3 | 2);
  put_varint(c, number(c, n));
  memcpy(c->file + c->n, inner, c->n + n <= ROOM ? n : 0);
  c->n += c->n + n <= ROOM ? n : 0;
}

static void put_piece(choices *c, const char *text, unsigned type) {
  size_t piece = c->n;
  float score = -(float)choice(c);
  uint32_t bits;
  memcpy(&bits, &score, 4);
  put_text(c, text);
  wrap(c, piece, 1);
  put_varint(c, 2 << 3 | 5);
  put(c, choice(c) > 250 ? 0x7fc00000 : bits, 4);
  put_whole(c, 3, type);
  wrap(c, piece, 1);
}

static void put_charsmap(choices *c) {
  size_t map = c->n;
  unsigned units = choice(c) % 16, i;
  put(c, number(c, 4 * units), 4);
  for (i = 0; i < 4 * units; i++) put(c, choice(c), 1);
  put_text(c, "a");
  put(c, 0, 1);
  wrap(c, map, 2);
}

static void compose_spm(choices *c) {
  static const char *const texts[] = {"a", "b", "ab", "\xe2\x96\x81", "\xe2\x96\x81\x61",
                                      "\xc3\xa9", "abab", "<x>", " ", "\xe2\x96", "\n"};
  unsigned odd = choice(c), count = choice(c) % 24, i;
  char byte[8];
  size_t from;
  put_piece(c, "<unk>", 2);
  put_piece(c, "<s>", 3);
  put_piece(c, "</s>", 3);
  for (i = 0; i < 6; i++) put_piece(c, texts[i], 1);
  for (i = 0; i < count; i++) put_piece(c, texts[choice(c) % COUNT(texts)], choice(c) % 8);
  for (i = 0; odd & 1 && i < 256; i++) snprintf(byte, 8, "<0x%02X>", i), put_piece(c, byte, 6);
  from = c->n;
  put_whole(c, 3, odd & 2 ? 1 : 2);
  put_whole(c, 35, odd & 1);
  if (odd & 4) for (i = 40; i < 44; i++) put_whole(c, i, i - 40);
  if (odd & 8) put_whole(c, 24, 1);
  wrap(c, from, 2);
  from = c->n;
  if (odd & 16) put_charsmap(c);
  for (i = 3; i < 6; i++) put_whole(c, i, choice(c) < 128);
  wrap(c, from, 3);
  if (odd & 32) put_whole(c, 200 + choice(c), 7);
}

/* ---- Text through a vocabulary ---- */

/* What was streamed id by id must be what is decoded at once. */
static void both_ways(const tfm_tokenizer *t, const char *text, size_t bytes, unsigned flags) {
  int32_t ids[256];
  char piece[8192], whole[8192];
  tfm_decoder state;
  int64_t n = tfm_encode(t, text, bytes, flags, ids, 256), i, used = 0, length;
  if (n < 0 || n > 256 || tfm_decode_bound(t) > sizeof piece) return;
  length = tfm_decode(t, ids, (size_t)n, whole, sizeof whole);
  memset(&state, 0, sizeof state);
  for (i = 0; i <= n; i++) {
    int64_t k = tfm_decode_next(t, &state, i < n ? ids[i] : -1, piece, sizeof piece);
    if (k < 0 || used + k >= (int64_t)sizeof whole) return;
    if (memcmp(whole + used, piece, (size_t)k) != 0) __builtin_trap();
    used += k;
  }
  if (length >= 0 && length < (int64_t)sizeof whole && length != used) __builtin_trap();
}

static void run(const uint8_t *file, size_t bytes, int32_t vocabulary, const char *text,
                size_t size) {
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  memset(&config, 0, sizeof config);
  config.host.memory_limit_bytes = 256u << 20;
  config.vocabulary = vocabulary;
  t = tfm_tokenizer_load_memory(file, bytes, &config);
  if (!t) {
    if (!tfm_error()[0]) __builtin_trap(); /* a refusal has a reason */
    return;
  }
  both_ways(t, text, size, 0);
  both_ways(t, text, size, TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL);
  tfm_tokenizer_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static choices c;
  size_t cut;
  if (size < 2) return 0;
  if (data[0] < 0xfe) {
    cut = 1 + (size - 1) * (192 + (size_t)(data[0] >> 2)) / 256;
    run(data + 1, cut - 1, data[0] & 1 ? 0 : 300, (const char *)data + cut, size - cut);
    return 0;
  }
  c.at = data + 1, c.end = data + size, c.n = 0;
  if (data[0] == 0xfe) compose_json(&c);
  else compose_spm(&c);
  run(c.file, c.n, 0, c.at < c.end ? (const char *)c.at : "a ab\n\xc3\xa9 <s> 1",
      c.at < c.end ? (size_t)(c.end - c.at) : 13);
  return 0;
}

/* The sound choices must load, and come back whole. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
  static choices c;
  int i;
  (void)argc, (void)argv;
  for (i = 0; i < 2; i++) {
    tfm_tokenizer *t;
    c.n = 0;
    if (i) compose_spm(&c);
    else compose_json(&c);
    t = tfm_tokenizer_load_memory(c.file, c.n, NULL);
    if (!t) fprintf(stderr, "%s\n%.*s\n", tfm_error(), (int)c.n, c.file), __builtin_trap();
    tfm_tokenizer_free(t);
  }
  return 0;
}
