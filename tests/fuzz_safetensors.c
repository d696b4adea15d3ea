/* Any bytes as a .safetensors file, with a fixed config.json: no crash, no leak, no endless work.
   Bytes that begin with 'S' are choices instead: of the header's entries, their fields, types,
   shapes and places. A model that loads says a token.
     clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_safetensors.c -lm -lpthread */
#include "fuzz_choices.h"

static const char config_json[] =
    "{\"model_type\":\"llama\",\"hidden_size\":4,\"intermediate_size\":6,\"num_hidden_layers\":1,"
    "\"num_attention_heads\":2,\"num_key_value_heads\":1,\"vocab_size\":5,"
    "\"max_position_embeddings\":8,\"rms_norm_eps\":1e-5,\"tie_word_embeddings\":true}";

static const struct { const char *name; uint16_t rows, cols; } tensors[] = {
  {"embed_tokens", 5, 4}, {"norm", 0, 4}, {"layers.0.input_layernorm", 0, 4},
  {"layers.0.self_attn.q_proj", 4, 4}, {"layers.0.self_attn.k_proj", 2, 4},
  {"layers.0.self_attn.v_proj", 2, 4}, {"layers.0.self_attn.o_proj", 4, 4},
  {"layers.0.post_attention_layernorm", 0, 4}, {"layers.0.mlp.gate_proj", 6, 4},
  {"layers.0.mlp.up_proj", 6, 4}, {"layers.0.mlp.down_proj", 4, 6},
  {"lm_head", 5, 4}, {"layers.0.self_attn.rotary_emb.inv_freq", 0, 1}, {"extra", 3, 3}};

static const char *const dtypes[] = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F64", "I32", "I8",
                                     "U8", "BOOL", "F4", "F6_E2M3", "F8_E8M0", "C64", "f32", ""};
static const uint8_t bits[] = {32, 16, 16, 8, 8, 64, 32, 8, 8, 8, 4, 6, 8, 64, 32, 0};

static void put_shape(choices *c, int i) {
  unsigned extra = choice(c);
  put_text(c, "\"shape\":[");
  if (extra > 192) put_number(c, 1), put_text(c, ",");
  if (tensors[i].rows) put_number(c, tensors[i].rows), put_text(c, ",");
  put_number(c, tensors[i].cols);
  put_text(c, extra > 128 && extra <= 192 ? ",1]" : "]");
}

/* One field of a tensor, or what is none. */
static void put_field(choices *c, unsigned field, int i, unsigned type, uint64_t from,
                      uint64_t to) {
  if (field == 0) put_text(c, "\"dtype\":\""), put_text(c, dtypes[type]), put_text(c, "\"");
  if (field == 1) put_shape(c, i);
  if (field == 2) {
    put_text(c, "\"data_offsets\":[");
    put_number(c, from);
    put_text(c, ",");
    put_number(c, to);
    put_text(c, "]");
  }
  if (field == 3) put_text(c, "\"x\":"), put_number(c, 1);
}

static void put_tensor(choices *c, int i, uint64_t *offset) {
  unsigned type = choice(c) % 16, odd = choice(c), k;
  uint64_t count = (tensors[i].rows ? tensors[i].rows : 1u) * (uint64_t)tensors[i].cols;
  uint64_t to = *offset + (count * bits[type] + 7) / 8;
  put_text(c, odd & 1 ? "\"\\u006dodel." : "\"model.");
  put_text(c, tensors[i].name);
  put_text(c, odd & 2 ? ".bias\":{" : ".weight\":{");
  for (k = 0; k < 3; k++) {
    put_text(c, k ? "," : "");
    put_field(c, (k + (odd >> 2 & 3)) % (odd & 128 ? 4 : 3), i, type, *offset, to);
  }
  put_text(c, "}");
  *offset = to;
}

static void compose(choices *c) {
  static const char *const begins[] = {"", " ", "\"__metadata__\":{\"format\":\"pt\"},",
                                       "\"__metadata__\":{},", "\"__metadata__\":{\"a\":1},"};
  static const char *const ends[] = {"}", "} ", "}      ", "},", "", "}\n\t", "}}", "}\xff"};
  unsigned count = 11 + choice(c) % 4, skip = choice(c), cut = choice(c), i;
  uint64_t offset = 0, header, size;
  put(c, 0, 8);
  put_text(c, "{");
  put_one_of(c, begins, COUNT(begins));
  for (i = 0; i < count; i++) {
    if (skip && i == skip % 16) continue;
    put_text(c, i ? "," : "");
    put_tensor(c, (int)i, &offset);
  }
  put_one_of(c, ends, COUNT(ends));
  header = number(c, c->n - 8);
  for (i = 0; i < 8; i++) c->file[i] = (uint8_t)(header >> 8 * i);
  size = c->n + offset;
  while (c->n < size && c->n < ROOM) put(c, choice(c), 1);
  if (cut > 200) c->n -= c->n * (cut - 200) / 64;
  if (cut > 190 && cut <= 200) put(c, 0, 1);
}

static tfm_model *load(const uint8_t *data, size_t bytes) {
  tfm_model_config config;
  memset(&config, 0, sizeof config);
  config.config_json = config_json;
  config.device = TFM_REF;
  config.threads = 1;
  config.host.memory_limit_bytes = 64u << 20;
  return tfm_model_load_memory(data, bytes, &config);
}

static void say(tfm_model *m) {
  static const int32_t prompt[] = {1, 4};
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_feed(s, prompt, 2);
  tfm_next(s, NULL);
  tfm_session_free(s);
  tfm_model_free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  static choices c;
  if (bytes == 0 || data[0] != 'S') {
    say(load(data, bytes));
    return 0;
  }
  c.at = data + 1, c.end = data + bytes, c.n = 0;
  compose(&c);
  say(load(c.file, c.n));
  return 0;
}

/* The sound choices must load. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
  static choices c;
  tfm_model *m;
  (void)argc, (void)argv;
  compose(&c);
  m = load(c.file, c.n);
  if (!m) fprintf(stderr, "%s\n", tfm_error()), __builtin_trap();
  tfm_model_free(m);
  return 0;
}
