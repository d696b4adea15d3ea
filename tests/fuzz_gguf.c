/* Any bytes as a model file (GGUF, llama2.c): no crash, no leak, no endless work.
     clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_gguf.c -lm -lpthread */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.device = TFM_REF;
  c.threads = 1;
  c.host.memory_limit_bytes = 64u << 20;
  tfm_model_free(tfm_model_load_memory(data, bytes, &c));
  return 0;
}
