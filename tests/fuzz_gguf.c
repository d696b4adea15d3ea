/* Any bytes as a model file (GGUF, llama2.c): no crash, no leak, no endless work. Bytes that begin
   with 'S' are choices instead: of a GGUF file's keys, their types and values, its tensors' names,
   types, shapes and places. A choice of 0 is the sound one, so that few bytes reach far.
     clang -g -O1 -fsanitize=fuzzer,address,undefined fuzz_gguf.c -lm -lpthread */
#include "fuzz_choices.h"

enum { KEYS = 17, TENSORS = 24 };

static void put_string(choices *c, const char *text) {
  put(c, strlen(text), 8);
  put_text(c, text);
}

static const char *const architectures[] = {
  "llama", "gpt2", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "qwen2moe", "qwen3moe",
  "mistral", "mixtral", "gpt2moe", "bert"};

static const struct { const char *name; uint32_t type, value; } keys[KEYS] = {
  {"block_count", 4, 1}, {"embedding_length", 4, 32}, {"feed_forward_length", 4, 32},
  {"attention.head_count", 4, 2}, {"attention.head_count_kv", 4, 1}, {"context_length", 4, 8},
  {"attention.layer_norm_rms_epsilon", 6, 0x3727c5ac},
  {"attention.layer_norm_epsilon", 6, 0x3727c5ac}, {"rope.freq_base", 6, 0x461c4000},
  {"rope.dimension_count", 4, 16}, {"vocab_size", 4, 32}, {"attention.key_length", 4, 16},
  {"attention.sliding_window", 4, 4}, {"expert_count", 4, 0}, {"expert_used_count", 4, 0},
  {"final_logit_softcapping", 6, 0x41f00000}, {"rope.scaling.factor", 6, 0x40000000}};

static const struct { const char *name; uint16_t rows, cols; } tensors[TENSORS] = {
  {"token_embd.weight", 32, 32}, {"output_norm.weight", 0, 32},
  {"blk.0.attn_norm.weight", 0, 32}, {"blk.0.attn_q.weight", 32, 32},
  {"blk.0.attn_k.weight", 16, 32}, {"blk.0.attn_v.weight", 16, 32},
  {"blk.0.attn_output.weight", 32, 32}, {"blk.0.ffn_norm.weight", 0, 32},
  {"blk.0.ffn_gate.weight", 32, 32}, {"blk.0.ffn_up.weight", 32, 32},
  {"blk.0.ffn_down.weight", 32, 32}, {"output.weight", 32, 32}, {"rope_freqs.weight", 0, 8},
  {"blk.0.attn_q.bias", 0, 32}, {"blk.0.attn_k.bias", 0, 16}, {"blk.0.attn_v.bias", 0, 16},
  {"blk.0.attn_q_norm.weight", 0, 16}, {"blk.0.attn_k_norm.weight", 0, 16},
  {"blk.0.post_attention_norm.weight", 0, 32}, {"blk.0.post_ffw_norm.weight", 0, 32},
  {"blk.0.attn_qkv.weight", 64, 32}, {"blk.0.ffn_gate_inp.weight", 4, 32},
  {"blk.0.ffn_gate_exps.weight", 128, 32}, {"position_embd.weight", 8, 32}};

static void put_key(choices *c, const char *architecture, int i) {
  char name[96];
  uint32_t type = (uint32_t)number(c, keys[i].type);
  int bytes = type >= 10 ? 8 : type == 7 || type < 2 ? 1 : type < 4 ? 2 : 4;
  snprintf(name, sizeof name, "%s.%s", architecture, keys[i].name);
  put_string(c, name);
  put(c, type, 4);
  if (type == 8) put_string(c, "yarn");
  else if (type == 9) put(c, number(c, 4), 4), put(c, number(c, 1), 8), put(c, keys[i].value, 4);
  else put(c, number(c, keys[i].value), bytes);
}

static void put_tensor(choices *c, int i, uint64_t *offset) {
  static const uint8_t types[] = {0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30, 10, 39, 255};
  uint32_t type = types[choice(c) % sizeof types], k;
  uint32_t rank = (uint32_t)number(c, tensors[i].rows ? 2 : 1);
  uint64_t cols = tensors[i].cols * (type > 9 && type < 15 ? 8u : 1); /* of K types: a block */
  put_string(c, tensors[i].name);
  put(c, rank, 4);
  for (k = 0; k < rank && k < 5; k++) put(c, number(c, k == 0 ? cols : tensors[i].rows), 8);
  put(c, type, 4);
  put(c, number(c, *offset), 8);
  *offset += (tensors[i].rows ? tensors[i].rows : 1u) * (uint64_t)tensors[i].cols * 4;
}

/* A GGUF file as the choices make it; its data are what the choices leave, and zeros. */
static void compose(choices *c) {
  const char *architecture = architectures[choice(c) % 14];
  unsigned alignment = choice(c), cut = choice(c), count = 12 + choice(c) % 13;
  uint64_t offset = 0;
  int i;
  put(c, 0x46554747, 4);
  put(c, 3, 4);
  put(c, count, 8);
  put(c, (alignment ? 2 : 1) + KEYS, 8);
  put_string(c, "general.architecture");
  put(c, 8, 4);
  put_string(c, architecture);
  if (alignment) {
    put_string(c, "general.alignment");
    put(c, 4, 4);
    put(c, alignment < 128 ? 32 : number(c, 32), 4);
  }
  for (i = 0; i < KEYS; i++) put_key(c, architecture, i);
  for (i = 0; i < (int)count; i++) put_tensor(c, i, &offset);
  while (c->n % 32) put(c, 0, 1);
  for (i = 0; (uint64_t)i < offset && c->n < ROOM; i++) put(c, choice(c), 1);
  if (cut & 1) c->n -= c->n / 256 * (cut >> 1);
}

static void load(const uint8_t *data, size_t bytes) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.device = TFM_REF;
  c.threads = 1;
  c.host.memory_limit_bytes = 64u << 20;
  tfm_model_free(tfm_model_load_memory(data, bytes, &c));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  static choices c;
  if (bytes == 0 || data[0] != 'S') {
    load(data, bytes);
    return 0;
  }
  c.at = data + 1, c.end = data + bytes, c.n = 0;
  compose(&c);
  load(c.file, c.n);
  return 0;
}

/* The sound choices must load. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
  tfm_model_config k;
  static choices c;
  tfm_model *m;
  (void)argc, (void)argv;
  memset(&k, 0, sizeof k);
  compose(&c);
  m = tfm_model_load_memory(c.file, c.n, &k);
  if (!m) fprintf(stderr, "%s\n", tfm_error()), __builtin_trap();
  tfm_model_free(m);
  return 0;
}
