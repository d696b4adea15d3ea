/* train.c - trains a language model on your texts, from the first weights to a model that writes.

   build:   cc -O3 -march=native -o train examples/train.c -lm -lpthread
   run:     ./train book.txt -o model               letters as tokens, 4 layers of 128
            ./train books/ -o model --preset small  a vocabulary of 4096 built from the texts
            ./train books/ -o model --preset small --resume     goes on from model/checkpoint
            ./train books/ --preset small --lr-find             which learning rate?
   output:  progress on stderr, samples on stdout. DIR gets config.json, model.safetensors and
            tokenizer.json, which generate and transformers read; checkpoint; log.jsonl; loss.svg;
            samples.txt. Ctrl-C saves and exits with status 130. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "train"
#include "common.h"
#include "training.h"

enum { KEY_ARCH = 256 + 32, KEY_PRESET, KEY_LAYERS, KEY_WIDTH, KEY_HEADS, KEY_KV_HEADS, KEY_FFN,
       KEY_TOKENIZER, KEY_UNTIED, KEY_EXPERTS, KEY_EXPERTS_USED, KEY_LR_FIND };

typedef struct options {
  tfm_shape shape;
  run_options run;
  const char *tokenizer, *preset;
  int32_t lr_find; /* steps of each rate; 0: train */
} options;

/* ---- Options ---- */

static const struct preset {
  const char *name, *arch, *tokenizer;
  int32_t layers, width, heads, ffn, context, batch, accumulate;
  float lr;
} presets[] = { /* parameters: 0.8, 5.8, 20 and 102 million */
  {"char", "gpt2", "char", 4, 128, 4, 512, 64, 16, 1, 1e-3f},
  {"small", "llama", "bpe:4096", 6, 256, 4, 768, 256, 32, 1, 1e-3f},
  {"medium", "llama", "bpe:8192", 5, 512, 8, 1376, 512, 16, 1, 6e-4f},
  {"large", "llama", "bpe:16384", 12, 768, 12, 2048, 512, 8, 4, 4e-4f}};

static const struct argp_option option_list[] = {
  {"preset", KEY_PRESET, "NAME", 0, "char (the default), small, medium or large: the defaults of "
   "what follows, and of --batch, --context and --lr", 0},
  {"tokenizer", KEY_TOKENIZER, "KIND", 0, "char, word, word:N or bpe:N, built from the texts; or "
   "a PATH", 0},
  {"arch", KEY_ARCH, "NAME", 0, "gpt2, llama, moe (gpt2 with 8 experts, 2 for each token) or any "
   "family's name, as config.json has it: mixtral, qwen3 ...", 0},
  {"layers", KEY_LAYERS, "N", 0, "Layers", 0},
  {"width", KEY_WIDTH, "N", 0, "Values of the residual stream", 0},
  {"heads", KEY_HEADS, "N", 0, "Attention heads", 0},
  {"kv-heads", KEY_KV_HEADS, "N", 0, "Heads of keys and values; default --heads", 0},
  {"ffn", KEY_FFN, "N", 0, "Values inside the feed-forward part", 0},
  {"experts", KEY_EXPERTS, "N", 0, "Feed-forward parts to choose from, with --arch moe ...", 0},
  {"experts-used", KEY_EXPERTS_USED, "N", 0, "How many of them each token goes through", 0},
  {"untied", KEY_UNTIED, NULL, 0, "A head of its own instead of the embedding table", 0},
  {"lr-find", KEY_LR_FIND, "N", OPTION_ARG_OPTIONAL, "Instead of training, N (100) steps with each "
   "of 13 rates, from 1e-5 to 1e-1; DIR/lr.svg", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static int32_t width_of(struct argp_state *state, const char *option, const char *arg) {
  return (int32_t)tool_integer(state, option, arg, 1, 65536);
}

static error_t option_parse(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  tfm_shape *s = &o->shape;
  switch (key) {
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->run; return 0;
  case KEY_PRESET: o->preset = arg; return 0;
  case KEY_TOKENIZER: o->tokenizer = arg; return 0;
  case KEY_ARCH: s->family = strcmp(arg, "moe") ? arg : "gpt2_moe"; return 0;
  case KEY_LAYERS: s->layers = (int32_t)tool_integer(state, "--layers", arg, 1, 4096); return 0;
  case KEY_WIDTH: s->width = width_of(state, "--width", arg); return 0;
  case KEY_HEADS: s->heads = width_of(state, "--heads", arg); return 0;
  case KEY_KV_HEADS: s->kv_heads = width_of(state, "--kv-heads", arg); return 0;
  case KEY_FFN: s->ffn_width = width_of(state, "--ffn", arg); return 0;
  case KEY_EXPERTS: s->experts = width_of(state, "--experts", arg); return 0;
  case KEY_EXPERTS_USED: s->experts_used = width_of(state, "--experts-used", arg); return 0;
  case KEY_UNTIED: s->untied = true; return 0;
  case KEY_LR_FIND:
    o->lr_find = arg ? (int32_t)tool_integer(state, "--lr-find", arg, 1, 100000) : 100;
    return 0;
  case ARGP_KEY_ARG: o->run.named[o->run.named_count++] = arg; return 0;
  case ARGP_KEY_END:
    if (!o->run.named_count) argp_error(state, "expected DATA, a text to learn from");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {option_list, option_parse, "DATA...",
                                   "Trains a language model on texts: files, or folders of them.",
                                   run_child, NULL, NULL};

/* What the command line left open is as the preset has it. */
static bool preset_apply(options *o) {
  const char *name = o->preset ? o->preset : "char";
  tfm_shape *s = &o->shape;
  tfm_trainer_config *c = &o->run.config;
  bool as_preset = !s->width && !s->family; /* or else the family's own feed-forward width */
  size_t i;
  for (i = 0; i < sizeof presets / sizeof *presets; i++) {
    const struct preset *p = &presets[i];
    if (strcmp(p->name, name)) continue;
    if (!s->family) s->family = p->arch;
    if (!s->layers) s->layers = p->layers;
    if (!s->width) s->width = p->width;
    if (!s->heads) s->heads = p->heads;
    if (!s->ffn_width && as_preset) s->ffn_width = p->ffn;
    if (!c->context) c->context = p->context;
    if (!c->batch) c->batch = p->batch;
    if (!c->accumulate) c->accumulate = p->accumulate;
    if (c->lr == 0) c->lr = p->lr;
    if (!o->tokenizer) o->tokenizer = p->tokenizer;
    return true;
  }
  fprintf(stderr, TOOL ": --preset: expected char, small, medium or large, found \"%s\"\n", name);
  return false;
}

/* ---- The vocabulary ---- */

typedef struct texts { /* whole files in memory, while a vocabulary is built */
  char **text;
  size_t *bytes, count;
} texts;

static bool texts_read(texts *t, const file_list *files) {
  size_t i;
  for (i = 0; i < files->count; i++) {
    FILE *f = fopen(files->path[i], "rb");
    t->text[t->count] = f ? tool_read_all(f, &t->bytes[t->count]) : NULL;
    if (f) fclose(f);
    else fprintf(stderr, TOOL ": %s cannot be opened\n", files->path[i]);
    if (!t->text[t->count++]) return false;
  }
  return true;
}

static tfm_tokenizer *tokenizer_train(const options *o, tfm_vocabulary kind, int32_t size) {
  static const char *const special[] = {"<|endoftext|>", "<unk>"};
  const run_options *r = &o->run;
  size_t all = r->texts.count + r->held_out.count;
  texts t = {(char **)calloc(all, sizeof *t.text), (size_t *)calloc(all, sizeof *t.bytes), 0};
  tfm_vocabulary_config c;
  tfm_tokenizer *made = NULL;
  memset(&c, 0, sizeof c);
  c.host.progress = tool_progress;
  c.host.cancel = &interrupted;
  c.kind = kind;
  c.size = size;
  c.special = special;
  c.special_count = kind == TFM_WORDS ? 2 : 1;
  c.threads = r->config.threads;
  if (t.text && t.bytes && texts_read(&t, &r->texts) &&
      (kind != TFM_CHARACTERS || texts_read(&t, &r->held_out))) { /* whose letters count too */
    made = tfm_tokenizer_train((const char *const *)t.text, t.bytes, t.count, &c);
    if (!made) tool_fail();
  }
  while (t.count) free(t.text[--t.count]);
  free(t.text);
  free(t.bytes);
  return made;
}

/* The N of "bpe:N". */
static bool size_read(const char *text, int32_t *size) {
  char *end;
  long n = strtol(text, &end, 10);
  *size = (int32_t)n;
  if (end != text && !*end && n >= 1 && n <= INT32_MAX) return true;
  fprintf(stderr, TOOL ": --tokenizer: expected a number of tokens, found \"%s\"\n", text);
  return false;
}

/* The tokenizer that --tokenizer names: built from the texts, or a file's. */
static tfm_tokenizer *tokenizer_named(const options *o) {
  static const struct { const char *name; tfm_vocabulary kind; } kinds[] = {
    {"char", TFM_CHARACTERS}, {"word", TFM_WORDS}, {"bpe", TFM_BPE}};
  tfm_tokenizer *t;
  int32_t size;
  size_t i;
  for (i = 0; i < 3; i++) {
    size_t n = strlen(kinds[i].name);
    if (strncmp(o->tokenizer, kinds[i].name, n)) continue;
    if (o->tokenizer[n] == 0) return tokenizer_train(o, kinds[i].kind, 0);
    if (o->tokenizer[n] == ':')
      return size_read(o->tokenizer + n + 1, &size) ? tokenizer_train(o, kinds[i].kind, size)
                                                    : NULL;
  }
  t = tfm_tokenizer_load(o->tokenizer, NULL);
  if (!t) tool_fail();
  return t;
}

/* A run that goes on has one; a new one leaves it in its folder, where that can be written. */
static tfm_tokenizer *tokenizer_open(const options *o) {
  char path[RUN_ROOM];
  tfm_tokenizer *t;
  if (o->run.resume && access(run_path(&o->run, "tokenizer.json", path), R_OK) == 0) {
    t = tfm_tokenizer_load(path, NULL);
    if (!t) tool_fail();
    return t;
  }
  t = tokenizer_named(o);
  if (t && o->run.folder &&
      tfm_tokenizer_save(t, run_path(&o->run, "tokenizer.json", path)) != TFM_OK)
    fprintf(stderr, TOOL ": %s\n", tfm_error());
  return t;
}

/* ---- Which rate ---- */

/* The loss after some steps at one rate, from the same weights over the same texts; NaN where it
   did not stay finite. */
static tfm_status loss_at(run *r, const options *o, float rate, double *loss) {
  tfm_trainer_config c = o->run.config;
  tfm_status status = TFM_OK;
  int32_t i, last = o->lr_find < 10 ? o->lr_find : 10;
  c.lr = rate;
  c.min_lr = 0;
  c.schedule = TFM_CONSTANT;
  c.warmup = o->lr_find / 10;
  r->trainer = tfm_trainer_init(&o->shape, &c);
  if (!r->trainer) return tfm_error_status();
  r->sequences = 0;
  *loss = 0;
  for (i = 0; i < o->lr_find && status == TFM_OK; i++) {
    tfm_step s = {0};
    status = run_step(r, &s);
    if (s.skipped) *loss = NAN;
    if (i >= o->lr_find - last) *loss += s.loss / last;
  }
  tfm_trainer_free(r->trainer);
  r->trainer = NULL;
  return status;
}

static int lr_find(run *r, const options *o) {
  plot_line line = {"loss", "#4878cf", NULL, NULL, 0, 0, true};
  plot p = {"loss after a few steps at each learning rate", "learning rate", "", &line, 1, true};
  const tfm_trainer_config *c = &o->run.config;
  char path[RUN_ROOM];
  int i;
  r->info.batch = c->batch;
  r->info.accumulate = c->accumulate;
  r->info.context = c->context;
  for (i = 0; run_room(r) && i < 13 && !interrupted; i++) {
    float rate = powf(10, -5 + (float)i / 3);
    double loss = 0;
    if (loss_at(r, o, rate, &loss) != TFM_OK) break;
    fprintf(stderr, "lr %.1e  loss %.4f\n", (double)rate, loss);
    p.lines = &line;
    plot_add(&line, (double)rate, loss);
    if (o->run.folder) plot_write(&p, run_path(&o->run, "lr.svg", path));
  }
  plot_free(&line);
  return i == 13 ? 0 : interrupted ? TOOL_CANCELLED : tool_fail();
}

static tfm_trainer *trainer_make(const void *origin, const tfm_trainer_config *config) {
  return tfm_trainer_init((const tfm_shape *)origin, config);
}

static int run_all(options *o, run *r, tfm_tokenizer *tokenizer) {
  tfm_tokenizer_info v = {0};
  r->o = &o->run;
  r->tokenizer = tokenizer;
  if (tfm_tokenizer_describe(tokenizer, &v) != TFM_OK || !run_data_open(r)) return tool_fail();
  o->run.config.data = r->data->mark;
  o->shape.vocabulary = v.vocabulary;
  o->shape.context = o->run.config.context;
  o->shape.seed = o->run.seed;
  o->shape.tokenizer = tokenizer;
  if (o->lr_find) return lr_find(r, o);
  return run_make(r, &o->run, trainer_make, &o->shape) ? run_loop(r) : tool_fail();
}

int main(int argc, char **argv) {
  options o;
  run r;
  tfm_tokenizer *tokenizer = NULL;
  int status = TOOL_FAILED;
  memset(&o, 0, sizeof o);
  memset(&r, 0, sizeof r);
  run_defaults(&o.run, argc);
  tool_parse(&parser, argc, argv, &o);
  if (!preset_apply(&o)) return TOOL_USAGE;
  run_settle(&o.run);
  signal(SIGINT, on_interrupt);
  if (o.run.folder) mkdir(o.run.folder, 0777);
  if (run_list(&o.run)) tokenizer = tokenizer_open(&o);
  if (tokenizer) status = run_all(&o, &r, tokenizer);
  else if (interrupted) status = TOOL_CANCELLED;
  run_free(&r);
  tfm_tokenizer_free(tokenizer);
  run_options_free(&o.run);
  return tool_finish(status);
}
