/* beam.c - beam search: the continuation that is most probable as a whole, as far as it is seen.

   build:   cc -O3 -march=native -o beam examples/beam.c -lm -lpthread
   run:     ./beam stories260K.bin -p "Once upon a time" -b 4 -n 20
   output:  -0.2913  Once upon a time, there was a little girl named Lily. ...
            and the other beams, best first: the mean log-probability of a token, and the text.

   Each beam is a session. After every token the best continuations of all beams are the new beams;
   one whose parent's session another child took rewinds that of a beam which died to what both
   share, and is fed the rest. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "beam"
#include "common.h"
#include <math.h>

enum { MOST = 32, ENDS = 8 };

typedef struct options {
  tfm_model_config model;
  tfm_engine_config engine;
  const char *path, *prompt;
  int32_t tokens;
  float length; /* exponent of the length that a sum of log-probabilities is divided by */
} options;

static const struct argp_option option_list[] = {
  {"prompt", 'p', "TEXT", 0, "Continue TEXT; without it, start from the model's BOS token", 0},
  {"beams", 'b', "N", 0, "Texts that are kept at a time, default 4; 1: greedy", 0},
  {"tokens", 'n', "N", 0, "Generate at most N tokens, default 64", 0},
  {"length", 'l', "A", 0, "Divide sums of log-probabilities by length^A, default 1: the mean", 0},
  {"context", 'c', "N", 0, "Positions; 0, the default: the model's, at most 4096", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'p': o->prompt = arg; return 0;
  case 'b': o->engine.sequences = (int32_t)tool_integer(state, "--beams", arg, 1, MOST); return 0;
  case 'n': o->tokens = (int32_t)tool_integer(state, "--tokens", arg, 1, INT32_MAX); return 0;
  case 'l': o->length = tool_number(state, "--length", arg, 0, 10); return 0;
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
  "Continues a text by beam search.\v"
  "Exit status: 0, or 1 on failure, 2 on wrong usage.",
  tool_model_child, NULL, NULL};

/* ---- Beams ---- */

typedef struct beam {
  tfm_session *session;
  float sum;     /* of log-probabilities */
} beam;

typedef struct choice { /* a token after a beam */
  float sum;
  int32_t id, parent;
} choice;

typedef struct ended { /* a text that came to its end token, or was cut */
  char *text;
  float score;
} ended;

typedef struct search {
  const options *o;
  const tfm_tokenizer *tokenizer;
  tfm_model_info info;
  size_t prompt;              /* tokens of it */
  tfm_session *session[MOST]; /* [opened], of which [spares] have no beam */
  tfm_session *spare[MOST];
  beam beam[MOST];            /* [beams], best first */
  ended best[MOST];           /* [found], best first */
  int32_t opened, spares, beams, found;
} search;

static bool is_end(const search *s, int32_t id) {
  int32_t i;
  for (i = 0; i < s->info.end_count; i++)
    if (s->info.end[i] == id) return true;
  return false;
}

/* Where `score` stands among n descending ones, `stride` bytes apart. */
static int32_t rank(const float *score, int32_t n, size_t stride, float value) {
  int32_t i = 0;
  while (i < n && *(const float *)(const void *)((const char *)score + (size_t)i * stride) >= value)
    i++;
  return i;
}

/* Keeps a beam's text among the best, if it is. tokens: of the continuation, its end counted. */
static bool keep_text(search *s, const beam *b, float sum, size_t tokens) {
  float score = sum / powf((float)tokens, s->o->length);
  int32_t at = rank(&s->best->score, s->found, sizeof *s->best, score);
  int32_t most = s->o->engine.sequences;
  size_t n;
  const int32_t *ids = tfm_session_tokens(b->session, &n);
  int64_t bytes;
  char *text;
  if (n > 0 && ids[0] == s->info.bos) ids++, n--;
  bytes = tfm_decode(s->tokenizer, ids, n, NULL, 0);
  if (at == most) return true;
  text = bytes < 0 ? NULL : (char *)malloc((size_t)bytes + 1);
  if (!text) return fprintf(stderr, TOOL ": out of memory\n"), false;
  tfm_decode(s->tokenizer, ids, n, text, (size_t)bytes + 1);
  text[bytes] = 0;
  if (s->found == most) free(s->best[--s->found].text);
  memmove(s->best + at + 1, s->best + at, (size_t)(s->found - at) * sizeof *s->best);
  s->best[at].text = text;
  s->best[at].score = score;
  s->found++;
  return true;
}

/* The best tokens after all beams, descending; those that end a text are kept at once. */
static int32_t choose(search *s, choice *out) {
  float logprob[MOST + ENDS];
  int32_t id[MOST + ENDS], most = s->o->engine.sequences, count = 0, i, j, n, at;
  for (i = 0; i < s->beams; i++) {
    size_t tokens;
    n = tfm_top(s->beam[i].session, most + ENDS, id, logprob);
    if (n < 0) return n;
    tfm_session_tokens(s->beam[i].session, &tokens);
    for (j = 0; j < n; j++) {
      choice c = {s->beam[i].sum + logprob[j], id[j], i};
      if (is_end(s, c.id)) {
        if (!keep_text(s, &s->beam[i], c.sum, tokens - s->prompt + 1)) return TFM_E_MEMORY;
        continue;
      }
      at = rank(&out->sum, count, sizeof *out, c.sum);
      if (at == most) break; /* the rest is less probable */
      count = count < most ? count + 1 : most;
      memmove(out + at + 1, out + at, (size_t)(count - 1 - at) * sizeof *out);
      out[at] = c;
    }
  }
  return count;
}

/* The session comes to hold what `like` does. */
static tfm_status become(tfm_session *session, const tfm_session *like) {
  size_t n, have, same = 0;
  const int32_t *to = tfm_session_tokens(like, &n), *from = tfm_session_tokens(session, &have);
  while (same < n && same < have && to[same] == from[same]) same++;
  if (tfm_session_rewind(session, same) != TFM_OK) return tfm_error_status();
  return tfm_feed(session, to + same, n - same);
}

/* The choices become the beams: a parent's first child has its session. */
static tfm_status advance(search *s, const choice *c, int32_t count) {
  tfm_session *of[MOST] = {NULL};
  bool taken[MOST] = {false};
  tfm_status status = TFM_OK;
  int32_t i;
  for (i = 0; i < count; i++)
    if (!taken[c[i].parent]) of[i] = s->beam[c[i].parent].session, taken[c[i].parent] = true;
  for (i = 0; i < s->beams; i++)
    if (!taken[i]) s->spare[s->spares++] = s->beam[i].session;
  for (i = 0; i < count && status == TFM_OK; i++)
    if (!of[i]) status = become(of[i] = s->spare[--s->spares], s->beam[c[i].parent].session);
  for (i = 0; i < count && status == TFM_OK; i++) status = tfm_feed(of[i], &c[i].id, 1);
  for (i = 0; i < count; i++) s->beam[i].session = of[i], s->beam[i].sum = c[i].sum;
  s->beams = count;
  return status;
}

/* Until the tokens are there, the context is full, or as many texts ended as there are beams. */
static bool run(search *s) {
  choice c[MOST + 1];
  int32_t room = s->o->engine.context - (int32_t)s->prompt, step, count, i;
  int32_t most = s->o->tokens < room ? s->o->tokens : room;
  for (step = 0; step < most && s->found < s->o->engine.sequences; step++) {
    count = choose(s, c);
    if (count < 0 || advance(s, c, count) != TFM_OK) return false;
  }
  for (i = 0; i < s->beams && step; i++)
    if (!keep_text(s, &s->beam[i], s->beam[i].sum, (size_t)step)) return false;
  for (i = 0; i < s->found; i++) printf("%.4f  %s\n", (double)s->best[i].score, s->best[i].text);
  return true;
}

static bool begin(search *s, tfm_engine *engine) {
  for (; s->opened < s->o->engine.sequences; s->opened++) {
    tfm_session *session = tfm_session_open(engine);
    if (!session) return false;
    s->session[s->opened] = s->spare[s->opened] = session;
  }
  s->spares = s->opened - 1;
  s->beam[0].session = s->spare[s->spares];
  s->beams = 1;
  if (tfm_feed_text(s->beam[0].session, s->tokenizer, s->o->prompt) != TFM_OK) return false;
  tfm_session_tokens(s->beam[0].session, &s->prompt);
  return true;
}

int main(int argc, char **argv) {
  enum { LONGEST = 4096 };
  options o;
  search s;
  tfm_model *m;
  tfm_tokenizer *t;
  tfm_engine *engine;
  int status;
  memset(&o, 0, sizeof o);
  memset(&s, 0, sizeof s);
  o.engine.sequences = 4, o.tokens = 64, o.length = 1, o.prompt = "";
  tool_parse(&parser, argc, argv, &o);
  s.o = &o;
  o.engine.threads = o.model.threads;
  m = tfm_model_load(o.path, &o.model);
  s.tokenizer = t = m ? tfm_tokenizer_load(o.path, NULL) : NULL;
  if (t) tfm_model_describe(m, &s.info);
  if (!o.engine.context) o.engine.context = s.info.context < LONGEST ? s.info.context : LONGEST;
  engine = t ? tfm_engine_create(m, &o.engine) : NULL;
  status = engine && begin(&s, engine) && run(&s) ? 0 : tool_fail();
  while (s.found) free(s.best[--s.found].text);
  while (s.opened) tfm_session_free(s.session[--s.opened]);
  tfm_engine_free(engine), tfm_tokenizer_free(t), tfm_model_free(m);
  return tool_finish(status);
}
