/* Engines under stress: random operations whose every result must be a fresh session's, devices
   that fail at every call, passes that are padded or recorded. White box: tables are wrapped. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "files.h"

#define LLAMA DATA "models/llama-b"
#define TINY DATA "models/tiny"

/* Whose table may be wrapped: its weights are the reference's. */
static tfm_model *model_open(tfm_device device) {
  tfm_model_config c;
  tfm_model *m;
  memset(&c, 0, sizeof c);
  c.device = device;
  m = tfm_model_load(LLAMA, &c);
  if (!m) fprintf(stderr, "%s\n", tfm_error());
  CHECK(m != NULL);
  return m;
}

/* ---- Random operations ---- */

typedef struct shadow { /* what a session must be */
  tfm_session *s;
  int32_t tokens[64];
  size_t n;
} shadow;

typedef struct stress {
  uint32_t random;
  const tfm_model *model;
  size_t vocabulary;
  tfm_engine_config config;
  tfm_engine *engine;
  shadow shadows[5];
  volatile int32_t flag;
  int cancel_in; /* calls of the tap or progress until the flag is raised; below 0: never */
  float *row, *rows;
} stress;

static uint32_t draw(stress *t, uint32_t n) {
  t->random ^= t->random << 13;
  t->random ^= t->random >> 17;
  t->random ^= t->random << 5;
  return t->random % n;
}

static bool count_down(void *user, const char *phase, double done) {
  stress *t = (stress *)user;
  (void)phase;
  (void)done;
  if (t->cancel_in >= 0 && t->cancel_in-- == 0) t->flag = 1;
  return true;
}

static void tap_down(void *user, const char *name, int32_t layer, const float *data, int32_t rows,
                     int32_t cols) {
  (void)name;
  (void)layer;
  CHECK(data[(size_t)rows * (size_t)cols - 1] != -12345.0f); /* all of it can be read */
  count_down(user, "", 0);
}

/* The logits after n tokens, from an engine that has done nothing else. */
static void fresh_logits(stress *t, const int32_t *tokens, size_t n) {
  tfm_engine_config c;
  tfm_session *s;
  memset(&c, 0, sizeof c);
  c.threads = 1;
  c.deterministic = true;
  s = tfm_session_create(t->model, &c);
  CHECK_EQ_INT(tfm_feed(s, tokens, n), TFM_OK);
  memcpy(t->row, tfm_logits(s), t->vocabulary * sizeof(float));
  tfm_session_free(s);
}

static void expect_row(stress *t, const shadow *w, size_t n, const float *logits) {
  fresh_logits(t, w->tokens, n);
  CHECK(memcmp(t->row, logits, t->vocabulary * sizeof(float)) == 0);
}

static bool allowed(tfm_status status) {
  return status == TFM_OK || status == TFM_E_FULL || status == TFM_E_CANCELLED;
}

static void stress_feed(stress *t, shadow *w) {
  int32_t ids[16];
  size_t n = draw(t, 14), i;
  bool eval = draw(t, 2) == 0;
  tfm_status status;
  for (i = 0; i < n; i++) ids[i] = (int32_t)draw(t, (uint32_t)t->vocabulary);
  status = eval ? tfm_eval(w->s, ids, n, t->rows) : tfm_feed(w->s, ids, n);
  CHECK(allowed(status));
  if (status != TFM_OK) return;
  memcpy(w->tokens + w->n, ids, n * sizeof *ids);
  for (i = 0; eval && i < n; i++) expect_row(t, w, w->n + i + 1, t->rows + i * t->vocabulary);
  w->n += n;
  t->cancel_in = -1;
  t->flag = 0;
  if (w->n && draw(t, 2)) expect_row(t, w, w->n, tfm_logits(w->s));
}

static void stress_rewind(stress *t, shadow *w) {
  size_t n = draw(t, (uint32_t)w->n + 1);
  CHECK_EQ_INT(tfm_session_rewind(w->s, n), TFM_OK);
  w->n = n;
}

/* Looks at the logits before and after some sessions chose: they are those it chose from. */
static void stress_next(stress *t) {
  tfm_session *batch[5];
  tfm_sampling how[5];
  shadow *which[5];
  int32_t ids[5];
  size_t n = 0, i;
  tfm_status status;
  memset(how, 0, sizeof how);
  for (i = 0; i < (size_t)t->config.sequences; i++)
    if (t->shadows[i].s && t->shadows[i].n && draw(t, 3)) {
      how[n].temperature = (float)draw(t, 3);
      how[n].seed = draw(t, 1000);
      which[n] = &t->shadows[i];
      batch[n++] = t->shadows[i].s;
    }
  if (n == 0) return;
  status = tfm_next_batch(batch, n, how, ids);
  CHECK(allowed(status));
  for (i = 0; status == TFM_OK && i < n; i++) {
    const float *logits;
    t->cancel_in = -1;
    t->flag = 0;
    logits = tfm_logits(batch[i]);
    CHECK(logits != NULL);
    if (logits) expect_row(t, which[i], which[i]->n, logits);
    if (ids[i] >= 0) which[i]->tokens[which[i]->n++] = ids[i];
    else CHECK(ids[i] == TFM_END || ids[i] == TFM_E_FULL);
  }
}

static void stress_check(stress *t) {
  int32_t i, used = 0, page = t->engine->config.page_tokens;
  for (i = 0; i < t->config.sequences; i++) {
    shadow *w = &t->shadows[i];
    size_t n;
    const int32_t *tokens;
    if (!w->s) continue;
    tokens = tfm_session_tokens(w->s, &n);
    CHECK_EQ_INT(n, w->n);
    CHECK(memcmp(tokens, w->tokens, w->n * sizeof *tokens) == 0);
    used += w->n ? ((int32_t)w->n - 1) / page + 1 : 0;
  }
  CHECK_EQ_INT(t->engine->config.pages - t->engine->free_count, used);
}

static void stress_step(stress *t) {
  shadow *w = &t->shadows[draw(t, (uint32_t)t->config.sequences)];
  if (!w->s) {
    w->s = tfm_session_open(t->engine);
    w->n = 0;
    CHECK(w->s != NULL);
    return;
  }
  t->cancel_in = draw(t, 6) == 0 ? (int)draw(t, 30) : -1;
  t->flag = 0;
  if (draw(t, 40) == 0) tfm_cancel(w->s);
  switch (draw(t, 7)) {
    case 0: case 1: stress_feed(t, w); break;
    case 2: stress_rewind(t, w); break;
    case 3: case 4: case 5: stress_next(t); break;
    default:
      if (draw(t, 4)) break;
      tfm_session_free(w->s);
      w->s = NULL;
  }
  stress_check(t);
}

static void stress_run(const tfm_model *m, uint32_t seed) {
  stress t;
  int step, i;
  memset(&t, 0, sizeof t);
  t.random = seed * 7919 + 1;
  t.model = m;
  t.vocabulary = (size_t)m->net.vocabulary;
  t.row = (float *)malloc(t.vocabulary * sizeof(float));
  t.rows = (float *)malloc(16 * t.vocabulary * sizeof(float));
  t.config.sequences = 1 + (int32_t)draw(&t, 5);
  t.config.context = 1 + (int32_t)draw(&t, 40);
  t.config.page_tokens = 1 + (int32_t)draw(&t, 9);
  t.config.batch_rows = 1 + (int32_t)draw(&t, 12);
  t.config.threads = 1 + (int32_t)draw(&t, 3);
  t.config.deterministic = true;
  if (draw(&t, 2)) t.config.pages = 1 + (int32_t)draw(&t, 40);
  if (draw(&t, 2) && m->dev.table == tfm_backend_ref()) t.config.tap = tap_down;
  t.config.tap_user = t.config.host.user = &t;
  t.config.host.progress = count_down;
  t.config.host.cancel = &t.flag;
  t.engine = tfm_engine_create(m, &t.config);
  CHECK(t.engine != NULL);
  for (step = 0; step < 120 && !test_failures; step++) stress_step(&t);
  if (test_failures) fprintf(stderr, "seed %u, step %d\n", (unsigned)seed, step);
  for (i = 0; i < 5; i++) tfm_session_free(t.shadows[i].s);
  tfm_engine_free(t.engine);
  free(t.row);
  free(t.rows);
}

/* On the reference, and on the fastest table, which a tap would make use other kernels. */
TEST(random_operations_leave_no_trace) {
  static const tfm_device devices[] = {TFM_REF, TFM_AUTO};
  uint32_t seed;
  int i;
  for (i = 0; i < 2; i++) {
    tfm_model *m = model_open(devices[i]);
    for (seed = 1; m && seed <= 12 && !test_failures; seed++) stress_run(m, seed);
    tfm_model_free(m);
  }
}

/* ---- Devices that fail, pad and record ---- */

static tfm_backend table; /* the reference's, wrapped */
static long calls, fail_at;
static int recorded, replayed;

/* Counts an entry's call; true: the device has failed, now or before, and skips it. */
static bool hit(tfm_dev *d) {
  if (++calls == fail_at) tfm_dev_fail(d, TFM_E_DEVICE, "injected at call %ld", fail_at);
  return d->status != TFM_OK;
}

static void hit_matmul(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                       const tfm_epilogue *e) {
  if (!hit(d)) tfm_backend_ref()->matmul(d, y, x, w, e);
}
static void hit_norm(tfm_dev *d, tfm_mat y, tfm_mat x, const float *w, const float *b, tfm_mat r,
                     float *stats, const tfm_norm *p) {
  if (!hit(d)) tfm_backend_ref()->norm(d, y, x, w, b, r, stats, p);
}
static void hit_kv_put(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v, const tfm_rows *rows) {
  if (!hit(d)) tfm_backend_ref()->kv_put(d, kv, k, v, rows);
}
static void hit_attn(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv, const tfm_rows *rows,
                     float *lse, const tfm_attn *p) {
  if (!hit(d)) tfm_backend_ref()->attn(d, y, q, kv, rows, lse, p);
}
static void hit_embed(tfm_dev *d, tfm_mat y, const tfm_weight *w, const tfm_weight *positions,
                      const tfm_rows *rows, float scale) {
  if (!hit(d)) tfm_backend_ref()->embed(d, y, w, positions, rows, scale);
}
static void hit_gather(tfm_dev *d, tfm_mat y, tfm_mat x, const int32_t *index) {
  if (!hit(d)) tfm_backend_ref()->gather(d, y, x, index);
}
static void hit_copy(tfm_dev *d, void *dst, const void *src, size_t bytes) {
  if (!hit(d)) tfm_backend_ref()->copy(d, dst, src, bytes);
}
static void hit_put(tfm_dev *d, void *dst, const void *src, size_t bytes) {
  if (!hit(d)) tfm_backend_ref()->put(d, dst, src, bytes);
}
static void hit_get(tfm_dev *d, void *dst, const void *src, size_t bytes) {
  if (!hit(d)) tfm_backend_ref()->get(d, dst, src, bytes);
}
static void hit_sample(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits,
                       const tfm_sampler *s) {
  if (!hit(d)) tfm_backend_ref()->sample(d, ids, logprobs, logits, s);
}

static void wrap(tfm_model *m) {
  table = *tfm_backend_ref();
  table.matmul = hit_matmul;
  table.norm = hit_norm;
  table.kv_put = hit_kv_put;
  table.attn = hit_attn;
  table.embed = hit_embed;
  table.gather = hit_gather;
  table.copy = hit_copy;
  table.put = hit_put;
  table.get = hit_get;
  table.sample = hit_sample;
  m->dev.table = &table;
}

typedef struct outcome {
  int32_t tokens[16];
  float logits[4];
  int n, failures;
} outcome;

/* Each call again until it succeeds: at most once more, as one failure is injected. */
#define RETRY(call)                                      \
  do {                                                   \
    if (call) break;                                     \
    CHECK_EQ_INT(tfm_error_status(), TFM_E_DEVICE);      \
    CHECK_STR_HAS(tfm_error(), "injected at call");      \
  } while (++o.failures < 3)

static outcome failing_run(const tfm_model *m, const tfm_engine_config *c, long at, bool eval) {
  static const int32_t prompt[] = {5, 17, 33, 2, 80, 41, 9, 64, 21};
  tfm_session *s;
  const float *logits = NULL;
  float rows[3 * 128];
  outcome o;
  int i;
  memset(&o, 0, sizeof o);
  fail_at = 0;
  s = tfm_session_create(m, c);
  calls = 0;
  fail_at = at;
  RETRY(tfm_feed(s, prompt, 6) == TFM_OK);
  for (i = 0; i < 8; i++) {
    if (i == 4 && eval) RETRY(tfm_eval(s, prompt + 6, 3, rows) == TFM_OK);
    if (i == 4 && !eval) RETRY(tfm_feed(s, prompt + 6, 3) == TFM_OK);
    RETRY((o.tokens[o.n] = tfm_next(s, NULL)) >= 0 || o.tokens[o.n] == TFM_END);
    o.n++;
  }
  RETRY((logits = tfm_logits(s)) != NULL);
  if (logits) memcpy(o.logits, logits + 3, sizeof o.logits);
  tfm_session_free(s);
  return o;
}

static void drop_tap(void *user, const char *name, int32_t layer, const float *data, int32_t rows,
                     int32_t cols) {
  (void)user, (void)name, (void)layer, (void)data, (void)rows, (void)cols;
}

TEST(after_a_device_failed_the_same_call_succeeds) {
  tfm_model *m = model_open(TFM_REF);
  tfm_engine_config c;
  int variant;
  memset(&c, 0, sizeof c);
  c.threads = 1;
  c.batch_rows = 4;
  wrap(m);
  for (variant = 0; variant < 4; variant++) {
    outcome good, bad;
    long total, at;
    c.tap = variant & 1 ? drop_tap : NULL;
    good = failing_run(m, &c, 0, variant >= 2);
    total = calls;
    CHECK(good.n == 8 && good.failures == 0);
    for (at = 1; at <= total && !test_failures; at += 1 + variant) {
      bad = failing_run(m, &c, at, variant >= 2);
      CHECK_EQ_INT(bad.failures, 1);
      CHECK(memcmp(bad.tokens, good.tokens, sizeof good.tokens) == 0);
      CHECK(memcmp(bad.logits, good.logits, sizeof good.logits) == 0);
      if (test_failures) fprintf(stderr, "variant %d, call %ld of %ld\n", variant, at, total);
    }
  }
  m->dev.table = tfm_backend_ref();
  tfm_model_free(m);
}

/* As a graph device does: the first pass of a size is recorded, which here just runs it; replay
   then declines, but has seen the key. */
static bool record_pass(tfm_dev *d, uint64_t key, bool begin) {
  (void)d;
  CHECK(key % 8 == 0 && key > 0);
  recorded += begin;
  return true;
}
static bool replay_pass(tfm_dev *d, uint64_t key) {
  (void)d;
  (void)key;
  replayed++;
  return false;
}
static size_t some_work(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                        int32_t context) {
  (void)d;
  CHECK(net->layers > 0 && rows % 8 == 0 && sequences == 1 && context > 0);
  return 1000;
}

TEST(padded_and_recorded_passes_change_nothing) {
  tfm_model *m = model_open(TFM_REF);
  tfm_engine_config c;
  outcome plain, padded;
  memset(&c, 0, sizeof c);
  c.batch_rows = 5;
  plain = failing_run(m, &c, 0, true);
  wrap(m);
  table.row_multiple = 8;
  table.record = record_pass;
  table.replay = replay_pass;
  table.work_bytes = some_work;
  recorded = replayed = 0;
  padded = failing_run(m, &c, 0, true);
  CHECK(recorded > 0 && recorded == replayed);
  CHECK(memcmp(plain.tokens, padded.tokens, sizeof plain.tokens) == 0);
  CHECK(memcmp(plain.logits, padded.logits, sizeof plain.logits) == 0);
  m->dev.table = tfm_backend_ref();
  tfm_model_free(m);
}

/* ---- Devices that run ahead ---- */

static int steps_run;

/* As `decode` is described: whole steps, with what they change in place. */
static bool run_ahead(tfm_dev *d, const tfm_run_ahead *r, int32_t steps) {
  const tfm_net *net = r->net;
  tfmi_arena measured = {NULL, 0, false}, arena = {NULL, 0, false};
  tfm_mat none = tfmi_absent(), stream = tfmi_take_mat(&measured, TFM_F32, 1, net->width), logits;
  int32_t *pos = (int32_t *)(uintptr_t)r->rows.pos, *next = (int32_t *)(uintptr_t)r->sampler.pos;
  tfmi_pass p;
  int i;
  tfmi_take_buffers(&measured, net, none, TFM_F32, 1, false);
  tfmi_take_mat(&measured, TFM_F32, 1, net->vocabulary);
  arena.base = (char *)malloc(measured.used);
  memset(&p, 0, sizeof p);
  p.dev = d;
  p.net = net;
  p.kv = r->kv;
  p.rows = r->rows;
  stream = tfmi_take_mat(&arena, TFM_F32, 1, net->width);
  p.buffers = tfmi_take_buffers(&arena, net, stream, TFM_F32, 1, false);
  logits = tfmi_take_mat(&arena, TFM_F32, 1, net->vocabulary);
  for (i = 0; i < steps && d->status == TFM_OK; i++, steps_run++) {
    int32_t id = 0;
    tfmi_forward(&p);
    tfmi_head(&p, logits, p.buffers.norm1, stream);
    d->table->sample(d, &id, NULL, logits, &r->sampler);
    *(int32_t *)(uintptr_t)r->rows.id = id;
    *next = ++*pos + 1;
    ((int32_t *)(uintptr_t)r->sampler.history)[r->rows.seq[0] * r->sampler.history_stride + *pos] =
        id;
    if (d->status == TFM_OK) r->ids[i] = id;
  }
  free(arena.base);
  return true;
}

/* Tokens and logits of two sessions: fed, asked in different ways, rewound and filled up. */
static void ahead_story(const tfm_model *m, int32_t *out) {
  static const int32_t prompt[] = {5, 17, 33, 2, 80, 41, 9, 64, 21};
  tfm_engine_config c;
  tfm_sampling how = {0.9f, 20, 0.95f, 0, 1.1f, 3, 4}, greedy = {0, 0, 0, 0, 0, 0, 0};
  tfm_engine *e;
  tfm_session *a, *b;
  int i, status;
  memset(&c, 0, sizeof c);
  c.context = 48;
  c.page_tokens = 4;
  c.pages = 16;
  c.sequences = 2;
  e = tfm_engine_create(m, &c);
  a = tfm_session_open(e);
  b = tfm_session_open(e);
  CHECK_EQ_INT(tfm_feed(a, prompt, 5), TFM_OK);
  CHECK_EQ_INT(tfm_feed(b, prompt + 2, 3), TFM_OK);
  for (i = 0; i < 7; i++) *out++ = tfm_next(a, &greedy);
  for (i = 0; i < 3; i++) *out++ = tfm_next(b, &how);
  CHECK_EQ_INT(tfm_feed(b, prompt + 5, 2), TFM_OK);
  for (i = 0; i < 5; i++) *out++ = tfm_next(a, &how);
  memcpy(out, tfm_logits(a), 4 * sizeof *out);
  out += 4;
  CHECK_EQ_INT(tfm_session_rewind(a, 9), TFM_OK);
  for (i = 0; i < 4; i++) *out++ = tfm_next(a, NULL);
  CHECK_EQ_INT(tfm_feed(a, prompt, 2), TFM_OK);
  do *out++ = status = tfm_next(a, &how);
  while (status >= 0);
  CHECK(status == TFM_E_FULL || status == TFM_END);
  tfm_session_free(a);
  for (i = 0; i < 6; i++) *out++ = tfm_next(b, &how);
  tfm_session_free(b);
  tfm_engine_free(e);
}

TEST(running_ahead_changes_nothing) {
  tfm_model *m = model_open(TFM_REF);
  int32_t plain[160] = {0}, ahead[160] = {0};
  ahead_story(m, plain);
  wrap(m);
  fail_at = 0;
  table.decode = run_ahead;
  steps_run = 0;
  ahead_story(m, ahead);
  CHECK(steps_run > 30);
  CHECK(memcmp(plain, ahead, sizeof plain) == 0);
  m->dev.table = tfm_backend_ref();
  tfm_model_free(m);
}

/* A failure is told at most once: what ran ahead in vain may fail in vain. */
TEST(failing_ahead_loses_nothing) {
  tfm_model *m = model_open(TFM_REF);
  tfm_engine_config c;
  outcome good, bad;
  long total, at;
  memset(&c, 0, sizeof c);
  c.threads = 1;
  wrap(m);
  table.decode = run_ahead;
  good = failing_run(m, &c, 0, false);
  total = calls;
  for (at = 1; at <= total && !test_failures; at++) {
    bad = failing_run(m, &c, at, false);
    CHECK(bad.failures <= 1);
    CHECK(memcmp(bad.tokens, good.tokens, sizeof good.tokens) == 0);
    CHECK(memcmp(bad.logits, good.logits, sizeof good.logits) == 0);
    if (test_failures) fprintf(stderr, "call %ld of %ld\n", at, total);
  }
  m->dev.table = tfm_backend_ref();
  tfm_model_free(m);
}

/* ---- Rewinding ---- */

/* The new end may lie inside a character: its first bytes wait for the rest. */
TEST(rewinding_into_a_character_keeps_its_bytes) {
  tfm_model *m = tfm_model_load(TINY, NULL);
  tfm_tokenizer *t = tfm_tokenizer_load(TINY, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  const char *text = "a \xf0\x9f\x98\x80";
  size_t n, before;
  CHECK_EQ_INT(tfm_feed_text(s, t, text), TFM_OK);
  tfm_session_tokens(s, &n);
  before = n - 1; /* without the last byte of the emoji */
  CHECK_EQ_INT(tfm_session_rewind(s, before), TFM_OK);
  CHECK(s->decoder.pending_bytes > 0);
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
}

/* ---- The application's threads ---- */

static int parallel_calls;

static void run_in_turn(void *user, int32_t workers, void (*job)(void *context, int32_t worker),
                        void *context) {
  int32_t i;
  (void)user;
  parallel_calls++;
  for (i = workers; i-- > 0;) job(context, i);
}

TEST(threads_may_be_lent) {
  tfm_model *m = model_open(TFM_REF);
  tfm_engine_config c;
  outcome own, lent;
  memset(&c, 0, sizeof c);
  own = failing_run(m, &c, 0, false);
  c.threads = 3;
  c.host.parallel = run_in_turn;
  lent = failing_run(m, &c, 0, false);
  CHECK(parallel_calls > 0);
  CHECK(memcmp(own.tokens, lent.tokens, sizeof own.tokens) == 0);
  CHECK(memcmp(own.logits, lent.logits, sizeof own.logits) == 0);
  tfm_model_free(m);
}

TEST_MAIN
