/* inspect.c - what a model file holds, and what it would take to run it.

   build:   cc -O3 -march=native -o inspect examples/inspect.c -lm -lpthread
   run:     ./inspect stories260K.bin --context 512
   output:  family       llama
            format       llama2.c
            layers       5
            ...          and the memory that a model and a session of 512 positions take.
   Exit status 1 and one sentence for whatever does not load. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "inspect"
#include "common.h"

typedef struct options {
  tfm_model_config model;
  tfm_engine_config engine;
  const char *path;
  bool json, tensors;
} options;

static const struct argp_option option_list[] = {
  {"context", 'c', "N", 0, "Plan for N positions; 0, the default: the model's, at most 4096", 0},
  {"sequences", 's', "N", 0, "Plan for N sequences at a time, default 1", 0},
  {"tensors", 't', NULL, 0, "Every tensor's name, shape, type and size instead, of any model", 0},
  {"json", 'J', NULL, 0, "One JSON object instead of a table", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'c':
    o->engine.context = (int32_t)tool_integer(state, "--context", arg, 0, INT32_MAX);
    return 0;
  case 's':
    o->engine.sequences = (int32_t)tool_integer(state, "--sequences", arg, 1, INT32_MAX);
    return 0;
  case 't': o->tensors = true; return 0;
  case 'J': o->json = true; return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_NO_ARGS: argp_error(state, "expected a MODEL: a folder or a file"); return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Tells what a model file holds and what memory it takes.\v"
  "Exit status: 0, or 1 when it does not load, 2 on wrong usage.",
  tool_model_child, NULL, NULL};

/* ---- Two ways to print a name with its value ---- */

static bool as_json;
static int name_width = 20;
static int printed; /* values so far: JSON wants commas between them */

static void print_name(const char *name) {
  if (as_json) printf("%s\n  \"%s\": ", printed ? "," : "{", name);
  else printf("%-*s ", name_width, name);
  printed++;
}

static void print_string(const char *name, const char *value) {
  print_name(name);
  if (as_json) putchar('"');
  for (; *value; value++) {
    unsigned char c = (unsigned char)*value;
    if (!as_json || (c >= 0x20 && c != '"' && c != '\\')) putchar(c);
    else printf("\\u%04x", c);
  }
  fputs(as_json ? "\"" : "\n", stdout);
}

static void print_count(const char *name, uint64_t value) {
  print_name(name);
  printf(as_json ? "%llu" : "%llu\n", (unsigned long long)value);
}

static void print_bytes(const char *name, uint64_t bytes) {
  static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
  double size = (double)bytes / 1024;
  int unit = 0;
  print_name(name);
  printf("%llu", (unsigned long long)bytes);
  if (as_json) return;
  while (size >= 1024 && unit < 3) size /= 1024, unit++;
  printf(bytes >= 1024 ? " bytes, %.1f %s\n" : " bytes\n", size, units[unit]);
}

static void print_id(const char *name, int32_t id) {
  if (id < 0) print_string(name, "none");
  else print_count(name, (uint64_t)id);
}

/* ---- What is printed ---- */

static void print_model(const tfm_model_info *info) {
  int32_t i;
  print_string("family", info->family);
  print_string("format", info->format);
  print_string("device", info->device);
  print_count("layers", (uint64_t)info->layers);
  print_count("width", (uint64_t)info->width);
  print_count("heads", (uint64_t)info->heads);
  print_count("kv_heads", (uint64_t)info->kv_heads);
  print_count("head_width", (uint64_t)info->head_width);
  print_count("ffn_width", (uint64_t)info->ffn_width);
  print_count("vocabulary", (uint64_t)info->vocabulary);
  if (info->experts) print_count("experts", (uint64_t)info->experts);
  print_count("context", (uint64_t)info->context);
  print_string("head", info->tied ? "tied to the embedding" : "its own");
  print_string("weights", tfm_type_name(info->weights));
  print_id("bos", info->bos);
  print_name("end");
  if (as_json) putchar('[');
  for (i = 0; i < info->end_count; i++) printf("%s%d", i ? ", " : "", (int)info->end[i]);
  fputs(as_json ? "]" : info->end_count ? "\n" : "none\n", stdout);
  print_count("parameters", info->parameters);
  print_bytes("token_bytes", info->token_bytes);
}

static void print_plan(const tfm_plan *plan) {
  print_bytes("mapped_bytes", plan->mapped_bytes);
  print_bytes("load_peak_bytes", plan->load_peak_bytes);
  print_bytes("model_bytes", plan->model_bytes);
  print_bytes("engine_bytes", plan->engine_bytes);
  print_bytes("cache_bytes", plan->cache_bytes);
  print_bytes("workspace_bytes", plan->workspace_bytes);
}

static void print_tokenizer(const char *path) {
  tfm_tokenizer *t = tfm_tokenizer_load(path, NULL);
  tfm_tokenizer_info info;
  if (tfm_tokenizer_describe(t, &info) != TFM_OK) {
    print_string("tokenizer", "none");
    print_string("tokenizer_reason", tfm_error());
    return;
  }
  print_string("tokenizer", info.kind);
  print_count("tokenizer_vocabulary", (uint64_t)info.vocabulary);
  tfm_tokenizer_free(t);
}

static void print_tensor(void *user, const tfm_tensor_info *t) {
  int i;
  (void)user;
  print_name(t->name);
  printf(as_json ? "{\"type\": \"%s\", \"shape\": [" : "%-8s [", t->type);
  for (i = 0; i < t->rank && i < 4; i++)
    printf("%s%llu", i ? ", " : "", (unsigned long long)t->dims[i]);
  if (t->rank > 4) printf(as_json ? ", null" : ", ...");
  printf(as_json ? "], \"bytes\": %llu}" : "] %llu bytes\n", (unsigned long long)t->bytes);
}

static int print_tensors(const options *o) {
  name_width = 44;
  if (tfm_model_tensors(o->path, &o->model.host, print_tensor, NULL) != TFM_OK) return tool_fail();
  if (as_json) printf(printed ? "\n}\n" : "{}\n");
  return tool_finish(0);
}

int main(int argc, char **argv) {
  options o;
  tfm_model *m;
  tfm_model_info info;
  tfm_plan plan;
  memset(&o, 0, sizeof o);
  tool_parse(&parser, argc, argv, &o);
  o.engine.threads = o.model.threads;
  as_json = o.json;
  if (o.tensors) return print_tensors(&o);
  m = tfm_model_load(o.path, &o.model);
  if (tfm_model_describe(m, &info) != TFM_OK ||
      tfm_plan_memory(o.path, &o.model, &o.engine, &plan) != TFM_OK) {
    tfm_model_free(m);
    return tool_fail();
  }
  print_string("path", o.path);
  print_model(&info);
  print_plan(&plan);
  print_tokenizer(o.path);
  if (as_json) printf("\n}\n");
  tfm_model_free(m);
  return tool_finish(0);
}
