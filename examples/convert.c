/* convert.c - a model's files written in another format or number type.

   build:   cc -O3 -march=native -o convert examples/convert.c -lm -lpthread
   run:     ./convert stories260K.bin stories260K.gguf --type q8_0 --report
   output:  blk.0.attn_k.weight      F32   [32, 64] -> Q8_0  2176 bytes, error 0.00463
            ...                      one line for each tensor, with --report
            47 tensors, 1040128 bytes become 292352
   A folder is written where OUT does not end with .gguf: config.json, model.safetensors, and the
   tokenizer's files as they are. Ctrl-C stops it and leaves nothing half written. Exit status 1 and
   one sentence for whatever goes wrong. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "convert"
#include "common.h"
#include <signal.h>

typedef struct options {
  tfm_convert_config config;
  const char *from, *to;
  bool report;
  uint64_t tensors, bytes, new_bytes;
} options;

static const struct argp_option option_list[] = {
  {"type", 't', "TYPE", 0,
   "Matrices become f32, f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1; default: as they are", 0},
  {"force", 'f', NULL, 0, "Overwrite what is there", 0},
  {"report", 'r', NULL, 0, "Tell for each tensor what became of it and how much it lost", 0},
  {"threads", 'j', "N", 0, "Use N threads; 0, the default: one per core", 0},
  {"verbose", 'v', NULL, 0, "Tell on stderr what the library logs", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static volatile int32_t interrupted;

static void interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
}

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 't': o->config.type = tool_type(state, "--type", arg); return 0;
  case 'f': o->config.overwrite = true; return 0;
  case 'r': o->report = true; return 0;
  case 'j': o->config.threads = (int32_t)tool_integer(state, "--threads", arg, 0, 1024); return 0;
  case 'v': o->config.host.log = tool_log; return 0;
  case ARGP_KEY_ARG:
    if (o->to) argp_error(state, "expected MODEL and OUT, found another: \"%s\"", arg);
    *(o->from ? &o->to : &o->from) = arg;
    return 0;
  case ARGP_KEY_END:
    if (!o->to) argp_error(state, "expected MODEL and OUT");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL OUT",
  "Writes a model as a Hugging Face folder or, when OUT ends with .gguf, as a GGUF file.\v"
  "Exit status: 0, or 1 when it could not be written, 2 on wrong usage.",
  NULL, NULL, NULL};

static void print_tensor(void *user, const tfm_tensor_info *t) {
  options *o = (options *)user;
  char shape[100] = "";
  int i, n = 0;
  o->tensors++;
  o->bytes += t->bytes;
  o->new_bytes += t->new_bytes;
  if (!o->report) return;
  for (i = 0; i < t->rank && i < 4; i++)
    n += snprintf(shape + n, sizeof shape - (size_t)n, "%s%llu", i ? ", " : "",
                  (unsigned long long)t->dims[i]);
  printf("%-44s %-5s [%s] -> %-5s %llu bytes, error %.3g\n", t->new_name, t->type, shape,
         t->new_type, (unsigned long long)t->new_bytes, t->error);
}

int main(int argc, char **argv) {
  options o;
  memset(&o, 0, sizeof o);
  o.config.host.progress = tool_progress;
  o.config.host.cancel = &interrupted;
  o.config.visitor = print_tensor;
  o.config.user = &o;
  tool_parse(&parser, argc, argv, &o);
  signal(SIGINT, interrupt);
  if (tfm_convert(o.from, o.to, &o.config) != TFM_OK) return tool_fail();
  printf("%llu tensors, %llu bytes become %llu\n", (unsigned long long)o.tensors,
         (unsigned long long)o.bytes, (unsigned long long)o.new_bytes);
  return tool_finish(0);
}
