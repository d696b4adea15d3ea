/* train.c - trains a small model on a text, then lets it write.

   build:   cc -O3 -march=native -o train examples/train.c -lm -lpthread
   run:     ./train book.txt -o model            letters as tokens, 4 layers of 128
            ./train book.txt -o model --resume   goes on from model/checkpoint
   output:  a line of loss now and then on stderr, samples and the last one on stdout. The folder
            gets config.json and model.safetensors, which generate and transformers read, and the
            checkpoint. Ctrl-C saves and exits with status 130. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "train"
#include "common.h"
#include <math.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>

enum { KEY_ARCH = 256 + 32, KEY_LAYERS, KEY_WIDTH, KEY_HEADS, KEY_LR, KEY_SAVE, KEY_RESUME,
       KEY_TOKENIZER, KEY_SEED };

typedef struct options {
  tfm_shape shape;
  tfm_trainer_config config;
  const char *path, *folder, *tokenizer;
  int64_t save_every;
  bool resume;
} options;

typedef struct data { /* the text as tokens; the last tenth is for validation */
  tfm_tokenizer *tokenizer;
  int32_t *ids;
  int64_t count, training;
} data;

static volatile int32_t interrupted;

static void on_interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
}

/* ---- Options ---- */

static const struct argp_option option_list[] = {
  {"output", 'o', "DIR", 0, "Write the model and the checkpoint into DIR", 0},
  {"resume", KEY_RESUME, NULL, 0, "Go on from DIR/checkpoint: same text, same options", 0},
  {"tokenizer", KEY_TOKENIZER, "PATH", 0, "Tokens of PATH; by default, one per character", 0},
  {"steps", 'n', "N", 0, "Train N steps, default 1000", 0},
  {"batch", 'b', "B", 0, "Sequences in a step, default 16", 0},
  {"context", 'c', "T", 0, "Tokens of a sequence, default 64", 0},
  {"arch", KEY_ARCH, "NAME", 0, "gpt2, the default, or llama", 0},
  {"layers", KEY_LAYERS, "N", 0, "Default 4", 0},
  {"width", KEY_WIDTH, "N", 0, "Default 128", 0},
  {"heads", KEY_HEADS, "N", 0, "Default 4", 0},
  {"lr", KEY_LR, "X", 0, "Highest learning rate, default 0.001; it falls along a cosine", 0},
  {"save-every", KEY_SAVE, "N", 0, "Steps between checkpoints, default 250", 0},
  {"seed", KEY_SEED, "S", 0, "Of the first weights and the choice of sequences, default 1", 0},
  {"threads", 'j', "N", 0, "Use N threads; 0, the default: one per core", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t option_parse(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  tfm_shape *s = &o->shape;
  tfm_trainer_config *c = &o->config;
  switch (key) {
  case 'o': o->folder = arg; return 0;
  case KEY_RESUME: o->resume = true; return 0;
  case KEY_TOKENIZER: o->tokenizer = arg; return 0;
  case 'n': c->steps = (int32_t)tool_integer(state, "--steps", arg, 1, 100000000); return 0;
  case 'b': c->batch = (int32_t)tool_integer(state, "--batch", arg, 1, 65536); return 0;
  case 'c': s->context = (int32_t)tool_integer(state, "--context", arg, 2, 65536); return 0;
  case KEY_ARCH: s->family = arg; return 0;
  case KEY_LAYERS: s->layers = (int32_t)tool_integer(state, "--layers", arg, 1, 4096); return 0;
  case KEY_WIDTH: s->width = (int32_t)tool_integer(state, "--width", arg, 1, 65536); return 0;
  case KEY_HEADS: s->heads = (int32_t)tool_integer(state, "--heads", arg, 1, 65536); return 0;
  case KEY_LR: c->lr = tool_number(state, "--lr", arg, 1e-9f, 10); return 0;
  case KEY_SAVE: o->save_every = tool_integer(state, "--save-every", arg, 1, INT32_MAX); return 0;
  case KEY_SEED: s->seed = (uint64_t)tool_integer(state, "--seed", arg, 0, INT64_MAX); return 0;
  case 'j': c->threads = (int32_t)tool_integer(state, "--threads", arg, 0, 1024); return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_END:
    if (!o->path) argp_error(state, "expected a TEXT to learn from");
    if (o->resume && !o->folder) argp_error(state, "--resume needs the DIR of --output");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {option_list, option_parse, "TEXT",
                                   "Trains a small model on a text, then lets it write.", NULL,
                                   NULL, NULL};

/* ---- Data ---- */

static tfm_tokenizer *characters_of(const char *text, size_t bytes) {
  tfm_vocabulary_config c = {.kind = TFM_CHARACTERS};
  return tfm_tokenizer_train(&text, &bytes, 1, &c);
}

static bool data_open(data *d, const options *o) {
  FILE *f = fopen(o->path, "rb");
  size_t bytes;
  char *text = f ? tool_read_all(f, &bytes) : NULL;
  if (f) fclose(f);
  else fprintf(stderr, TOOL ": %s cannot be opened\n", o->path);
  if (!text) return false;
  d->tokenizer = o->tokenizer ? tfm_tokenizer_load(o->tokenizer, NULL)
                              : characters_of(text, bytes);
  d->count = d->tokenizer ? tfm_encode(d->tokenizer, text, bytes, 0, NULL, 0) : -1;
  d->ids = d->count > 0 ? (int32_t *)malloc((size_t)d->count * sizeof *d->ids) : NULL;
  if (d->ids) tfm_encode(d->tokenizer, text, bytes, 0, d->ids, (size_t)d->count);
  else tool_fail();
  d->training = d->count - d->count / 10;
  free(text);
  if (d->ids && d->count / 10 <= o->shape.context) {
    fprintf(stderr, TOOL ": %s has %lld tokens; expected more than ten times the context\n",
            o->path, (long long)d->count);
    return false;
  }
  return d->ids != NULL;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t mix(uint64_t x) { /* splitmix64 */
  x += UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

/* Sequences of ids [first, end), chosen by seed and step alone: a resumed run sees the same. */
static void batch_fill(const data *d, const options *o, int64_t first, int64_t end, int64_t step,
                       int32_t *tokens, int32_t *targets) {
  int32_t context = o->shape.context, row;
  for (row = 0; row < o->config.batch; row++) {
    uint64_t at = mix(mix(o->shape.seed + (uint64_t)step) + (uint64_t)row);
    const int32_t *from = d->ids + first + (int64_t)(at % (uint64_t)(end - first - context));
    memcpy(tokens + (size_t)row * (size_t)context, from, (size_t)context * sizeof *tokens);
    memcpy(targets + (size_t)row * (size_t)context, from + 1, (size_t)context * sizeof *tokens);
  }
}

/* ---- The run ---- */

static char *in_folder(const options *o, const char *name, char *path, size_t room) {
  snprintf(path, room, "%s/%s", o->folder, name);
  return path;
}

static bool save(tfm_trainer *t, const options *o) {
  char path[1000];
  if (!o->folder) return true;
  return tfm_trainer_save(t, in_folder(o, "checkpoint", path, sizeof path)) == TFM_OK &&
         tfm_trainer_export(t, o->folder) == TFM_OK;
}

/* Mean loss of four batches that are never learnt from. */
static double validate(tfm_trainer *t, const data *d, const options *o, int32_t *tokens,
                       int32_t *targets) {
  double sum = 0;
  int i;
  for (i = 0; i < 4; i++) {
    tfm_step s = {0};
    batch_fill(d, o, d->training, d->count, i, tokens, targets);
    if (tfm_trainer_eval(t, tokens, targets, NULL, &s) != TFM_OK) return NAN;
    sum += s.loss / 4;
  }
  return sum;
}

/* A passage by the model that was saved last. */
static bool write_sample(const data *d, const options *o) {
  tfm_sampling how = {.temperature = 0.8f, .seed = o->shape.seed};
  tfm_model *m = tfm_model_load(o->folder, NULL);
  tfm_session *s = tfm_session_create(m, NULL);
  tfm_status status = tfm_feed(s, d->ids, 1);
  int32_t ids[256], n = 0, id = 0;
  char text[8192];
  while (status == TFM_OK && n < 256 && n < o->shape.context - 2 && (id = tfm_next(s, &how)) >= 0)
    ids[n++] = id;
  if (n > 0 && tfm_decode(d->tokenizer, ids, (size_t)n, text, sizeof text) > 0) puts(text);
  fflush(stdout);
  tfm_session_free(s);
  tfm_model_free(m);
  return n > 0;
}

static int run(tfm_trainer *t, const data *d, const options *o) {
  size_t n = (size_t)o->config.batch * (size_t)o->shape.context;
  int32_t *tokens = (int32_t *)malloc(2 * n * sizeof *tokens), *targets = tokens + n;
  tfm_trainer_info info = {0};
  tfm_status status = tokens ? tfm_trainer_describe(t, &info) : TFM_E_MEMORY;
  double since = seconds();
  int64_t step = info.step, told = step;
  fprintf(stderr, TOOL ": %llu parameters, %.1f MB, %lld tokens\n",
          (unsigned long long)info.parameters, (double)info.memory_bytes / 1e6,
          (long long)d->count);
  while (status == TFM_OK && step < o->config.steps) {
    tfm_step s = {0};
    bool tell;
    batch_fill(d, o, 0, d->training, step, tokens, targets);
    status = tfm_trainer_step(t, tokens, targets, NULL, &s);
    if (status != TFM_OK) break;
    step++;
    tell = step % o->save_every == 0 || step == o->config.steps;
    if (!tell && step % 25) continue;
    fprintf(stderr, "step %lld  loss %.4f  accuracy %.3f  %.0f tokens/s", (long long)step, s.loss,
            s.accuracy, (double)(step - told) * (double)n / (seconds() - since));
    if (tell) fprintf(stderr, "  validation %.4f", validate(t, d, o, tokens, targets));
    fprintf(stderr, "\n");
    if (tell && !save(t, o)) status = tfm_error_status();
    if (tell && o->folder && status == TFM_OK && !write_sample(d, o)) status = tfm_error_status();
    since = seconds();
    told = step;
  }
  free(tokens);
  if (status == TFM_E_CANCELLED) return save(t, o) ? TOOL_CANCELLED : tool_fail();
  return status == TFM_OK ? 0 : tool_fail();
}

int main(int argc, char **argv) {
  options o;
  data d = {0};
  tfm_trainer *t = NULL;
  tfm_tokenizer_info vocabulary = {0};
  char path[1000];
  int status = TOOL_FAILED;
  memset(&o, 0, sizeof o);
  o.shape.layers = o.shape.heads = 4;
  o.shape.width = 128;
  o.shape.context = 64;
  o.shape.seed = 1;
  o.save_every = 250;
  o.config.batch = 16;
  o.config.steps = 1000;
  o.config.lr = 1e-3f;
  o.config.schedule = TFM_COSINE;
  o.config.host.cancel = &interrupted;
  tool_parse(&parser, argc, argv, &o);
  o.config.warmup = o.config.steps / 20;
  o.config.context = o.shape.context;
  signal(SIGINT, on_interrupt);
  if (data_open(&d, &o) && tfm_tokenizer_describe(d.tokenizer, &vocabulary) == TFM_OK) {
    o.shape.vocabulary = vocabulary.vocabulary;
    if (o.folder) mkdir(o.folder, 0777);
    t = tfm_trainer_init(&o.shape, &o.config);
    if (!t || (o.resume &&
               tfm_trainer_resume(t, in_folder(&o, "checkpoint", path, sizeof path)) != TFM_OK))
      status = tool_fail();
    else status = run(t, &d, &o);
  }
  tfm_trainer_free(t);
  tfm_tokenizer_free(d.tokenizer);
  free(d.ids);
  return tool_finish(status);
}
