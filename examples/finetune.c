/* finetune.c - goes on training a model that exists, on your texts: all of it, or chosen parts.

   build:   cc -O3 -march=native -o finetune examples/finetune.c -lm -lpthread
   run:     ./finetune MODEL book.txt -o mine
            ./finetune MODEL book.txt -o mine --first-layer 8 --freeze embeddings,norms
   output:  as train's: DIR gets the model with its tokenizer's files, checkpoint, log, chart and
            samples. Ctrl-C saves and exits with status 130; --resume goes on. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "finetune"
#include "common.h"
#include "training.h"

typedef struct options {
  run_options run;
  const char *model;
} options;

static error_t option_parse(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->run; return 0;
  case ARGP_KEY_ARG:
    if (!o->model) o->model = arg;
    else o->run.named[o->run.named_count++] = arg;
    return 0;
  case ARGP_KEY_END:
    if (!o->run.named_count) argp_error(state, "expected a MODEL and DATA to learn from");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {NULL, option_parse, "MODEL DATA...",
                                   "Trains a model further, on texts: files, or folders of them.",
                                   run_child, NULL, NULL};

static tfm_trainer *trainer_make(const void *origin, const tfm_trainer_config *config) {
  return tfm_trainer_create((const tfm_model *)origin, config);
}

static int run_all(options *o, run *r, const tfm_model *model, tfm_tokenizer *tokenizer) {
  r->o = &o->run;
  r->tokenizer = tokenizer;
  if (!run_data_open(r)) return tool_fail();
  o->run.config.data = r->data->mark;
  if (!run_make(r, &o->run, trainer_make, model)) return tool_fail();
  if (o->run.folder && !tokenizer_copy(tokenizer, o->model, o->run.folder))
    return TOOL_FAILED;
  return run_loop(r);
}

int main(int argc, char **argv) {
  options o;
  run r;
  tfm_model *model;
  tfm_tokenizer *tokenizer;
  tfm_model_info info = {0};
  int status;
  memset(&o, 0, sizeof o);
  memset(&r, 0, sizeof r);
  run_defaults(&o.run, argc);
  tool_parse(&parser, argc, argv, &o);
  signal(SIGINT, on_interrupt);
  model = tfm_model_load(o.model, NULL);
  tokenizer = model ? tfm_tokenizer_load(o.model, NULL) : NULL;
  if (tfm_model_describe(model, &info) == TFM_OK && !o.run.config.context)
    o.run.config.context = info.context < 256 ? info.context : 256;
  if (o.run.config.lr == 0) o.run.config.lr = 1e-4f;
  run_settle(&o.run);
  if (o.run.folder) mkdir(o.run.folder, 0777);
  if (!tokenizer) status = tool_fail();
  else status = run_list(&o.run) ? run_all(&o, &r, model, tokenizer) : TOOL_FAILED;
  run_free(&r);
  tfm_tokenizer_free(tokenizer);
  tfm_model_free(model);
  run_options_free(&o.run);
  return tool_finish(status);
}
