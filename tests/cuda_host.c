/* The host side of transformer_cuda.cu against a stand-in for the CUDA runtime, without a GPU: every
   call fails once, everything is given back, and without a device the next table computes. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "cuda_standin.h"
#include "files.h"

static int warnings;
static char warned[200];

static void note(void *user, tfm_log_level level, const char *line) {
  (void)user;
  if (level != TFM_LOG_WARNING || !strstr(line, "device cuda")) return;
  warnings++;
  snprintf(warned, sizeof warned, "%s", line);
}

static tfm_model *load(tfm_type weights, const char *override, bool no_fallback) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.host.log = note;
  c.device = TFM_CUDA;
  c.weights = weights;
  c.override = override;
  c.no_fallback = no_fallback;
  c.threads = 1;
  return tfm_model_load(DATA "models/llama-a", &c);
}

/* What a program does; counts what failed, which has to be said in a sentence. */
static int story(tfm_type weights, const char *override) {
  static const int32_t prompt[] = {5, 17, 33, 2, 80, 41, 9, 64, 21};
  tfm_model *m = load(weights, override, true);
  tfm_engine_config c;
  tfm_engine *e;
  tfm_session *both[2];
  int32_t ids[2], failed = 0, i;
  memset(&c, 0, sizeof c);
  c.sequences = 2;
  c.threads = 1;
  if (!m) return 1;
  e = tfm_engine_create(m, &c);
  if (e) {
    both[0] = tfm_session_open(e);
    both[1] = tfm_session_open(e);
    failed += tfm_feed(both[0], prompt, 9) != TFM_OK;
    failed += tfm_feed(both[1], prompt, 7) != TFM_OK;
    for (i = 0; i < 3; i++) failed += tfm_next_batch(both, 2, NULL, ids) != TFM_OK;
    failed += tfm_next(both[0], NULL) < 0;
    failed += tfm_next(both[0], NULL) < 0;
    failed += tfm_top(both[0], 3, ids, NULL) < 0 && tfm_error_status() == TFM_E_DEVICE;
  }
  tfm_engine_free(e);
  tfm_model_free(m);
  return failed + !e;
}

static void begin(long fail_at) {
  cuda_standin.calls = cuda_standin.launches = 0;
  cuda_standin.fail_at = fail_at;
}

static void fail_everywhere(tfm_type weights, const char *override, long step) {
  long total, at;
  begin(0);
  CHECK_EQ_INT(story(weights, override), 0);
  total = cuda_standin.calls;
  CHECK(total > 100 && cuda_standin.launches > 20);
  CHECK_EQ_INT(cuda_standin.live, 0);
  for (at = 1; at <= total && !test_failures; at += step) {
    begin(at);
    if (story(weights, override) > 0)
      CHECK(tfm_error_status() == TFM_E_DEVICE || tfm_error_status() == TFM_E_MEMORY ||
            tfm_error_status() == TFM_E_STATE);
    CHECK_EQ_INT(cuda_standin.live, 0);
    if (test_failures) fprintf(stderr, "call %ld of %ld: %s\n", at, total, tfm_error());
  }
  begin(0);
  CHECK_EQ_INT(story(weights, override), 0); /* as if nothing had happened */
  CHECK_EQ_INT(cuda_standin.unordered, 0);
}

TEST(every_call_may_fail) { fail_everywhere(TFM_TYPE_DEFAULT, NULL, 1); }
TEST(every_call_of_wide_passes_may_fail) { fail_everywhere(TFM_F16, NULL, 1); }
TEST(every_call_may_fail_beside_the_reference) { fail_everywhere(TFM_F32, "norm, attn", 3); }

TEST(without_a_device_the_next_table_computes) {
  tfm_model *m;
  tfm_model_info info;
  cuda_standin.devices = 0;
  begin(0);
  warnings = 0;
  m = load(TFM_TYPE_DEFAULT, NULL, false);
  CHECK(m && tfm_model_describe(m, &info) == TFM_OK && strcmp(info.device, "cuda") != 0);
  CHECK_EQ_INT(warnings, 1);
  CHECK_STR_HAS(warned, "no CUDA device can be used");
  tfm_model_free(m);
  CHECK(load(TFM_TYPE_DEFAULT, NULL, true) == NULL);
  CHECK_EQ_INT(tfm_error_status(), TFM_E_DEVICE);
  cuda_standin.devices = 1;
}

TEST_MAIN
