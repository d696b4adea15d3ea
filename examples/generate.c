/* generate.c - continues a text, word by word as it is computed.

   build:   cc -O3 -march=native -o generate examples/generate.c -lm -lpthread
   run:     ./generate stories260K.bin -p "Once upon a time" -t 0 -n 40
   output:  Once upon a time, there was a little girl named Lily. She loved to play outside ...
            and on stderr how fast that was. Ctrl-C stops cleanly, with exit status 130. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "generate"
#include "common.h"
#include <signal.h>
#include <time.h>

enum { STOPS_MAX = 16 };
enum { KEY_TOP_K = 256 + 32, KEY_TOP_P, KEY_MIN_P, KEY_PENALTY, KEY_STOP, KEY_CACHE, KEY_TOKENIZER,
       KEY_NO_PROMPT };

typedef struct options {
  tfm_model_config model;
  tfm_engine_config engine;
  tfm_generate_config generate;
  const char *path, *tokenizer, *prompt, *stops[STOPS_MAX];
  bool seeded, no_prompt;
} options;

/* ---- Ctrl-C ---- */

static volatile int32_t interrupted;    /* stops a load */
static tfm_session *volatile in_session; /* what it stops after that */

static void on_interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
  tfm_cancel(in_session);
}

static void catch_interrupt(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  action.sa_flags = (int)SA_RESETHAND; /* a second Ctrl-C ends the program at once */
  sigaction(SIGINT, &action, NULL);
}

/* ---- Options ---- */

static const struct argp_option option_list[] = {
  {"prompt", 'p', "TEXT", 0, "Continue TEXT; without it, start from the model's BOS token", 0},
  {"tokens", 'n', "N", 0, "Generate at most N tokens, default 256; 0: to the end", 0},
  {"temperature", 't', "T", 0, "Default 0.8; 0: always the most probable token", 0},
  {"top-k", KEY_TOP_K, "K", 0, "Choose among the K most probable tokens; 0, the default: all", 0},
  {"top-p", KEY_TOP_P, "P", 0, "Choose among tokens that sum up to P, default 0.95; 1: all", 0},
  {"min-p", KEY_MIN_P, "P", 0, "Leave out tokens below P times the best one; default 0: none", 0},
  {"repeat-penalty", KEY_PENALTY, "R", 0, "Make used tokens less probable; 1, the default: off", 0},
  {"seed", 's', "S", 0, "Repeat an earlier run; default: from the clock, told on stderr", 0},
  {"stop", KEY_STOP, "TEXT", 0, "End before TEXT; may be given up to 16 times", 0},
  {"no-prompt", KEY_NO_PROMPT, NULL, 0, "Print the continuation only", 0},
  {"tokenizer", KEY_TOKENIZER, "FILE", 0, "By default found in or beside MODEL", 0},
  {"context", 'c', "N", 0, "Positions; 0, the default: the model's, at most 4096", 0},
  {"cache", KEY_CACHE, "TYPE", 0, "Keep keys and values as f32, f16 or bf16", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static void add_stop(options *o, struct argp_state *state, const char *text) {
  if (o->generate.stop_count == STOPS_MAX) argp_error(state, "--stop: at most %d times", STOPS_MAX);
  o->stops[o->generate.stop_count++] = text;
}

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  tfm_sampling *how = &o->generate.sampling;
  switch (key) {
  case 'p': o->prompt = arg; return 0;
  case 'n':
    o->generate.max_tokens = (int32_t)tool_integer(state, "-n", arg, 0, INT32_MAX);
    return 0;
  case 't': how->temperature = tool_number(state, "-t", arg, 0, 1e6f); return 0;
  case KEY_TOP_K: how->top_k = (int32_t)tool_integer(state, "--top-k", arg, 0, INT32_MAX); return 0;
  case KEY_TOP_P: how->top_p = tool_number(state, "--top-p", arg, 0, 1); return 0;
  case KEY_MIN_P: how->min_p = tool_number(state, "--min-p", arg, 0, 1); return 0;
  case KEY_PENALTY:
    how->repetition_penalty = tool_number(state, "--repeat-penalty", arg, 0, 1e6f);
    return 0;
  case 's':
    how->seed = (uint64_t)tool_integer(state, "--seed", arg, 0, INT64_MAX);
    o->seeded = true;
    return 0;
  case KEY_STOP: add_stop(o, state, arg); return 0;
  case KEY_NO_PROMPT: o->no_prompt = true; return 0;
  case KEY_TOKENIZER: o->tokenizer = arg; return 0;
  case 'c':
    o->engine.context = (int32_t)tool_integer(state, "--context", arg, 0, INT32_MAX);
    return 0;
  case KEY_CACHE: o->engine.cache = tool_type(state, "--cache", arg); return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_NO_ARGS: argp_error(state, "expected a MODEL: a folder or a file"); return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Continues a text with a language model.\v"
  "MODEL is a Hugging Face folder, a .safetensors file, a GGUF file, or a llama2.c checkpoint. The "
  "prompt and its continuation go to stdout as they are computed, all else goes to stderr.\n\n"
  "Exit status: 0, or 1 on failure, 2 on wrong usage, 130 when interrupted.",
  tool_model_child, NULL, NULL};

/* ---- The work ---- */

static bool print_text(void *user, const char *text, size_t bytes) {
  (void)user;
  return fwrite(text, 1, bytes, stdout) == bytes && fflush(stdout) == 0;
}

static double rate(uint64_t tokens, double seconds) {
  return seconds > 0 ? (double)tokens / seconds : 0;
}

static void print_speed(const tfm_session *s, const tfm_model_info *info) {
  tfm_stats stats;
  if (tfm_session_stats(s, &stats) != TFM_OK) return;
  fprintf(stderr,
          TOOL ": prompt %llu tokens, %.1f tokens/s; generated %llu tokens, %.1f tokens/s "
               "(%s, %d threads)\n",
          (unsigned long long)stats.prompt_tokens, rate(stats.prompt_tokens, stats.prompt_seconds),
          (unsigned long long)stats.generated_tokens,
          rate(stats.generated_tokens, stats.generate_seconds), info->device, (int)stats.threads);
}

static int continue_text(tfm_session *s, const tfm_tokenizer *t, const options *o,
                         const tfm_model_info *info) {
  int64_t tokens;
  if (!o->seeded && o->generate.sampling.temperature > 0)
    fprintf(stderr, TOOL ": seed %llu\n", (unsigned long long)o->generate.sampling.seed);
  if (!o->no_prompt) print_text(NULL, o->prompt, strlen(o->prompt));
  in_session = s;
  if (interrupted) tfm_cancel(s); /* before the handler knew the session */
  tokens = tfm_generate(s, t, o->prompt, &o->generate);
  in_session = NULL;
  putchar('\n');
  if (tokens < 0 && tokens != TFM_E_CANCELLED) return tool_fail();
  print_speed(s, info);
  return tokens == TFM_E_CANCELLED ? TOOL_CANCELLED : 0;
}

static tfm_tokenizer *load_tokenizer(const options *o, const tfm_model_info *info) {
  tfm_tokenizer_config config;
  memset(&config, 0, sizeof config);
  config.host = o->model.host;
  if (!strcmp(info->format, "llama2.c")) config.vocabulary = info->vocabulary;
  return tfm_tokenizer_load(o->tokenizer ? o->tokenizer : o->path, &config);
}

static int run(const options *o) {
  tfm_model *m = tfm_model_load(o->path, &o->model);
  tfm_tokenizer *t = NULL;
  tfm_session *s = NULL;
  tfm_model_info info;
  int status;
  if (tfm_model_describe(m, &info) == TFM_OK) t = load_tokenizer(o, &info);
  if (t) s = tfm_session_create(m, &o->engine);
  status = s ? continue_text(s, t, o, &info) : tool_fail();
  tfm_session_free(s);
  tfm_tokenizer_free(t);
  tfm_model_free(m);
  return interrupted ? TOOL_CANCELLED : status;
}

int main(int argc, char **argv) {
  options o;
  memset(&o, 0, sizeof o);
  o.prompt = "";
  o.generate.max_tokens = 256;
  o.generate.sampling.temperature = 0.8f;
  o.generate.sampling.top_p = 0.95f;
  o.generate.sampling.seed = (uint64_t)time(NULL);
  o.generate.stop = o.stops;
  o.generate.on_text = print_text;
  tool_parse(&parser, argc, argv, &o);
  o.engine.threads = o.model.threads;
  o.engine.host = o.model.host;
  o.model.host.cancel = &interrupted;
  catch_interrupt();
  return tool_finish(run(&o));
}
