/* perplexity.c - how well a model predicts a text.

   build:   cc -O3 -march=native -o perplexity examples/perplexity.c -lm -lpthread
   run:     ./perplexity stories260K.bin -f story.txt --context 256 --stride 128
   output:  tokens       512
            predicted    511
            nats         1.2893 per token
            perplexity   3.6303
   As transformers' documentation defines it for models of fixed length: windows of --context tokens
   begin every --stride tokens, and each predicts the tokens that no window before it held, but for
   one that it begins with. Perplexity is e to the mean of their negative log-probabilities, windows
   weighted as there. A stride below the context gives every token more of what comes before it, and
   takes longer. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "perplexity"
#include "common.h"
#include <math.h>

enum { SLICE = 64 }; /* rows of logits at a time */

typedef struct options {
  tfm_model_config model;
  const char *path, *file;
  int32_t context, stride;
  tfm_type cache;
  bool json;
} options;

static const struct argp_option option_list[] = {
  {"file", 'f', "FILE", 0, "The text; default: stdin", 0},
  {"context", 'c', "N", 0, "Tokens of a window; default: the model's context, at most 1024", 0},
  {"stride", 's', "N", 0, "Tokens between windows; default: the context, so none overlap", 0},
  {"cache", 'k', "TYPE", 0, "Keep keys and values as f32, f16, bf16 or q8_0", 0},
  {"json", 'J', NULL, 0, "One JSON object instead of a table", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'f': o->file = arg; return 0;
  case 'c': o->context = (int32_t)tool_integer(state, "--context", arg, 2, INT32_MAX); return 0;
  case 's': o->stride = (int32_t)tool_integer(state, "--stride", arg, 1, INT32_MAX); return 0;
  case 'k': o->cache = tool_type(state, "--cache", arg); return 0;
  case 'J': o->json = true; return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_NO_ARGS: argp_error(state, "expected a MODEL: a folder or a file"); return 0;
  case ARGP_KEY_END:
    if (o->context && o->stride > o->context)
      argp_error(state, "--stride: expected at most the context of %d", (int)o->context);
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL", "Tells how well a model predicts a text.\v"
  "Exit status: 0, or 1 on failure, 2 on wrong usage.", tool_model_child, NULL, NULL};

/* -log of the softmax's share of one logit, in double precision. */
static double nats_of(const float *logits, int32_t n, int32_t id) {
  double most = -INFINITY, sum = 0;
  int32_t i;
  for (i = 0; i < n; i++) most = logits[i] > most ? logits[i] : most;
  for (i = 0; i < n; i++) sum += exp((double)logits[i] - most);
  return most + log(sum) - (double)logits[id];
}

/* The whole file, or stdin; NULL with a line on stderr. */
static char *read_text(const char *path, size_t *bytes) {
  FILE *f = path ? fopen(path, "rb") : stdin;
  char *text;
  if (!f) {
    fprintf(stderr, TOOL ": %s cannot be opened\n", path);
    return NULL;
  }
  text = tool_read_all(f, bytes);
  if (path) fclose(f);
  return text;
}

static int32_t *read_tokens(const char *path, const char *text, size_t bytes, int64_t *count) {
  tfm_tokenizer *t = tfm_tokenizer_load(path, NULL);
  int32_t *ids = NULL;
  *count = tfm_encode(t, text, bytes, TFM_ENCODE_SPECIAL, NULL, 0);
  if (*count >= 0) ids = (int32_t *)malloc(((size_t)*count + 1) * sizeof *ids);
  if (ids) tfm_encode(t, text, bytes, TFM_ENCODE_SPECIAL, ids, (size_t)*count);
  tfm_tokenizer_free(t);
  return ids;
}

typedef struct score { /* as the documentation's loop has it */
  double nats;      /* means of the windows, times their weights */
  int64_t weight;   /* new tokens of the windows, less one of each */
  int64_t predicted;
} score;

/* A window of n tokens, of which those from `first` on are new. logits [SLICE, vocabulary]. */
static tfm_status score_window(tfm_session *s, const int32_t *ids, int32_t n, int32_t first,
                               int32_t vocabulary, float *logits, score *sum) {
  int32_t at, i, predicted = 0;
  double nats = 0;
  tfm_status status = tfm_session_rewind(s, 0);
  for (at = 0; at < n && status == TFM_OK; at += SLICE) {
    int32_t some = n - at < SLICE ? n - at : SLICE;
    bool before = at + some < first; /* nothing new in this slice or right behind it */
    status = before ? tfm_feed(s, ids + at, (size_t)some)
                    : tfm_eval(s, ids + at, (size_t)some, logits);
    for (i = at; i < at + some && !before && status == TFM_OK; i++)
      if (i + 1 < n && i + 1 >= first) {
        nats += nats_of(logits + (int64_t)(i - at) * vocabulary, vocabulary, ids[i + 1]);
        predicted++;
      }
  }
  if (predicted) sum->nats += nats / predicted * (n - first - 1);
  sum->weight += n - first - 1;
  sum->predicted += predicted;
  return status;
}

static tfm_status score_text(const options *o, tfm_session *s, const int32_t *ids, int64_t count,
                             int32_t vocabulary, score *sum) {
  float *logits = (float *)malloc(sizeof *logits * SLICE * (size_t)vocabulary);
  tfm_status status = logits ? TFM_OK : TFM_E_MEMORY;
  int64_t begin, end, done = 0;
  for (begin = 0; begin < count && status == TFM_OK; begin += o->stride) {
    end = count - begin < o->context ? count : begin + o->context;
    status = score_window(s, ids + begin, (int32_t)(end - begin), (int32_t)(done - begin),
                          vocabulary, logits, sum);
    done = end;
    tool_progress(NULL, "scoring", (double)done / (double)count);
    if (end == count) break;
  }
  free(logits);
  return status;
}

static void print_score(const options *o, int64_t count, const score *sum) {
  double nats = sum->nats / (double)sum->weight;
  printf(o->json ? "{\"tokens\": %lld, \"predicted\": %lld, \"nats\": %.8g, \"perplexity\": %.8g}\n"
                 : "tokens       %lld\npredicted    %lld\nnats         %.8g per token\n"
                   "perplexity   %.8g\n",
         (long long)count, (long long)sum->predicted, nats, exp(nats));
}

int main(int argc, char **argv) {
  options o;
  score sum = {0, 0, 0};
  tfm_model_info info;
  tfm_engine_config engine;
  tfm_session *s = NULL;
  tfm_model *m;
  int64_t count = 0;
  int32_t *ids = NULL;
  size_t bytes = 0;
  char *text;
  tfm_status status;
  memset(&o, 0, sizeof o);
  memset(&engine, 0, sizeof engine);
  tool_parse(&parser, argc, argv, &o);
  text = read_text(o.file, &bytes);
  if (!text) return TOOL_FAILED;
  m = tfm_model_load(o.path, &o.model);
  status = tfm_model_describe(m, &info);
  if (status == TFM_OK) {
    if (!o.context) o.context = info.context < 1024 ? info.context : 1024;
    if (!o.stride || o.stride > o.context) o.stride = o.context; /* the default's */
    engine.context = o.context;
    engine.threads = o.model.threads;
    engine.cache = o.cache;
    s = tfm_session_create(m, &engine);
    ids = s ? read_tokens(o.path, text, bytes, &count) : NULL;
    status = ids ? score_text(&o, s, ids, count, info.vocabulary, &sum) : TFM_E_STATE;
  }
  if (status == TFM_OK && sum.weight > 0) print_score(&o, count, &sum);
  else if (status == TFM_OK) fprintf(stderr, TOOL ": the text has fewer than 2 tokens\n");
  free(ids);
  free(text);
  tfm_session_free(s);
  tfm_model_free(m);
  if (status != TFM_OK) return tool_fail();
  return sum.weight > 0 ? tool_finish(0) : TOOL_FAILED;
}
