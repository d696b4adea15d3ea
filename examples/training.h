/* What train and finetune share: their options, lists of files, the loop of steps with its progress
   line, log, chart, samples and checkpoints. Include it after common.h. Not part of the library. */
#ifndef EXAMPLES_TRAINING_H
#define EXAMPLES_TRAINING_H

#include <fts.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include "plot.h"

enum {
  RUN_ROOM = 1000, /* bytes of a path */
  RUN_TELL = 25,   /* steps from line to line */
  RUN_SKIPS = 20   /* skipped steps in a row that end a run */
};

static volatile int32_t interrupted;

static inline void on_interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
}

/* Warnings only: which device computes is of no interest here. */
static inline void run_warn(void *user, tfm_log_level level, const char *line) {
  if (level != TFM_LOG_INFO) tool_log(user, level, line);
}

static inline double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- Files: what the arguments name, folders with all below them ---- */

typedef struct file_list {
  char **path;
  struct stat *st;
  size_t count, room;
} file_list;

static inline bool file_listed(const file_list *l, const struct stat *st) {
  size_t i;
  for (i = 0; l && i < l->count; i++)
    if (l->st[i].st_dev == st->st_dev && l->st[i].st_ino == st->st_ino) return true;
  return false;
}

static inline bool file_add(file_list *l, const char *path, const struct stat *st) {
  if (l->count == l->room) {
    size_t room = 2 * l->room + 16;
    char **paths = (char **)realloc(l->path, room * sizeof *paths);
    struct stat *stats = paths ? (struct stat *)realloc(l->st, room * sizeof *stats) : NULL;
    if (paths) l->path = paths;
    if (!stats) return false;
    l->st = stats;
    l->room = room;
  }
  l->st[l->count] = *st;
  l->path[l->count] = strdup(path);
  return l->path[l->count++] != NULL;
}

static inline int file_order(const FTSENT **a, const FTSENT **b) {
  return strcmp((*a)->fts_name, (*b)->fts_name);
}

/* Adds a file, or all of a folder in the order of names, but what is hidden or in `but`. */
static inline bool file_list_add(file_list *l, const char *path, const file_list *but) {
  char *const roots[] = {(char *)(uintptr_t)path, NULL};
  FTS *walk = fts_open(roots, FTS_LOGICAL | FTS_NOCHDIR, file_order);
  FTSENT *e;
  bool good = walk != NULL;
  while (good && (e = fts_read(walk)) != NULL) {
    if (e->fts_level > 0 && e->fts_name[0] == '.') fts_set(walk, e, FTS_SKIP);
    else if (e->fts_info == FTS_F && !file_listed(but, e->fts_statp))
      good = file_add(l, e->fts_path, e->fts_statp);
    else if (e->fts_info == FTS_NS || e->fts_info == FTS_DNR || e->fts_info == FTS_ERR) {
      fprintf(stderr, TOOL ": %s cannot be read\n", e->fts_path);
      good = false;
    }
  }
  if (walk) fts_close(walk);
  return good;
}

static inline void file_list_free(file_list *l) {
  size_t i;
  for (i = 0; i < l->count; i++) free(l->path[i]);
  free(l->path);
  free(l->st);
}

/* ---- The tokenizer's files go with the model ---- */

/* A file that is not there is passed over, as not every model has each; so is one onto itself. */
static inline bool file_copy(const char *from, const char *to) {
  struct stat a, b;
  FILE *in, *out;
  size_t bytes = 0;
  bool good = false;
  char *text;
  if (stat(from, &a) != 0) return true;
  if (stat(to, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino) return true;
  in = fopen(from, "rb");
  text = in ? tool_read_all(in, &bytes) : NULL;
  if (in) fclose(in);
  out = text ? fopen(to, "wb") : NULL;
  if (out) {
    good = fwrite(text, 1, bytes, out) == bytes;
    good = fclose(out) == 0 && good;
  }
  if (!good) fprintf(stderr, TOOL ": %s cannot be written\n", to);
  free(text);
  return good;
}

/* A folder's files are copied as they are; the vocabulary of a single file is saved, or refused. */
static inline bool tokenizer_copy(const tfm_tokenizer *tokenizer, const char *model,
                                  const char *folder) {
  static const char *const names[] = {"tokenizer.json", "tokenizer.model", "tokenizer.bin",
                                      "vocab.json", "merges.txt", "added_tokens.json",
                                      "tokenizer_config.json", "special_tokens_map.json",
                                      "chat_template.jinja"};
  char from[RUN_ROOM], to[RUN_ROOM];
  struct stat st;
  size_t i;
  if (stat(model, &st) == 0 && !S_ISDIR(st.st_mode)) {
    snprintf(to, sizeof to, "%s/tokenizer.json", folder);
    return tfm_tokenizer_save(tokenizer, to) == TFM_OK || tool_fail() < 0;
  }
  for (i = 0; i < sizeof names / sizeof *names; i++) {
    snprintf(from, sizeof from, "%s/%s", model, names[i]);
    snprintf(to, sizeof to, "%s/%s", folder, names[i]);
    if (!file_copy(from, to)) return false;
  }
  return true;
}

/* ---- Options ---- */

typedef struct run_options {
  tfm_trainer_config config;
  file_list texts, held_out;    /* held_out none: a share of the texts */
  const char **named;           /* the arguments */
  size_t named_count;
  const char *folder, *prompt, *separator;
  float share, minutes;         /* minutes 0: as many steps as config has */
  int32_t save_every, sample_tokens, batches; /* batches: of a validation */
  uint64_t seed;
  bool resume;
} run_options;

enum { RUN_KEY = 1024, RUN_LR, RUN_MIN_LR, RUN_SAVE, RUN_SEED, RUN_RESUME, RUN_VALIDATION,
       RUN_SHARE, RUN_SEPARATOR, RUN_GENERATE, RUN_KEEP, RUN_WARMUP, RUN_SCHEDULE, RUN_DECAY,
       RUN_CLIP, RUN_ACCUMULATE, RUN_SAMPLE, RUN_BATCHES, RUN_DROPOUT, RUN_RECOMPUTE, RUN_FREEZE,
       RUN_FIRST_LAYER, RUN_MINUTES, RUN_PRECISION };

static const struct argp_option run_option_list[] = {
  {"output", 'o', "DIR", 0, "Model, tokenizer, checkpoint, log.jsonl, loss.svg, samples.txt", 0},
  {"resume", RUN_RESUME, NULL, 0, "Go on from DIR/checkpoint: same texts, same options", 0},
  {"steps", 'n', "N", 0, "Train N steps, default 1000", 0},
  {"minutes", RUN_MINUTES, "M", 0, "Instead of --steps: as many as M minutes hold, by the speed of "
   "the first ones; --save-every is then a twentieth of them", 0},
  {"batch", 'b', "B", 0, "Sequences of a pass, default 16", 0},
  {"accumulate", RUN_ACCUMULATE, "N", 0, "Passes of a step, default 1", 0},
  {"context", 'c', "T", 0, "Tokens of a sequence, default 64", 0},
  {"lr", RUN_LR, "X", 0, "Highest learning rate, default 0.001", 0},
  {"min-lr", RUN_MIN_LR, "X", 0, "Last learning rate, default a tenth of --lr", 0},
  {"schedule", RUN_SCHEDULE, "NAME", 0, "constant, linear, cosine (default) or wsd", 0},
  {"warmup", RUN_WARMUP, "N", 0, "Steps of a linear start, default 5 % of --steps", 0},
  {"decay", RUN_DECAY, "X", 0, "Weight decay, default 0.1; below 0: none", 0},
  {"clip", RUN_CLIP, "X", 0, "Longest gradient, default 1; below 0: any", 0},
  {"dropout", RUN_DROPOUT, "X", 0, "Of embeddings, attention and residual, default 0", 0},
  {"precision", RUN_PRECISION, "TYPE", 0, "f32 (default), or bf16: products of matrices in bf16, "
   "where the processor has AMX", 0},
  {"recompute", RUN_RECOMPUTE, NULL, 0, "Less memory for more time, the same result", 0},
  {"freeze", RUN_FREEZE, "LIST", 0, "Parts that stay as they are: embeddings, head, norms, "
   "attention, ffn, experts; separated by commas", 0},
  {"first-layer", RUN_FIRST_LAYER, "N", 0, "Layers below N stay as they are, and embeddings", 0},
  {"validation", RUN_VALIDATION, "PATH", 0, "Held-out file or folder, again for more; training "
   "leaves them out even where DATA has them", 0},
  {"share", RUN_SHARE, "X", 0, "Without --validation: hold out this share, default 0.1", 0},
  {"validation-batches", RUN_BATCHES, "N", 0, "Passes of a validation, default 8", 0},
  {"separator", RUN_SEPARATOR, "TEXT", 0, "Ends a document within a file", 0},
  {"save-every", RUN_SAVE, "N", 0, "Steps between checkpoints, default 250", 0},
  {"keep", RUN_KEEP, "K", 0, "Newest checkpoints that are kept, default 1", 0},
  {"generate", RUN_GENERATE, "TEXT", 0, "Samples begin with TEXT", 0},
  {"sample-tokens", RUN_SAMPLE, "N", 0, "Length of samples, default 200; 0: none", 0},
  {"seed", RUN_SEED, "S", 0, "Of the first weights and the order of sequences, default 1", 0},
  {"threads", 'j', "N", 0, "Use N threads; 0, the default: one per core", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static inline tfm_schedule run_schedule(struct argp_state *state, const char *text) {
  static const char *const names[] = {"constant", "linear", "cosine", "wsd"};
  int i;
  for (i = 0; i < 4; i++)
    if (!strcmp(text, names[i])) return (tfm_schedule)i;
  argp_error(state, "--schedule: expected constant, linear, cosine or wsd, found \"%s\"", text);
  return TFM_CONSTANT;
}

static inline tfm_type run_precision(struct argp_state *state, const char *text) {
  if (!strcmp(text, "bf16")) return TFM_BF16;
  if (!strcmp(text, "f32")) return TFM_F32;
  argp_error(state, "--precision: expected f32 or bf16, found \"%s\"", text);
  return TFM_F32;
}

static inline unsigned run_freeze(struct argp_state *state, const char *text) {
  static const char *const names[] = {"embeddings", "head", "norms", "attention", "ffn", "experts"};
  unsigned parts = 0;
  while (*text) {
    size_t n = strcspn(text, ","), i;
    for (i = 0; i < 6; i++)
      if (strlen(names[i]) == n && !strncmp(names[i], text, n)) break;
    if (i == 6) argp_error(state, "--freeze: there is no part \"%.*s\"; see --help", (int)n, text);
    parts |= 1u << i;
    text += n + (text[n] == ',');
  }
  return parts;
}

static inline int32_t run_count(struct argp_state *state, const char *option, const char *text,
                                int64_t low) {
  return (int32_t)tool_integer(state, option, text, low, 100000000);
}

static inline error_t run_option(int key, char *arg, struct argp_state *state) {
  run_options *o = (run_options *)state->input;
  tfm_trainer_config *c = &o->config;
  switch (key) {
  case 'o': o->folder = arg; return 0;
  case RUN_RESUME: o->resume = true; return 0;
  case 'n': c->steps = run_count(state, "--steps", arg, 1); return 0;
  case RUN_MINUTES: o->minutes = tool_number(state, "--minutes", arg, 0.01f, 1e6f); return 0;
  case 'b': c->batch = run_count(state, "--batch", arg, 1); return 0;
  case RUN_ACCUMULATE: c->accumulate = run_count(state, "--accumulate", arg, 1); return 0;
  case 'c': c->context = run_count(state, "--context", arg, 2); return 0;
  case RUN_LR: c->lr = tool_number(state, "--lr", arg, 1e-9f, 10); return 0;
  case RUN_MIN_LR: c->min_lr = tool_number(state, "--min-lr", arg, 0, 10); return 0;
  case RUN_SCHEDULE: c->schedule = run_schedule(state, arg); return 0;
  case RUN_WARMUP: c->warmup = run_count(state, "--warmup", arg, 0); return 0;
  case RUN_DECAY: c->decay = tool_number(state, "--decay", arg, -1, 10); return 0;
  case RUN_CLIP: c->clip = tool_number(state, "--clip", arg, -1, 1e9f); return 0;
  case RUN_DROPOUT:
    c->drop_embed = c->drop_attn = c->drop_residual = tool_number(state, "--dropout", arg, 0, 0.9f);
    return 0;
  case RUN_PRECISION: c->precision = run_precision(state, arg); return 0;
  case RUN_RECOMPUTE: c->recompute = true; return 0;
  case RUN_FREEZE: c->freeze = run_freeze(state, arg); return 0;
  case RUN_FIRST_LAYER: c->first_layer = run_count(state, "--first-layer", arg, 0); return 0;
  case RUN_VALIDATION: return file_list_add(&o->held_out, arg, NULL) ? 0 : EINVAL;
  case RUN_SHARE: o->share = tool_number(state, "--share", arg, 0, 0.9f); return 0;
  case RUN_BATCHES: o->batches = run_count(state, "--validation-batches", arg, 1); return 0;
  case RUN_SEPARATOR: o->separator = arg; return 0;
  case RUN_SAVE: o->save_every = run_count(state, "--save-every", arg, 1); return 0;
  case RUN_KEEP: c->keep = (int32_t)tool_integer(state, "--keep", arg, 1, 1000); return 0;
  case RUN_GENERATE: o->prompt = arg; return 0;
  case RUN_SAMPLE: o->sample_tokens = run_count(state, "--sample-tokens", arg, 0); return 0;
  case RUN_SEED: o->seed = (uint64_t)tool_integer(state, "--seed", arg, 0, INT64_MAX); return 0;
  case 'j': c->threads = (int32_t)tool_integer(state, "--threads", arg, 0, 1024); return 0;
  case ARGP_KEY_END:
    if (o->resume && !o->folder) argp_error(state, "--resume needs the DIR of --output");
    if (o->minutes > 0 && (o->resume || c->steps))
      argp_error(state, "--minutes chooses the number of steps: expected no --steps, and to "
                 "--resume with the --steps that were chosen");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp run_argp = {run_option_list, run_option, NULL, NULL, NULL, NULL, NULL};
static const struct argp_child run_child[] = {{&run_argp, 0, "Training:", 10}, {NULL, 0, NULL, 0}};

/* Before the command line is read; what is 0 afterwards gets its default in run_settle, and what
   depends on the number of steps in run_pace. */
static inline void run_defaults(run_options *o, int argc) {
  memset(o, 0, sizeof *o);
  o->named = (const char **)calloc((size_t)argc + 1, sizeof *o->named);
  o->share = 0.1f;
  o->sample_tokens = 200;
  o->seed = 1;
  o->config.warmup = -1;
  o->config.min_lr = -1;
  o->config.schedule = TFM_COSINE;
  o->config.host.cancel = &interrupted;
  o->config.host.log = run_warn;
}

static inline void run_settle(run_options *o) {
  tfm_trainer_config *c = &o->config;
  if (!c->batch) c->batch = 16;
  if (!c->accumulate) c->accumulate = 1;
  if (!c->context) c->context = 64;
  if (c->lr == 0) c->lr = 1e-3f;
  if (c->min_lr < 0) c->min_lr = c->lr / 10;
  if (!o->batches) o->batches = 8;
  c->seed = o->seed;
}

static inline void run_pace(run_options *o) {
  tfm_trainer_config *c = &o->config;
  if (!c->steps) c->steps = 1000;
  if (c->warmup < 0) c->warmup = c->steps / 20;
  if (!o->save_every) o->save_every = o->minutes > 0 ? c->steps / 20 + 1 : 250;
}

/* The files that the arguments name, without the held-out ones. */
static inline bool run_list(run_options *o) {
  size_t i;
  for (i = 0; i < o->named_count; i++)
    if (!file_list_add(&o->texts, o->named[i], &o->held_out)) return false;
  if (o->texts.count) return true;
  fprintf(stderr, TOOL ": there is no text to learn from\n");
  return false;
}

static inline void run_options_free(run_options *o) {
  file_list_free(&o->texts);
  file_list_free(&o->held_out);
  free(o->named);
}

/* ---- A run ---- */

typedef struct run {
  const run_options *o;
  tfm_trainer *trainer;
  const tfm_tokenizer *tokenizer;
  tfm_data *data, *held_out; /* the same, when a share is held out; held_out may be NULL */
  tfm_trainer_info info;     /* as it was when the loop began */
  int32_t *tokens, *targets; /* of a step */
  int64_t step, sequences;
  double begun, before;      /* when the loop began; seconds of runs that this one goes on from */
  double over;               /* when it ends by --minutes; 0: after its steps */
  double loss, accuracy;     /* sums since the last line */
  int64_t since;             /* steps of these sums */
  double told;               /* when that line was */
  int skips;                 /* in a row */
  plot_line curve[2];        /* training, validation */
} run;

static inline char *run_path(const run_options *o, const char *name, char *path) {
  snprintf(path, RUN_ROOM, "%s/%s", o->folder, name);
  return path;
}

static inline tfm_data *run_texts(const run *r, const file_list *files, float share,
                                  const char *cache) {
  char path[RUN_ROOM];
  tfm_data_config c;
  memset(&c, 0, sizeof c);
  c.host = r->o->config.host;
  c.host.progress = tool_progress;
  c.context = r->o->config.context;
  c.held_out = share;
  c.seed = r->o->seed;
  c.separator = r->o->separator;
  c.cache = r->o->folder ? run_path(r->o, cache, path) : NULL;
  return tfm_data_open((const char *const *)files->path, files->count, r->tokenizer, &c);
}

static inline bool run_data_open(run *r) {
  const run_options *o = r->o;
  float share = o->held_out.count ? 0 : o->share;
  r->data = run_texts(r, &o->texts, share, ".ids");
  if (!r->data) return false;
  if (share > 0) r->held_out = r->data;
  else if (o->held_out.count && !(r->held_out = run_texts(r, &o->held_out, 1, ".held_out_ids")))
    return false;
  return true;
}

static inline void run_free(run *r) {
  tfm_trainer_free(r->trainer);
  if (r->held_out != r->data) tfm_data_free(r->held_out);
  tfm_data_free(r->data);
  plot_free(&r->curve[0]);
  plot_free(&r->curve[1]);
  free(r->tokens);
}

/* ---- The log: a JSON object a line; and the chart of it ---- */

static inline double log_number(const char *line, const char *key) {
  char quoted[64];
  const char *at;
  snprintf(quoted, sizeof quoted, "\"%s\":", key);
  at = strstr(line, quoted);
  return at ? strtod(at + strlen(quoted), NULL) : NAN;
}

/* Keeps the lines up to the step that is gone on from, and their points. */
static inline void run_log_cut(run *r) {
  char path[RUN_ROOM], part[RUN_ROOM + 8], line[1000];
  FILE *from = fopen(run_path(r->o, "log.jsonl", path), "r"), *to;
  snprintf(part, sizeof part, "%s.part", path);
  to = fopen(part, "w");
  while (r->step && from && to && fgets(line, sizeof line, from)) {
    double step = log_number(line, "step");
    if (!(step <= (double)r->step)) continue;
    fputs(line, to);
    plot_add(&r->curve[0], step, log_number(line, "loss"));
    plot_add(&r->curve[1], step, log_number(line, "validation"));
    r->before = log_number(line, "seconds");
  }
  if (from) fclose(from);
  if (to && fclose(to) == 0) rename(part, path);
}

static inline void run_log(run *r, const tfm_step *s, double loss, double rate, double validation) {
  char path[RUN_ROOM];
  plot p = {"loss, nats per token", "step", "", r->curve, 2, false};
  FILE *f;
  plot_add(&r->curve[0], (double)s->step, loss);
  plot_add(&r->curve[1], (double)s->step, validation);
  if (!r->o->folder) return;
  f = fopen(run_path(r->o, "log.jsonl", path), "a");
  if (f) {
    fprintf(f, "{\"step\":%lld,\"tokens\":%lld,\"loss\":%.6g,\"accuracy\":%.4f,"
            "\"gradient_norm\":%.5g,\"lr\":%.5g,\"tokens_per_s\":%.0f,\"seconds\":%.1f",
            (long long)s->step, (long long)(r->sequences * r->info.context), loss,
            r->accuracy / (double)r->since, (double)s->gradient_norm, (double)s->lr, rate,
            r->before + seconds() - r->begun);
    if (s->balance != 0) fprintf(f, ",\"balance\":%.5g", s->balance);
    if (isfinite(validation)) fprintf(f, ",\"validation\":%.6g", validation);
    fprintf(f, "}\n");
    fclose(f);
  }
  plot_write(&p, run_path(r->o, "loss.svg", path));
}

/* Mean loss of batches that are never learnt from: always the same ones. */
static inline double run_validate(run *r) {
  double sum = 0;
  int32_t i;
  if (!r->held_out) return NAN;
  for (i = 0; i < r->o->batches; i++) {
    tfm_step s = {0};
    if (tfm_data_read(r->held_out, true, (int64_t)i * r->info.batch, r->info.batch, r->tokens,
                      r->targets) != TFM_OK ||
        tfm_trainer_eval(r->trainer, r->tokens, r->targets, NULL, &s) != TFM_OK)
      return NAN;
    sum += s.loss / r->o->batches;
  }
  return sum;
}

/* Step, losses, speed, what is left, memory: a line that the next overwrites on a terminal. */
static inline void run_tell(run *r, const tfm_step *s, bool validate) {
  double rate, loss = r->loss / (double)r->since, left, validation;
  int64_t per_step = (int64_t)r->info.batch * r->info.context * r->info.accumulate;
  bool terminal = isatty(STDERR_FILENO) != 0;
  rate = (double)(r->since * per_step) / (seconds() - r->told);
  left = (double)((r->o->config.steps - r->step) * per_step) / rate;
  validation = validate ? run_validate(r) : NAN;
  fprintf(stderr, "%sstep %lld/%lld  loss %.4f  accuracy %.3f  gradient %.2f  lr %.2e  %.0f "
          "tokens/s  %d:%02d:%02d left  %.0f MB", terminal ? "\r" : "", (long long)s->step,
          (long long)r->o->config.steps, loss, r->accuracy / (double)r->since,
          (double)s->gradient_norm, (double)s->lr, rate, (int)(left / 3600),
          (int)(left / 60) % 60, (int)left % 60, (double)r->info.memory_bytes / 1e6);
  if (s->balance != 0) fprintf(stderr, "  balance %.3f", s->balance);
  if (isfinite(validation)) fprintf(stderr, "  validation %.4f", validation);
  fprintf(stderr, "%s", !terminal ? "\n" : isfinite(validation) ? "\033[K\n" : "\033[K");
  run_log(r, s, loss, rate, validation);
  r->loss = r->accuracy = 0;
  r->since = 0;
}

/* ---- What happens now and then ---- */

static inline bool run_save(run *r) {
  char path[RUN_ROOM];
  if (!r->o->folder) return true;
  return tfm_trainer_save(r->trainer, run_path(r->o, "checkpoint", path)) == TFM_OK &&
         tfm_trainer_export(r->trainer, r->o->folder) == TFM_OK;
}

static inline bool sample_text(void *user, const char *text, size_t bytes) {
  FILE **to = (FILE **)user;
  fwrite(text, 1, bytes, stdout);
  if (*to) fwrite(text, 1, bytes, *to);
  return !interrupted;
}

/* A passage by the model that was saved last, on stdout and at the end of samples.txt. */
static inline bool run_sample(run *r) {
  char path[RUN_ROOM], start[256] = "";
  const char *prompt = r->o->prompt ? r->o->prompt : start;
  tfm_tokenizer_info v = {0};
  tfm_generate_config how = {0};
  tfm_model *m;
  tfm_session *s;
  int64_t n;
  FILE *f;
  if (!r->o->folder || !r->o->sample_tokens) return true;
  if (tfm_tokenizer_describe(r->tokenizer, &v) == TFM_OK && v.bos < 0) /* the texts' first token */
    tfm_decode(r->tokenizer, r->tokens, 1, start, sizeof start);
  f = fopen(run_path(r->o, "samples.txt", path), "a");
  how.sampling.temperature = 0.8f;
  how.sampling.top_p = 0.95f;
  how.sampling.seed = r->o->seed;
  how.max_tokens = r->o->sample_tokens;
  how.on_text = sample_text;
  how.user = &f;
  m = tfm_model_load(r->o->folder, NULL);
  s = tfm_session_create(m, NULL);
  if (f) fprintf(f, "---- step %lld ----\n%s", (long long)r->step, prompt);
  fputs(prompt, stdout);
  n = tfm_generate(s, r->tokenizer, prompt, &how);
  puts("");
  fflush(stdout);
  if (f) fputs("\n", f), fclose(f);
  tfm_session_free(s);
  tfm_model_free(m);
  return n >= 0;
}

/* ---- Steps ---- */

static inline bool run_room(run *r) {
  size_t n = (size_t)r->info.batch * (size_t)r->info.context * (size_t)r->info.accumulate;
  if (!r->tokens) r->tokens = (int32_t *)malloc(2 * n * sizeof *r->tokens);
  r->targets = r->tokens + n;
  return r->tokens != NULL;
}

static inline tfm_status run_step(run *r, tfm_step *s) {
  int32_t rows = r->info.batch * r->info.accumulate;
  tfm_status status = tfm_data_read(r->data, false, r->sequences, rows, r->tokens, r->targets);
  if (status == TFM_OK) status = tfm_trainer_step(r->trainer, r->tokens, r->targets, NULL, s);
  if (status != TFM_OK) return status;
  r->sequences += rows;
  r->skips = s->skipped ? r->skips + 1 : 0;
  if (s->skipped) return TFM_OK;
  r->step = s->step;
  r->loss += s->loss;
  r->accuracy += s->accuracy;
  r->since++;
  return TFM_OK;
}

/* ---- The trainer, and how many steps a time holds ---- */

typedef tfm_trainer *(*run_maker)(const void *origin, const tfm_trainer_config *config);

/* Sets the steps, by the speed of some: until a fortieth of the time is gone, but for at most 20
   seconds. The rest of what a run does, validation too, is given a twentieth. */
static inline bool run_count_steps(run *r, run_options *o) {
  double all = 60 * (double)o->minutes, begun = seconds(), since = begun, now = begun;
  double trial = all / 40 < 20 ? all / 40 : 20;
  int32_t n = 0;
  r->over = begun + all;
  if (tfm_trainer_describe(r->trainer, &r->info) != TFM_OK || !run_room(r)) return false;
  for (; n < 2 || now - since < trial; n++) {
    tfm_step s = {0};
    if (run_step(r, &s) != TFM_OK) return false;
    now = seconds();
    if (n == 0) since = now; /* the first touches the memory */
  }
  o->config.steps = 2 + (int32_t)(0.95 * (r->over - now) * (n - 1) / (now - since));
  fprintf(stderr, TOOL ": %g minutes hold %d steps\n", (double)o->minutes, (int)o->config.steps);
  r->step = r->sequences = r->since = 0;
  r->loss = r->accuracy = 0;
  return true;
}

/* With --minutes a first trainer is timed and thrown away. */
static inline bool run_make(run *r, run_options *o, run_maker make, const void *origin) {
  if (o->minutes > 0) {
    tfm_trainer_config trial = o->config;
    bool timed;
    trial.schedule = TFM_CONSTANT;
    trial.warmup = 0;
    r->trainer = make(origin, &trial);
    timed = r->trainer && run_count_steps(r, o);
    tfm_trainer_free(r->trainer);
    r->trainer = NULL;
    if (!timed) return false;
  }
  run_pace(o);
  r->trainer = make(origin, &o->config);
  return r->trainer != NULL;
}

/* ---- The loop ---- */

static inline bool run_begin(run *r) {
  static const plot_line curve[2] = {{"training", "#4878cf", NULL, NULL, 0, 0, false},
                                     {"validation", "#d1561f", NULL, NULL, 0, 0, true}};
  char path[RUN_ROOM];
  memcpy(r->curve, curve, sizeof curve);
  if (r->o->resume &&
      tfm_trainer_resume(r->trainer, run_path(r->o, "checkpoint", path)) != TFM_OK)
    return false;
  if (tfm_trainer_describe(r->trainer, &r->info) != TFM_OK) return false;
  r->step = r->info.step;
  r->sequences = r->info.sequences;
  if (r->o->folder) run_log_cut(r);
  fprintf(stderr, TOOL ": %llu parameters, %.1f MB; %lld tokens, %lld of them held out\n",
          (unsigned long long)r->info.parameters, (double)r->info.memory_bytes / 1e6,
          (long long)(r->data->tokens + (r->held_out == r->data || !r->held_out
                                             ? 0 : r->held_out->tokens)),
          r->held_out ? (long long)r->held_out->held_out : 0LL);
  r->begun = r->told = seconds();
  return run_room(r);
}

/* Trains to the last step; returns the tool's exit status. */
static inline int run_loop(run *r) {
  const run_options *o = r->o;
  tfm_status status = TFM_OK;
  bool last, save;
  if (!run_begin(r)) return tool_fail();
  last = r->step >= o->config.steps;
  if (last)
    fprintf(stderr, TOOL ": %s has %lld steps already; --steps for more\n", o->folder,
            (long long)r->step);
  while (status == TFM_OK && !last) {
    tfm_step s = {0};
    status = run_step(r, &s);
    if (status != TFM_OK || s.skipped) {
      if (r->skips < RUN_SKIPS) continue;
      fprintf(stderr, TOOL ": %d steps in a row were not finite; lower --lr\n", r->skips);
      return TOOL_FAILED;
    }
    last = r->step >= o->config.steps || (r->over > 0 && seconds() > r->over);
    save = r->step % o->save_every == 0 || last;
    if (!save && r->step % RUN_TELL) continue;
    run_tell(r, &s, save);
    if (save && (!run_save(r) || !run_sample(r))) status = tfm_error_status();
    r->told = seconds();
  }
  if (status == TFM_E_CANCELLED) return run_save(r) ? TOOL_CANCELLED : tool_fail();
  return status == TFM_OK ? 0 : tool_fail();
}

#endif
