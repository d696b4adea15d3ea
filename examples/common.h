/* What the tools share: options of every model, numbers and names from the command line, progress.
   Include it after transformer.h, with TOOL defined as the tool's name. Not part of the library. */
#ifndef EXAMPLES_COMMON_H
#define EXAMPLES_COMMON_H

#include <argp.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

const char *argp_program_version = TOOL " (transformer.h) " TFM_VERSION;

enum { TOOL_FAILED = 1, TOOL_USAGE = 2, TOOL_CANCELLED = 130 }; /* exit statuses beside 0 */

static inline int tool_fail(void) {
  fprintf(stderr, TOOL ": %s\n", tfm_error());
  return tfm_error_status() == TFM_E_CANCELLED ? TOOL_CANCELLED : TOOL_FAILED;
}

/* ---- Arguments; a bad one ends the program with a hint at --help ---- */

static inline int64_t tool_integer(struct argp_state *state, const char *option, const char *text,
                                   int64_t low, int64_t high) {
  char *end;
  long long value;
  errno = 0;
  value = strtoll(text, &end, 10);
  if (end == text || *end || errno || value < low || value > high)
    argp_error(state, "%s: expected a whole number from %lld to %lld, found \"%s\"", option,
               (long long)low, (long long)high, text);
  return value;
}

static inline float tool_number(struct argp_state *state, const char *option, const char *text,
                                float low, float high) {
  char *end;
  float value = strtof(text, &end);
  if (end == text || *end || !(value >= low && value <= high))
    argp_error(state, "%s: expected a number from %g to %g, found \"%s\"", option, (double)low,
               (double)high, text);
  return value;
}

static inline tfm_type tool_type(struct argp_state *state, const char *option, const char *text) {
  static const tfm_type types[] = {TFM_F32, TFM_F16, TFM_BF16, TFM_Q8_0, TFM_Q4_0,
                                   TFM_Q4_1, TFM_Q5_0, TFM_Q5_1, TFM_F8_E4M3};
  size_t i;
  for (i = 0; i < sizeof types / sizeof *types; i++)
    if (!strcasecmp(text, tfm_type_name(types[i]))) return types[i];
  argp_error(state, "%s: expected f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1 or f8_e4m3, found "
             "\"%s\"", option, text);
  return TFM_TYPE_DEFAULT;
}

static inline tfm_device tool_device(struct argp_state *state, const char *option,
                                     const char *text) {
  static const char *const names[] = {"auto", "ref", "cpu", "cuda"};
  int i;
  for (i = 0; i < 4; i++)
    if (!strcasecmp(text, names[i])) return (tfm_device)i;
  argp_error(state, "%s: expected auto, ref, cpu or cuda, found \"%s\"", option, text);
  return TFM_AUTO;
}

/* ---- Progress and log ---- */

/* For tfm_host.progress: "loading 45 %" where stderr is a terminal, removed when done. */
static inline bool tool_progress(void *user, const char *phase, double done) {
  static int shown = -1;
  int percent = (int)(100 * done);
  (void)user;
  if (percent == shown || !isatty(STDERR_FILENO)) return true;
  shown = percent;
  if (done < 1) fprintf(stderr, "\r" TOOL ": %s %d %%", phase, percent);
  else fprintf(stderr, "\r\033[K");
  return true;
}

static inline void tool_log(void *user, tfm_log_level level, const char *line) {
  (void)user;
  fprintf(stderr, TOOL ": %s%s\n", level == TFM_LOG_INFO ? "" : "warning: ", line);
}

/* ---- The options that belong to loading a model: a child parser whose input is a config ---- */

static const struct argp_option tool_model_options[] = {
  {"device", 'd', "NAME", 0, "Compute on auto (the fastest there is), ref, cpu or cuda", 0},
  {"backend", 0, NULL, OPTION_ALIAS, NULL, 0},
  {"weights", 'w', "TYPE", 0,
   "Convert matrices to f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1 or, on a GPU, f8_e4m3 while "
   "loading", 0},
  {"threads", 'j', "N", 0, "Use N threads; 0, the default: one per core", 0},
  {"override", 'o' + 256, "LIST", 0, "Run these by the reference: \"attn,norm\" or \"all\"", 0},
  {"no-mmap", 'm' + 256, NULL, 0, "Read files instead of mapping them", 0},
  {"verbose", 'v', NULL, 0, "Tell on stderr what the library logs", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static inline error_t tool_model_option(int key, char *arg, struct argp_state *state) {
  tfm_model_config *c = (tfm_model_config *)state->input;
  switch (key) {
  case 'd':
    c->device = tool_device(state, "--device", arg);
    c->no_fallback = c->device != TFM_AUTO;
    return 0;
  case 'w': c->weights = tool_type(state, "--weights", arg); return 0;
  case 'j': c->threads = (int32_t)tool_integer(state, "--threads", arg, 0, 1024); return 0;
  case 'o' + 256: c->override = arg; return 0;
  case 'm' + 256: c->no_mmap = true; return 0;
  case 'v': c->host.log = tool_log; return 0;
  case ARGP_KEY_INIT: c->host.progress = tool_progress; return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp tool_model_argp = {tool_model_options, tool_model_option, NULL, NULL,
                                            NULL, NULL, NULL};
static const struct argp_child tool_model_child[] = {{&tool_model_argp, 0, "Model:", 10},
                                                     {NULL, 0, NULL, 0}};

/* For the parent parser's ARGP_KEY_ARG: the one positional argument. */
static inline error_t tool_only_argument(struct argp_state *state, char *arg, const char **path) {
  if (*path) argp_error(state, "expected one argument, found another: \"%s\"", arg);
  *path = arg;
  return 0;
}

static inline void tool_parse(const struct argp *argp, int argc, char **argv, void *options) {
  argp_err_exit_status = TOOL_USAGE;
  argp_parse(argp, argc, argv, 0, NULL, options);
}

/* ---- Whole files ---- */

/* All of a stream, followed by a NUL; NULL with a line on stderr on failure. */
static inline char *tool_read_all(FILE *f, size_t *bytes) {
  char *text = NULL;
  size_t room = 0, n = 0;
  do {
    char *grown = (char *)realloc(text, (room = 2 * room + 4096) + 1);
    if (!grown) break;
    text = grown;
    n += fread(text + n, 1, room - n, f);
  } while (n == room);
  if (n == room || ferror(f) || !text) {
    fprintf(stderr, TOOL ": the input cannot be read to its end: %s\n", strerror(errno));
    free(text);
    return NULL;
  }
  text[n] = 0;
  *bytes = n;
  return text;
}

/* Token ids separated by blanks or commas; NULL with a line on stderr on failure. */
static inline int32_t *tool_read_ids(const char *text, size_t *count) {
  int32_t *ids = (int32_t *)malloc((strlen(text) / 2 + 1) * sizeof *ids);
  const char *at = text;
  *count = 0;
  while (ids && *(at += strspn(at, " ,\t\r\n"))) {
    char *end;
    long id = strtol(at, &end, 10);
    if (end == at || id < 0 || id > INT32_MAX || !strchr(" ,\t\r\n", *end)) {
      fprintf(stderr, TOOL ": expected token ids, found \"%.20s\"\n", at);
      free(ids);
      return NULL;
    }
    ids[(*count)++] = (int32_t)id;
    at = end;
  }
  return ids;
}

/* Flushes stdout and tells whether all that was written got there: the last thing a tool does. */
static inline int tool_finish(int status) {
  if (fflush(stdout) == 0 && !ferror(stdout)) return status;
  fprintf(stderr, TOOL ": the output cannot be written\n");
  return TOOL_FAILED;
}

#endif
