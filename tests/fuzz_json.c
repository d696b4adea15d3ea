/* Any bytes as the text of a config.json, beside a sound .safetensors file. Bytes that begin with
   'S' are choices instead: of a family and of its keys' values, sound or not, as JSON.
     clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_json.c -lm -lpthread */
#include "fuzz_choices.h"

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

static void put_rope(choices *c, const char *begin) {
  static const char *const types[] = {"default", "linear", "dynamic", "yarn", "llama3", "longrope",
                                      "su", "mrope"};
  static const char *const keys[] = {
    "factor", "rope_theta", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim", "truncate", "partial_rotary_factor", "x"};
  unsigned more = choice(c) % 8, i, n;
  put_text(c, begin);
  put_text(c, "{\"rope_type\":\"");
  put_one_of(c, types, COUNT(types));
  put_text(c, "\"");
  for (; more; more--) {
    put_text(c, ",\"");
    put_one_of(c, keys, COUNT(keys));
    put_text(c, "\":");
    put_number(c, 2 + choice(c) % 8);
  }
  if ((n = choice(c) % 4) != 0)
    for (i = 0; i < 2; i++) {
      put_text(c, i ? "],\"long_factor\":[" : ",\"short_factor\":[");
      put_number(c, 1);
      for (; n > 2; n--) put_text(c, ","), put_number(c, 1);
    }
  put_text(c, n ? "]}" : "}");
}

static void put_extra(choices *c) {
  static const char *const flags[] = {
    "tie_word_embeddings", "attention_bias", "mlp_bias", "qkv_bias", "norm_topk_prob",
    "use_sliding_window", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn", "use_cache", "add_cross_attention", "alibi"};
  static const char *const texts[] = {
    "\"hidden_act\":\"silu\"", "\"hidden_act\":\"gelu\"", "\"hidden_activation\":\"relu\"",
    "\"activation_function\":\"gelu_new\"", "\"torch_dtype\":\"bfloat16\"", "\"dtype\":\"float16\"",
    "\"architectures\":[\"LlamaForCausalLM\"]", "\"layer_types\":[\"full_attention\"]",
    "\"layer_types\":[\"sliding_attention\"]", "\"layer_types\":[7,\"x\"]",
    "\"mlp_only_layers\":[0]", "\"mlp_only_layers\":[-1,9]", "\"eos_token_id\":[1,2]",
    "\"quantization_config\":{\"quant_method\":\"gptq\"}", "\"text_config\":{\"a\":[{}]}",
    "\"head_dim\":2", "\"sliding_window\":null", "\"rope_scaling\":null",
    "\"id2label\":{\"0\":\"a\"}"};
  static const char *const ropes[] = {
    "\"rope_scaling\":", "\"rope_parameters\":", "\"rope_parameters\":{\"full_attention\":"};
  unsigned kind = choice(c) % 4, rope = choice(c) % 3;
  if (kind == 0) put_one_of(c, texts, COUNT(texts));
  if (kind == 1) {
    put_text(c, "\"");
    put_one_of(c, flags, COUNT(flags));
    put_text(c, choice(c) & 1 ? "\":true" : "\":false");
  }
  if (kind == 2) put_rope(c, ropes[rope]), put_text(c, rope == 2 ? "}" : "");
  if (kind == 3) { /* what a neutral value leaves as it is */
    put_text(c, "\"");
    put_text(c, tfmi_rules[choice(c) % COUNT(tfmi_rules)].key);
    put_text(c, "\":");
    put_number(c, 0);
  }
}

static void compose(choices *c) {
  static const uint8_t sound[] = {1, 4, 2, 1, 2, 6, 5, 8, 1, 100, 100, 1, 8, 4, 1, 2, 2, 2, 2, 4, 2,
                                  6, 6, 1, 1};
  const tfmi_family *f = &tfmi_families[choice(c) % COUNT(tfmi_families)];
  unsigned extras = choice(c) % 12, cut = choice(c), i;
  put_text(c, "{\"model_type\":\"");
  put_text(c, f->name);
  put_text(c, "\"");
  for (i = 0; i < COUNT(sound); i++) {
    bool said = i < 9 || choice(c) & 1;
    if (!said || !f->key[i].hf[0]) continue;
    put_text(c, ",\"");
    put_text(c, f->key[i].hf[0]);
    put_text(c, "\":");
    put_number(c, sound[i]);
  }
  for (; extras; extras--) put_text(c, ","), put_extra(c);
  put_text(c, "}");
  if (cut > 224) c->n -= c->n * (cut - 224) / 64;
}

/* The weights must let the load get as far as the config, and a sound config as far as them. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
  static choices c;
  uint8_t first;
  (void)argc, (void)argv;
  load("{}");
  if (!strstr(tfm_error(), "model_type is missing")) __builtin_trap();
  for (first = 0; first < COUNT(tfmi_families); first++) {
    c.at = &first, c.end = &first + 1, c.n = 0;
    compose(&c);
    put(&c, 0, 1);
    load((const char *)c.file);
    if (strstr(tfm_error(), "tensor ") == NULL)
      fprintf(stderr, "%s\n%s\n", c.file, tfm_error()), __builtin_trap();
  }
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  static choices c;
  char *text;
  if (bytes && data[0] == 'S') {
    c.at = data + 1, c.end = data + bytes, c.n = 0;
    compose(&c);
    data = c.file, bytes = c.n;
  }
  text = (char *)malloc(bytes + 1);
  if (!text) return 0;
  if (bytes) memcpy(text, data, bytes);
  text[bytes] = 0;
  load(text);
  free(text);
  return 0;
}
