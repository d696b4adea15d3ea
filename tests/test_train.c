/* The trainer: gradients of every parameter and loss curves against PyTorch (training.safetensors
   of tests/make_goldens.py); schedules; accumulation, threads and export; memory as planned. */
#include <stdio.h>
#include <unistd.h>

/* Every call that changes a file may be the process's last: see every_write_may_be_the_last. */
static long calls_until_death; /* 0: for ever */
static void call_counts(void);
static ssize_t hooked_write(int fd, const void *data, size_t n);
static int hooked_rename(const char *from, const char *to);
static int hooked_link(const char *from, const char *to);
static int hooked_fsync(int fd);
#define write hooked_write
#define rename hooked_rename
#define link hooked_link
#define fsync hooked_fsync
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#undef write
#undef rename
#undef link
#undef fsync
#include "files.h"
#include <signal.h>
#include <sys/wait.h>

static const char *const cases[] = {
  "gpt2-a", "gpt2-b", "llama-a", "llama-b", "llama-c", "llama-d", "mistral-a", "qwen2-a", "qwen3-a",
  "gemma-a", "gemma-b", "gemma2-a", "gemma3-a", "phi3-a", "mixtral-b", "qwen2moe-a", "qwen3moe-a",
  "gpt2moe-a"};

/* ---- Tensors of a safetensors file, found by name ---- */

typedef struct tensor {
  const void *data; /* NULL: there is none */
  size_t bytes;
} tensor;

static tensor tensor_find(const blob *file, const char *name) {
  tensor t = {NULL, 0};
  char key[200];
  const char *at;
  unsigned long long begin, end;
  snprintf(key, sizeof key, "\"%s\":{", name);
  at = file->data ? strstr((const char *)file->data + 8, key) : NULL;
  at = at ? strstr(at, "\"data_offsets\":[") : NULL;
  if (!at || sscanf(at, "\"data_offsets\":[%llu,%llu]", &begin, &end) != 2) return t;
  t.data = file->data + 8 + tfmi_u64(file->data) + begin;
  t.bytes = end - begin;
  return t;
}

/* One whose tensors are words of 4 bytes, which become the machine's. */
static blob tensors_read(const char *path) {
  blob b = blob_read(path);
  if (b.data) blob_turn(&b, 8 + (size_t)tfmi_u64(b.data));
  return b;
}

typedef struct golden {
  tfm_model *model;
  blob file;
  const int32_t *ids, *targets;
  const float *losses, *balance; /* of the first step, not weighted; NULL: as 0 */
  int32_t context;
} golden;

static bool golden_open(golden *g, const char *name, tfm_device device) {
  char path[300];
  tfm_model_config c;
  tensor ids;
  memset(&c, 0, sizeof c);
  c.device = device;
  snprintf(path, sizeof path, DATA "models/%s", name);
  g->model = tfm_model_load(path, &c);
  snprintf(path, sizeof path, DATA "models/%s/training.safetensors", name);
  g->file = tensors_read(path);
  ids = tensor_find(&g->file, "ids");
  g->ids = (const int32_t *)ids.data;
  g->targets = (const int32_t *)tensor_find(&g->file, "targets").data;
  g->losses = (const float *)tensor_find(&g->file, "losses").data;
  g->balance = (const float *)tensor_find(&g->file, "balance").data;
  g->context = (int32_t)(ids.bytes / 8);
  CHECK(g->model && g->ids && g->targets && g->losses);
  return g->model && g->ids && g->targets && g->losses;
}

static void golden_close(golden *g) {
  tfm_model_free(g->model);
  free(g->file.data);
}

/* As TRAINING in make_goldens.py has it. */
static tfm_trainer_config golden_config(const golden *g) {
  tfm_trainer_config c;
  memset(&c, 0, sizeof c);
  c.batch = 2;
  c.context = g->context;
  c.lr = 3e-3f;
  c.threads = 2;
  return c;
}

/* ---- Gradients ---- */

static blob gradients_of(tfm_trainer *t) {
  const char *path = "build/test_train.safetensors";
  blob b;
  CHECK_EQ_INT(tfmi_export_file(t, "build", "test_train.safetensors", tfmi_export_tensors, t->g),
               TFM_OK);
  b = tensors_read(path);
  remove(path);
  return b;
}

/* Largest difference over largest value, of one parameter. */
static double gradient_error(const float *got, const float *want, size_t n) {
  double most = 0, apart = 0;
  size_t i;
  for (i = 0; i < n; i++) {
    double d = fabs((double)got[i] - (double)want[i]);
    if (!(d <= apart)) apart = isnan(d) ? 1e9 : d;
    most = fmax(most, fabs((double)want[i]));
  }
  return apart / most;
}

static double worst_gradient(const golden *g, const blob *got, int *count) {
  const char *at = (const char *)g->file.data + 8;
  double worst = 0;
  char name[200];
  for (*count = 0; (at = strstr(at, "\":{\"dtype\"")) != NULL; at++) {
    const char *start = at;
    tensor a, b;
    double e;
    while (start[-1] != '"') start--;
    snprintf(name, sizeof name, "%.*s", (int)(at - start), start);
    if (!strchr(name, '.')) continue;
    a = tensor_find(&g->file, name);
    b = tensor_find(got, name);
    CHECK(b.data && a.bytes == b.bytes);
    if (!b.data || a.bytes != b.bytes) {
      fprintf(stderr, "  %s: %zu bytes, expected %zu\n", name, b.bytes, a.bytes);
      continue;
    }
    e = gradient_error((const float *)b.data, (const float *)a.data, a.bytes / 4);
    if (!(e <= 1e-4)) fprintf(stderr, "  %s: relative error %.1e\n", name, e);
    worst = fmax(worst, e);
    ++*count;
  }
  return worst;
}

TEST(gradients_equal_pytorch) {
  size_t i;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    golden g;
    tfm_trainer_config c;
    tfm_trainer *t;
    tfm_step s;
    blob got;
    double worst;
    int count;
    if (!golden_open(&g, cases[i], TFM_AUTO)) continue;
    c = golden_config(&g);
    t = tfm_trainer_create(g.model, &c);
    if (!t) fprintf(stderr, "%s\n", tfm_error());
    CHECK(t != NULL);
    CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &s), TFM_OK);
    got = gradients_of(t);
    worst = worst_gradient(&g, &got, &count);
    printf("  %-10s %d parameters, largest relative error %.1e\n", cases[i], count, worst);
    CHECK(fabs(s.balance - (g.balance ? (double)*g.balance : 0)) < 1e-5);
    CHECK(worst <= 1e-4 && count >= 15);
    CHECK(!s.skipped && s.step == 1);
    free(got.data);
    tfm_trainer_free(t);
    golden_close(&g);
  }
}

TEST(loss_curves_equal_pytorch) {
  size_t i;
  int step;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    golden g;
    tfm_trainer_config c;
    tfm_trainer *t;
    double worst = 0;
    if (!golden_open(&g, cases[i], TFM_AUTO)) continue;
    c = golden_config(&g);
    t = tfm_trainer_create(g.model, &c);
    CHECK(t != NULL);
    for (step = 0; t && step < 20; step++) {
      tfm_step s;
      CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &s), TFM_OK);
      worst = fmax(worst, fabs(s.loss - (double)g.losses[step]));
    }
    printf("  %-10s loss %.4f to %.4f, largest difference %.1e\n", cases[i], (double)g.losses[0],
           (double)g.losses[19], worst);
    CHECK(worst <= 1e-4);
    tfm_trainer_free(t);
    golden_close(&g);
  }
}

/* ---- Steps ---- */

/* A trainer of a case's model after a step, its weights in *w. */
static tfm_trainer *stepped(const golden *g, int32_t batch, int32_t accumulate, int32_t threads,
                            float **w, tfm_step *s) {
  tfm_trainer_config c = golden_config(g);
  tfm_trainer *t;
  c.batch = batch;
  c.accumulate = accumulate;
  c.threads = threads;
  t = tfm_trainer_create(g->model, &c);
  CHECK(t != NULL);
  CHECK_EQ_INT(tfm_trainer_step(t, g->ids, g->targets, NULL, s), TFM_OK);
  *w = t ? t->w : NULL;
  return t;
}

TEST(threads_change_no_bit) {
  golden g;
  tfm_step a, b;
  float *one, *three;
  tfm_trainer *t, *u;
  if (!golden_open(&g, "llama-b", TFM_AUTO)) return;
  t = stepped(&g, 2, 1, 1, &one, &a);
  u = stepped(&g, 2, 1, 3, &three, &b);
  CHECK(t && u && !memcmp(one, three, (size_t)t->total * sizeof *one));
  CHECK(a.loss == b.loss && a.gradient_norm == b.gradient_norm);
  tfm_trainer_free(t), tfm_trainer_free(u);
  golden_close(&g);
}

/* BF16 where the device has it, near F32; elsewhere the same bits as F32, and told so. */
static void precision_on(tfm_device device) {
  golden g;
  tfm_trainer_config c;
  tfm_trainer_info info = {0};
  tfm_step s[2];
  int i, k;
  if (!golden_open(&g, "llama-a", device)) return;
  c = golden_config(&g);
  for (i = 0; i < 2; i++) {
    tfm_trainer *t;
    c.precision = i ? TFM_BF16 : TFM_F32;
    t = tfm_trainer_create(g.model, &c);
    for (k = 0; k < 20; k++)
      CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &s[i]), TFM_OK);
    CHECK_EQ_INT(tfm_trainer_describe(t, &info), TFM_OK);
    CHECK_EQ_INT(info.precision, i && t->dev.has_bf16 ? TFM_BF16 : TFM_F32);
    tfm_trainer_free(t);
  }
  if (info.precision == TFM_F32) CHECK(memcmp(&s[0], &s[1], sizeof s[0]) == 0);
  else CHECK(s[0].loss != s[1].loss && fabs(s[0].loss - s[1].loss) < 0.02 * s[0].loss);
  golden_close(&g);
}
TEST(precision_is_asked_for) {
  precision_on(TFM_REF);
#ifdef TFM_USE_CPU
  precision_on(TFM_CPU);
#endif
}

TEST(accumulation_is_a_larger_batch) {
  golden g;
  tfm_step a, b;
  float *whole, *halves;
  tfm_trainer *t, *u;
  if (!golden_open(&g, "gpt2-a", TFM_AUTO)) return;
  t = stepped(&g, 2, 1, 2, &whole, &a);
  u = stepped(&g, 1, 2, 2, &halves, &b);
  CHECK(fabs(a.loss - b.loss) < 1e-5 && a.accuracy == b.accuracy && a.targets == b.targets);
  CHECK(fabsf(a.gradient_norm / b.gradient_norm - 1) < 1e-5f);
  CHECK(t && u && gradient_error(t->g, u->g, (size_t)t->total) < 1e-5);
  tfm_trainer_free(t), tfm_trainer_free(u);
  golden_close(&g);
}

/* Weights are relative; 0 is as -100; and a token that counts twice is one that is there twice. */
TEST(targets_have_weights) {
  golden g;
  tfm_trainer_config c;
  tfm_trainer *t;
  tfm_step plain = {0}, twice = {0}, some = {0}, masked = {0};
  float weights[512];
  int32_t targets[512], n, i;
  if (!golden_open(&g, "gpt2-a", TFM_AUTO)) return;
  c = golden_config(&g);
  t = tfm_trainer_create(g.model, &c);
  n = 2 * g.context;
  for (i = 0; i < n; i++) weights[i] = 2;
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, NULL, &plain), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, weights, &twice), TFM_OK);
  CHECK(fabs(plain.loss - twice.loss) < 1e-6 && plain.targets == twice.targets);
  CHECK(fabs(plain.accuracy - twice.accuracy) < 1e-9);
  for (i = 0; i < n; i++) {
    weights[i] = i % 3 ? 0.0f : 0.5f;
    targets[i] = i % 3 ? -100 : g.targets[i];
  }
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, weights, &some), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, targets, NULL, &masked), TFM_OK);
  CHECK(fabs(some.loss - masked.loss) < 1e-6 && some.targets == masked.targets);
  weights[5] = -1;
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, weights, &some), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "weight 5 is -1");
  tfm_trainer_free(t);
  golden_close(&g);
}

/* ---- Dropout ---- */

static tfm_trainer_config dropping(const golden *g) {
  tfm_trainer_config c = golden_config(g);
  c.drop_embed = 0.1f;
  c.drop_attn = 0.2f;
  c.drop_residual = 0.3f;
  c.seed = 9;
  return c;
}

/* Loss and, in t->g, gradients of a golden's batch, with the masks of the first step. */
static double dropped_loss(tfm_trainer *t, const golden *g) {
  tfmi_lesson batch = {g->ids, g->targets, NULL};
  tfm_step s = {0};
  CHECK_EQ_INT(tfmi_train_passes(t, &batch, t->config.accumulate, true, &s), TFM_OK);
  return s.loss;
}

/* Against transformers' GPT-2 with the same masks: see golden_dropout in make_goldens.py. */
TEST(dropout_equals_pytorch) {
  golden g, dropped;
  tfm_trainer_config c;
  tfm_trainer *t;
  const float *want;
  blob got;
  double loss, worst;
  int count;
  if (!golden_open(&g, "gpt2-a", TFM_AUTO)) return;
  dropped = g;
  dropped.file = tensors_read(DATA "models/gpt2-a/dropout.safetensors");
  want = (const float *)tensor_find(&dropped.file, "loss").data;
  c = dropping(&g);
  t = tfm_trainer_create(g.model, &c);
  CHECK(t && want);
  loss = dropped_loss(t, &g);
  got = gradients_of(t);
  worst = worst_gradient(&dropped, &got, &count);
  printf("  loss %.6f, PyTorch's %.6f; %d parameters, largest relative error %.1e\n", loss,
         want ? (double)*want : 0.0, count, worst);
  CHECK(want && fabs(loss / (double)*want - 1) < 1e-5);
  CHECK(worst <= 1e-4 && count >= 15);
  free(got.data);
  free(dropped.file.data);
  tfm_trainer_free(t);
  golden_close(&g);
}

/* The loss along a random direction of one parameter, and what the gradient says of it. */
static void along(tfm_trainer *t, const golden *g, const tfmi_parameter *p, double *got,
                  double *want) {
  int64_t n = tfmi_parameter_values(p), i;
  float *g0 = (float *)malloc((size_t)n * sizeof *g0), *w0 = (float *)malloc((size_t)n * 4);
  double length = 0, step, loss[2];
  size_t host, device;
  int k;
  memcpy(g0, t->g + p->at, (size_t)n * sizeof *g0);
  memcpy(w0, t->w + p->at, (size_t)n * sizeof *w0);
  for (i = 0; i < n; i++) length += (double)g0[i] * (double)g0[i];
  length = sqrt(length);
  step = 4e-3 / length;
  for (k = 0; k < 2; k++) {
    for (i = 0; i < n; i++) t->w[p->at + i] = w0[i] + (float)((k ? -step : step) * (double)g0[i]);
    tfmi_pack_parameters(t, &host, &device);
    loss[k] = dropped_loss(t, g);
  }
  memcpy(t->w + p->at, w0, (size_t)n * sizeof *w0);
  tfmi_pack_parameters(t, &host, &device);
  *got = (loss[0] - loss[1]) / (2 * step * length);
  *want = length;
  free(g0), free(w0);
}

/* Gradients under dropout are the slopes of the loss under the same masks. */
TEST(dropout_has_gradients) {
  static const char *const which[] = {"gpt2-a", "llama-b"};
  int i, k;
  for (k = 0; k < 2; k++) {
    golden g;
    tfm_trainer_config c;
    tfm_trainer *t;
    double worst = 0;
    if (!golden_open(&g, which[k], k ? TFM_AUTO : TFM_REF)) return;
    c = dropping(&g);
    t = tfm_trainer_create(g.model, &c);
    CHECK(t != NULL);
    for (i = 0; t && i < t->parameters; i++) {
      double got, want;
      dropped_loss(t, &g);
      along(t, &g, &t->parameter[i], &got, &want);
      if (want > 0.05) worst = fmax(worst, fabs(got / want - 1)); /* else: rounding of the loss */
    }
    printf("  %-8s slopes under dropout differ by at most %.1e\n", which[k], worst);
    CHECK(worst < 3e-3);
    tfm_trainer_free(t);
    golden_close(&g);
  }
}

/* Masks belong to sequences and places: threads, batches and devices change nothing. */
TEST(dropout_is_the_same_however_it_is_computed) {
  golden g, r;
  tfm_trainer_config c;
  tfm_trainer *t, *u, *v, *w;
  double plain;
  tfm_step s = {0};
  if (!golden_open(&g, "gpt2-a", TFM_AUTO) || !golden_open(&r, "gpt2-a", TFM_REF)) return;
  c = dropping(&g);
  t = tfm_trainer_create(g.model, &c);
  c.threads = 3;
  u = tfm_trainer_create(g.model, &c);
  v = tfm_trainer_create(r.model, &c);
  c.batch = 1;
  c.accumulate = 2;
  w = tfm_trainer_create(g.model, &c);
  plain = dropped_loss(t, &g);
  CHECK(plain == dropped_loss(u, &g) && !memcmp(t->g, u->g, (size_t)t->total * sizeof(float)));
  CHECK(fabs(plain - dropped_loss(v, &g)) < 1e-5);
  CHECK(gradient_error(v->g, t->g, (size_t)t->total) < 1e-4);
  CHECK(fabs(plain - dropped_loss(w, &g)) < 1e-5);
  CHECK(gradient_error(w->g, t->g, (size_t)t->total) < 1e-4);
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, NULL, &s), TFM_OK);
  CHECK(fabs(s.loss - (double)g.losses[0]) < 1e-4); /* without dropout */
  CHECK(fabs(plain - s.loss) > 1e-3);
  t->sequences += 2;
  CHECK(plain != dropped_loss(t, &g)); /* new masks */
  tfm_trainer_free(t), tfm_trainer_free(u), tfm_trainer_free(v), tfm_trainer_free(w);
  golden_close(&g), golden_close(&r);
}

/* ---- Computing activations again ---- */

TEST(recomputation_changes_no_bit) {
  size_t i;
  int k;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    golden g;
    tfm_trainer_config c;
    tfm_trainer *t, *u;
    if (!golden_open(&g, cases[i], TFM_AUTO)) continue;
    c = dropping(&g);
    if (g.model->net.experts || g.model->net.layer[0].post1) c.drop_residual = 0; /* refused */
    t = tfm_trainer_create(g.model, &c);
    c.recompute = true;
    u = tfm_trainer_create(g.model, &c);
    if (!t || !u) fprintf(stderr, "  %s: %s\n", cases[i], tfm_error());
    for (k = 0; k < 3; k++) {
      CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, NULL), TFM_OK);
      CHECK_EQ_INT(tfm_trainer_step(u, g.ids, g.targets, NULL, NULL), TFM_OK);
    }
    CHECK(t && u && !memcmp(t->w, u->w, (size_t)t->total * sizeof(float)));
    tfm_trainer_free(t), tfm_trainer_free(u);
    golden_close(&g);
  }
}

TEST(recomputation_needs_less_memory) {
  tfm_shape s = {0};
  tfm_trainer_config c;
  tfm_trainer_info all = {0}, less = {0}, held = {0};
  tfm_trainer *t;
  s.layers = 8;
  s.width = 64;
  s.heads = 4;
  s.vocabulary = 100;
  s.context = 64;
  memset(&c, 0, sizeof c);
  c.batch = 8;
  c.threads = 1; /* each thread has its own workspace besides */
  CHECK_EQ_INT(tfm_trainer_plan(&s, &c, &all), TFM_OK);
  c.recompute = true;
  CHECK_EQ_INT(tfm_trainer_plan(&s, &c, &less), TFM_OK);
  t = tfm_trainer_init(&s, &c);
  CHECK_EQ_INT(tfm_trainer_describe(t, &held), TFM_OK);
  printf("  8 layers: %.1f MB of activations, %.1f MB with recomputation\n",
         (double)(all.memory_bytes - all.state_bytes) / 1e6,
         (double)(less.memory_bytes - less.state_bytes) / 1e6);
  CHECK_EQ_INT(held.memory_bytes, less.memory_bytes);
  CHECK((less.memory_bytes - less.state_bytes) * 3 < all.memory_bytes - all.state_bytes);
  tfm_trainer_free(t);
}

/* ---- Frozen parameters ---- */

/* After a step with some frozen: they are as before, and the others as if nothing were. */
static void freezes(const golden *g, unsigned freeze, int32_t first_layer, bool some) {
  tfm_trainer_config c = golden_config(g);
  tfm_trainer *before, *all, *part;
  double square = 0;
  tfm_step s = {0};
  int64_t k;
  int i, frozen = 0, trained = 0;
  c.clip = -1;
  before = tfm_trainer_create(g->model, &c);
  all = tfm_trainer_create(g->model, &c);
  c.freeze = freeze;
  c.first_layer = first_layer;
  part = tfm_trainer_create(g->model, &c);
  CHECK(before && all && part);
  CHECK_EQ_INT(tfm_trainer_step(all, g->ids, g->targets, NULL, NULL), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_step(part, g->ids, g->targets, NULL, &s), TFM_OK);
  for (i = 0; i < part->parameters; i++) {
    const tfmi_parameter *p = &part->parameter[i];
    const float *want = (p->frozen ? before : all)->w + p->at;
    int64_t n = tfmi_parameter_values(p);
    CHECK(!memcmp(part->w + p->at, want, (size_t)n * sizeof *want));
    for (k = 0; !p->frozen && k < n; k++)
      square += (double)all->g[p->at + k] * (double)all->g[p->at + k];
    frozen += p->frozen, trained += !p->frozen;
  }
  CHECK(trained > 0 && (frozen > 0) == some);
  CHECK(fabs(sqrt(square) / (double)s.gradient_norm - 1) < 1e-5);
  tfm_trainer_free(before), tfm_trainer_free(all), tfm_trainer_free(part);
}

TEST(frozen_parameters_stay) {
  static const char *const which[] = {"gpt2-a", "llama-c"};
  tfm_trainer_config c;
  golden g;
  int k;
  for (k = 0; k < 2; k++) {
    if (!golden_open(&g, which[k], TFM_AUTO)) return;
    freezes(&g, 0, 0, false);
    freezes(&g, TFM_EMBEDDINGS, 0, true);
    freezes(&g, TFM_NORMS | TFM_HEAD, 0, true);
    freezes(&g, TFM_ATTENTION, 0, true);
    freezes(&g, TFM_FEED_FORWARD | TFM_EMBEDDINGS, 0, true);
    freezes(&g, 0, 1, true);
    freezes(&g, 0, g.model->net.layers, true); /* the final norm, and an untied head */
    c = golden_config(&g);
    c.freeze = 63;
    CHECK(!tfm_trainer_create(g.model, &c));
    CHECK_STR_HAS(tfm_error(), "frozen");
    golden_close(&g);
  }
}

TEST(evaluation_learns_nothing) {
  golden g;
  tfm_trainer_config c;
  tfm_trainer *t;
  tfm_step a = {0}, b = {0};
  if (!golden_open(&g, "llama-a", TFM_AUTO)) return;
  c = golden_config(&g);
  t = tfm_trainer_create(g.model, &c);
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, NULL, &a), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_eval(t, g.ids, g.targets, NULL, &b), TFM_OK);
  CHECK(a.loss == b.loss && a.step == 0 && a.gradient_norm == 0);
  CHECK(fabs(a.loss - (double)g.losses[0]) < 1e-4);
  CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &b), TFM_OK);
  CHECK(a.loss == b.loss && a.accuracy == b.accuracy);
  tfm_trainer_free(t);
  golden_close(&g);
}

TEST(a_step_that_is_not_finite_is_skipped) {
  golden g;
  tfm_trainer_config c;
  tfm_trainer *t;
  tfm_step s;
  float *before;
  size_t bytes;
  if (!golden_open(&g, "gpt2-a", TFM_REF)) return;
  c = golden_config(&g);
  t = tfm_trainer_create(g.model, &c);
  bytes = (size_t)t->total * sizeof(float);
  before = (float *)malloc(bytes);
  CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &s), TFM_OK);
  t->w[t->total - 1] = NAN; /* the last bias of all */
  memcpy(before, t->w, bytes);
  CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &s), TFM_OK);
  CHECK(s.skipped && s.step == 1 && !memcmp(before, t->w, bytes));
  t->w[t->total - 1] = 0;
  CHECK_EQ_INT(tfm_trainer_step(t, g.ids, g.targets, NULL, &s), TFM_OK);
  CHECK(!s.skipped && s.step == 2 && isfinite(s.loss));
  free(before);
  tfm_trainer_free(t);
  golden_close(&g);
}

static bool close_to(float a, double b) { return fabs((double)a - b) < 1e-6; }

TEST(schedules) {
  tfm_trainer_config c;
  memset(&c, 0, sizeof c);
  c.lr = 1;
  c.min_lr = 0.1f;
  c.warmup = 10;
  c.steps = 110;
  c.decay_steps = 20;
  for (c.schedule = TFM_CONSTANT; c.schedule <= TFM_WSD;
       c.schedule = (tfm_schedule)(c.schedule + 1)) {
    CHECK(close_to(tfmi_learning_rate(&c, 0), 0.1));
    CHECK(close_to(tfmi_learning_rate(&c, 4), 0.5));
    CHECK(close_to(tfmi_learning_rate(&c, 10), 1));
  }
  c.schedule = TFM_CONSTANT;
  CHECK(close_to(tfmi_learning_rate(&c, 100000), 1));
  c.schedule = TFM_LINEAR;
  CHECK(close_to(tfmi_learning_rate(&c, 60), 0.55));
  CHECK(close_to(tfmi_learning_rate(&c, 110), 0.1));
  c.schedule = TFM_COSINE;
  CHECK(close_to(tfmi_learning_rate(&c, 35), 0.1 + 0.9 * (0.5 + 0.5 * sqrt(0.5))));
  CHECK(close_to(tfmi_learning_rate(&c, 60), 0.55));
  CHECK(close_to(tfmi_learning_rate(&c, 500), 0.1));
  c.schedule = TFM_WSD;
  CHECK(close_to(tfmi_learning_rate(&c, 90), 1));
  CHECK(close_to(tfmi_learning_rate(&c, 100), 0.55));
  CHECK(close_to(tfmi_learning_rate(&c, 110), 0.1));
  CHECK(close_to(tfmi_learning_rate(&c, 1000), 0.1));
}

/* ---- New models ---- */

static tfm_shape shape_of(const char *family) {
  tfm_shape s;
  memset(&s, 0, sizeof s);
  s.family = family;
  s.layers = 2;
  s.width = 32;
  s.heads = 4;
  s.vocabulary = 50;
  s.context = 24;
  s.seed = 3;
  return s;
}

static double deviation(const float *x, int64_t n) {
  double sum = 0;
  int64_t i;
  for (i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sqrt(sum / (double)n);
}

TEST(initialisation) {
  tfm_shape s = shape_of("gpt2");
  tfm_trainer *t, *u;
  int32_t i;
  s.width = 64;
  t = tfm_trainer_init(&s, NULL);
  u = tfm_trainer_init(&s, NULL);
  CHECK(t && u);
  for (i = 0; t && i < t->parameters; i++) {
    const tfmi_parameter *p = &t->parameter[i];
    bool residual = p->slot == TFMI_OUT || p->slot == TFMI_DOWN;
    double want = residual ? 0.01 : 0.02; /* two layers: sqrt(4) */
    if (p->cols) CHECK(fabs(deviation(t->w + p->at, p->rows * p->cols) / want - 1) < 0.06);
    else CHECK(t->w[p->at] == (p->bias ? 0.0f : 1.0f));
  }
  CHECK(t && u && !memcmp(t->w, u->w, (size_t)t->total * sizeof(float)));
  tfm_trainer_free(u);
  s.seed = 4;
  u = tfm_trainer_init(&s, NULL);
  CHECK(t && u && memcmp(t->w, u->w, (size_t)t->total * sizeof(float)));
  tfm_trainer_free(t), tfm_trainer_free(u);
}

/* Counts up and down: learnt within a hundred steps. */
static void learns(const char *family, bool untied) {
  tfm_shape s = shape_of(family);
  tfm_trainer_config c;
  tfm_trainer *t;
  tfm_step first = {0}, step = {0};
  int32_t tokens[4 * 24], targets[4 * 24], i;
  memset(&c, 0, sizeof c);
  s.untied = untied;
  c.batch = 4;
  c.lr = 5e-3f;
  c.schedule = TFM_COSINE;
  c.warmup = 5;
  c.steps = 100;
  for (i = 0; i < 4 * 24; i++) {
    tokens[i] = (i % 24 + i / 24 * 7) % 50;
    targets[i] = i % 24 == 23 ? -100 : (tokens[i] + 1) % 50;
  }
  t = tfm_trainer_init(&s, &c);
  CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, &first), TFM_OK);
  for (i = 1; i < 100; i++) CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, &step), TFM_OK);
  CHECK(fabs(first.loss - log(50)) < 0.1);
  CHECK(step.loss < 0.2 && step.accuracy == 1 && step.targets == 4 * 23 && step.step == 100);
  tfm_trainer_free(t);
}

TEST(new_models_learn) {
  learns("gpt2", false);
  learns("llama", true);
  learns("llama", false);
}

#define EXPORTED "build/test_train_export"

static tfm_model *exported(tfm_trainer *t) {
  tfm_model *m;
  mkdir(EXPORTED, 0777);
  CHECK_EQ_INT(tfm_trainer_export(t, EXPORTED), TFM_OK);
  m = tfm_model_load(EXPORTED, NULL);
  if (!m) fprintf(stderr, "%s\n", tfm_error());
  CHECK(m != NULL);
  return m;
}

static void exported_remove(void) {
  remove(EXPORTED "/config.json");
  remove(EXPORTED "/model.safetensors");
  rmdir(EXPORTED);
}

/* Every family from a shape: learns, is exported and loads again. */
TEST(new_models_of_every_family) {
  int k;
  for (k = 0; k < TFMI_COUNT(tfmi_families); k++) {
    tfm_shape s = shape_of(tfmi_families[k].name);
    tfm_trainer_config c;
    tfm_trainer *t;
    tfm_step first = {0}, step = {0};
    tfm_model *m;
    int32_t tokens[48], targets[48], i;
    memset(&c, 0, sizeof c);
    s.experts = 4;
    s.experts_used = 2;
    s.window = 9;
    c.batch = 2;
    c.lr = 1e-2f;
    c.threads = 1;
    c.balance = 0.01f;
    for (i = 0; i < 48; i++) tokens[i] = i % 50, targets[i] = i % 24 == 23 ? -100 : (i + 1) % 50;
    t = tfm_trainer_init(&s, &c);
    if (!t) fprintf(stderr, "  %s: %s\n", s.family, tfm_error());
    CHECK(t != NULL);
    CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, &first), TFM_OK);
    for (i = 1; i < 30; i++)
      CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, &step), TFM_OK);
    if (!(step.loss < 0.6 * first.loss))
      fprintf(stderr, "  %s: loss %g to %g\n", s.family, first.loss, step.loss);
    CHECK(step.loss < 0.6 * first.loss && (step.balance >= 0.99) == (t->net.experts > 0));
    CHECK_EQ_INT(tfm_trainer_eval(t, tokens, targets, NULL, &first), TFM_OK);
    m = exported(t);
    tfm_trainer_free(t);
    t = tfm_trainer_create(m, &c);
    CHECK_EQ_INT(tfm_trainer_eval(t, tokens, targets, NULL, &step), TFM_OK);
    if (fabs(first.loss - step.loss) > 1e-6)
      fprintf(stderr, "  %s: %g, loaded again %g\n", s.family, first.loss, step.loss);
    CHECK(fabs(first.loss - step.loss) <= 1e-6);
    tfm_trainer_free(t);
    tfm_model_free(m);
    exported_remove();
  }
}

/* ---- Memory ---- */

TEST(memory_is_as_planned) {
  tfm_shape s = shape_of("llama");
  tfm_trainer_config c;
  tfm_trainer_info plan = {0}, info = {0};
  tfm_trainer *t;
  failing f;
  long calls;
  int32_t tokens[24] = {1, 2, 3}, i;
  memset(&c, 0, sizeof c);
  memset(&f, 0, sizeof f);
  c.host.user = &f;
  c.host.alloc = failing_alloc;
  c.threads = 2;
  CHECK_EQ_INT(tfm_trainer_plan(&s, &c, &plan), TFM_OK);
  CHECK_EQ_INT(f.live, 0);
  f.peak = 0;
  t = tfm_trainer_init(&s, &c);
  CHECK_EQ_INT(tfm_trainer_describe(t, &info), TFM_OK);
  CHECK_EQ_INT(info.memory_bytes, plan.memory_bytes);
  CHECK_EQ_INT(info.parameters, plan.parameters);
  CHECK_EQ_INT(f.peak, info.memory_bytes);
  calls = f.calls;
  for (i = 0; i < 3; i++) CHECK_EQ_INT(tfm_trainer_step(t, tokens, tokens, NULL, NULL), TFM_OK);
  CHECK_EQ_INT(f.calls, calls);
  tfm_trainer_free(t);
  CHECK_EQ_INT(f.live, 0);
  c.host.memory_limit_bytes = plan.memory_bytes - 1;
  CHECK(!tfm_trainer_init(&s, &c));
  CHECK_EQ_INT(tfm_error_status(), TFM_E_MEMORY);
  c.host.memory_limit_bytes++;
  t = tfm_trainer_init(&s, &c);
  CHECK(t != NULL);
  tfm_trainer_free(t);
}

TEST(every_failing_allocation_is_told) {
  tfm_shape s = shape_of("gpt2");
  tfm_trainer_config c;
  failing f;
  long n;
  memset(&c, 0, sizeof c);
  c.host.user = &f;
  c.host.alloc = failing_alloc;
  c.threads = 2;
  for (n = 1;; n++) {
    tfm_trainer *t;
    memset(&f, 0, sizeof f);
    f.fail_at = n;
    t = tfm_trainer_init(&s, &c);
    tfm_trainer_free(t);
    CHECK_EQ_INT(f.live, 0);
    if (t) break;
    CHECK_EQ_INT(tfm_error_status(), TFM_E_MEMORY);
  }
  CHECK(n > 4);
}

TEST(bad_arguments_are_told) {
  tfm_shape s = shape_of("gpt2");
  tfm_trainer_config c;
  tfm_trainer *t;
  int32_t tokens[24] = {0}, targets[24] = {0};
  memset(&c, 0, sizeof c);
  c.schedule = TFM_COSINE;
  CHECK(!tfm_trainer_init(&s, &c));
  CHECK_STR_HAS(tfm_error(), "steps is 0");
  c.schedule = TFM_CONSTANT;
  c.freeze = 64;
  CHECK(!tfm_trainer_init(&s, &c));
  CHECK_STR_HAS(tfm_error(), "freeze is 64");
  c.freeze = 0;
  c.context = 25;
  CHECK(!tfm_trainer_init(&s, &c));
  CHECK_STR_HAS(tfm_error(), "context is 25");
  s.heads = 5;
  CHECK(!tfm_trainer_init(&s, NULL));
  CHECK_STR_HAS(tfm_error(), "head width");
  s.family = "mamba";
  CHECK(!tfm_trainer_init(&s, NULL));
  CHECK_STR_HAS(tfm_error(), "mamba");
  s = shape_of("gpt2");
  s.layers = 0;
  CHECK(!tfm_trainer_init(&s, NULL));
  CHECK_STR_HAS(tfm_error(), "layers is 0");
  s = shape_of("gpt2");
  t = tfm_trainer_init(&s, NULL);
  tokens[7] = 50;
  CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, NULL), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "token 7 is 50");
  tokens[7] = 0;
  targets[3] = -1;
  CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, NULL), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "target 3 is -1");
  memset(targets, 0, sizeof targets);
  CHECK_EQ_INT(tfm_trainer_step(t, tokens, NULL, NULL, NULL), TFM_E_ARG);
  CHECK_EQ_INT(tfm_trainer_export(t, "build/no/such/folder"), TFM_E_IO);
  CHECK_EQ_INT(tfm_trainer_step(NULL, tokens, targets, NULL, NULL), TFM_E_ARG);
  tfm_trainer_free(t);
}

/* ---- Export ---- */


/* Logits of the model in a folder for some ids, whatever type its weights have. */
static float *logits_of(const tfm_model *m, const int32_t *ids, int32_t n) {
  tfm_engine_config c = {0};
  tfm_model_info info = {0};
  tfm_session *s;
  float *out;
  c.deterministic = true;
  s = tfm_session_create(m, &c);
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  out = (float *)calloc((size_t)n * (size_t)info.vocabulary, sizeof *out);
  CHECK_EQ_INT(tfm_eval(s, ids, (size_t)n, out), TFM_OK);
  tfm_session_free(s);
  return out;
}

/* Untrained, the logits are the model's own; trained, the loss is the trainer's. */
static void exports(const tfm_model *m, const tfm_trainer_config *c, const int32_t *ids,
                    const int32_t *targets, float bound) {
  tfm_trainer *t = tfm_trainer_create(m, c), *u;
  int32_t n = t ? t->config.context : 1, i;
  tfm_step a = {0}, b = {0};
  tfm_model *again;
  float *before = logits_of(m, ids, n), *after, worst = 0;
  CHECK(t != NULL);
  again = exported(t);
  after = logits_of(again, ids, n);
  for (i = 0; i < n * m->net.vocabulary; i++) worst = fmaxf(worst, fabsf(before[i] - after[i]));
  if (!(worst <= bound)) fprintf(stderr, "  logits differ by %g\n", (double)worst);
  CHECK(worst <= bound);
  tfm_model_free(again);
  for (i = 0; i < 3; i++) CHECK_EQ_INT(tfm_trainer_step(t, ids, targets, NULL, NULL), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_eval(t, ids, targets, NULL, &a), TFM_OK);
  again = exported(t);
  u = tfm_trainer_create(again, c);
  CHECK_EQ_INT(tfm_trainer_eval(u, ids, targets, NULL, &b), TFM_OK);
  CHECK(fabs(a.loss - b.loss) <= (double)bound);
  tfm_trainer_free(t), tfm_trainer_free(u);
  tfm_model_free(again);
  exported_remove();
  free(before), free(after);
}

TEST(exports_load_again) {
  size_t i;
  for (i = 0; i < sizeof cases / sizeof *cases; i++) {
    golden g;
    tfm_trainer_config c;
    if (!golden_open(&g, cases[i], TFM_AUTO)) continue;
    c = golden_config(&g);
    exports(g.model, &c, g.ids, g.targets, 0);
    golden_close(&g);
  }
}

/* llama2.c keeps the rows of q and k in pairs. */
TEST(exports_interleaved_heads) {
  const char *path = SHARED "stories260K/stories260K.bin";
  tfm_model *m;
  tfm_trainer_config c;
  int32_t ids[64], i;
  blob b = blob_read(path);
  free(b.data);
  if (!b.data) SKIP("stories260K.bin is not there");
  memset(&c, 0, sizeof c);
  c.context = 64;
  for (i = 0; i < 64; i++) ids[i] = 3 + i * 7 % 500;
  m = tfm_model_load(path, NULL);
  CHECK(m != NULL);
  if (m) exports(m, &c, ids, ids, 2e-4f);
  tfm_model_free(m);
}

/* ---- Checkpoints ---- */

#define SAVED "build/test_train.checkpoint"

/* A batch that depends on the step only. */
static void batch_of(int64_t step, int32_t *tokens, int32_t *targets) {
  int32_t i;
  for (i = 0; i < 24; i++) {
    tokens[i] = (int32_t)(tfmi_philox(11, (uint64_t)step, (uint64_t)i).word[0] % 50);
    targets[i] = (tokens[i] * 3 + 1) % 50;
  }
}

static tfm_trainer *trained(const char *family, int64_t until, const char *from) {
  tfm_shape s = shape_of(family);
  tfm_trainer_config c;
  tfm_trainer *t;
  int32_t tokens[24], targets[24];
  memset(&c, 0, sizeof c);
  c.lr = 1e-2f;
  c.schedule = TFM_LINEAR;
  c.steps = 20;
  c.threads = 1;
  t = tfm_trainer_init(&s, &c);
  CHECK(t != NULL);
  if (from) CHECK_EQ_INT(tfm_trainer_resume(t, from), TFM_OK);
  while (t->step < until) {
    batch_of(t->step, tokens, targets);
    CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, NULL), TFM_OK);
  }
  return t;
}

TEST(resumes_bit_for_bit) {
  tfm_trainer *whole = trained("llama", 12, NULL), *first = trained("llama", 5, NULL), *second;
  CHECK_EQ_INT(tfm_trainer_save(first, SAVED), TFM_OK);
  second = trained("llama", 12, SAVED);
  CHECK(!memcmp(whole->w, second->w, (size_t)whole->total * sizeof(float)));
  CHECK(!memcmp(whole->m, second->m, (size_t)whole->total * sizeof(float)));
  CHECK(!memcmp(whole->v, second->v, (size_t)whole->total * sizeof(float)));
  tfm_trainer_free(whole), tfm_trainer_free(first), tfm_trainer_free(second);
  remove(SAVED);
}

static void refused(tfm_trainer *t, const void *data, size_t bytes, const char *why) {
  FILE *f = fopen(SAVED, "wb");
  float before = t->w[5];
  CHECK(f && fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0);
  CHECK_EQ_INT(tfm_trainer_resume(t, SAVED), TFM_E_FORMAT);
  CHECK_STR_HAS(tfm_error(), why);
  CHECK(t->w[5] == before && t->step == 0);
}

TEST(other_and_damaged_checkpoints_are_refused) {
  tfm_trainer *a = trained("llama", 2, NULL), *b = trained("gpt2", 0, NULL);
  tfm_trainer *c = trained("llama", 0, NULL);
  blob saved;
  size_t i;
  CHECK_EQ_INT(tfm_trainer_save(a, SAVED), TFM_OK);
  saved = blob_read(SAVED);
  refused(b, saved.data, saved.bytes, "another shape");
  refused(c, saved.data, saved.bytes - 1, "damaged");
  refused(c, saved.data, 20, "no checkpoint");
  refused(c, saved.data, 0, "no checkpoint");
  for (i = 0; i < saved.bytes; i += i < 64 ? 1 : saved.bytes / 50) {
    saved.data[i] ^= 16;
    refused(c, saved.data, saved.bytes, "is ");
    saved.data[i] ^= 16;
  }
  for (i = TFMI_WORD_STEP; i <= TFMI_WORD_SEQUENCES; i++) { /* whoever knows the checksum */
    uint64_t *word = (uint64_t *)(void *)saved.data, kept = word[i], sum;
    word[i] = (uint64_t)-1;
    sum = tfmi_checksum(0, saved.data, saved.bytes - 8, 1);
    tfmi_little(&sum, sizeof sum, sizeof sum);
    word[saved.bytes / 8 - 1] = sum;
    refused(c, saved.data, saved.bytes, "expected 0 to 2^48");
    word[i] = kept;
  }
  CHECK_EQ_INT(tfm_trainer_resume(c, "build/no such file"), TFM_E_IO);
  tfm_trainer_free(a), tfm_trainer_free(b), tfm_trainer_free(c);
  free(saved.data);
  remove(SAVED);
}

static int64_t step_of(const char *path) {
  tfm_trainer *t = trained("llama", 0, NULL);
  int64_t step = tfm_trainer_resume(t, path) == TFM_OK ? t->step : -1;
  tfm_trainer_free(t);
  return step;
}

TEST(the_newest_checkpoints_are_kept) {
  tfm_trainer *t = trained("llama", 1, NULL);
  int32_t tokens[24] = {0}, targets[24] = {0}, i;
  t->config.keep = 3;
  for (i = 0; i < 5; i++) {
    CHECK_EQ_INT(tfm_trainer_save(t, SAVED), TFM_OK);
    CHECK_EQ_INT(tfm_trainer_step(t, tokens, targets, NULL, NULL), TFM_OK);
  }
  CHECK_EQ_INT(step_of(SAVED), 5);
  CHECK_EQ_INT(step_of(SAVED ".1"), 4);
  CHECK_EQ_INT(step_of(SAVED ".2"), 3);
  CHECK_EQ_INT(step_of(SAVED ".3"), -1);
  tfm_trainer_free(t);
  remove(SAVED), remove(SAVED ".1"), remove(SAVED ".2");
}

TEST(a_checkpoint_knows_its_data_and_place) {
  tfm_trainer *t = trained("llama", 4, NULL), *u = trained("llama", 0, NULL);
  tfm_trainer_info info = {0};
  t->config.data = 17;
  CHECK_EQ_INT(tfm_trainer_save(t, SAVED), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_resume(u, SAVED), TFM_E_FORMAT);
  CHECK_STR_HAS(tfm_error(), "other data");
  u->config.data = 17;
  CHECK_EQ_INT(tfm_trainer_resume(u, SAVED), TFM_OK);
  CHECK_EQ_INT(tfm_trainer_describe(u, &info), TFM_OK);
  CHECK(info.step == 4 && info.sequences == 4);
  tfm_trainer_free(t), tfm_trainer_free(u);
  remove(SAVED);
}

/* The disk is full: an error, and the checkpoint before is still whole. */
TEST(a_full_disk_leaves_the_last_checkpoint) {
  tfm_trainer *t = trained("gpt2", 1, NULL), *u;
  struct stat st;
  if (stat("/dev/full", &st) != 0) SKIP("there is no /dev/full");
  CHECK_EQ_INT(tfm_trainer_save(t, SAVED), TFM_OK);
  CHECK(symlink("/dev/full", SAVED ".part") == 0);
  CHECK_EQ_INT(tfm_trainer_save(t, SAVED), TFM_E_IO);
  CHECK_STR_HAS(tfm_error(), "disk");
  u = trained("gpt2", 1, SAVED);
  CHECK(!memcmp(t->w, u->w, (size_t)t->total * sizeof(float)));
  tfm_trainer_free(t), tfm_trainer_free(u);
  remove(SAVED);
}

static void call_counts(void) {
  if (calls_until_death && --calls_until_death == 0) kill(getpid(), SIGKILL);
}
static ssize_t hooked_write(int fd, const void *data, size_t n) {
  call_counts();
  return write(fd, data, n);
}
static int hooked_rename(const char *from, const char *to) {
  call_counts();
  return rename(from, to);
}
static int hooked_link(const char *from, const char *to) {
  call_counts();
  return link(from, to);
}
static int hooked_fsync(int fd) {
  call_counts();
  return fsync(fd);
}

/* Killed before the n-th write, sync, link or rename of a save, for every n: the checkpoint's name
   holds the one before or the new one, whole. */
TEST(every_write_may_be_the_last) {
  tfm_trainer *before = trained("gpt2", 1, NULL), *after = trained("gpt2", 2, NULL);
  int status = 0, old = 0, new_ = 0;
  long n;
  before->config.keep = after->config.keep = 3;
  for (n = 1;; n++) {
    pid_t child;
    int64_t step;
    CHECK_EQ_INT(tfm_trainer_save(before, SAVED), TFM_OK);
    child = fork();
    if (child == 0) {
      calls_until_death = n;
      _exit(tfm_trainer_save(after, SAVED) == TFM_OK ? 0 : 1);
    }
    waitpid(child, &status, 0);
    before->step = 0;
    CHECK_EQ_INT(tfm_trainer_resume(before, SAVED), TFM_OK);
    step = before->step;
    CHECK(step == 1 || step == 2);
    old += step == 1, new_ += step == 2;
    tfm_trainer_free(before);
    before = trained("gpt2", 1, NULL);
    before->config.keep = 3;
    if (WIFEXITED(status)) break;
  }
  CHECK_EQ_INT(WEXITSTATUS(status), 0);
  printf("  killed at %ld places: %d times the old one is there, %d times the new\n", n - 1, old,
         new_);
  CHECK(old > 10 && new_ >= 1);
  tfm_trainer_free(before), tfm_trainer_free(after);
  remove(SAVED), remove(SAVED ".1"), remove(SAVED ".2"), remove(SAVED ".part");
}

/* A process that saves after every step is killed at random moments: each time the next goes on
   from a whole checkpoint, and in the end all is as if nothing had happened. */
TEST(kill_loses_no_checkpoint) {
  tfm_trainer *t = trained("gpt2", 1, NULL), *whole = trained("gpt2", 19, NULL);
  int kills = 0, round;
  CHECK_EQ_INT(tfm_trainer_save(t, SAVED), TFM_OK);
  tfm_trainer_free(t);
  for (round = 0; round < 200; round++) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
      int64_t step;
      t = trained("gpt2", 1, SAVED);
      for (step = t->step + 1; step <= 19; step++) {
        tfm_trainer_free(t);
        t = trained("gpt2", step, SAVED);
        if (tfm_trainer_save(t, SAVED) != TFM_OK) _exit(2);
      }
      _exit(0);
    }
    usleep(1000 + (useconds_t)(tfmi_philox(12, (uint64_t)round, 0).word[0] % 20000));
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
      CHECK_EQ_INT(WEXITSTATUS(status), 0);
      break;
    }
    kills++;
  }
  t = trained("gpt2", 19, SAVED);
  CHECK(kills > 0 && !memcmp(t->w, whole->w, (size_t)t->total * sizeof(float)));
  printf("  killed %d times, at step %lld in the end\n", kills, (long long)t->step);
  tfm_trainer_free(t), tfm_trainer_free(whole);
  remove(SAVED);
  remove(SAVED ".part");
}

TEST_MAIN
