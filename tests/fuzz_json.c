/* Any bytes as the text of a config.json, beside a sound .safetensors file.
     clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_json.c -lm -lpthread */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

static const char weights[] = /* an 86-byte header, then five rows of a table */
    "\x56\0\0\0\0\0\0\0{\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[5,4],"
    "\"data_offsets\":[0,80]}}     "
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

static void load(const char *text) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.config_json = text;
  c.device = TFM_REF;
  c.threads = 1;
  c.host.memory_limit_bytes = 64u << 20;
  tfm_model_free(tfm_model_load_memory(weights, sizeof weights - 1, &c));
}

/* The weights above must let the load get as far as the config. */
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
  (void)argc;
  (void)argv;
  load("{}");
  if (!strstr(tfm_error(), "model_type is missing")) __builtin_trap();
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  char *text = (char *)malloc(bytes + 1);
  if (!text) return 0;
  if (bytes) memcpy(text, data, bytes);
  text[bytes] = 0;
  load(text);
  free(text);
  return 0;
}
