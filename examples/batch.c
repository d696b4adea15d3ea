/* batch.c - continues many prompts together: continuous batching.

   build:   cc -O3 -march=native -o batch examples/batch.c -lm -lpthread
   run:     ./batch stories260K.bin -f prompts.txt -b 8 -n 40
   output:  the texts, in the order of the prompts, and on stderr
            batch: 12 prompts, 480 tokens in 0.09 s: 5333 tokens/s, up to 8 at a time
            The same texts with -b 1, one after the other: only the time differs.

   Every line of the file is a prompt. A session is opened for a prompt as soon as one is free, and
   all that are open take one token in one pass. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "batch"
#include "common.h"
#include <time.h>

enum { MOST = 256 }; /* sessions at a time */

typedef struct options {
  tfm_model_config model;
  tfm_engine_config engine;
  tfm_sampling sampling;
  const char *path, *file;
  int32_t tokens;
} options;

static const struct argp_option option_list[] = {
  {"file", 'f', "FILE", 0, "A prompt in each line; without it, lines of stdin", 0},
  {"batch", 'b', "N", 0, "Prompts at a time, default 16; 1: one after the other", 0},
  {"tokens", 'n', "N", 0, "Generate at most N tokens for each, default 64", 0},
  {"temperature", 't', "T", 0, "Default 0.8; 0: always the most probable token", 0},
  {"seed", 's', "S", 0, "Default 1", 0},
  {"context", 'c', "N", 0, "Positions of each; 0, the default: the model's, at most 4096", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'f': o->file = arg; return 0;
  case 'b': o->engine.sequences = (int32_t)tool_integer(state, "--batch", arg, 1, MOST); return 0;
  case 'n': o->tokens = (int32_t)tool_integer(state, "--tokens", arg, 1, INT32_MAX); return 0;
  case 't': o->sampling.temperature = tool_number(state, "--temperature", arg, 0, 100); return 0;
  case 's': o->sampling.seed = (uint64_t)tool_integer(state, "--seed", arg, 0, INT64_MAX); return 0;
  case 'c': o->engine.context = (int32_t)tool_integer(state, "--context", arg, 0, INT32_MAX);
    return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_END:
    if (!o->path) argp_error(state, "expected a MODEL");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Continues many prompts at a time, one token of each in one pass.\v"
  "Exit status: 0, or 1 on failure, 2 on wrong usage.",
  tool_model_child, NULL, NULL};

/* ---- Prompts and their texts ---- */

typedef struct text { /* one prompt, and how it goes on */
  const char *prompt;
  char *more;
  size_t bytes, room;
  int32_t tokens;
} text;

typedef struct work {
  const options *o;
  const tfm_tokenizer *tokenizer;
  tfm_engine *engine;
  text *all;
  size_t count, next;           /* the first that is not open yet */
  tfm_session *session[MOST];   /* [open], those at work, */
  tfm_sampling sampling[MOST];  /* and how they choose: its .sequence is the number of the text */
  size_t open;
} work;

static bool add(text *t, const char *more) {
  size_t n = strlen(more);
  if (t->bytes + n + 1 > t->room) {
    char *grown = (char *)realloc(t->more, t->room = 2 * (t->bytes + n) + 64);
    if (!grown) return fprintf(stderr, TOOL ": out of memory\n"), false;
    t->more = grown;
  }
  memcpy(t->more + t->bytes, more, n + 1);
  t->bytes += n;
  return true;
}

/* Lines that are not empty; the input is cut where it lies. */
static bool split(work *w, char *input) {
  char *line, *rest = input;
  size_t most = 1;
  for (line = input; *line; line++) most += *line == '\n';
  w->all = (text *)calloc(most, sizeof *w->all);
  if (!w->all) return fprintf(stderr, TOOL ": out of memory\n"), false;
  while ((line = strtok_r(rest, "\r\n", &rest))) w->all[w->count++].prompt = line;
  return true;
}

/* ---- The batch ---- */

/* Sessions for the next prompts, as many as there is room for. */
static bool open_more(work *w) {
  while (w->next < w->count && w->open < (size_t)w->o->engine.sequences) {
    tfm_session *s = tfm_session_open(w->engine);
    w->session[w->open] = s;
    w->sampling[w->open] = w->o->sampling;
    w->sampling[w->open].sequence = w->next;
    if (s) w->open++;
    if (tfm_feed_text(s, w->tokenizer, w->all[w->next].prompt) != TFM_OK) return false;
    w->next++;
  }
  return true;
}

static void close_one(work *w, size_t i) { /* the last takes its place */
  tfm_session_free(w->session[i]);
  w->session[i] = w->session[--w->open];
  w->sampling[i] = w->sampling[w->open];
}

/* One token for each that is open; what is at its end makes room. */
static bool step(work *w) {
  int32_t id[MOST];
  size_t i;
  if (tfm_next_batch(w->session, w->open, w->sampling, id) != TFM_OK) return false;
  for (i = w->open; i-- > 0;) {
    text *t = &w->all[w->sampling[i].sequence];
    if (id[i] < 0 && id[i] != TFM_END && id[i] != TFM_E_FULL) return false;
    if (!add(t, tfm_text(w->session[i]))) return false;
    t->tokens += id[i] >= 0;
    if (id[i] < 0 || t->tokens == w->o->tokens) close_one(w, i);
  }
  return true;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static bool run(work *w) {
  double start = now(), seconds;
  int64_t tokens = 0;
  size_t i;
  while (open_more(w) && w->open)
    if (!step(w)) return false;
  if (w->next < w->count) return false;
  seconds = now() - start;
  for (i = 0; i < w->count; i++) {
    printf("%s%s\n", w->all[i].prompt, w->all[i].more ? w->all[i].more : "");
    tokens += w->all[i].tokens;
  }
  fprintf(stderr, TOOL ": %zu prompts, %lld tokens in %.2f s: %.0f tokens/s, up to %d at a time\n",
          w->count, (long long)tokens, seconds, (double)tokens / seconds,
          (int)w->o->engine.sequences);
  return true;
}

static char *read_input(const char *path) {
  FILE *f = path ? fopen(path, "rb") : stdin;
  char *input = NULL;
  size_t bytes;
  if (!f) fprintf(stderr, TOOL ": %s cannot be opened: %s\n", path, strerror(errno));
  else input = tool_read_all(f, &bytes);
  if (path && f) fclose(f);
  return input;
}

int main(int argc, char **argv) {
  options o;
  work w;
  tfm_model *m = NULL;
  tfm_tokenizer *t = NULL;
  char *input;
  int status = TOOL_FAILED;
  memset(&o, 0, sizeof o);
  memset(&w, 0, sizeof w);
  o.engine.sequences = 16, o.tokens = 64;
  o.sampling.temperature = 0.8f, o.sampling.top_p = 0.95f, o.sampling.seed = 1;
  tool_parse(&parser, argc, argv, &o);
  o.engine.threads = o.model.threads;
  input = read_input(o.file);
  if (input && split(&w, input)) {
    m = tfm_model_load(o.path, &o.model);
    w.tokenizer = t = m ? tfm_tokenizer_load(o.path, NULL) : NULL;
    w.engine = t ? tfm_engine_create(m, &o.engine) : NULL;
    w.o = &o;
    status = w.engine && run(&w) ? 0 : tool_fail();
  }
  while (w.open) close_one(&w, 0);
  while (w.count) free(w.all[--w.count].more);
  free(w.all), free(input);
  tfm_engine_free(w.engine), tfm_tokenizer_free(t), tfm_model_free(m);
  return tool_finish(status);
}
