/* Engines and sessions: what must not change the bits (batches, pages, threads, rewinding), limits,
   sampling, stop strings, cancelling, the memory plan, and every allocation failing. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "files.h"
#include <fenv.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define LLAMA DATA "models/llama-b"
#define TINY DATA "models/tiny"

static const int32_t prompt[] = {5,  17, 33, 2,  80, 41, 9,  64, 21, 7,
                                 99, 12, 3,  55, 70, 28, 90, 1,  44, 60};
#define PROMPT (sizeof prompt / sizeof *prompt)

static tfm_model *model_open(const char *path) {
  tfm_model *m = tfm_model_load(path, NULL);
  if (!m) fprintf(stderr, "%s\n", tfm_error());
  return m;
}

static int32_t vocabulary_of(const tfm_model *m) {
  tfm_model_info info;
  tfm_model_describe(m, &info);
  return info.vocabulary;
}

/* Logits after the prompt, then of 12 greedy tokens: [13, V]. */
static float *run_alone(const tfm_model *m, const tfm_engine_config *c, size_t n) {
  tfm_session *s = tfm_session_create(m, c);
  size_t v = (size_t)vocabulary_of(m), i;
  float *out = (float *)calloc(13 * v, sizeof(float));
  CHECK(s != NULL);
  CHECK_EQ_INT(tfm_feed(s, prompt, n), TFM_OK);
  for (i = 0; i < 13; i++) {
    const float *row = tfm_logits(s);
    int32_t id;
    CHECK(row != NULL);
    if (row) memcpy(out + i * v, row, v * sizeof(float));
    id = tfm_next(s, NULL);
    if (id == TFM_END) { /* go on anyway, with what was chosen */
      tfm_top(s, 1, &id, NULL);
      tfm_feed(s, &id, 1);
    }
  }
  tfm_session_free(s);
  return out;
}

static void same_bits(const tfm_model *m, const tfm_engine_config *a, const tfm_engine_config *b) {
  float *x = run_alone(m, a, PROMPT), *y = run_alone(m, b, PROMPT);
  CHECK(memcmp(x, y, 13 * (size_t)vocabulary_of(m) * sizeof(float)) == 0);
  free(x);
  free(y);
}

TEST(pages_threads_and_passes_do_not_change_the_bits) {
  tfm_engine_config plain, other;
  tfm_model *m = model_open(LLAMA);
  memset(&plain, 0, sizeof plain);
  plain.threads = 1;
  plain.deterministic = true;
  other = plain;
  other.page_tokens = 3;
  same_bits(m, &plain, &other);
  other.page_tokens = 256; /* contiguous */
  other.threads = 3;
  same_bits(m, &plain, &other);
  other.batch_rows = 5;
  same_bits(m, &plain, &other);
  tfm_model_free(m);
}

/* Prompts of different lengths in one engine, against each in an engine of its own. */
enum { RAGGED = 5, STEPS = 15 };
static const int32_t lengths[RAGGED] = {20, 1, 7, 13, 18};

typedef struct ragged {
  int32_t ids[RAGGED][STEPS];
  float *logits; /* [RAGGED, V] that the second token was chosen from */
} ragged;

static tfm_sampling ragged_sampling(int i) {
  tfm_sampling how;
  memset(&how, 0, sizeof how);
  how.temperature = i == 0 ? 0 : 1.5f;
  how.seed = 7;
  how.sequence = (uint64_t)i;
  how.top_k = i * 5;
  how.repetition_penalty = i == 4 ? 1.3f : 0;
  return how;
}

static void ragged_keep(ragged *r, int i, tfm_session *s, size_t v) {
  const float *row = tfm_logits(s);
  CHECK(row != NULL);
  if (row) memcpy(r->logits + (size_t)i * v, row, v * sizeof *row);
}

static void ragged_alone(ragged *r, const tfm_model *m, tfm_engine_config c) {
  size_t v = (size_t)vocabulary_of(m);
  int i, step;
  c.sequences = 1;
  c.page_tokens = 0;
  r->logits = (float *)calloc(RAGGED * v, sizeof(float));
  for (i = 0; i < RAGGED; i++) {
    tfm_sampling how = ragged_sampling(i);
    tfm_session *s = tfm_session_create(m, &c);
    CHECK_EQ_INT(tfm_feed(s, prompt, (size_t)lengths[i]), TFM_OK);
    for (step = 0; step < STEPS; step++) {
      r->ids[i][step] = tfm_next(s, &how);
      if (step == 1) ragged_keep(r, i, s, v);
    }
    tfm_session_free(s);
  }
}

static void ragged_batch(ragged *r, const tfm_model *m, const tfm_engine_config *c) {
  tfm_engine *e = tfm_engine_create(m, c);
  tfm_session *s[RAGGED];
  tfm_sampling how[RAGGED];
  int32_t ids[RAGGED];
  int i, step;
  r->logits = (float *)calloc(RAGGED * (size_t)vocabulary_of(m), sizeof(float));
  for (i = 0; i < RAGGED; i++) {
    how[i] = ragged_sampling(i);
    s[i] = tfm_session_open(e);
    CHECK_EQ_INT(tfm_feed(s[i], prompt, (size_t)lengths[i]), TFM_OK);
  }
  CHECK(tfm_session_open(e) == NULL);
  CHECK_EQ_INT(tfm_error_status(), TFM_E_FULL);
  CHECK_STR_HAS(tfm_error(), "all 5 sequences are open");
  for (step = 0; step < STEPS; step++) {
    CHECK_EQ_INT(tfm_next_batch(s, RAGGED, how, ids), TFM_OK);
    for (i = 0; i < RAGGED; i++) r->ids[i][step] = ids[i];
    for (i = 0; i < RAGGED && step == 1; i++) ragged_keep(r, i, s[i], (size_t)vocabulary_of(m));
  }
  for (i = 0; i < RAGGED; i++) tfm_session_free(s[i]);
  s[0] = tfm_session_open(e); /* a slot used again remembers nothing */
  tfm_feed(s[0], prompt, (size_t)lengths[2]);
  for (step = 0; step < STEPS && c->deterministic; step++)
    CHECK_EQ_INT(tfm_next(s[0], &how[2]), r->ids[2][step]);
  tfm_session_free(s[0]);
  tfm_engine_free(e);
}

/* Largest difference of logits, as a share of their range. */
static float ragged_distance(const ragged *a, const ragged *b, size_t n) {
  float low = a->logits[0], high = low, worst = 0;
  size_t i;
  for (i = 0; i < n; i++) {
    low = fminf(low, a->logits[i]);
    high = fmaxf(high, a->logits[i]);
    worst = fmaxf(worst, fabsf(a->logits[i] - b->logits[i]));
  }
  return worst / (high - low);
}

/* Where engines need not be deterministic, the fastest ways of a GPU, and of a CPU that has tiles,
   compute with activations of 16 bits: `bound` is for these. */
static void ragged_compare(tfm_type type, bool deterministic, float bound) {
  tfm_model_config mc;
  tfm_engine_config c;
  tfm_model *m;
  ragged alone, batch;
  size_t n;
  float d;
  memset(&mc, 0, sizeof mc);
  memset(&c, 0, sizeof c);
  mc.weights = type;
  m = tfm_model_load(TINY, &mc);
  CHECK(m != NULL);
  c.sequences = RAGGED;
  c.page_tokens = 4;
  c.batch_rows = 16;
  c.deterministic = deterministic;
  n = RAGGED * (size_t)vocabulary_of(m);
  ragged_alone(&alone, m, c);
  ragged_batch(&batch, m, &c);
  d = ragged_distance(&alone, &batch, n);
  if (deterministic || type == TFM_F32) {
    CHECK(memcmp(alone.ids, batch.ids, sizeof alone.ids) == 0);
    CHECK(memcmp(alone.logits, batch.logits, n * sizeof(float)) == 0);
  } else {
    printf("  %s in a batch and alone: %.1e of the range of the logits\n", tfm_type_name(type),
           (double)d);
    CHECK(d <= bound);
  }
  free(alone.logits);
  free(batch.logits);
  tfm_model_free(m);
}

TEST(a_batch_is_each_alone) {
  ragged_compare(TFM_F32, false, 0);
  ragged_compare(TFM_F16, true, 0);
  ragged_compare(TFM_F16, false, 5e-3f);
  ragged_compare(TFM_BF16, true, 0);
  ragged_compare(TFM_BF16, false, 4e-2f);
}

/* The model with room for long contexts. */
static tfm_model *model_long(tfm_type weights) {
  blob config = blob_read(LLAMA "/config.json");
  char *at = config.data ? strstr((char *)config.data, "\"max_position_embeddings\": 256") : NULL;
  static overlay o; /* for as long as the model */
  static tfm_io io;
  tfm_model_config mc;
  tfm_model *m;
  o.name = "config.json";
  o.text = (char *)config.data;
  o.bytes = config.bytes;
  io = overlay_io(&o);
  memset(&mc, 0, sizeof mc);
  mc.host.io = &io;
  mc.weights = weights;
  CHECK(at != NULL);
  if (at) at[27] = '9'; /* 956 */
  m = tfm_model_load(LLAMA, &mc);
  CHECK(m != NULL);
  free(config.data);
  return m;
}

/* What a device decodes by itself, drawing as it goes, has the bits of the same tokens fed: also
   where the keys of a row are many enough to be shared out. */
static void decode_and_feed(tfm_type weights) {
  enum { TOKENS = 940 };
  tfm_model *m = model_long(weights);
  tfm_sampling how = ragged_sampling(1);
  size_t bytes = (size_t)vocabulary_of(m) * sizeof(float);
  tfm_engine_config c;
  tfm_session *a, *b;
  int32_t ids[TOKENS] = {5, 17, 33};
  int i;
  memset(&c, 0, sizeof c);
  c.deterministic = true;
  how.top_k = 0;
  a = tfm_session_create(m, &c);
  b = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_feed(a, ids, 3), TFM_OK);
  for (i = 3; i < TOKENS; i++) {
    ids[i] = tfm_next(a, &how);
    if (ids[i] >= 0) continue;
    ids[i] = 7; /* the end: go on */
    CHECK_EQ_INT(tfm_feed(a, ids + i, 1), TFM_OK);
  }
  for (i = 0; i < TOKENS; i += 47) CHECK_EQ_INT(tfm_feed(b, ids + i, 47), TFM_OK);
  CHECK_EQ_INT(tfm_feed(a, ids, 1), TFM_OK);
  CHECK_EQ_INT(tfm_feed(b, ids, 1), TFM_OK);
  CHECK(memcmp(tfm_logits(a), tfm_logits(b), bytes) == 0);
  tfm_session_free(a);
  tfm_session_free(b);
  tfm_model_free(m);
}

TEST(decoding_far_has_the_bits_of_feeding) {
  decode_and_feed(TFM_F16);
  if (getenv("QUICK")) return; /* under a GPU's sanitizer a type takes minutes */
  decode_and_feed(TFM_F32);
  decode_and_feed(TFM_BF16);
}

TEST(rewinding_is_never_having_been_there) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  size_t v = (size_t)vocabulary_of(m), n;
  float *first = (float *)malloc(v * sizeof(float));
  int32_t again;
  CHECK_EQ_INT(tfm_feed(s, prompt, 8), TFM_OK);
  memcpy(first, tfm_logits(s), v * sizeof(float));
  CHECK_EQ_INT(tfm_feed(s, prompt + 8, 9), TFM_OK);
  CHECK_EQ_INT(tfm_session_rewind(s, 8), TFM_OK);
  CHECK(memcmp(first, tfm_logits(s), v * sizeof(float)) == 0);
  again = tfm_next(s, NULL);
  CHECK(memcmp(first, tfm_logits(s), v * sizeof(float)) == 0); /* those that it was chosen from */
  CHECK(tfm_session_tokens(s, &n)[n - 1] == again && n == 9);
  CHECK_EQ_INT(tfm_session_rewind(s, 10), TFM_E_ARG);
  CHECK_EQ_INT(tfm_session_rewind(s, 0), TFM_OK);
  CHECK(tfm_logits(s) == NULL);
  CHECK_EQ_INT(tfm_error_status(), TFM_E_STATE);
  free(first);
  tfm_session_free(s);
  tfm_model_free(m);
}

TEST(eval_gives_the_logits_of_every_position) {
  tfm_model *m = model_open(LLAMA);
  tfm_engine_config c;
  tfm_session *s, *t;
  size_t v = (size_t)vocabulary_of(m), i;
  float *all = (float *)malloc(PROMPT * v * sizeof(float));
  memset(&c, 0, sizeof c);
  c.deterministic = true;
  s = tfm_session_create(m, &c);
  t = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_eval(s, prompt, PROMPT, all), TFM_OK);
  for (i = 0; i < PROMPT; i++) {
    CHECK_EQ_INT(tfm_feed(t, prompt + i, 1), TFM_OK);
    CHECK(memcmp(all + i * v, tfm_logits(t), v * sizeof(float)) == 0);
  }
  CHECK_EQ_INT(tfm_eval(s, prompt, PROMPT, NULL), TFM_E_ARG);
  free(all);
  tfm_session_free(s);
  tfm_session_free(t);
  tfm_model_free(m);
}

TEST(probabilities) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  int32_t v = vocabulary_of(m), ids[200], i;
  float logprobs[200];
  double sum = 0;
  tfm_feed(s, prompt, PROMPT);
  for (i = 0; i < v; i++) sum += exp((double)tfm_logprob(s, i));
  CHECK(fabs(sum - 1) < 1e-5);
  CHECK_EQ_INT(tfm_top(s, 200, ids, logprobs), v);
  for (i = 0; i < v; i++) CHECK(fabsf(logprobs[i] - tfm_logprob(s, ids[i])) < 1e-5f);
  for (i = 1; i < v; i++) CHECK(logprobs[i - 1] >= logprobs[i]);
  CHECK_EQ_INT(tfm_next(s, NULL), ids[0]);
  CHECK(isnan(tfm_logprob(s, v)));
  CHECK_EQ_INT(tfm_top(s, -1, ids, NULL), TFM_E_ARG);
  CHECK_EQ_INT(tfm_top(s, 0, ids, NULL), 0);
  tfm_session_free(s);
  tfm_model_free(m);
}

/* ---- Sampling ---- */

/* How often each id is drawn in n draws that differ by their `sequence`. */
static void draw(tfm_session *s, tfm_sampling how, int n, int *count) {
  int i;
  size_t tokens;
  tfm_session_tokens(s, &tokens);
  for (i = 0; i < n; i++) {
    int32_t id;
    how.sequence = (uint64_t)i;
    id = tfm_next(s, &how);
    if (id >= 0) count[id]++;
    tfm_session_rewind(s, tokens);
  }
}

TEST(draws_follow_the_distribution) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_sampling how;
  int count[200] = {0}, i, kept = 0;
  int32_t v = vocabulary_of(m), ids[200];
  float logprobs[200];
  double chi = 0, mass = 0;
  const float *logits;
  memset(&how, 0, sizeof how);
  how.temperature = 2;
  how.seed = 3;
  tfm_feed(s, prompt, PROMPT);
  draw(s, how, 4000, count);
  logits = tfm_logits(s);
  for (i = 0; i < v; i++) mass += exp((double)logits[i] / 2);
  for (i = 0; i < v; i++) {
    double expected = 4000 * exp((double)logits[i] / 2) / mass;
    if (i == 2) continue; /* ends the text: not counted */
    chi += (count[i] - expected) * (count[i] - expected) / expected;
  }
  CHECK(chi < 170); /* 102 degrees of freedom: 99.99 % */
  memset(count, 0, sizeof count);
  how.top_k = 3;
  draw(s, how, 500, count);
  for (i = 0; i < v; i++) kept += count[i] != 0;
  CHECK(kept <= 3 && kept >= 2);
  tfm_top(s, 200, ids, logprobs);
  memset(count, 0, sizeof count);
  memset(&how, 0, sizeof how);
  how.temperature = 1;
  how.top_p = expf(logprobs[0]) + 0.5f * expf(logprobs[1]); /* reached by the second */
  draw(s, how, 500, count);
  for (kept = 0, i = 0; i < v; i++) kept += count[i] != 0;
  CHECK(kept <= 2 && count[ids[0]] > 0 && count[ids[1]] > 0);
  memset(count, 0, sizeof count);
  how.top_p = 0;
  how.min_p = expf(logprobs[1] - logprobs[0]) * 0.999f;
  draw(s, how, 500, count);
  for (kept = 0, i = 0; i < v; i++) kept += count[i] != 0;
  CHECK(kept <= 2);
  tfm_session_free(s);
  tfm_model_free(m);
}

TEST(bad_sampling_is_refused) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  static const tfm_sampling bad[] = {{-1, 0, 0, 0, 0, 0, 0},       {NAN, 0, 0, 0, 0, 0, 0},
                                     {INFINITY, 0, 0, 0, 0, 0, 0}, {1, -1, 0, 0, 0, 0, 0},
                                     {1, 0, -0.1f, 0, 0, 0, 0},    {1, 0, 1.5f, 0, 0, 0, 0},
                                     {1, 0, NAN, 0, 0, 0, 0},      {1, 0, 0, 2, 0, 0, 0},
                                     {1, 0, 0, 0, -2, 0, 0},       {1, 0, 0, 0, NAN, 0, 0}};
  static const tfm_sampling odd[] = { /* strange but defined */
    {1e-45f, 0, 0, 0, 0, 0, 0}, {1e30f, 0, 0, 0, 0, 0, 0}, {1, INT32_MAX, 1, 0, 1, 0, 0},
    {1, 1, 1e-30f, 1, 1e-30f, UINT64_MAX, UINT64_MAX}};
  size_t i;
  CHECK_EQ_INT(tfm_next(s, NULL), TFM_E_STATE);
  CHECK_STR_HAS(tfm_error(), "feed it something first");
  tfm_feed(s, prompt, 3);
  for (i = 0; i < sizeof bad / sizeof *bad; i++) {
    CHECK_EQ_INT(tfm_next(s, &bad[i]), TFM_E_ARG);
    CHECK_STR_HAS(tfm_error(), "tfm_sampling.");
  }
  for (i = 0; i < sizeof odd / sizeof *odd; i++) {
    int32_t id = tfm_next(s, &odd[i]);
    CHECK(id == TFM_END || (id >= 0 && id < vocabulary_of(m)));
  }
  tfm_session_free(s);
  tfm_model_free(m);
}

/* ---- Limits ---- */

TEST(a_full_context_says_so_and_loses_nothing) {
  tfm_model *m = model_open(LLAMA);
  tfm_engine_config c;
  tfm_session *s;
  size_t n;
  int32_t id;
  memset(&c, 0, sizeof c);
  c.context = 10;
  s = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_feed(s, prompt, 11), TFM_E_FULL);
  CHECK_STR_HAS(tfm_error(), "0 tokens so far and 11 more do not fit into 10");
  CHECK_EQ_INT(tfm_feed(s, prompt, 9), TFM_OK);
  id = tfm_next(s, NULL);
  CHECK(id >= 0);
  CHECK_EQ_INT(tfm_next(s, NULL), TFM_E_FULL);
  CHECK(tfm_session_tokens(s, &n) && n == 10);
  CHECK_EQ_INT(tfm_session_rewind(s, 9), TFM_OK);
  CHECK_EQ_INT(tfm_next(s, NULL), id);
  tfm_session_free(s);
  c.context = 1;
  s = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_feed(s, prompt, 1), TFM_OK);
  CHECK_EQ_INT(tfm_next(s, NULL), TFM_E_FULL);
  tfm_session_free(s);
  tfm_model_free(m);
}

TEST(an_empty_pool_of_pages_says_so) {
  tfm_model *m = model_open(LLAMA);
  tfm_engine_config c;
  tfm_engine *e;
  tfm_session *a, *b;
  memset(&c, 0, sizeof c);
  c.sequences = 2;
  c.context = 32;
  c.page_tokens = 4;
  c.pages = 6;
  e = tfm_engine_create(m, &c);
  a = tfm_session_open(e);
  b = tfm_session_open(e);
  CHECK_EQ_INT(tfm_feed(a, prompt, 15), TFM_OK);
  CHECK_EQ_INT(tfm_feed(b, prompt, 9), TFM_E_FULL);
  CHECK_STR_HAS(tfm_error(), "all 6 pages are taken");
  CHECK_EQ_INT(tfm_feed(b, prompt, 8), TFM_OK);
  tfm_session_free(a);
  CHECK_EQ_INT(tfm_feed(b, prompt + 8, 8), TFM_OK);
  tfm_session_free(b);
  tfm_engine_free(e);
  tfm_model_free(m);
}

TEST(bad_engine_configs_are_refused) {
  tfm_model *m = model_open(LLAMA);
  static const tfm_engine_config zero;
  tfm_engine_config c;
#define REFUSED(field, value, part)                  \
  c = zero;                                          \
  c.field = value;                                   \
  CHECK(tfm_engine_create(m, &c) == NULL);           \
  CHECK_STR_HAS(tfm_error(), part)
  REFUSED(context, -1, "tfm_engine_config.context is -1");
  REFUSED(context, 257, "expected 1 to the model's 256");
  REFUSED(sequences, -1, "sequences is -1");
  REFUSED(sequences, INT32_MAX, "sequences");
  REFUSED(batch_rows, -5, "batch_rows is -5");
  REFUSED(page_tokens, -1, "page_tokens is -1");
  REFUSED(pages, -1, "pages is -1");
  REFUSED(threads, -1, "threads");
  REFUSED(threads, 10000, "threads");
  REFUSED(cache, TFM_Q4_K, "cache is Q4_K");
  REFUSED(cache, TFM_Q8_0, "a multiple of 32 values, found");
  REFUSED(host.memory_limit_bytes, 1000, "memory limit");
  CHECK(tfm_engine_create(NULL, NULL) == NULL);
  tfm_model_free(m);
}

TEST(cache_types_are_close) {
  tfm_model *m = model_open(LLAMA);
  tfm_engine_config f32, half;
  float *a, *b, range = 0, worst = 0;
  size_t v = (size_t)vocabulary_of(m), i;
  memset(&f32, 0, sizeof f32);
  f32.cache = TFM_F32;
  f32.deterministic = true;
  half = f32;
  half.cache = TFM_F16;
  a = run_alone(m, &f32, PROMPT);
  b = run_alone(m, &half, PROMPT);
  for (i = 0; i < v; i++) { /* before any token is chosen */
    range = fmaxf(range, fabsf(a[i]));
    worst = fmaxf(worst, fabsf(a[i] - b[i]));
  }
  CHECK(worst > 0 && worst < 5e-3f * range);
  free(a);
  free(b);
  tfm_model_free(m);
}

/* Largest difference of n values, as a share of the range of those of a; both are freed. */
static float apart(float *a, float *b, size_t n) {
  float low = a[0], high = low, worst = 0;
  size_t i;
  for (i = 0; i < n; i++) {
    low = fminf(low, a[i]);
    high = fmaxf(high, a[i]);
    worst = fabsf(a[i] - b[i]) <= worst ? worst : fabsf(a[i] - b[i]); /* NaN stays */
  }
  free(a);
  free(b);
  return worst / (high - low);
}

/* Logits of the prompt's tokens in passes of seven, and then of the same tokens one by one: all are
   given, so that none is chosen because two logits are close. [2, PROMPT, V] */
static float *run_given(const tfm_model *m, const tfm_engine_config *c) {
  tfm_engine_config rows = *c;
  size_t v = (size_t)vocabulary_of(m), i;
  float *out = (float *)calloc(2 * PROMPT * v, sizeof(float));
  tfm_session *s;
  rows.batch_rows = 7;
  s = tfm_session_create(m, &rows);
  CHECK_EQ_INT(tfm_eval(s, prompt, PROMPT, out), TFM_OK);
  for (i = 0; i < PROMPT; i++)
    CHECK_EQ_INT(tfm_eval(s, prompt + i, 1, out + (PROMPT + i) * v), TFM_OK);
  tfm_session_free(s);
  return out;
}

/* The same, by the logits of given tokens: heads of 64. */
TEST(a_cache_of_8_bits_is_close) {
  tfm_model *m = model_open("examples/tales/tales.gguf");
  size_t n = 2 * PROMPT * (size_t)vocabulary_of(m);
  tfm_engine_config f32, eight;
  float d;
  memset(&f32, 0, sizeof f32);
  f32.cache = TFM_F32;
  eight = f32;
  eight.cache = TFM_Q8_0;
  d = apart(run_given(m, &f32), run_given(m, &eight), n);
  printf("  a cache of 8 bits: %.1e of the range of the logits\n", (double)d);
  CHECK(d > 0 && d < 8e-2f);
  tfm_model_free(m);
}

/* Heads of 32, two in place of four of 16: the halves that are rotated lie apart. */
TEST(wider_heads_are_rotated_as_in_the_reference) {
  blob file = blob_read(TINY "/config.json");
  char text[1000];
  overlay o = {"config.json", text, 0};
  tfm_io io = overlay_io(&o);
  tfm_model_config mc;
  tfm_engine_config c;
  float *logits[2], d;
  size_t n = 0;
  int i;
  snprintf(text, sizeof text, "%.*s", (int)file.bytes, (const char *)file.data);
  memcpy(strstr(text, "\"head_dim\": 16") + 12, "32", 2);
  *strstr(strstr(text, "num_attention_heads"), "4") = '2';
  *strstr(strstr(text, "num_key_value_heads"), "2") = '1';
  o.bytes = strlen(text);
  memset(&mc, 0, sizeof mc);
  memset(&c, 0, sizeof c);
  mc.host.io = &io;
  mc.weights = TFM_F16;
  for (i = 0; i < 2; i++) {
    tfm_model *m;
    mc.device = i ? TFM_REF : TFM_AUTO;
    m = tfm_model_load(TINY, &mc);
    CHECK(m != NULL);
    n = 2 * PROMPT * (size_t)vocabulary_of(m);
    logits[i] = run_given(m, &c);
    tfm_model_free(m);
  }
  d = apart(logits[1], logits[0], n);
  CHECK(d < 5e-2f); /* activations may have 16 bits */
  free(file.data);
}

TEST(null_objects_and_arguments) {
  int32_t id = 0;
  tfm_plan plan;
  CHECK_EQ_INT(tfm_feed(NULL, &id, 1), TFM_E_ARG);
  CHECK_EQ_INT(tfm_next(NULL, NULL), TFM_E_ARG);
  CHECK(tfm_session_create(NULL, NULL) == NULL);
  CHECK(tfm_logits(NULL) == NULL);
  CHECK_STR(tfm_text(NULL), "");
  CHECK(tfm_model_load(NULL, NULL) == NULL);
  CHECK(tfm_tokenizer_load(NULL, NULL) == NULL);
  CHECK(tfm_model_load("no/such/file", NULL) == NULL);
  CHECK_STR_HAS(tfm_error(), "no/such/file");
  CHECK(tfm_session_create(NULL, NULL) == NULL);
  CHECK_STR_HAS(tfm_error(), "no/such/file"); /* the first sentence stays */
  CHECK(tfm_plan_memory("no/such/file", NULL, NULL, &plan) < 0);
  tfm_session_free(NULL);
  tfm_engine_free(NULL);
  tfm_model_free(NULL);
  tfm_tokenizer_free(NULL);
  tfm_cancel(NULL);
}

TEST(ids_outside_the_vocabulary_are_refused) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  int32_t ids[3] = {1, 2, 103};
  CHECK_EQ_INT(tfm_feed(s, ids, 3), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "token id 103 at 2; the model's ids are 0 to 102");
  ids[2] = -1;
  CHECK_EQ_INT(tfm_feed(s, ids, 3), TFM_E_ARG);
  CHECK_EQ_INT(tfm_feed(s, NULL, 3), TFM_E_ARG);
  CHECK_EQ_INT(tfm_feed(s, NULL, 0), TFM_OK);
  tfm_session_free(s);
  tfm_model_free(m);
}

/* ---- Text ---- */

typedef struct catcher {
  char text[4096];
  size_t n;
  int calls, stop_after;
} catcher;

static bool catch_text(void *user, const char *text, size_t bytes) {
  catcher *c = (catcher *)user;
  memcpy(c->text + c->n, text, bytes);
  c->text[c->n += bytes] = 0;
  return ++c->calls != c->stop_after;
}

static int64_t generate(tfm_model *m, tfm_tokenizer *t, const char *stop, int stop_after,
                        catcher *out) {
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_generate_config c;
  int64_t n;
  memset(&c, 0, sizeof c);
  memset(out, 0, sizeof *out);
  out->stop_after = stop_after;
  c.max_tokens = 40;
  c.sampling.temperature = 1;
  c.stop = &stop;
  c.stop_count = stop != NULL;
  c.on_text = catch_text;
  c.user = out;
  n = tfm_generate(s, t, "The", &c);
  tfm_session_free(s);
  return n;
}

TEST(stop_strings) {
  tfm_model *m = model_open(TINY);
  tfm_tokenizer *t = tfm_tokenizer_load(TINY, NULL);
  catcher whole, part;
  char stop[8];
  size_t at;
  if (!t) fprintf(stderr, "%s\n", tfm_error());
  CHECK(generate(m, t, NULL, 0, &whole) > 5);
  CHECK(whole.n > 24);
  for (at = 1; at + 20 < whole.n; at += 5) { /* wherever it begins, across tokens or not */
    size_t length = 4, first;
    while (at + length < whole.n && ((unsigned char)whole.text[at + length] & 0xc0) == 0x80)
      length++;
    if (length > 7 || ((unsigned char)whole.text[at] & 0xc0) == 0x80) continue;
    memcpy(stop, whole.text + at, length);
    stop[length] = 0;
    first = (size_t)(strstr(whole.text, stop) - whole.text);
    CHECK(generate(m, t, stop, 0, &part) > 0);
    CHECK_EQ_INT(part.n, first);
    CHECK(memcmp(part.text, whole.text, first) == 0);
  }
  CHECK(generate(m, t, "\x01 never", 0, &part) > 5);
  CHECK_STR(part.text, whole.text);
  CHECK(generate(m, t, NULL, 2, &part) >= 2); /* on_text's false */
  CHECK_EQ_INT(part.calls, 2);
  CHECK_EQ_INT(generate(m, t, "", 0, &part), TFM_E_ARG);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
}

TEST(text_as_it_comes_is_the_decoded_whole) {
  tfm_model *m = model_open(TINY);
  tfm_tokenizer *t = tfm_tokenizer_load(TINY, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_sampling how;
  char streamed[8192] = "", whole[8192];
  int32_t id = 0, ids[200];
  size_t n = 0;
  memset(&how, 0, sizeof how);
  how.temperature = 3; /* almost any token: many broken characters */
  CHECK_EQ_INT(tfm_feed_text(s, t, "The"), TFM_OK);
  while (n < 120 && (id = tfm_next(s, &how)) >= 0) {
    ids[n++] = id;
    strcat(streamed, tfm_text(s));
  }
  if (id == TFM_END) strcat(streamed, tfm_text(s));
  CHECK(n > 3);
  CHECK(tfm_decode(t, ids, n, whole, sizeof whole) > 0);
  CHECK(strncmp(streamed, whole, strlen(streamed)) == 0);
  CHECK(strlen(whole) - strlen(streamed) <= 9); /* at most a broken tail is still to come */
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
}

TEST(an_empty_prompt_starts_from_bos) {
  tfm_model *m = model_open(TINY);
  tfm_tokenizer *t = tfm_tokenizer_load(TINY, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_tokenizer_info info = {0, 0, 0, 0, 0, 0, false, false};
  size_t n;
  CHECK_EQ_INT(tfm_tokenizer_describe(t, &info), TFM_OK);
  CHECK_EQ_INT(tfm_feed_text(s, t, ""), TFM_OK);
  CHECK_EQ_INT(tfm_session_tokens(s, &n)[0], info.bos);
  CHECK_EQ_INT(n, 1);
  CHECK_EQ_INT(tfm_feed_text(s, t, NULL), TFM_E_ARG);
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
}

/* ---- Cancelling ---- */

static bool refuse_progress(void *user, const char *phase, double done) {
  int *calls = (int *)user;
  (void)phase;
  (void)done;
  return --*calls >= 0;
}

TEST(cancelling_leaves_the_session_as_it_was) {
  tfm_model *m = model_open(LLAMA);
  tfm_engine_config c;
  tfm_session *s;
  volatile int32_t flag = 0;
  int calls = 1000;
  size_t v = (size_t)vocabulary_of(m), n;
  float *before = (float *)malloc(v * sizeof(float));
  memset(&c, 0, sizeof c);
  c.host.cancel = &flag;
  c.host.progress = refuse_progress;
  c.host.user = &calls;
  c.batch_rows = 4;
  s = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_feed(s, prompt, 5), TFM_OK);
  memcpy(before, tfm_logits(s), v * sizeof(float));
  tfm_cancel(s);
  CHECK_EQ_INT(tfm_feed(s, prompt, 10), TFM_E_CANCELLED);
  flag = 1;
  CHECK_EQ_INT(tfm_feed(s, prompt, 10), TFM_E_CANCELLED);
  flag = 0;
  calls = 1; /* cancels after the second pass of ten tokens */
  CHECK_EQ_INT(tfm_feed(s, prompt, 10), TFM_E_CANCELLED);
  calls = 1000;
  CHECK(tfm_session_tokens(s, &n) && n == 5);
  CHECK(memcmp(before, tfm_logits(s), v * sizeof(float)) == 0);
  CHECK_EQ_INT(tfm_feed(s, prompt, 10), TFM_OK);
  free(before);
  tfm_session_free(s);
  tfm_model_free(m);
}

/* ---- Overriding, planning, allocating ---- */

TEST(an_override_names_entries) {
  tfm_model_config c;
  tfm_model *m;
  memset(&c, 0, sizeof c);
  c.override = "attn,norm";
  m = tfm_model_load(LLAMA, &c);
  CHECK(m != NULL);
  tfm_model_free(m);
  c.override = "attn,banana";
  CHECK(tfm_model_load(LLAMA, &c) == NULL);
  CHECK_STR_HAS(tfm_error(), "banana");
  CHECK_STR_HAS(tfm_error(), "matmul");
}

TEST(the_plan_is_what_happens) {
  static const char *const paths[] = {LLAMA, TINY, DATA "models/gpt2-a", DATA "models/gpt2-b",
                                      SHARED "stories260K/stories260K.bin",
                                      SHARED "stories260K/stories260K.gguf"};
  size_t i, k;
  for (i = 0; i < sizeof paths / sizeof *paths; i++)
    for (k = 0; k < 6; k++) {
      tfm_model_config mc;
      tfm_engine_config ec;
      tfm_model_info info;
      tfm_plan plan;
      tfm_stats stats = {0};
      tfm_model *m;
      tfm_session *s;
      failing count;
      bool on_host;
      memset(&count, 0, sizeof count);
      memset(&mc, 0, sizeof mc);
      memset(&ec, 0, sizeof ec);
      mc.no_mmap = k & 1;
      mc.weights = k < 2 ? TFM_TYPE_DEFAULT : k < 4 ? TFM_F16 : TFM_F32;
      ec.sequences = (int32_t)k;
      ec.context = 11 + 3 * (int32_t)k;
      ec.cache = k & 1 ? TFM_F16 : TFM_F32;
      if (tfm_plan_memory(paths[i], &mc, &ec, &plan) != TFM_OK) {
        if (tfm_error_status() != TFM_E_IO)
          CHECK_STR(tfm_error(), ""); /* the shared data may not be here */
        continue;
      }
      mc.host.alloc = ec.host.alloc = failing_alloc;
      mc.host.user = ec.host.user = &count;
      m = tfm_model_load(paths[i], &mc);
      tfm_model_describe(m, &info);
      on_host = strcmp(info.device, "cuda") != 0; /* a GPU's memory is its own */
      CHECK_EQ_INT(info.peak_bytes, plan.load_peak_bytes);
      if (on_host) CHECK_EQ_INT(count.peak, plan.load_peak_bytes); /* what the allocator has seen */
      if (on_host) CHECK_EQ_INT(count.bytes, plan.model_bytes);
      CHECK_EQ_INT(info.memory_bytes, plan.model_bytes);
      CHECK_EQ_INT(info.mapped_bytes, plan.mapped_bytes);
      count.peak = count.bytes;
      s = tfm_session_create(m, &ec);
      count.calls = 0;
      tfm_feed(s, prompt, 9);
      tfm_next(s, NULL);
      CHECK_EQ_INT(count.calls, 0); /* nothing is allocated while running */
      tfm_session_stats(s, &stats);
      CHECK_EQ_INT(stats.peak_bytes, plan.engine_bytes);
      if (on_host) CHECK_EQ_INT(count.peak - plan.model_bytes, plan.engine_bytes);
      tfm_session_free(s);
      tfm_model_free(m);
      CHECK_EQ_INT(count.live, 0);
    }
}

/* Everything that a program does, with an allocator that fails; true when it all went well. */
static bool whole_program(failing *f, const char *model_path, const char *tokenizer_path) {
  tfm_model_config mc;
  tfm_engine_config ec;
  tfm_tokenizer_config tc;
  tfm_model *m;
  tfm_tokenizer *t;
  tfm_session *s;
  bool went_well;
  char text[64];
  int32_t ids[64];
  memset(&mc, 0, sizeof mc);
  memset(&ec, 0, sizeof ec);
  memset(&tc, 0, sizeof tc);
  mc.host.alloc = ec.host.alloc = tc.host.alloc = failing_alloc;
  mc.host.user = ec.host.user = tc.host.user = f;
  mc.weights = TFM_F32;
  ec.threads = 2;
  tc.vocabulary = 512;
  m = tfm_model_load(model_path, &mc);
  t = tfm_tokenizer_load(tokenizer_path, &tc);
  s = tfm_session_create(m, &ec);
  went_well = m && t && s;
  if (!strcmp(model_path, tokenizer_path))
    went_well = went_well && tfm_feed_text(s, t, "The little dog saw 12 birds.") == TFM_OK;
  else
    went_well = went_well && tfm_feed(s, prompt, PROMPT) == TFM_OK;
  went_well =
      went_well && tfm_next(s, NULL) >= TFM_END && tfm_encode(t, "one two", 7, 0, ids, 64) > 0;
  went_well = went_well && tfm_decode(t, ids, 3, text, sizeof text) > 0;
  if (!went_well) {
    CHECK_EQ_INT(tfm_error_status(), TFM_E_MEMORY);
    CHECK_STR_HAS(tfm_error(), "out of memory");
  }
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
  CHECK_EQ_INT(f->live, 0);
  return went_well;
}

static void every_failure(const char *model_path, const char *tokenizer_path) {
  int for_ever;
  long n, step;
  for (for_ever = 0; for_ever < 2; for_ever++)
    for (n = 1, step = 1;; n += step) {
      failing f;
      memset(&f, 0, sizeof f);
      f.fail_at = n;
      f.for_ever = for_ever != 0;
      if (n > 400) step = 1 + n / 100; /* vocabularies allocate much alike */
      if (whole_program(&f, model_path, tokenizer_path) && f.calls < n) break;
      if (test_failures) {
        fprintf(stderr, "%s: at allocation %ld\n", model_path, n);
        break;
      }
    }
}

TEST(every_allocation_may_fail) {
  every_failure(TINY, TINY);
  every_failure(DATA "models/gpt2-b", TINY);
}

/* ---- Figures ---- */

/* Every kind of work that the pass is made of takes its time, and all together no more than there
   was. */
TEST(usage_is_told_by_kinds_of_work) {
  static const tfm_work kinds[] = {TFM_WORK_EMBED, TFM_WORK_ATTENTION, TFM_WORK_FEED_FORWARD,
                                   TFM_WORK_HEAD, TFM_WORK_SAMPLE};
  tfm_model *m = model_open(LLAMA);
  tfm_engine_config c;
  tfm_session *s;
  tfm_stats stats;
  double all = 0;
  size_t i;
  memset(&c, 0, sizeof c);
  c.profile = true;
  s = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_feed(s, prompt, PROMPT), TFM_OK);
  CHECK(tfm_next(s, NULL) >= TFM_END);
  tfm_top(s, 1, NULL, NULL); /* waits */
  CHECK_EQ_INT(tfm_session_stats(s, &stats), TFM_OK);
  for (i = 0; i < sizeof kinds / sizeof *kinds; i++) CHECK(stats.work_seconds[kinds[i]] > 0);
  for (i = 0; i < TFM_WORK_COUNT; i++) all += stats.work_seconds[i];
  CHECK(all <= stats.seconds);
  CHECK(stats.last_seconds > 0 && stats.slowest_seconds >= stats.last_seconds);
  CHECK(stats.first_token_seconds >= stats.last_seconds);
  CHECK(stats.device_peak_bytes >= stats.device_bytes);
  CHECK(stats.device_total_bytes >= stats.device_free_bytes);
  tfm_session_free(s);
  tfm_model_free(m);
}

TEST(conversion_at_load_is_counted) {
  tfm_model_config c;
  tfm_model_info info;
  tfm_model *m = model_open(DATA "models/gpt2-a");
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  CHECK_EQ_INT(info.converted, 0);
  tfm_model_free(m);
  memset(&c, 0, sizeof c);
  c.weights = TFM_F16;
  m = tfm_model_load(DATA "models/gpt2-a", &c); /* in F32, four matrices a layer, and the tables */
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  CHECK(info.converted >= 4 * info.layers + 2);
  CHECK(info.converted_to > 0);
  CHECK_EQ_INT(info.converted_from, 2 * info.converted_to);
  tfm_model_free(m);
}

/* Thousands of tokens through contexts that fill up take no more memory than the first ones. */
TEST(long_runs_take_no_more_memory) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_model_info info;
  tfm_stats first, last;
  int tokens, i;
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  tokens = strcmp(info.device, "cuda") ? 1000 : 10000;
  for (i = 0; i < tokens; i++) {
    int32_t id = i % (info.context - 4) ? tfm_next(s, NULL) : TFM_E_FULL;
    if (id >= 0) continue;
    CHECK_EQ_INT(tfm_session_rewind(s, 0), TFM_OK);
    CHECK_EQ_INT(tfm_feed(s, prompt + i % 17, 3), TFM_OK);
    if (i == 0) tfm_session_stats(s, &first);
  }
  CHECK_EQ_INT(tfm_session_stats(s, &last), TFM_OK);
  CHECK(last.generated_tokens > (uint64_t)tokens / 2);
  CHECK_EQ_INT(last.peak_bytes, first.peak_bytes);
  CHECK_EQ_INT(last.device_peak_bytes, first.device_peak_bytes);
  CHECK(last.device_free_bytes + (64 << 20) >= first.device_free_bytes); /* kernels load lazily */
  printf("  %llu tokens on %s\n", (unsigned long long)last.generated_tokens, info.device);
  tfm_session_free(s);
  tfm_model_free(m);
}

/* ---- Threads ---- */

static void *thread_main(void *context) {
  tfm_engine_config c;
  float *out;
  memset(&c, 0, sizeof c);
  c.threads = 2;
  out = run_alone((const tfm_model *)context, &c, PROMPT);
  return out;
}

TEST(a_model_is_shared_by_threads) {
  tfm_model *m = model_open(LLAMA);
  pthread_t thread[3];
  void *out[3];
  int i;
  for (i = 0; i < 3; i++) pthread_create(&thread[i], NULL, thread_main, m);
  for (i = 0; i < 3; i++) pthread_join(thread[i], &out[i]);
  for (i = 1; i < 3; i++)
    CHECK(memcmp(out[0], out[i], 13 * (size_t)vocabulary_of(m) * sizeof(float)) == 0);
  for (i = 0; i < 3; i++) free(out[i]);
  tfm_model_free(m);
}

static void *cancel_often(void *context) {
  int i;
  for (i = 0; i < 2000; i++) tfm_cancel((tfm_session *)context);
  return NULL;
}

TEST(cancelling_from_another_thread) {
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL);
  pthread_t thread;
  int cancelled = 0, i;
  size_t n;
  pthread_create(&thread, NULL, cancel_often, s);
  for (i = 0; i < 200; i++) {
    cancelled += tfm_feed(s, prompt, PROMPT) == TFM_E_CANCELLED;
    tfm_session_rewind(s, 0);
  }
  pthread_join(thread, NULL);
  tfm_feed(s, prompt, 1); /* whether or not a last cancel was left */
  CHECK_EQ_INT(tfm_feed(s, prompt, PROMPT), TFM_OK);
  CHECK(tfm_session_tokens(s, &n) && n >= PROMPT);
  CHECK(cancelled <= 200);
  tfm_session_free(s);
  tfm_model_free(m);
}

/* ---- What the host's process does ---- */

static tfm_session *signalled;

static void on_alarm(int number) {
  (void)number;
  tfm_cancel(signalled);
}

TEST(cancelling_from_a_signal_handler) {
  struct itimerval soon = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
  tfm_model *m = model_open(LLAMA);
  int cancelled = 0, i;
  signalled = tfm_session_create(m, NULL);
  signal(SIGALRM, on_alarm);
  setitimer(ITIMER_REAL, &soon, NULL);
  for (i = 0; i < 20000 && cancelled < 3; i++) {
    int status = tfm_feed(signalled, prompt, PROMPT);
    CHECK(status == TFM_OK || status == TFM_E_CANCELLED);
    cancelled += status == TFM_E_CANCELLED;
    tfm_session_rewind(signalled, 0);
  }
  setitimer(ITIMER_REAL, &never, NULL);
  signal(SIGALRM, SIG_DFL);
  CHECK_EQ_INT(cancelled, 3);
  tfm_session_free(signalled);
  tfm_model_free(m);
}

TEST(a_child_of_fork_has_the_model) { /* but makes its own engine */
  tfm_model *m = model_open(LLAMA);
  tfm_session *s = tfm_session_create(m, NULL); /* the parent's, with its threads */
  size_t bytes = 13 * (size_t)vocabulary_of(m) * sizeof(float);
  float *want = run_alone(m, NULL, PROMPT), *got;
  int status = -1;
  tfm_model_info info;
  pid_t child = -1;
  bool cuda;
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  cuda = !strcmp(info.device, "cuda");
  if (!cuda) child = fork();
  if (child == 0) {
    got = run_alone(m, NULL, PROMPT);
    _exit(test_failures || memcmp(want, got, bytes) != 0);
  }
  if (!cuda) {
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 0);
    CHECK_EQ_INT(tfm_feed(s, prompt, PROMPT), TFM_OK);
    CHECK(memcmp(tfm_logits(s), want, bytes / 13) == 0);
  }
  free(want);
  tfm_session_free(s);
  tfm_model_free(m);
  if (cuda) SKIP("CUDA cannot be used in a child of fork");
}

typedef struct inner { /* what a callback did with the library */
  int calls, good;
} inner;

static bool progress_that_loads(void *user, const char *what, double done) {
  inner *in = (inner *)user;
  tfm_model *m;
  (void)what, (void)done;
  if (in->calls++) return true;
  m = model_open(TINY);
  in->good += m != NULL && tfm_model_load("no/such", NULL) == NULL;
  tfm_model_free(m);
  return true;
}

TEST(callbacks_may_call_the_library) {
  tfm_model_config c;
  inner in = {0, 0};
  tfm_model *m;
  memset(&c, 0, sizeof c);
  c.host.progress = progress_that_loads;
  c.host.user = &in;
  m = tfm_model_load(LLAMA, &c);
  CHECK(m && in.calls > 0 && in.good == 1);
  tfm_model_free(m);
}

/* While a session says its text, another one of its model is made, used and freed; so is the one
   that it was given. */
typedef struct freeing {
  tfm_session *other;
  const tfm_model *m;
  int calls;
} freeing;

static bool free_the_other(void *user, const char *text, size_t bytes) {
  freeing *f = (freeing *)user;
  (void)text, (void)bytes;
  f->calls++;
  tfm_session_free(f->other);
  f->other = tfm_session_create(f->m, NULL);
  CHECK_EQ_INT(tfm_feed(f->other, prompt, PROMPT), TFM_OK);
  return f->calls < 3;
}

TEST(callbacks_may_free_other_objects) {
  tfm_model *m = model_open(TINY);
  tfm_tokenizer *t = tfm_tokenizer_load(TINY, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  freeing f = {tfm_session_create(m, NULL), m, 0};
  tfm_generate_config c;
  memset(&c, 0, sizeof c);
  c.max_tokens = 20;
  c.on_text = free_the_other;
  c.user = &f;
  CHECK(tfm_generate(s, t, "Once", &c) >= 3);
  CHECK_EQ_INT(f.calls, 3);
  tfm_session_free(f.other);
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
}

/* Loaded and run in a process that is set up otherwise: how far from `want`, [13, V]. */
static float farthest(const float *want) {
  tfm_model *m = model_open(LLAMA);
  size_t n = 13 * (size_t)vocabulary_of(m), i;
  float *got = run_alone(m, NULL, PROMPT), most = 0;
  for (i = 0; i < n; i++) most = fmaxf(most, fabsf(got[i] - want[i]));
  for (i = 0; i < n; i++) CHECK(isfinite(got[i]));
  free(got);
  tfm_model_free(m);
  return most;
}

static float *usual(void) {
  tfm_model *m = model_open(LLAMA);
  float *want = run_alone(m, NULL, PROMPT);
  tfm_model_free(m);
  return want;
}

TEST(decimal_commas_change_nothing) {
  static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8", "de_DE"};
  float *want;
  int i = 0;
  while (i < 4 && !setlocale(LC_ALL, names[i])) i++;
  if (i == 4) SKIP("no locale with decimal commas is installed");
  setlocale(LC_ALL, "C");
  want = usual();
  setlocale(LC_ALL, names[i]);
  CHECK(farthest(want) == 0);
  setlocale(LC_ALL, "C");
  free(want);
}

/* Rounding and flushing: a little off, and left as set. The range of the logits is 19; what tiles
   round to BF16 may fall to the other side. */
TEST(the_hosts_arithmetic_is_its_own) {
  static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  float *want = usual();
  int i;
  for (i = 0; i < 3; i++) {
    fesetround(modes[i]);
    CHECK(farthest(want) < 2e-2f);
    CHECK_EQ_INT(fegetround(), modes[i]);
  }
  fesetround(FE_TONEAREST);
#ifdef __SSE__
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040); /* denormals are zero, in and out */
  CHECK(farthest(want) < 1e-5f);
  CHECK((_mm_getcsr() & 0x8040) == 0x8040);
  _mm_setcsr(before);
#endif
  free(want);
}

static void *with_little_stack(void *out) {
  tfm_model *m = model_open(TINY);
  tfm_tokenizer *t = tfm_tokenizer_load(TINY, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_sampling how = {0.8f, 20, 0.9f, 0.01f, 1.1f, 1, 0};
  int i, id = tfm_feed_text(s, t, "Once upon a time");
  for (i = 0; i < 8 && id >= 0; i++) id = tfm_next(s, &how);
  *(int *)out = id;
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
  return NULL;
}

TEST(a_thread_of_64_KB_is_enough) {
  size_t bytes = 64 << 10;
  pthread_attr_t attributes;
  pthread_t thread;
  int id = TFM_E_STATE;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  bytes *= 8; /* theirs are larger */
#elif defined(TFM_USE_CUDA)
  bytes *= 4; /* what its libraries keep for every thread lies there too */
#endif
  pthread_attr_init(&attributes);
  CHECK_EQ_INT(pthread_attr_setstacksize(&attributes, bytes), 0);
  CHECK_EQ_INT(pthread_create(&thread, &attributes, with_little_stack, &id), 0);
  pthread_join(thread, NULL);
  CHECK(id >= 0 || id == TFM_END);
  pthread_attr_destroy(&attributes);
}

/* ---- Weights that are no numbers ---- */

static void check_weights_of(uint32_t bits) {
  blob file = blob_read(LLAMA "/model.safetensors"), config = blob_read(LLAMA "/config.json");
  static const tfm_sampling hot = {1, 3, 0.5f, 0.1f, 1.2f, 1, 0};
  size_t i, first = 8 + (size_t)blob_u64(&file, 0);
  tfm_model_config c;
  tfm_session *s;
  tfm_model *m;
  for (i = first; i + 4 <= file.bytes; i += 4) memcpy(file.data + i, &bits, 4);
  blob_turn(&file, first);
  memset(&c, 0, sizeof c);
  c.config_json = (const char *)config.data;
  m = tfm_model_load_memory(file.data, file.bytes, &c);
  if (!m) CHECK_STR(tfm_error(), "");
  s = tfm_session_create(m, NULL);
  CHECK_EQ_INT(tfm_feed(s, prompt, PROMPT), TFM_OK);
  for (i = 0; i < 4; i++) {
    int32_t id = tfm_next(s, i & 1 ? &hot : NULL), ids[3];
    CHECK(id < vocabulary_of(m) && (id >= 0 || tfm_error()[0] || id == TFM_END));
    CHECK(tfm_top(s, 3, ids, NULL) <= 3);
  }
  tfm_session_free(s);
  tfm_model_free(m);
  free(file.data);
  free(config.data);
}

TEST(weights_that_are_no_numbers_are_survived) {
  check_weights_of(0x7fc00000); /* NaN */
  check_weights_of(0x7f800000); /* infinity */
  check_weights_of(0xff7fffff); /* the most negative */
  check_weights_of(0x00000001); /* the least above 0 */
}

TEST_MAIN
