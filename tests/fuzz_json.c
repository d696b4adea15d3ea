/* Any bytes as the text of a config.json, beside a sound .safetensors file.
     clang -g -O1 -fsanitize=fuzzer,address,undefined -I.. fuzz_json.c -lm -lpthread */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

static const char weights[] = /* an 88-byte header, then five rows of a table */
    "\x58\0\0\0\0\0\0\0{\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[5,4],"
    "\"data_offsets\":[0,80]}}     "
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  char *text = (char *)malloc(bytes + 1);
  tfm_model_config c;
  if (!text) return 0;
  memset(&c, 0, sizeof c);
  if (bytes) memcpy(text, data, bytes);
  text[bytes] = 0;
  c.config_json = text;
  c.device = TFM_REF;
  c.threads = 1;
  c.host.memory_limit_bytes = 64u << 20;
  tfm_model_free(tfm_model_load_memory(weights, sizeof weights - 1, &c));
  free(text);
  return 0;
}
