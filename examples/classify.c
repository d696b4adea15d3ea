/* classify.c - learns from examples what a text is: a label, a tab and a text on each line.

   build:   cc -O3 -march=native -o classify examples/classify.c -lm -lpthread
   run:     ./classify examples/classify.tsv -o mood -t "what a lovely day" -t "the soup was cold"
            ./classify examples/classify.tsv -o mood -n 100 --lr 5e-4 -m examples/tales/tales.gguf
                                                                 starts from a model
            ./classify --load mood < lines.txt                   tells what was learnt before
   output:  for each text its label, that label's probability and the text, with tabs between; on
            stderr the accuracy on held-out texts, which training never saw. DIR gets the model,
            its tokenizer and labels.txt.

   A label is the word that follows a text: the language model is the classifier, and what it is
   asked for is which of the labels comes next. In training the label is asked for after every word,
   with little weight, and some words are hidden, so that no sentence is learnt by heart. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "classify"
#include "common.h"
#include "training.h"
#include <ctype.h>

enum { CONTEXT = 32, LABELS = 64, LABEL_ROOM = 40, BATCH = 16, HIDDEN = 30 /* % of words */,
       KEY_LOAD = 256 + 32, KEY_LR, KEY_SEED, KEY_SHARE };

typedef struct sentence {
  char *text;
  int label;
  int32_t ids[CONTEXT], count;
} sentence;

typedef struct options {
  const char *path, *model, *folder, *load, **texts;
  int32_t text_count, steps, threads;
  float lr, share; /* share: held out */
  uint64_t seed;
} options;

typedef struct labels {
  char name[LABELS][LABEL_ROOM];
  int32_t count, id[LABELS]; /* the first token of each */
} labels;

typedef struct set {
  char *file;    /* cut into lines and fields */
  sentence *all; /* the first `training` are learnt from */
  int32_t count, training, labelled[LABELS];
} set;

typedef struct task {
  const options *o;
  labels labels;
  set set;
  tfm_tokenizer *tokenizer;
  tfm_model *model;
  tfm_session *session;
  int32_t bos, unknown; /* tokens; -1: there is none */
} task;

/* ---- Options ---- */

static const struct argp_option option_list[] = {
  {"output", 'o', "DIR", 0, "Where what is learnt from FILE goes", 0},
  {"load", KEY_LOAD, "DIR", 0, "Instead of learning: what was learnt before", 0},
  {"text", 't', "TEXT", 0, "Tell the label of TEXT; again for more. Default with --load: of every "
   "line of stdin", 0},
  {"model", 'm', "MODEL", 0, "Start from this model, a folder or a file, not from nothing", 0},
  {"steps", 'n', "N", 0, "Steps of 16 texts, default 400", 0},
  {"lr", KEY_LR, "X", 0, "Highest learning rate, default 0.002, with --model 0.0003", 0},
  {"share", KEY_SHARE, "X", 0, "Hold out this share of the texts, default 0.2", 0},
  {"seed", KEY_SEED, "S", 0, "Of the weights and of which texts are held out, default 1", 0},
  {"threads", 'j', "N", 0, "Use N threads; 0, the default: one per core", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static void options_check(const options *o, struct argp_state *state) {
  if (o->load && (o->path || o->folder || o->model))
    argp_error(state, "--load learns nothing: neither FILE nor --output nor --model go with it");
  if (!o->load && !o->path)
    argp_error(state, "expected a FILE of labels and texts, or --load");
  if (!o->load && !o->folder) argp_error(state, "expected the DIR of --output");
}

static error_t option_parse(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'o': o->folder = arg; return 0;
  case 'm': o->model = arg; return 0;
  case 't': o->texts[o->text_count++] = arg; return 0;
  case 'n': o->steps = (int32_t)tool_integer(state, "--steps", arg, 2, 1000000); return 0;
  case 'j': o->threads = (int32_t)tool_integer(state, "--threads", arg, 0, 1024); return 0;
  case KEY_LOAD: o->load = arg; return 0;
  case KEY_LR: o->lr = tool_number(state, "--lr", arg, 1e-9f, 1); return 0;
  case KEY_SHARE: o->share = tool_number(state, "--share", arg, 0.01f, 0.9f); return 0;
  case KEY_SEED: o->seed = (uint64_t)tool_integer(state, "--seed", arg, 0, INT64_MAX); return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_END: options_check(o, state); return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, option_parse, "FILE -o DIR\n--load DIR",
  "Learns from examples what a text is: a label, a tab and a text on each line.\v"
  "Exit status: 0, or 1 on failure, 2 on wrong usage, 130 when interrupted.", NULL, NULL, NULL};

static uint64_t mix(uint64_t x) { /* splitmix64 */
  x += UINT64_C(0x9E3779B97F4A7C15);
  x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
  return x ^ x >> 31;
}

/* ---- The file of examples ---- */

/* The number of a label, which is new the first time; -1: too many, or too long a name. */
static int label_number(labels *l, const char *name) {
  int i;
  for (i = 0; i < l->count; i++)
    if (!strcmp(l->name[i], name)) return i;
  if (l->count == LABELS || !*name || strlen(name) >= LABEL_ROOM) return -1;
  snprintf(l->name[l->count], LABEL_ROOM, "%s", name);
  return l->count++;
}

static bool set_split(task *t) {
  set *s = &t->set;
  int32_t room = 1, number = 0;
  char *at, *line, *next;
  for (at = s->file; *at; at++) room += *at == '\n';
  s->all = (sentence *)calloc((size_t)room, sizeof *s->all);
  for (line = s->file; s->all && *line; line = next) {
    sentence *x = &s->all[s->count];
    next = line + strcspn(line, "\n");
    if (*next) *next++ = 0;
    number++;
    line[strcspn(line, "\r")] = 0;
    if (!*line) continue;
    at = strchr(line, '\t');
    if (at) *at++ = 0;
    x->text = at;
    x->label = at && *at ? label_number(&t->labels, line) : -1;
    if (x->label < 0) {
      fprintf(stderr, TOOL ": %s, line %d: expected a label (at most %d of them, each of at most "
              "%d bytes), a tab and a text\n", t->o->path, (int)number, LABELS, LABEL_ROOM - 1);
      return false;
    }
    s->labelled[x->label]++;
    s->count++;
  }
  return s->all != NULL;
}

/* The seed tells which texts are held out: the last ones. */
static void set_shuffle(set *s, uint64_t seed, float share) {
  int32_t i;
  for (i = s->count - 1; i > 0; i--) {
    int32_t other = (int32_t)(mix(seed * 1000003 + (uint64_t)i) % (uint64_t)(i + 1));
    sentence x = s->all[i];
    s->all[i] = s->all[other];
    s->all[other] = x;
  }
  s->training = s->count - (int32_t)((float)s->count * share + 0.5f);
}

static bool set_read(task *t) {
  FILE *f = fopen(t->o->path, "rb");
  set *s = &t->set;
  size_t bytes;
  s->file = f ? tool_read_all(f, &bytes) : NULL;
  if (f) fclose(f);
  else fprintf(stderr, TOOL ": %s cannot be opened\n", t->o->path);
  if (!s->file || !set_split(t)) return false;
  set_shuffle(s, t->o->seed, t->o->share);
  if (s->count >= 20 && t->labels.count >= 2) return true;
  fprintf(stderr, TOOL ": %s has %d texts and %d labels; expected at least 20 and 2\n", t->o->path,
          (int)s->count, (int)t->labels.count);
  return false;
}

/* ---- Tokens ---- */

/* A text in small letters behind a blank, so that its first word is as any other; NULL: no memory.
   label: what follows, or NULL. */
static char *spelled(const char *text, const char *label) {
  size_t n = strlen(text), i, more = label ? strlen(label) + 1 : 0;
  char *s = (char *)malloc(n + more + 2);
  if (!s) return NULL;
  s[0] = ' ';
  for (i = 0; i < n; i++)
    s[i + 1] = (char)((unsigned char)text[i] < 128 ? tolower((unsigned char)text[i]) : text[i]);
  s[n + 1] = 0;
  if (label) snprintf(s + n + 1, more + 1, " %s", label);
  return s;
}

/* The first CONTEXT tokens. */
static bool sentence_encode(const task *t, sentence *x) {
  char *text = spelled(x->text, NULL);
  int32_t before = t->bos >= 0;
  int64_t n = text ? tfm_encode(t->tokenizer, text, strlen(text), 0, x->ids + before,
                                (size_t)(CONTEXT - before)) : -1;
  if (before) x->ids[0] = t->bos;
  x->count = n + before > CONTEXT ? CONTEXT : (int32_t)n + before;
  free(text);
  return n >= 0;
}

/* Words that come twice in what is learnt from, and the labels; others are unknown. */
static tfm_tokenizer *words_of(const task *t) {
  static const char *const special[] = {"<unk>"};
  const set *s = &t->set;
  char **text = (char **)calloc((size_t)s->training, sizeof *text);
  tfm_tokenizer *made = NULL;
  tfm_vocabulary_config c;
  int32_t n = 0;
  memset(&c, 0, sizeof c);
  c.kind = TFM_WORDS;
  c.min_frequency = 2;
  c.special = special;
  c.special_count = 1;
  while (text && n < s->training &&
         (text[n] = spelled(s->all[n].text, t->labels.name[s->all[n].label])) != NULL)
    n++;
  if (n == s->training)
    made = tfm_tokenizer_train((const char *const *)text, NULL, (size_t)n, &c);
  while (n) free(text[--n]);
  free(text);
  return made;
}

/* Labels must differ in their first token, which is what is asked for. */
static bool labels_encode(task *t) {
  labels *l = &t->labels;
  int32_t i, j;
  for (i = 0; i < l->count; i++) {
    char text[LABEL_ROOM + 1];
    snprintf(text, sizeof text, " %s", l->name[i]);
    if (tfm_encode(t->tokenizer, text, strlen(text), 0, &l->id[i], 1) < 1) return tool_fail() < 0;
    for (j = 0; j < i && l->id[j] != l->id[i]; j++) {}
    if (j == i && l->id[i] != t->unknown) continue;
    fprintf(stderr, TOOL ": the label \"%s\" begins as \"%s\" to this tokenizer; rename one\n",
            l->name[i], j < i ? l->name[j] : "an unknown word");
    return false;
  }
  return true;
}

static bool tokenizer_ready(task *t) {
  tfm_tokenizer_info v = {0};
  if (!t->tokenizer || tfm_tokenizer_describe(t->tokenizer, &v) != TFM_OK) return tool_fail() < 0;
  t->bos = v.bos;
  t->unknown = tfm_token_id(t->tokenizer, "<unk>", 5);
  return labels_encode(t);
}

/* ---- Learning ---- */

typedef struct batch {
  int32_t tokens[BATCH * CONTEXT], targets[BATCH * CONTEXT];
  float weights[BATCH * CONTEXT];
} batch;

/* Row by row: a text, some of its words hidden, and its label as what follows each of them. */
static void batch_row(const task *t, batch *b, int32_t row, const sentence *x, uint64_t draw) {
  int32_t i, at = row * CONTEXT;
  for (i = 0; i < CONTEXT; i++) {
    bool hide = t->unknown >= 0 && mix(draw + (uint64_t)i) % 100 < HIDDEN;
    b->tokens[at + i] = i >= x->count ? 0 : hide ? t->unknown : x->ids[i];
    b->targets[at + i] = i < x->count ? t->labels.id[x->label] : -100;
    b->weights[at + i] = i + 1 < x->count ? 0.1f : 1;
  }
}

static tfm_trainer *trainer_open(const task *t) {
  const options *o = t->o;
  tfm_tokenizer_info v = {0};
  tfm_trainer_config c;
  tfm_shape shape;
  memset(&c, 0, sizeof c);
  memset(&shape, 0, sizeof shape);
  c.host.cancel = &interrupted;
  c.host.log = run_warn;
  c.batch = BATCH;
  c.context = CONTEXT;
  c.lr = o->lr > 0 ? o->lr : t->model ? 3e-4f : 2e-3f;
  c.schedule = TFM_COSINE;
  c.steps = o->steps;
  c.warmup = o->steps / 20;
  c.drop_embed = c.drop_residual = t->model ? 0 : 0.3f;
  c.seed = o->seed;
  c.threads = o->threads;
  if (t->model) return tfm_trainer_create(t->model, &c);
  if (tfm_tokenizer_describe(t->tokenizer, &v) != TFM_OK) return NULL;
  shape.layers = 1;
  shape.heads = 4;
  shape.width = 64;
  shape.vocabulary = v.vocabulary;
  shape.context = CONTEXT;
  shape.seed = o->seed;
  shape.tokenizer = t->tokenizer;
  return tfm_trainer_init(&shape, &c);
}

static tfm_status learn(const task *t, tfm_trainer *trainer) {
  const options *o = t->o;
  tfm_status status = TFM_OK;
  double loss = 0;
  int32_t step, row;
  batch b;
  for (step = 1; step <= o->steps && status == TFM_OK; step++) {
    tfm_step done = {0};
    for (row = 0; row < BATCH; row++) {
      uint64_t draw = mix(mix(o->seed + (uint64_t)step) + (uint64_t)row);
      batch_row(t, &b, row, &t->set.all[draw % (uint64_t)t->set.training], draw);
    }
    status = tfm_trainer_step(trainer, b.tokens, b.targets, b.weights, &done);
    loss += done.loss / 100;
    if (step % 100) continue;
    fprintf(stderr, TOOL ": step %d of %d  loss %.4f\n", (int)step, (int)o->steps, loss);
    loss = 0;
  }
  return status;
}

/* Model, tokenizer and labels into the folder. */
static bool task_save(const task *t, tfm_trainer *trainer) {
  const char *folder = t->o->folder;
  char path[RUN_ROOM];
  FILE *f;
  bool good;
  int32_t i;
  mkdir(folder, 0777);
  if (tfm_trainer_export(trainer, folder) != TFM_OK) return tool_fail() < 0;
  snprintf(path, sizeof path, "%s/tokenizer.json", folder);
  if (t->o->model && !tokenizer_copy(t->tokenizer, t->o->model, folder)) return false;
  if (!t->o->model && tfm_tokenizer_save(t->tokenizer, path) != TFM_OK) return tool_fail() < 0;
  snprintf(path, sizeof path, "%s/labels.txt", folder);
  f = fopen(path, "w");
  for (i = 0; f && i < t->labels.count; i++) fprintf(f, "%s\n", t->labels.name[i]);
  good = f && !ferror(f);
  if (f && fclose(f) != 0) good = false;
  if (!good) fprintf(stderr, TOOL ": %s cannot be written\n", path);
  return good;
}

/* From the file of examples to a folder. Returns the tool's exit status. */
static int task_learn(task *t) {
  const options *o = t->o;
  tfm_trainer *trainer;
  tfm_status status;
  int32_t i;
  if (!set_read(t)) return TOOL_FAILED;
  if (o->model && !(t->model = tfm_model_load(o->model, NULL))) return tool_fail();
  t->tokenizer = o->model ? tfm_tokenizer_load(o->model, NULL) : words_of(t);
  if (!tokenizer_ready(t)) return TOOL_FAILED;
  for (i = 0; i < t->set.count; i++)
    if (!sentence_encode(t, &t->set.all[i])) return tool_fail();
  trainer = trainer_open(t);
  status = trainer ? learn(t, trainer) : tfm_error_status();
  if (status != TFM_OK) tool_fail();
  else if (!task_save(t, trainer)) status = TFM_E_IO;
  tfm_trainer_free(trainer);
  tfm_model_free(t->model);
  t->model = NULL;
  return status == TFM_OK ? 0 : status == TFM_E_CANCELLED ? TOOL_CANCELLED : TOOL_FAILED;
}

/* ---- Telling ---- */

static bool labels_read(task *t, const char *folder) {
  char path[RUN_ROOM], line[LABEL_ROOM + 2];
  FILE *f;
  snprintf(path, sizeof path, "%s/labels.txt", folder);
  f = fopen(path, "r");
  while (f && fgets(line, sizeof line, f)) {
    line[strcspn(line, "\r\n")] = 0;
    label_number(&t->labels, line);
  }
  if (f) fclose(f);
  if (t->labels.count >= 2) return true;
  fprintf(stderr, TOOL ": %s is not there or does not name two labels; is %s what " TOOL
          " wrote?\n", path, folder);
  return false;
}

static bool task_open(task *t, const char *folder) {
  tfm_model_config model;
  tfm_engine_config engine;
  memset(&model, 0, sizeof model);
  memset(&engine, 0, sizeof engine);
  model.threads = engine.threads = t->o->threads;
  engine.context = CONTEXT;
  if (!t->tokenizer) {
    if (!labels_read(t, folder)) return false;
    t->tokenizer = tfm_tokenizer_load(folder, NULL);
    if (!tokenizer_ready(t)) return false;
  }
  t->model = tfm_model_load(folder, &model);
  t->session = tfm_session_create(t->model, &engine);
  return t->session || tool_fail() < 0;
}

/* The likeliest label, and how likely it is among the labels; -1 on failure. */
static int label_of(const task *t, const sentence *x, double *p) {
  const labels *l = &t->labels;
  double sum = 0, most = 0;
  int i, best = 0;
  if (tfm_session_rewind(t->session, 0) != TFM_OK ||
      tfm_feed(t->session, x->ids, (size_t)x->count) != TFM_OK)
    return -1;
  for (i = 0; i < l->count; i++) {
    double one = exp((double)tfm_logprob(t->session, l->id[i]));
    sum += one;
    if (one > most) most = one, best = i;
  }
  *p = most / sum;
  return best;
}

/* Accuracy over texts [from, to), and of each label: how many of how many. */
static bool report(const task *t, const char *which, int32_t from, int32_t to) {
  int32_t i, right = 0, hits[LABELS] = {0}, of[LABELS] = {0};
  double p;
  for (i = from; i < to; i++) {
    const sentence *x = &t->set.all[i];
    int label = label_of(t, x, &p);
    if (label < 0) return false;
    of[x->label]++;
    hits[x->label] += label == x->label;
    right += label == x->label;
  }
  fprintf(stderr, TOOL ": %s: %d of %d right, accuracy %.3f (", which, (int)right, (int)(to - from),
          (double)right / (to - from));
  for (i = 0; i < t->labels.count; i++)
    fprintf(stderr, "%s%s %d of %d", i ? ", " : "", t->labels.name[i], (int)hits[i], (int)of[i]);
  fprintf(stderr, ")\n");
  return true;
}

static bool tell(const task *t, char *text) {
  sentence x;
  double p = 0;
  int label;
  memset(&x, 0, sizeof x);
  x.text = text;
  if (!sentence_encode(t, &x)) return false;
  label = label_of(t, &x, &p);
  if (label >= 0) printf("%s\t%.3f\t%s\n", t->labels.name[label], p, text);
  return label >= 0;
}

/* Every line that is not empty, as it comes. */
static bool tell_lines(const task *t, FILE *f) {
  char *line = NULL;
  size_t room = 0;
  bool good = true;
  while (good && !interrupted && getline(&line, &room, f) >= 0) {
    line[strcspn(line, "\r\n")] = 0;
    if (*line) good = tell(t, line);
    fflush(stdout);
  }
  free(line);
  return good;
}

static int task_tell(const task *t) {
  const options *o = t->o;
  const set *s = &t->set;
  bool good = o->load || (report(t, "learnt from", 0, s->training) &&
                          report(t, "held out", s->training, s->count));
  int32_t i;
  for (i = 0; good && i < o->text_count; i++) good = tell(t, (char *)(uintptr_t)o->texts[i]);
  if (good && o->load && !o->text_count) good = tell_lines(t, stdin);
  return good ? 0 : tool_fail();
}

int main(int argc, char **argv) {
  options o;
  task t;
  int status;
  memset(&o, 0, sizeof o);
  memset(&t, 0, sizeof t);
  o.texts = (const char **)calloc((size_t)argc, sizeof *o.texts);
  o.steps = 400;
  o.share = 0.2f;
  o.seed = 1;
  if (!o.texts) return TOOL_FAILED;
  tool_parse(&parser, argc, argv, &o);
  t.o = &o;
  signal(SIGINT, on_interrupt);
  status = o.load ? 0 : task_learn(&t);
  if (status == 0) status = task_open(&t, o.load ? o.load : o.folder) ? task_tell(&t) : TOOL_FAILED;
  tfm_session_free(t.session);
  tfm_model_free(t.model);
  tfm_tokenizer_free(t.tokenizer);
  free(t.set.all);
  free(t.set.file);
  free(o.texts);
  return tool_finish(interrupted && status == 0 ? TOOL_CANCELLED : status);
}
