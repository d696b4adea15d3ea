/* logits.c - the logits of every position of a list of token ids, to compare with other programs.

   build:   cc -O3 -march=native -o logits examples/logits.c -lm -lpthread
   run:     ./logits stories260K.bin --ids "1 403 407 261 378" -o out.f32
   output:  out.f32 holds float32 [5, 512] in the byte order of the machine; on stderr
            logits: 5 x 512 float32 */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "logits"
#include "common.h"

typedef struct options {
  tfm_model_config model;
  const char *path, *ids, *output;
  bool step;
} options;

static const struct argp_option option_list[] = {
  {"ids", 'i', "LIST", 0, "Token ids, separated by blanks or commas", 0},
  {"output", 'o', "FILE", 0, "Write float32 [ids, vocabulary] as the machine has it; -: stdout", 0},
  {"step", 's', NULL, 0, "Run the ids one at a time, as when generating, not in one call", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'i': o->ids = arg; return 0;
  case 'o': o->output = arg; return 0;
  case 's': o->step = true; return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_END:
    if (!o->path || !o->ids || !o->output)
      argp_error(state, "expected a MODEL, --ids and --output");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Writes the logits that follow each of a list of token ids.\v"
  "Exit status: 0, or 1 on failure, 2 on wrong usage.",
  tool_model_child, NULL, NULL};

static tfm_status compute(tfm_session *s, const int32_t *ids, size_t n, bool step,
                          size_t vocabulary, float *logits) {
  tfm_status status = TFM_OK;
  size_t i;
  if (!step) return tfm_eval(s, ids, n, logits);
  for (i = 0; i < n && status == TFM_OK; i++) {
    const float *row;
    status = tfm_feed(s, ids + i, 1);
    row = status == TFM_OK ? tfm_logits(s) : NULL;
    if (row) memcpy(logits + i * vocabulary, row, vocabulary * sizeof *row);
    else if (status == TFM_OK) status = tfm_error_status();
  }
  return status;
}

static int save(const char *path, const float *logits, size_t n, size_t vocabulary) {
  bool to_stdout = !strcmp(path, "-");
  FILE *f = to_stdout ? stdout : fopen(path, "wb");
  bool good = f && fwrite(logits, sizeof *logits, n * vocabulary, f) == n * vocabulary;
  if (f && !to_stdout && fclose(f) != 0) good = false;
  if (good) fprintf(stderr, TOOL ": %zu x %zu float32\n", n, vocabulary);
  else fprintf(stderr, TOOL ": %s cannot be written\n", path);
  return good ? 0 : TOOL_FAILED;
}

static int run(const options *o, const int32_t *ids, size_t n) {
  tfm_model *m = tfm_model_load(o->path, &o->model);
  tfm_engine_config engine;
  tfm_session *s;
  tfm_model_info info;
  float *logits = NULL;
  int status;
  memset(&engine, 0, sizeof engine);
  engine.threads = o->model.threads;
  engine.context = n < INT32_MAX ? (int32_t)n : INT32_MAX;
  engine.host = o->model.host;
  s = m ? tfm_session_create(m, &engine) : NULL;
  if (s && tfm_model_describe(m, &info) == TFM_OK)
    logits = (float *)malloc((n ? n : 1) * (size_t)info.vocabulary * sizeof *logits);
  if (s && !logits) status = (fprintf(stderr, TOOL ": out of memory\n"), TOOL_FAILED);
  else if (!s || compute(s, ids, n, o->step, (size_t)info.vocabulary, logits) != TFM_OK)
    status = tool_fail();
  else status = save(o->output, logits, n, (size_t)info.vocabulary);
  free(logits);
  tfm_session_free(s);
  tfm_model_free(m);
  return status;
}

int main(int argc, char **argv) {
  options o;
  int32_t *ids;
  size_t n = 0;
  int status;
  memset(&o, 0, sizeof o);
  tool_parse(&parser, argc, argv, &o);
  ids = tool_read_ids(o.ids, &n);
  status = ids ? run(&o, ids, n) : TOOL_FAILED;
  free(ids);
  return tool_finish(status);
}
