/* The host side of transformer_cuda.cu against the stand-in of cuda_standin.h: every call failing,
   nothing leaked, streams in order, the way back to the processor. Kernels do nothing there, so no
   result is looked at but those that the processor computed. Built by tests/cuda.sh. */
#define TRANSFORMER_IMPLEMENTATION
#ifndef TFM_USE_CUDA
#define TFM_USE_CUDA
#endif
#include "../transformer.h"
#include "cuda_standin.h"
#include "files.h"
#include <driver_types.h>

enum { PROMPT = 9, TOKENS = 6 };
static const int32_t prompt[PROMPT] = {3, 14, 15, 9, 2, 6, 5, 35, 8};

/* F32 takes a prompt token by token, F16 through `layer`. */
static const struct { const char *path; tfm_type type; } models[] = {
  {DATA "models/gpt2-a", TFM_F32}, {DATA "models/llama-a", TFM_F32},
  {DATA "models/llama-a", TFM_F16}};
enum { MODELS = sizeof models / sizeof *models };

typedef struct outcome {
  tfm_status status;    /* of the first call that failed */
  char device[16];      /* that the model was loaded for */
  int32_t ids[TOKENS];
  int tokens;
  int warnings;         /* lines logged about CUDA that are no mere information */
  char sentence[512];   /* the error, or else the last of them */
  tfm_stats stats;
} outcome;

static void on_log(void *user, tfm_log_level level, const char *line) {
  outcome *o = (outcome *)user;
  if (level < TFM_LOG_WARNING || !strstr(line, "cuda")) return;
  o->warnings++;
  snprintf(o->sentence, sizeof o->sentence, "%s", line);
}

static void note_error(outcome *o) {
  o->status = tfm_error_status();
  snprintf(o->sentence, sizeof o->sentence, "%s", tfm_error());
}

static void generate(outcome *o, tfm_session *s) {
  int32_t id = s ? (int32_t)tfm_feed(s, prompt, PROMPT) : -1;
  while (id >= 0 && o->tokens < TOKENS) {
    id = tfm_next(s, NULL);
    if (id == TFM_END) id = (int32_t)tfm_feed(s, prompt, 1); /* one more row, all the same */
    if (id >= 0) o->ids[o->tokens++] = id;
  }
  if (id < 0) note_error(o);
}

/* After a fresh start, for the GPU alone; override NULL: none. */
static tfm_model *load(int model, tfm_type weights, const char *override) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.device = TFM_CUDA;
  c.no_fallback = true;
  c.weights = weights;
  c.override = override;
  standin_reset();
  return tfm_model_load(models[model].path, &c);
}

/* Loads, feeds, generates, and gives everything back. */
static outcome run(int model, tfm_device device, bool no_fallback) {
  outcome o;
  tfm_model_config c;
  tfm_engine_config e;
  tfm_model_info info;
  tfm_model *m;
  tfm_session *s;
  memset(&o, 0, sizeof o);
  memset(&c, 0, sizeof c);
  memset(&e, 0, sizeof e);
  c.weights = models[model].type;
  c.device = device;
  c.no_fallback = no_fallback;
  c.threads = e.threads = 1;
  e.context = 32;
  c.host.log = e.host.log = on_log;
  c.host.user = e.host.user = &o;
  m = tfm_model_load(models[model].path, &c);
  if (!m) {
    note_error(&o);
    return o;
  }
  tfm_model_describe(m, &info);
  snprintf(o.device, sizeof o.device, "%s", info.device);
  s = tfm_session_create(m, &e);
  generate(&o, s);
  if (s) tfm_session_stats(s, &o.stats);
  tfm_session_free(s);
  tfm_model_free(m);
  return o;
}

static void check_clean(void) {
  CHECK_EQ_INT(standin_live(), 0);
  CHECK_EQ_INT(standin.bytes, 0);
  CHECK_STR(standin.misuse, "");
}

TEST(a_whole_run_gives_everything_back) {
  int i;
  for (i = 0; i < MODELS; i++) {
    outcome o;
    standin_reset();
    o = run(i, TFM_CUDA, true);
    CHECK_EQ_INT(o.status, TFM_OK);
    CHECK_STR(o.sentence, "");
    CHECK_STR(o.device, "cuda");
    CHECK_EQ_INT(o.tokens, TOKENS);
    CHECK(standin.launches + standin.replays > TOKENS && standin.peak > 0);
    check_clean();
  }
}

/* Each call in turn, alone or with all that follow, as an error or as a lack of memory: the first
   60, then one of `step`. */
static void fail_calls(int model, bool for_ever, int error, long step) {
  long n = 0;
  int refused = 0;
  do {
    outcome o;
    standin_reset();
    n += n < 60 ? 1 : step * standin.step;
    standin.fail_at = n;
    standin.for_ever = for_ever;
    standin.error = error;
    o = run(model, TFM_CUDA, true);
    if (o.status != TFM_OK) refused++;
    CHECK(o.status == TFM_OK || o.status == TFM_E_DEVICE || o.status == TFM_E_MEMORY);
    CHECK(o.status == TFM_OK || o.sentence[0]);
    check_clean();
    if (test_failures) {
      fprintf(stderr, "  ... on call %ld: %s\n", n, o.sentence);
      return;
    }
  } while (standin.calls >= n);
  printf("  %s %s: %ld calls, %d failures told as a status\n", models[model].path,
         tfm_type_name(models[model].type), standin.calls, refused);
  CHECK(refused > 20);
}

TEST(every_call_may_fail) {
  int i;
  for (i = 0; i < MODELS; i++) {
    fail_calls(i, false, cudaErrorLaunchFailure, 1);
    fail_calls(i, true, cudaErrorLaunchFailure, 3);
    fail_calls(i, false, cudaErrorMemoryAllocation, 3);
  }
}

static void check_same_ids(const outcome *a, const outcome *b) {
  CHECK_EQ_INT(a->tokens, b->tokens);
  CHECK(!memcmp(a->ids, b->ids, sizeof a->ids));
}

TEST(without_a_device_the_processor_computes_and_says_so_once) {
  outcome o, expected = run(1, TFM_CPU, false); /* the tuned table, where it is linked */
  standin_reset();
  standin.devices = 0;
  o = run(1, TFM_CUDA, false);
  CHECK_EQ_INT(o.status, TFM_OK);
  CHECK_STR(o.device, expected.device);
  CHECK_EQ_INT(o.warnings, 1);
  CHECK_STR_HAS(o.sentence, "no CUDA device can be used");
  check_same_ids(&o, &expected);
  check_clean();

  o = run(1, TFM_CUDA, true);
  CHECK_EQ_INT(o.status, TFM_E_DEVICE);
  check_clean();

  o = run(1, TFM_AUTO, true); /* what nobody named may be passed over */
  CHECK_EQ_INT(o.status, TFM_OK);
  CHECK_EQ_INT(o.warnings, 1);
  check_same_ids(&o, &expected);
}

/* Whether a prompt's layers were taken as a whole, or by parts. */
static void check_fused(tfm_type weights, bool deterministic, bool fused) {
  tfm_engine_config e;
  tfm_stats stats;
  tfm_model *m;
  tfm_session *s;
  memset(&e, 0, sizeof e);
  e.profile = true;
  e.deterministic = deterministic;
  m = load(2, weights, NULL);
  s = tfm_session_create(m, &e);
  CHECK_EQ_INT(tfm_feed(s, prompt, PROMPT), TFM_OK);
  CHECK_EQ_INT(tfm_session_stats(s, &stats), TFM_OK);
  CHECK(!fused || stats.work_seconds[TFM_WORK_LAYER] > 0); /* it is asked in any case */
  CHECK((stats.work_seconds[TFM_WORK_FEED_FORWARD] > 0) == !fused);
  tfm_session_free(s);
  tfm_model_free(m);
  check_clean();
}

TEST(layers_are_taken_as_a_whole_where_the_bits_allow_it) {
  check_fused(TFM_F16, false, true);
  check_fused(TFM_F16, true, true);
  check_fused(TFM_F32, true, false);
}

/* The reference waits for the device, which a recording does not allow. */
TEST(passes_with_an_override_are_not_recorded) {
  outcome o;
  tfm_model *m;
  tfm_session *s;
  memset(&o, 0, sizeof o);
  m = load(1, TFM_TYPE_DEFAULT, "norm");
  s = tfm_session_create(m, NULL);
  generate(&o, s);
  CHECK_EQ_INT(o.tokens, TOKENS);
  CHECK_STR(o.sentence, "");
  tfm_session_free(s);
  tfm_model_free(m);
  check_clean();
}

static void feed_thrice(tfm_session *s, int32_t n) { /* the second pass is recorded, and replayed */
  static const int32_t ids[64];
  int i;
  for (i = 0; i < 3; i++) {
    const long before = standin.replays;
    CHECK_EQ_INT(tfm_feed(s, ids, (size_t)n), TFM_OK);
    CHECK_EQ_INT(tfm_session_rewind(s, 0), TFM_OK);
    CHECK_EQ_INT(standin.replays - before, i > 0);
  }
}

/* However many sizes of passes and steps have been seen, the latest are recorded. */
TEST(old_graphs_make_room_for_new_ones) {
  tfm_engine_config e;
  tfm_model *m;
  tfm_engine *engine;
  tfm_session *s[2];
  int32_t ids[2], n;
  memset(&e, 0, sizeof e);
  e.sequences = 2;
  m = load(1, TFM_TYPE_DEFAULT, NULL);
  engine = tfm_engine_create(m, &e);
  s[0] = tfm_session_open(engine);
  s[1] = tfm_session_open(engine);
  for (n = 64; n > 0; n--) feed_thrice(s[0], n); /* all places */
  for (n = 0; n < 2; n++) CHECK_EQ_INT(tfm_feed(s[n], prompt, PROMPT), TFM_OK);
  for (n = 0; n < 4; n++) { /* after the first, which has no pass, steps */
    const long before = standin.replays;
    CHECK_EQ_INT(tfm_next_batch(s, 2, NULL, ids), TFM_OK);
    CHECK_EQ_INT(standin.replays - before, n > 1);
  }
  CHECK_EQ_INT(tfm_session_rewind(s[0], 0), TFM_OK);
  feed_thrice(s[0], 64);
  tfm_engine_free(engine);
  tfm_model_free(m);
  check_clean();
}

/* The memory is the device's, and its time that of the work it was given. */
TEST(usage_is_told) {
  outcome o;
  double all = 0;
  int i;
  standin_reset();
  o = run(2, TFM_CUDA, true);
  for (i = 0; i < TFM_WORK_COUNT; i++) all += o.stats.work_seconds[i];
  CHECK(o.stats.work_seconds[TFM_WORK_PASS] > 0 && o.stats.work_seconds[TFM_WORK_HEAD] > 0);
  CHECK(o.stats.work_seconds[TFM_WORK_DECODE] > 0 && o.stats.work_seconds[TFM_WORK_NONE] == 0);
  CHECK(all > 0 && o.stats.seconds > 0);
  CHECK(o.stats.device_bytes > 0 && o.stats.device_peak_bytes >= o.stats.device_bytes);
  CHECK(o.stats.device_free_bytes + o.stats.device_bytes <= o.stats.device_total_bytes);
  CHECK(o.stats.first_token_seconds > 0 && o.stats.slowest_seconds >= o.stats.last_seconds);
}

TEST(out_of_device_memory_leaves_other_models_usable) {
  tfm_model *m;
  tfm_session *s;
  outcome o, after;
  memset(&after, 0, sizeof after);
  m = load(0, TFM_TYPE_DEFAULT, NULL);
  s = tfm_session_create(m, NULL);
  standin.memory_limit = standin.bytes + 1000;
  o = run(1, TFM_CUDA, true);
  CHECK_EQ_INT(o.status, TFM_E_MEMORY);
  CHECK(o.sentence[0]);
  generate(&after, s);
  CHECK_EQ_INT(after.status, TFM_OK);
  CHECK_EQ_INT(after.tokens, TOKENS);
  tfm_session_free(s);
  tfm_model_free(m);
  check_clean();
}

int main(int argc, char **argv) {
  if (standin_works()) return test_run_all(argc, argv);
  puts("skip: there is no GPU\n0 passed, 0 failed, 1 skipped");
  return 0;
}
