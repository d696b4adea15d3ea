/* libFuzzer entry: bytes as a vocabulary of whatever kind they look like, then text through it both
   ways. The first byte says where the vocabulary ends and the text begins. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  size_t cut;
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  if (size < 2) return 0;
  memset(&config, 0, sizeof config);
  config.host.memory_limit_bytes = 256u << 20;
  config.vocabulary = data[0] & 1 ? 0 : 300;
  cut = 1 + (size - 1) * (192 + (size_t)(data[0] >> 2)) / 256;
  t = tfm_tokenizer_load_memory(data + 1, cut - 1, &config);
  if (!t) {
    if (!tfm_error()[0]) __builtin_trap(); /* a refusal has a reason */
    return 0;
  }
  both_ways(t, (const char *)data + cut, size - cut, 0);
  both_ways(t, (const char *)data + cut, size - cut, TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL);
  tfm_tokenizer_free(t);
  return 0;
}
