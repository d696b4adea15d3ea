/* look.c - looks inside a model while it reads a text: every step's numbers, attention's pictures.

   build:   cc -O3 -march=native -o look examples/look.c -lm -lpthread
   run:     ./look stories260K.bin -p "Once upon a time" -o attention.svg
   output:  a line for each step, in order: where, its shape, and what its values are like, as
            layer  step         rows x cols        mean     deviation      least      most
                -  embed           5 x 64       0.00093       0.0611    -0.2314     0.244
            attention.svg: a square for each layer (down) and head (across); a row of it is a token,
            and the darker a column, the more that token attends to that one. NaN and infinity are
            told, and the first step that has any, with exit status 1: where to begin debugging. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "look"
#include "common.h"
#include <math.h>

typedef struct options {
  tfm_model_config model;
  const char *path, *prompt, *output;
} options;

static const struct argp_option option_list[] = {
  {"prompt", 'p', "TEXT", 0, "What the model reads, at most 256 tokens", 0},
  {"output", 'o', "FILE", 0, "Draw attention's probabilities as SVG", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'p': o->prompt = arg; return 0;
  case 'o': o->output = arg; return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_END:
    if (!o->path || !o->prompt) argp_error(state, "expected a MODEL and --prompt");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Tells the numbers of every step of a model, and draws its attention.\v"
  "Exit status: 0, or 1 on failure and where a step has a value that is none, 2 on wrong usage.",
  tool_model_child, NULL, NULL};

/* ---- Steps ---- */

enum { CELL = 4, GAP = 12, TOP = 30, MOST = 256 };

typedef struct looking {
  FILE *svg;       /* NULL: no picture */
  int32_t tokens, heads;
  bool bad;        /* a step had a value that is none */
} looking;

static void tell(looking *l, const char *name, int32_t layer, const float *x, int32_t rows,
                 int32_t cols) {
  double sum = 0, squares = 0, least = INFINITY, most = -INFINITY, mean;
  int64_t n = (int64_t)rows * cols, odd = 0, i;
  char where[16] = "-";
  for (i = 0; i < n; i++) {
    if (!isfinite(x[i])) odd++;
    else {
      sum += (double)x[i], squares += (double)x[i] * (double)x[i];
      least = fmin(least, (double)x[i]), most = fmax(most, (double)x[i]);
    }
  }
  mean = n > odd ? sum / (double)(n - odd) : NAN;
  if (layer >= 0) snprintf(where, sizeof where, "%d", (int)layer);
  printf("%5s  %-12s %5d x %-6d %11.5g  %11.5g %10.4g %10.4g", where, name, (int)rows, (int)cols,
         mean, sqrt(fmax(0, squares / (double)(n > odd ? n - odd : 1) - mean * mean)), least, most);
  if (odd) printf("  %lld are NaN or infinite%s", (long long)odd, l->bad ? "" : ": the first");
  printf("\n");
  l->bad = l->bad || odd;
}

/* One head's square: rows of probs are [token][head], columns positions. */
static void draw(const looking *l, int32_t layer, int32_t head, const float *probs, int32_t cols) {
  int32_t side = l->tokens * CELL + GAP, i, j;
  fprintf(l->svg, "<g transform=\"translate(%d,%d)\"><title>layer %d, head %d</title>\n"
          "<rect width=\"%d\" height=\"%d\" fill=\"#f3f3f3\"/>\n", (int)(GAP + head * side),
          (int)(TOP + layer * side), (int)layer, (int)head, (int)(l->tokens * CELL),
          (int)(l->tokens * CELL));
  for (i = 0; i < l->tokens; i++)
    for (j = 0; j <= i && j < cols; j++) {
      float p = probs[((int64_t)i * l->heads + head) * cols + j];
      if (p >= 0.01f) /* paler ones are not seen */
        fprintf(l->svg, "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#123a7a\" "
                "fill-opacity=\"%.2f\"/>\n", (int)(j * CELL), (int)(i * CELL), CELL, CELL,
                (double)p);
    }
  fprintf(l->svg, "</g>\n");
}

static void on_step(void *user, const char *name, int32_t layer, const float *data, int32_t rows,
                    int32_t cols) {
  looking *l = (looking *)user;
  int32_t head;
  tell(l, name, layer, data, rows, cols);
  if (!l->svg || strcmp(name, "probs") != 0) return;
  for (head = 0; head < l->heads; head++) draw(l, layer, head, data, cols);
}

static bool look(looking *l, const options *o, const tfm_model *m, const int32_t *ids, size_t n) {
  tfm_engine_config engine;
  tfm_model_info info;
  tfm_session *s;
  bool good;
  memset(&engine, 0, sizeof engine);
  engine.threads = o->model.threads;
  engine.context = engine.batch_rows = l->tokens = (int32_t)n;
  engine.tap = on_step;
  engine.tap_user = l;
  tfm_model_describe(m, &info);
  l->heads = info.heads;
  s = tfm_session_create(m, &engine);
  if (s && l->svg)
    fprintf(l->svg, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"13\">\n<text x=\"%d\" y=\"20\">%d layers, "
            "%d heads, %d tokens</text>\n", (int)(GAP + info.heads * (l->tokens * CELL + GAP)),
            (int)(TOP + info.layers * (l->tokens * CELL + GAP)), GAP, (int)info.layers,
            (int)info.heads, (int)n);
  printf("layer  step          rows x cols          mean    deviation      least       most\n");
  good = s && tfm_feed(s, ids, n) == TFM_OK;
  if (good && l->svg) fprintf(l->svg, "</svg>\n");
  tfm_session_free(s);
  return good;
}

/* ---- From the command line to an exit status ---- */

static int run(const options *o, looking *l, const tfm_model *m, const tfm_tokenizer *t) {
  int32_t ids[MOST];
  int64_t n = t ? tfm_encode(t, o->prompt, strlen(o->prompt), TFM_ENCODE_SPECIAL, ids, MOST) : -1;
  if (n < 0) return tool_fail();
  if (n == 0 || n > MOST)
    return fprintf(stderr, TOOL ": the text has %lld tokens, expected 1 to %d\n", (long long)n,
                   MOST), TOOL_FAILED;
  return look(l, o, m, ids, (size_t)n) ? l->bad : tool_fail();
}

int main(int argc, char **argv) {
  options o;
  looking l;
  tfm_model *m;
  tfm_tokenizer *t;
  int status;
  memset(&o, 0, sizeof o);
  memset(&l, 0, sizeof l);
  tool_parse(&parser, argc, argv, &o);
  m = tfm_model_load(o.path, &o.model);
  t = m ? tfm_tokenizer_load(o.path, NULL) : NULL;
  if (t && o.output && !(l.svg = fopen(o.output, "w"))) {
    fprintf(stderr, TOOL ": %s cannot be written: %s\n", o.output, strerror(errno));
    status = TOOL_FAILED;
  } else status = run(&o, &l, m, t);
  if (l.svg && fclose(l.svg) != 0) {
    fprintf(stderr, TOOL ": %s cannot be written\n", o.output);
    status = TOOL_FAILED;
  }
  tfm_tokenizer_free(t), tfm_model_free(m);
  return tool_finish(status);
}
