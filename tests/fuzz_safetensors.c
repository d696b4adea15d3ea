/* Any bytes as a .safetensors file, with a fixed config.json: no crash, no leak, no endless work.
     clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_safetensors.c -lm -lpthread */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

static const char config_json[] =
    "{\"model_type\":\"llama\",\"hidden_size\":4,\"intermediate_size\":6,\"num_hidden_layers\":1,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":5,"
    "\"max_position_embeddings\":8,\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":true}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.config_json = config_json;
  c.device = TFM_REF;
  c.threads = 1;
  c.host.memory_limit_bytes = 64u << 20;
  tfm_model_free(tfm_model_load_memory(data, bytes, &c));
  return 0;
}
