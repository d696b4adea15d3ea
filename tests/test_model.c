/* Whole models against Hugging Face: golden logits of tests/make_goldens.py, a mutation of every
   config field that must then break them, llama2.c's text, and gpt-nano-sort's activations. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "files.h"

/* ---- Goldens ---- */

typedef struct golden {
  char folder[200];
  blob ids, logits; /* int32 [T], float32 [T, V] */
  size_t tokens, vocabulary;
  int32_t context;  /* of the engine */
  float range;      /* highest - lowest logit */
} golden;

static const char *const cases[] = {
  "gpt2-a", "gpt2-b", "gpt2-c", "llama-a", "llama-b", "llama-c", "llama-d", "llama-e", "mistral-a",
  "mistral-b", "qwen2-a", "qwen2-b", "qwen3-a", "qwen3-b", "gemma-a", "gemma-b", "gemma2-a",
  "gemma2-b", "gemma3-a", "gemma3-b", "phi3-a", "phi3-b", "mixtral-a", "mixtral-b", "qwen2moe-a",
  "qwen2moe-b", "qwen3moe-a", "qwen3moe-b", "gpt2moe-a", "gpt2moe-b", "qwen3-c", "llama-f"};

/* Where frequencies depend on the context: transformers takes the tokens so far for it. */
static const struct { const char *name; int32_t context; } contexts[] = {
  {"llama-e", 45}, {"phi3-b", 24}};

static const int32_t *golden_ids(const golden *g) {
  return (const int32_t *)(const void *)g->ids.data;
}
static const float *golden_logits(const golden *g) {
  return (const float *)(const void *)g->logits.data;
}

static golden golden_open(const char *name) {
  golden g;
  char path[300];
  size_t i, n;
  float low, high;
  snprintf(g.folder, sizeof g.folder, DATA "models/%s", name);
  for (i = 0, g.context = 0; i < sizeof contexts / sizeof *contexts; i++)
    if (!strcmp(contexts[i].name, name)) g.context = contexts[i].context;
  snprintf(path, sizeof path, "%s/ids.i32", g.folder);
  g.ids = blob_read(path);
  blob_turn(&g.ids, 0);
  snprintf(path, sizeof path, "%s/logits.f32", g.folder);
  g.logits = blob_read(path);
  blob_turn(&g.logits, 0);
  g.tokens = g.ids.bytes / sizeof(int32_t);
  n = g.logits.bytes / sizeof(float);
  g.vocabulary = g.tokens ? n / g.tokens : 0;
  low = high = n ? golden_logits(&g)[0] : 0;
  for (i = 0; i < n; i++) {
    low = fminf(low, golden_logits(&g)[i]);
    high = fmaxf(high, golden_logits(&g)[i]);
  }
  g.range = high - low;
  return g;
}

static void golden_close(golden *g) {
  free(g->ids.data);
  free(g->logits.data);
}

/* Largest difference from the golden logits, as a share of their range; NaN counts as 1e9. */
static float distance(const golden *g, const float *logits, size_t first, size_t count) {
  float worst = 0;
  size_t i;
  for (i = 0; i < count * g->vocabulary; i++) {
    float d = fabsf(logits[i] - golden_logits(g)[first * g->vocabulary + i]) / g->range;
    if (!(d <= worst)) worst = isnan(d) ? 1e9f : d;
  }
  return worst;
}

/* In one call, in passes of batch_rows; or token by token through tfm_logits. exact: even where a
   device has faster ways. */
static float model_distance(const golden *g, const tfm_model *m, int32_t batch_rows, bool stepwise,
                            bool exact) {
  tfm_engine_config c;
  tfm_session *s;
  float *logits = (float *)calloc(g->tokens * g->vocabulary, sizeof(float)), worst = 0;
  size_t i;
  memset(&c, 0, sizeof c);
  c.batch_rows = batch_rows;
  c.page_tokens = 16;
  c.context = g->context;
  c.deterministic = exact;
  c.cache = exact ? TFM_F32 : TFM_TYPE_DEFAULT;
  s = tfm_session_create(m, &c);
  CHECK(s != NULL);
  if (!s) fprintf(stderr, "%s\n", tfm_error());
  for (i = 0; s && stepwise && i < g->tokens; i++) {
    const float *row;
    CHECK_EQ_INT(tfm_feed(s, golden_ids(g) + i, 1), TFM_OK);
    row = tfm_logits(s);
    worst = fmaxf(worst, row ? distance(g, row, i, 1) : 1e9f);
  }
  if (s && !stepwise) {
    CHECK_EQ_INT(tfm_eval(s, golden_ids(g), g->tokens, logits), TFM_OK);
    worst = distance(g, logits, 0, g->tokens);
  }
  tfm_session_free(s);
  free(logits);
  return s ? worst : 1e9f;
}

#define GOLDEN_BOUND 1e-5f /* of the range of the logits */

TEST(logits_equal_transformers) {
  size_t i;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    golden g = golden_open(cases[i]);
    tfm_model *m = tfm_model_load(g.folder, NULL);
    float whole, chunks, steps;
    CHECK(g.ids.data && g.logits.data && g.range > 1);
    CHECK(m != NULL);
    if (!m) {
      fprintf(stderr, "%s\n", tfm_error());
      golden_close(&g);
      continue;
    }
    whole = model_distance(&g, m, 0, false, true);
    chunks = model_distance(&g, m, 7, false, true);
    steps = model_distance(&g, m, 0, true, true);
    printf("  %-10s largest difference / range: whole %.1e, passes of 7 %.1e, steps %.1e\n",
           cases[i], (double)whole, (double)chunks, (double)steps);
    CHECK(whole <= GOLDEN_BOUND);
    CHECK(chunks <= GOLDEN_BOUND);
    CHECK(steps <= GOLDEN_BOUND);
    tfm_model_free(m);
    golden_close(&g);
  }
}

/* ---- Types, on every table ---- */

/* The tuned CPU table multiplies quantised weights by activations rounded to 8 bits, which moves
   qwen3-c, the only one whose rows fill blocks, by 2.4e-2 in PyTorch. Where it has tiles, it takes
   prompts with weights, activations, keys, values and probabilities of BF16, which is off by up to
   4.9e-2 in BF16 and 8.0e-2 in F16 (llama-e both; 4.9e-2 qwen3moe-a, 7.0e-2 mixtral-a, where it
   changes a choice of experts), and below 2e-2 in most. The CUDA table takes passes of more than a
   few rows with activations of the weights' 16 bits, F16 for quantised ones, and keeps such keys
   and values too. Its bounds are what that does to these models: the reference, with both rounded
   in the same places, is off by up to 9.2e-3 in F16 (llama-e; 5.3e-3 llama-d, below 3e-3 most) and
   6.9e-2 in BF16 (llama-e; 6.8e-2 mixtral-a, where it changes a choice of experts; below 3e-2
   most), which are the table's figures, too. The last row is as the file has it: F32, F16, BF16 and
   F8. */
static const struct { tfm_type type; float cpu, tiles, cuda; } typed[] = {
  {TFM_F32, 1e-5f, 1e-5f, 1e-5f}, {TFM_F16, 1e-5f, 1e-1f, 1.2e-2f},
  {TFM_BF16, 1e-5f, 1e-1f, 1e-1f}, {TFM_Q8_0, 5e-2f, 1e-1f, 1.2e-2f},
  {TFM_Q4_0, 5e-2f, 1e-1f, 1.2e-2f}, {TFM_TYPE_DEFAULT, 1e-5f, 1e-1f, 1e-1f}};

static void typed_check(const golden *g, const tfm_model *m, tfm_type type, int32_t rows,
                        const char *how, float bound) {
  float d = model_distance(g, m, rows, false, false);
  printf("  %-10s %-5s %-4s %slargest difference / range %.1e\n", strrchr(g->folder, '/') + 1,
         tfm_type_name(type), m->dev.table->name, how, (double)d);
  CHECK(d <= bound);
}

/* NULL where the table is not there, or the rows do not fill the type's blocks. */
static tfm_model *typed_model(const golden *g, tfm_type type, tfm_device device) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.weights = type;
  c.device = device;
  c.no_fallback = true;
  return tfm_model_load(g->folder, &c);
}

/* The reference's logits on the same weights take the place of the golden ones. */
static bool typed_golden(golden *g, tfm_type type) {
  tfm_model *m = typed_model(g, type, TFM_REF);
  tfm_engine_config c;
  tfm_session *s;
  bool good;
  memset(&c, 0, sizeof c);
  c.context = g->context;
  s = tfm_session_create(m, &c);
  good = s && tfm_eval(s, golden_ids(g), g->tokens, (float *)(void *)g->logits.data) == TFM_OK;
  tfm_session_free(s);
  tfm_model_free(m);
  return good;
}

static void typed_distances(tfm_device device) {
  size_t i, k;
  for (i = 0; i < sizeof cases / sizeof *cases; i++)
    for (k = 0; k < sizeof typed / sizeof *typed; k++) {
      golden g = golden_open(cases[i]);
      tfm_model *m = typed_model(&g, typed[k].type, device);
      if (m && typed_golden(&g, typed[k].type)) {
        typed_check(&g, m, typed[k].type, 7, "",
                    device == TFM_CUDA ? typed[k].cuda : typed[k].cpu);
        if (device == TFM_CPU && m->dev.has_bf16)
          typed_check(&g, m, typed[k].type, 0, "in tiles: ", typed[k].tiles);
      }
      tfm_model_free(m);
      golden_close(&g);
    }
}

TEST(tuned_logits_are_near_the_reference) {
  typed_distances(TFM_CPU);
  typed_distances(TFM_CUDA);
}

/* ---- Mutations ---- */

/* Replaces the first occurrence; NULL when there is none. */
static char *replaced(const char *text, const char *from, const char *to) {
  const char *at = strstr(text, from);
  char *out;
  if (!at) return NULL;
  out = (char *)malloc(strlen(text) + strlen(to) + 1);
  sprintf(out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
  return out;
}

/* The golden distance with config.json changed; 1e9 when it then does not load at all. */
static float mutated_distance(const golden *g, const char *from, const char *to) {
  char path[300], *text;
  overlay o;
  tfm_io io;
  tfm_model_config c;
  tfm_model *m;
  float d = 1e9f;
  blob config;
  snprintf(path, sizeof path, "%s/config.json", g->folder);
  config = blob_read(path);
  text = replaced((const char *)config.data, from, to);
  if (!text) {
    fprintf(stderr, "%s has no %s\n", path, from);
    test_fail(__FILE__, __LINE__, "the mutation does not apply");
  } else {
    o.name = "config.json";
    o.text = text;
    o.bytes = strlen(text);
    io = overlay_io(&o);
    memset(&c, 0, sizeof c);
    c.host.io = &io;
    m = tfm_model_load(g->folder, &c);
    if (m) d = model_distance(g, m, 0, false, true);
    tfm_model_free(m);
  }
  free(text);
  free(config.data);
  return d;
}

typedef struct mutation {
  const char *model, *from, *to;
} mutation;

static const mutation mutations[] = {
    {"gpt2-a", "\"n_head\": 5", "\"n_head\": 6"},
    {"gpt2-a", "\"n_layer\": 3", "\"n_layer\": 2"},
    {"gpt2-a", "\"n_embd\": 60", "\"n_embd\": 55"},
    {"gpt2-a", "\"gelu_new\"", "\"gelu\""},
    {"gpt2-a", "\"layer_norm_epsilon\": 1e-05", "\"layer_norm_epsilon\": 1e-03"},
    {"gpt2-a", "\"scale_attn_weights\": true", "\"scale_attn_weights\": false"},
    {"gpt2-a", "\"scale_attn_by_inverse_layer_idx\": false",
     "\"scale_attn_by_inverse_layer_idx\": true"},
    {"gpt2-b", "\"activation_function\": \"gelu\"", "\"activation_function\": \"gelu_new\""},
    {"gpt2-b", "\"n_inner\": 100", "\"n_inner\": null"},
    {"gpt2-b", "\"layer_norm_epsilon\": 0.001", "\"layer_norm_epsilon\": 0.00001"},
    {"gpt2-b", "\"scale_attn_by_inverse_layer_idx\": true",
     "\"scale_attn_by_inverse_layer_idx\": false"},
    {"gpt2-c", "\"relu\"", "\"gelu_new\""},
    {"llama-a", "\"num_attention_heads\": 8", "\"num_attention_heads\": 4"},
    {"llama-a", "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 4"},
    {"llama-a", "\"rope_theta\": 10000", "\"rope_theta\": 20000"},
    {"llama-a", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""},
    {"llama-b", "\"rms_norm_eps\": 0.001", "\"rms_norm_eps\": 0.00001"},
    {"llama-b", "\"rope_theta\": 500.0", "\"rope_theta\": 10000.0"},
    {"llama-b", "\"factor\": 8.0", "\"factor\": 4.0"},
    {"llama-b", "\"low_freq_factor\": 1.0", "\"low_freq_factor\": 2.0"},
    {"llama-b", "\"high_freq_factor\": 4.0", "\"high_freq_factor\": 3.0"},
    {"llama-b", "\"original_max_position_embeddings\": 32",
     "\"original_max_position_embeddings\": 64"},
    {"llama-b", "\"rope_type\": \"llama3\"", "\"rope_type\": \"default\""},
    {"llama-b", "\"head_dim\": 16", "\"head_dim\": 12"},
    {"llama-b", "\"attention_bias\": true", "\"attention_bias\": false"},
    {"llama-b", "\"mlp_bias\": true", "\"mlp_bias\": false"},
    {"llama-b", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"},
    {"llama-b", "\"silu\"", "\"relu\""},
    {"llama-c", "\"hidden_act\": \"gelu\"", "\"hidden_act\": \"gelu_new\""},
    {"llama-c", "\"rope_theta\": 300.0", "\"rope_theta\": 310.0"},
    {"llama-c", "\"factor\": 4.0", "\"factor\": 8.0"},
    {"llama-c", "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-03"},
    {"llama-c", "\"num_key_value_heads\": 1", "\"num_key_value_heads\": 2"},
    {"llama-d", "\"yarn\"", "\"linear\""},
    {"llama-d", "\"factor\": 4.0", "\"factor\": 3.0"},
    {"llama-d", "\"beta_fast\": 3.0", "\"beta_fast\": 2.0"},
    {"llama-d", "\"beta_slow\": 0.5", "\"beta_slow\": 1.0"},
    {"llama-d", "\"mscale\": 2.0", "\"mscale\": 1.0"},
    {"llama-d", "\"mscale_all_dim\": 0.5", "\"mscale_all_dim\": 1.0"},
    {"llama-d", "\"original_max_position_embeddings\": 16",
     "\"original_max_position_embeddings\": 24"},
    {"llama-d", "\"truncate\": false", "\"truncate\": true"},
    {"llama-d", "\"rope_theta\": 50.0", "\"rope_theta\": 51.0"},
    {"llama-e", "\"factor\": 3.0", "\"factor\": 4.0"},
    {"llama-e", "\"max_position_embeddings\": 20", "\"max_position_embeddings\": 21"},
    {"mistral-a", "\"sliding_window\": 8", "\"sliding_window\": 9"},
    {"mistral-a", "\"sliding_window\": 8", "\"sliding_window\": null"},
    {"mistral-a", "\"head_dim\": 10", "\"head_dim\": null"},
    {"mistral-a", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""},
    {"mistral-a", "\"model_type\": \"mistral\"", "\"model_type\": \"qwen2\""},
    {"mistral-b", "\"sliding_window\": null", "\"sliding_window\": 39"},
    {"mistral-b", "\"factor\": 4.0", "\"factor\": 2.0"},
    {"mistral-b", "\"rope_theta\": 40.0", "\"rope_theta\": 41.0"},
    {"mistral-b", "\"rms_norm_eps\": 1e-06", "\"rms_norm_eps\": 1e-03"},
    {"qwen2-a", "\"sliding_attention\",\n    \"sliding_attention\"",
     "\"sliding_attention\",\n    \"full_attention\""},
    {"qwen2-a", "\"sliding_window\": 9", "\"sliding_window\": 8"},
    {"qwen2-a", "\"use_sliding_window\": true", "\"use_sliding_window\": false"},
    {"qwen2-b", "\"factor\": 2.5", "\"factor\": 2.0"},
    {"qwen2-b", "\"rms_norm_eps\": 0.001", "\"rms_norm_eps\": 0.00001"},
    {"qwen2-b", "\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"},
    {"qwen3-a", "\"attention_bias\": true", "\"attention_bias\": false"},
    {"qwen3-a", "\"head_dim\": 10", "\"head_dim\": 12"},
    {"qwen3-a", "\"sliding_window\": 9", "\"sliding_window\": 8"},
    {"qwen3-a", "\"full_attention\",\n    \"sliding_attention\"",
     "\"full_attention\",\n    \"full_attention\""},
    {"qwen3-b", "\"attention_factor\": 1.25", "\"attention_factor\": 1.0"},
    {"qwen3-b", "\"rms_norm_eps\": 0.001", "\"rms_norm_eps\": 0.00001"},
    {"gemma-a", "\"hidden_act\": \"gelu_pytorch_tanh\"", "\"hidden_act\": \"silu\""},
    {"gemma-a", "\"attention_bias\": true", "\"attention_bias\": false"},
    {"gemma-a", "\"model_type\": \"gemma\"", "\"model_type\": \"llama\""},
    {"gemma-b", "\"torch_dtype\": \"bfloat16\"", "\"torch_dtype\": \"float32\""},
    {"gemma-b", "\"head_dim\": 12", "\"head_dim\": 10"},
    {"gemma2-a", "\"attn_logit_softcapping\": 1.5", "\"attn_logit_softcapping\": null"},
    {"gemma2-a", "\"final_logit_softcapping\": 2.5", "\"final_logit_softcapping\": null"},
    {"gemma2-a", "\"query_pre_attn_scalar\": 13", "\"query_pre_attn_scalar\": 10"},
    {"gemma2-a", "\"sliding_window\": 8", "\"sliding_window\": 7"},
    {"gemma2-a", "\"full_attention\"", "\"sliding_attention\""},
    {"gemma2-a", "\"hidden_activation\": \"gelu_pytorch_tanh\"",
     "\"hidden_activation\": \"gelu\""},
    {"gemma2-b", "\"attn_logit_softcapping\": null", "\"attn_logit_softcapping\": 9.0"},
    {"gemma2-b", "\"final_logit_softcapping\": 3.0", "\"final_logit_softcapping\": 4.0"},
    {"gemma2-b", "\"sliding_window\": 11", "\"sliding_window\": 12"},
    {"gemma2-b", "\"torch_dtype\": \"bfloat16\"", "\"torch_dtype\": \"float32\""},
    {"gemma3-a", "\"factor\": 4.0", "\"factor\": 2.0"},
    {"gemma3-a", "\"rope_theta\": 500.0", "\"rope_theta\": 510.0"},
    {"gemma3-a", "\"rope_theta\": 20.0", "\"rope_theta\": 21.0"},
    {"gemma3-a", "\"query_pre_attn_scalar\": 13", "\"query_pre_attn_scalar\": 10"},
    {"gemma3-a", "\"sliding_window\": 8", "\"sliding_window\": 9"},
    {"gemma3-a", "\"full_attention\",\n", "\"sliding_attention\",\n"},
    {"gemma3-a", "\"final_logit_softcapping\": 3.0", "\"final_logit_softcapping\": null"},
    {"gemma3-b", "\"sliding_window_pattern\": 2", "\"sliding_window_pattern\": 3"},
    {"gemma3-b", "\"rope_local_base_freq\": 10.0", "\"rope_local_base_freq\": 11.0"},
    {"gemma3-b", "\"rope_theta\": 300.0", "\"rope_theta\": 310.0"},
    {"phi3-a", "\"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\": 1.0"},
    {"phi3-a", "\"sliding_window\": 13", "\"sliding_window\": 12"},
    {"phi3-a", "\"longrope\"", "\"default\""},
    {"phi3-a", "7.0", "7.5"},
    {"phi3-a", "\"original_max_position_embeddings\": 24",
     "\"original_max_position_embeddings\": 64"},
    {"phi3-b", "1.3", "1.2"},
    {"phi3-b", "\"max_position_embeddings\": 96", "\"max_position_embeddings\": 64"},
    {"phi3-b", "\"rope_theta\": 80.0", "\"rope_theta\": 81.0"},
    {"mixtral-a", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 3"},
    {"mixtral-a", "\"num_local_experts\": 5", "\"num_local_experts\": 4"},
    {"mixtral-a", "\"sliding_window\": 8", "\"sliding_window\": 9"},
    {"mixtral-a", "\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\""},
    {"mixtral-b", "\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 2"},
    {"mixtral-b", "\"rope_theta\": 200.0", "\"rope_theta\": 210.0"},
    {"mixtral-b", "\"head_dim\": 12", "\"head_dim\": 10"},
    {"qwen2moe-a", "\"norm_topk_prob\": false", "\"norm_topk_prob\": true"},
    {"qwen2moe-a", "\"decoder_sparse_step\": 2", "\"decoder_sparse_step\": 4"},
    {"qwen2moe-a", "\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 2"},
    {"qwen2moe-a", "\"moe_intermediate_size\": 12", "\"moe_intermediate_size\": 10"},
    {"qwen2moe-a", "\"shared_expert_intermediate_size\": 28",
     "\"shared_expert_intermediate_size\": 20"},
    {"qwen2moe-a", "\"qkv_bias\": true", "\"qkv_bias\": false"},
    {"qwen2moe-a", "\"sliding_attention\"", "\"full_attention\""},
    {"qwen2moe-a", "\"sliding_window\": 9", "\"sliding_window\": 10"},
    {"qwen2moe-b", "\"norm_topk_prob\": true", "\"norm_topk_prob\": false"},
    {"qwen2moe-b", "\"mlp_only_layers\": [\n    1\n  ]", "\"mlp_only_layers\": [2]"},
    {"qwen2moe-b", "\"num_experts\": 5", "\"num_experts\": 4"},
    {"qwen3moe-a", "\"norm_topk_prob\": true", "\"norm_topk_prob\": false"},
    {"qwen3moe-a", "\"attention_bias\": true", "\"attention_bias\": false"},
    {"qwen3moe-a", "\"sliding_window\": 9", "\"sliding_window\": 8"},
    {"qwen3moe-a", "\"use_sliding_window\": true", "\"use_sliding_window\": false"},
    {"qwen3moe-a", "\"mlp_only_layers\": [\n    1\n  ]", "\"mlp_only_layers\": []"},
    {"qwen3moe-b", "\"norm_topk_prob\": false", "\"norm_topk_prob\": true"},
    {"qwen3moe-b", "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 1"},
    {"qwen3moe-b", "\"num_local_experts\": 7", "\"num_local_experts\": 6"},
    {"gpt2moe-a", "\"n_expert_used\": 2", "\"n_expert_used\": 1"},
    {"gpt2moe-a", "\"n_expert\": 8", "\"n_expert\": 7"},
    {"gpt2moe-a", "\"n_inner\": 20", "\"n_inner\": 21"},
    {"gpt2moe-b", "\"n_expert_inner\": 14", "\"n_expert_inner\": 12"},
    {"gpt2moe-b", "\"relu\"", "\"gelu\""},
    {"gpt2moe-b", "\"scale_attn_by_inverse_layer_idx\": true",
     "\"scale_attn_by_inverse_layer_idx\": false"},
};

TEST(every_config_field_matters) {
  size_t i;
  float least = 1e9f;
  for (i = 0; i < sizeof mutations / sizeof *mutations; i++) {
    const mutation *mu = &mutations[i];
    golden g = golden_open(mu->model);
    float d = mutated_distance(&g, mu->from, mu->to);
    if (d <= GOLDEN_BOUND)
      fprintf(stderr, "%s: %s -> %s changes nothing\n", mu->model, mu->from, mu->to);
    CHECK(d > GOLDEN_BOUND);
    least = fminf(least, d);
    golden_close(&g);
  }
  printf("  %d mutations; the mildest moves the logits by %.1e of their range\n", (int)i,
         (double)least);
}

/* What nearly every config.json has: its number times `by`, and `plus`, or `to` for the text `from`
   must be noticed. */
static const struct common_field {
  const char *key;
  double by, plus;
  const char *from, *to;
} common_fields[] = {
  {"num_hidden_layers", 1, -1, NULL, NULL}, {"hidden_size", 1, 2, NULL, NULL},
  {"intermediate_size", 1, 1, NULL, NULL}, {"moe_intermediate_size", 1, 1, NULL, NULL},
  {"num_attention_heads", 1, 1, NULL, NULL}, {"num_key_value_heads", 1, 1, NULL, NULL},
  {"head_dim", 1, 2, NULL, NULL}, {"vocab_size", 1, 1, NULL, NULL},
  {"rms_norm_eps", 1, 0.01, NULL, NULL}, {"rope_theta", 2, 0, NULL, NULL},
  {"n_layer", 1, -1, NULL, NULL}, {"n_embd", 1, 2, NULL, NULL}, {"n_head", 1, 1, NULL, NULL},
  {"n_positions", 1, 1, NULL, NULL}, {"layer_norm_epsilon", 1, 0.01, NULL, NULL},
  {"hidden_act", 1, 0, "silu", "gelu"}, {"hidden_act", 1, 0, "gelu_pytorch_tanh", "relu"},
  {"hidden_activation", 1, 0, "gelu_pytorch_tanh", "relu"},
  {"activation_function", 1, 0, "gelu_new", "silu"},
  {"tie_word_embeddings", 1, 0, "true", "false"},
};

/* Where a model has the key with a number, or with `from`: what stands there, and what shall. */
static bool common_change(const char *config, const struct common_field *f, char *from, char *to,
                          size_t size) {
  const char *at, *value;
  char *end;
  double number;
  snprintf(from, size, "\"%s\": ", f->key);
  at = strstr(config, from);
  value = at ? at + strlen(from) : "";
  number = strtod(value, &end);
  if (f->from) {
    const char *quote = *value == '"' ? "\"" : "";
    snprintf(to, size, "\"%s\": %s%s%s", f->key, quote, f->to, quote);
    snprintf(from, size, "\"%s\": %s%s%s", f->key, quote, f->from, quote);
    return at && strstr(config, from) == at;
  }
  if (end == value) return false; /* not there, or null */
  snprintf(from, size, "%.*s", (int)(end - at), at);
  snprintf(to, size, "\"%s\": %.17g", f->key, number * f->by + f->plus);
  return true;
}

TEST(common_config_fields_matter) { /* in every model that has them */
  char path[300], from[100], to[100];
  size_t i, k, changes = 0;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    golden g = golden_open(cases[i]);
    blob config;
    snprintf(path, sizeof path, "%s/config.json", g.folder);
    config = blob_read(path);
    for (k = 0; k < sizeof common_fields / sizeof *common_fields; k++) {
      if (!common_change((const char *)config.data, &common_fields[k], from, to, sizeof from))
        continue;
      if (!strcmp(cases[i], "qwen3moe-b") && !strcmp(common_fields[k].key, "intermediate_size"))
        continue; /* it has no layer without experts */
      if (mutated_distance(&g, from, to) <= GOLDEN_BOUND) {
        fprintf(stderr, "%s: %s -> %s changes nothing\n", cases[i], from, to);
        test_fail(__FILE__, __LINE__, "a field that does not matter");
      }
      changes++;
    }
    free(config.data);
    golden_close(&g);
  }
  printf("  %d changes\n", (int)changes);
}

/* A head in the file is used even where the config calls it tied, as transformers 5 does. */
TEST(a_head_in_the_file_is_used) {
  static const char *const models[] = {"gpt2-b", "llama-a"};
  size_t i;
  for (i = 0; i < 2; i++) {
    golden g = golden_open(models[i]);
    CHECK(mutated_distance(&g, "\"tie_word_embeddings\": false",
                           "\"tie_word_embeddings\": true") <= GOLDEN_BOUND);
    golden_close(&g);
  }
}

/* ---- stories260K: a real model, three formats, the reference program's text ---- */

typedef struct text_buffer {
  char text[8192];
  size_t n;
} text_buffer;

static bool text_append(void *user, const char *text, size_t bytes) {
  text_buffer *t = (text_buffer *)user;
  if (t->n + bytes >= sizeof t->text) return false;
  memcpy(t->text + t->n, text, bytes);
  t->text[t->n += bytes] = 0;
  return true;
}

/* Greedy text from BOS; run.c's 250 steps print the text of 250 tokens after it and a newline. */
static void stories_text(const char *model_path, const char *tokenizer_path, const char *expected) {
  tfm_tokenizer_config tc;
  tfm_generate_config gc;
  tfm_model *m = tfm_model_load(model_path, NULL);
  tfm_tokenizer *t;
  tfm_session *s = tfm_session_create(m, NULL);
  text_buffer out;
  size_t n;
  out.n = 0;
  out.text[0] = 0;
  memset(&tc, 0, sizeof tc);
  memset(&gc, 0, sizeof gc);
  tc.vocabulary = 512;
  t = tfm_tokenizer_load(tokenizer_path, &tc);
  gc.max_tokens = 250;
  gc.on_text = text_append;
  gc.user = &out;
  if (tfm_generate(s, t, "", &gc) < 0) fprintf(stderr, "%s: %s\n", model_path, tfm_error());
  n = strlen(expected);
  while (n && expected[n - 1] == '\n') n--;
  CHECK_EQ_INT(out.n, n);
  if (strncmp(out.text, expected, n))
    fprintf(stderr, "%s with %s:\n%s\nexpected:\n%s\n", model_path, tokenizer_path, out.text,
            expected);
  CHECK(n > 500 && strncmp(out.text, expected, n) == 0);
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
}

TEST(stories260K_text) {
  blob expected = blob_read(SHARED "stories260K/stories260K-greedy-n250.txt");
  const char *text = (const char *)expected.data;
  if (!text) SKIP("../shared/data/stories260K is not here");
  stories_text(SHARED "stories260K/stories260K.bin", SHARED "stories260K/tok512.bin", text);
  stories_text(SHARED "stories260K/stories260K.bin", SHARED "stories260K/stories260K.bin", text);
  stories_text(SHARED "stories260K/checkpoint_v1.bin", SHARED "stories260K/tok512.model", text);
  stories_text(SHARED "stories260K/stories260K.gguf", SHARED "stories260K/stories260K.gguf", text);
  free(expected.data);
}

/* ---- gpt-nano-sort: every intermediate activation of a PyTorch forward pass ---- */

typedef struct array { /* a tensor of the JSON files: base64 float32 */
  char name[80];
  int64_t dims[4];
  int rank;
  float *data;
  size_t n;
} array;

typedef struct arrays {
  array item[128];
  int n;
} arrays;

static int base64_value(char c) {
  const char *digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const char *at = c ? strchr(digits, c) : NULL;
  return at ? (int)(at - digits) : -1;
}

static void array_decode(array *a, tfmi_text text) {
  size_t i, bytes = 0;
  uint32_t bits = 0;
  int count = 0;
  unsigned char *out = (unsigned char *)calloc(text.n + 4, 1);
  for (i = 0; i < text.n; i++) {
    int v = base64_value(text.at[i]);
    if (v < 0) continue;
    bits = bits << 6 | (uint32_t)v;
    if (++count == 4) {
      out[bytes++] = (unsigned char)(bits >> 16);
      out[bytes++] = (unsigned char)(bits >> 8);
      out[bytes++] = (unsigned char)bits;
      bits = 0, count = 0;
    }
  }
  if (count == 3)
    out[bytes++] = (unsigned char)(bits >> 10), out[bytes++] = (unsigned char)(bits >> 2);
  if (count == 2) out[bytes++] = (unsigned char)(bits >> 4);
  tfmi_little(out, bytes, sizeof(float));
  a->data = (float *)(void *)out;
  a->n = bytes / sizeof(float);
}

static void array_read(tfmi_json *j, array *a) {
  tfmi_text key;
  tfmi_json_object(j);
  while (tfmi_json_member(j, &key)) {
    if (tfmi_text_is(key, "shape")) {
      tfmi_json_array(j);
      while (tfmi_json_element(j)) a->dims[a->rank++] = tfmi_json_integer(j, 0, 1 << 20);
    } else if (tfmi_text_is(key, "data")) {
      array_decode(a, tfmi_json_string(j));
    } else {
      tfmi_json_skip(j);
    }
  }
}

/* White box: the library's own JSON reader. */
static void arrays_parse(tfmi_load *l, blob text, arrays *out) {
  tfmi_json j;
  tfmi_text key;
  tfmi_json_init(&j, l, "test", text.data, text.bytes);
  tfmi_json_object(&j);
  while (tfmi_json_member(&j, &key)) {
    array *a = &out->item[out->n];
    if (tfmi_text_is(key, "config")) {
      tfmi_json_skip(&j);
      continue;
    }
    snprintf(a->name, sizeof a->name, "%.*s", (int)key.n, key.at);
    array_read(&j, a);
    out->n++;
  }
}

static arrays *arrays_load(const char *path) {
  arrays *out = (arrays *)calloc(1, sizeof *out);
  blob text = blob_read(path);
  tfmi_heap heap;
  tfmi_load l;
  memset(&heap, 0, sizeof heap);
  tfmi_load_init(&l, &heap, path);
  if (setjmp(l.fail) == 0) arrays_parse(&l, text, out);
  else test_fail(__FILE__, __LINE__, tfm_error());
  tfmi_ring_free(&heap, &l.scratch);
  free(text.data);
  return out;
}

static const array *arrays_find(const arrays *a, const char *name) {
  int i;
  for (i = 0; i < a->n; i++)
    if (!strcmp(a->item[i].name, name)) return &a->item[i];
  test_fail(__FILE__, __LINE__, name);
  return &a->item[0];
}

static void arrays_free(arrays *a) {
  int i;
  for (i = 0; i < a->n; i++) free(a->item[i].data);
  free(a);
}

/* Hugging Face's GPT-2 keeps these as Conv1D, [in, out]; minGPT as Linear, [out, in]. */
static bool is_conv1d(const char *name) {
  return (strstr(name, ".c_attn.weight") || strstr(name, ".c_proj.weight") ||
          strstr(name, ".c_fc.weight")) != 0;
}

static void array_transpose(array *a) {
  int64_t rows = a->dims[0], cols = a->dims[1], r, c;
  float *t = (float *)malloc(a->n * sizeof(float));
  for (r = 0; r < rows; r++)
    for (c = 0; c < cols; c++) t[c * rows + r] = a->data[r * cols + c];
  free(a->data);
  a->data = t;
  a->dims[0] = cols;
  a->dims[1] = rows;
}

/* The weights as a safetensors file in memory. */
static blob safetensors_of(arrays *a) {
  blob b;
  char *header = (char *)malloc(64 * 1024);
  size_t n = 1, offset = 0;
  int i, d;
  header[0] = '{';
  for (i = 0; i < a->n; i++) {
    array *t = &a->item[i];
    if (is_conv1d(t->name)) array_transpose(t);
    n += (size_t)sprintf(header + n, "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[", i ? "," : "",
                         t->name);
    for (d = 0; d < t->rank; d++)
      n += (size_t)sprintf(header + n, "%s%d", d ? "," : "", (int)t->dims[d]);
    n += (size_t)sprintf(header + n, "],\"data_offsets\":[%d,%d]}", (int)offset,
                         (int)(offset + 4 * t->n));
    offset += 4 * t->n;
  }
  header[n++] = '}';
  b.bytes = 8 + n + offset;
  b.data = (unsigned char *)calloc(b.bytes, 1);
  for (d = 0; d < 8; d++) b.data[d] = (unsigned char)((uint64_t)n >> 8 * d);
  memcpy(b.data + 8, header, n);
  for (offset = 8 + n, i = 0; i < a->n; offset += 4 * a->item[i].n, i++)
    memcpy(b.data + offset, a->item[i].data, 4 * a->item[i].n);
  tfmi_little(b.data + 8 + n, offset - 8 - n, sizeof(float));
  free(header);
  return b;
}

#define NANO_T 11

typedef struct nano { /* compares what the tap shows of one sequence with the file */
  const arrays *expected;
  int sequence;
  float worst;
  int compared;
  float q[NANO_T * 48], k[NANO_T * 48], qkv[NANO_T * 144], in[NANO_T * 48], mid[NANO_T * 48];
} nano;

static void nano_compare(nano *n, const char *name, const float *data, size_t count) {
  const array *a = arrays_find(n->expected, name);
  const float *expected = a->data + (a->dims[0] == 1 ? 0 : (size_t)n->sequence * count);
  size_t i;
  for (i = 0; i < count; i++) n->worst = fmaxf(n->worst, fabsf(data[i] - expected[i]));
  n->compared++;
}

/* q, k, v are compared as [head, T, D], scores as [head, T, T]; -inf where masked. */
static void nano_compare_heads(nano *n, const char *name, const float *data, int stride,
                               int first) {
  float split[NANO_T * 48];
  int h, t, i;
  for (h = 0; h < 3; h++)
    for (t = 0; t < NANO_T; t++)
      for (i = 0; i < 16; i++)
        split[(h * NANO_T + t) * 16 + i] = data[t * stride + first + h * 16 + i];
  nano_compare(n, name, split, NANO_T * 48);
}

static void nano_compare_scores(nano *n) {
  const array *a = arrays_find(n->expected, "att");
  const float *expected = a->data + n->sequence * 3 * NANO_T * NANO_T;
  int h, t, s, i;
  for (h = 0; h < 3; h++)
    for (t = 0; t < NANO_T; t++)
      for (s = 0; s <= t; s++) {
        float dot = 0;
        for (i = 0; i < 16; i++) dot += n->q[t * 48 + h * 16 + i] * n->k[s * 48 + h * 16 + i];
        n->worst = fmaxf(n->worst, fabsf(dot * 0.25f - expected[(h * NANO_T + t) * NANO_T + s]));
      }
  n->compared++;
}

static void nano_compare_probs(nano *n, const float *data) {
  float split[3 * NANO_T * NANO_T];
  int h, t, s;
  for (h = 0; h < 3; h++)
    for (t = 0; t < NANO_T; t++)
      for (s = 0; s < NANO_T; s++)
        split[(h * NANO_T + t) * NANO_T + s] = data[(t * 3 + h) * NANO_T + s];
  nano_compare(n, "attSm", split, sizeof split / sizeof *split);
}

/* What a projection added to the residual stream: the file has it apart, the kernel fuses it. */
static void nano_compare_added(nano *n, const char *name, const float *sum, const float *before) {
  float added[NANO_T * 48];
  int i;
  for (i = 0; i < NANO_T * 48; i++) added[i] = sum[i] - before[i];
  nano_compare(n, name, added, NANO_T * 48);
}

static void nano_first_layer(nano *n, const char *name, const float *data, size_t count) {
  if (!strcmp(name, "norm1")) nano_compare(n, "ln1", data, count);
  if (!strcmp(name, "qkv")) {
    nano_compare(n, "qkv", data, count);
    nano_compare_heads(n, "v", data, 144, 96);
  }
  if (!strcmp(name, "q")) memcpy(n->q, data, sizeof n->q), nano_compare_heads(n, "q", data, 48, 0);
  if (!strcmp(name, "k")) memcpy(n->k, data, sizeof n->k), nano_compare_heads(n, "k", data, 48, 0);
  if (!strcmp(name, "probs")) nano_compare_scores(n), nano_compare_probs(n, data);
  if (!strcmp(name, "attn")) nano_compare(n, "y", data, count);
  if (!strcmp(name, "mid")) {
    nano_compare(n, "attnResid", data, count);
    nano_compare_added(n, "yProj", data, n->in);
    memcpy(n->mid, data, sizeof n->mid);
  }
  if (!strcmp(name, "norm2")) nano_compare(n, "ln2", data, count);
  if (!strcmp(name, "up")) nano_compare(n, "fc", data, count);
  if (!strcmp(name, "act")) nano_compare(n, "gelu", data, count);
  if (!strcmp(name, "out")) {
    nano_compare(n, "mlpResid", data, count);
    nano_compare_added(n, "mlp", data, n->mid);
  }
}

static void nano_tap(void *user, const char *name, int32_t layer, const float *data, int32_t rows,
                     int32_t cols) {
  nano *n = (nano *)user;
  size_t count = (size_t)rows * (size_t)cols;
  char block[16];
  if (!strcmp(name, "embed")) nano_compare(n, "x", data, count), memcpy(n->in, data, sizeof n->in);
  if (layer == 0) nano_first_layer(n, name, data, count);
  if (!strcmp(name, "out")) {
    snprintf(block, sizeof block, "block%d", (int)layer);
    nano_compare(n, block, data, count);
  }
  if (!strcmp(name, "norm")) nano_compare(n, "ln_f", data, count);
  if (!strcmp(name, "logits")) nano_compare(n, "lm_head", data, count);
}

TEST(gpt_nano_sort_activations) {
  const char *config =
    "{\"model_type\":\"gpt2\",\"n_layer\":3,\"n_head\":3,\"n_embd\":48,\"vocab_size\":3,"
    "\"n_positions\":11,\"activation_function\":\"gelu_new\",\"tie_word_embeddings\":false}";
  blob probe = blob_read(SHARED "gpt-nano-sort/gpt-nano-sort-model.json");
  arrays *weights, *expected;
  blob file;
  tfm_model_config mc;
  tfm_engine_config ec;
  tfm_model *m;
  nano n;
  int sequence, t;
  if (!probe.data) SKIP("../shared/data/gpt-nano-sort is not here");
  free(probe.data);
  weights = arrays_load(SHARED "gpt-nano-sort/gpt-nano-sort-model.json");
  expected = arrays_load(SHARED "gpt-nano-sort/gpt-nano-sort-t0-partials.json");
  file = safetensors_of(weights);
  memset(&mc, 0, sizeof mc);
  memset(&ec, 0, sizeof ec);
  memset(&n, 0, sizeof n);
  mc.config_json = config;
  m = tfm_model_load_memory(file.data, file.bytes, &mc);
  if (!m) fprintf(stderr, "%s\n", tfm_error());
  CHECK(m != NULL);
  n.expected = expected;
  ec.tap = nano_tap;
  ec.tap_user = &n;
  for (sequence = 0; m && sequence < 3; sequence++) {
    const float *idx = arrays_find(expected, "idx")->data + sequence * NANO_T;
    tfm_session *s = tfm_session_create(m, &ec);
    int32_t ids[NANO_T];
    float logits[NANO_T * 3];
    for (t = 0; t < NANO_T; t++) ids[t] = (int32_t)idx[t];
    n.sequence = sequence;
    CHECK(s != NULL);
    CHECK_EQ_INT(tfm_eval(s, ids, NANO_T, logits), TFM_OK);
    tfm_session_free(s);
  }
  printf("  %d activations compared, largest difference %.1e\n", n.compared, (double)n.worst);
  CHECK(n.compared >= 3 * 20);
  CHECK(n.worst <= 1e-5f);
  tfm_model_free(m);
  arrays_free(weights);
  arrays_free(expected);
  free(file.data);
}

TEST_MAIN
