/* generate.c - continues a text, word by word as it is computed, or talks with you.

   build:   cc -O3 -march=native -o generate examples/generate.c -lm -lpthread
   run:     ./generate stories260K.bin -p "Once upon a time" -t 0 -n 40
   output:  Once upon a time, there was a little girl named Lily. She loved to play outside ...
            and on stderr how fast that was. Ctrl-C stops cleanly, with exit status 130.
   talk:    ./generate Qwen2.5-0.5B-Instruct --chat --system "Be brief." */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "generate"
#include "common.h"
#include <signal.h>
#include <time.h>

enum { STOPS_MAX = 16 };
enum { KEY_TOP_K = 256 + 32, KEY_TOP_P, KEY_MIN_P, KEY_PENALTY, KEY_STOP, KEY_CACHE, KEY_TOKENIZER,
       KEY_NO_PROMPT, KEY_CHAT, KEY_TEMPLATE, KEY_SYSTEM };

typedef struct options {
  tfm_model_config model;
  tfm_engine_config engine;
  tfm_generate_config generate;
  const char *path, *tokenizer, *prompt, *stops[STOPS_MAX];
  const char *chat_template, *system;
  bool seeded, no_prompt, chat;
} options;

/* ---- Ctrl-C ---- */

static volatile int32_t interrupted;    /* stops a load */
static tfm_session *volatile in_session; /* what it stops after that */

static void on_interrupt(int signal_number) {
  (void)signal_number;
  interrupted = 1;
  tfm_cancel(in_session);
}

static void catch_interrupt(int flags) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_interrupt;
  action.sa_flags = flags;
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
  {"chat", KEY_CHAT, NULL, 0, "A conversation: lines from stdin, answers to stdout", 0},
  {"template", KEY_TEMPLATE, "NAME", 0,
   "Write it as NAME does (chatml, llama3, ...); default: the model's own, where that is known", 0},
  {"system", KEY_SYSTEM, "TEXT", 0, "Begin it with instructions to the model", 0},
  {"tokenizer", KEY_TOKENIZER, "FILE", 0, "By default found in or beside MODEL", 0},
  {"context", 'c', "N", 0, "Positions; 0, the default: the model's, at most 4096", 0},
  {"cache", KEY_CACHE, "TYPE", 0, "Keep keys and values as f32, f16, bf16 or q8_0", 0},
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
  case KEY_CHAT: o->chat = true; return 0;
  case KEY_TEMPLATE: o->chat_template = arg; return 0;
  case KEY_SYSTEM: o->system = arg; return 0;
  case KEY_TOKENIZER: o->tokenizer = arg; return 0;
  case 'c':
    o->engine.context = (int32_t)tool_integer(state, "--context", arg, 0, INT32_MAX);
    return 0;
  case KEY_CACHE: o->engine.cache = tool_type(state, "--cache", arg); return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_NO_ARGS: argp_error(state, "expected a MODEL: a folder or a file"); return 0;
  case ARGP_KEY_END:
    if (o->chat && o->generate.stop_count) argp_error(state, "--stop does not go with --chat");
    if (!o->chat && (o->chat_template || o->system))
      argp_error(state, "--template and --system go with --chat");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Continues a text with a language model.\v"
  "MODEL is a Hugging Face folder, a .safetensors file, a GGUF file, or a llama2.c checkpoint. The "
  "prompt and its continuation go to stdout as they are computed, all else goes to stderr.\n\n"
  "With --chat each line of stdin is a message, --prompt the first one; /system TEXT, /reset and "
  "/help are commands, Ctrl-C stops an answer, Ctrl-D ends. When the context is full the oldest "
  "messages are forgotten, which is told.\n\n"
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

static void print_usage(const tfm_stats *stats) { /* of a GPU */
  double busy = 0;
  int i;
  for (i = 0; i < TFM_WORK_COUNT; i++) busy += stats->work_seconds[i];
  fprintf(stderr,
          TOOL ": the GPU was busy for %.0f%% of the time; first token after %.1f ms, %.2f of %.2f "
               "GB in use\n",
          100 * busy / stats->seconds, 1e3 * stats->first_token_seconds,
          (double)(stats->device_total_bytes - stats->device_free_bytes) / 1e9,
          (double)stats->device_total_bytes / 1e9);
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
  if (stats.device_total_bytes) print_usage(&stats);
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

/* ---- Conversations ---- */

typedef struct conversation {
  tfm_session *session;
  const tfm_tokenizer *tokenizer;
  const options *o;
  tfm_chat chat;
  int32_t context;
  tfm_message *message; /* [count], texts owned; the system's first, if there is one */
  size_t count, room;
  char *piece, *answer; /* what a token says; the answer so far */
  size_t piece_bytes, answer_bytes, answer_room;
} conversation;

static void note(const char *text) { fprintf(stderr, TOOL ": %s\n", text); }

/* Appends a message, or puts it at the front; false when memory is out. */
static bool add_message(conversation *c, tfm_role role, const char *text, bool front) {
  char *own = strdup(text);
  if (own && c->count == c->room) {
    size_t room = 2 * c->room + 8;
    tfm_message *grown = (tfm_message *)realloc(c->message, room * sizeof *grown);
    if (!grown) return free(own), false;
    c->message = grown;
    c->room = room;
  }
  if (!own) return false;
  if (front) memmove(c->message + 1, c->message, c->count * sizeof *c->message);
  c->message[front ? 0 : c->count].role = role;
  c->message[front ? 0 : c->count].text = own;
  c->count++;
  return true;
}

static void remove_messages(conversation *c, size_t first, size_t n) {
  size_t i;
  for (i = first; i < first + n; i++) free((void *)(uintptr_t)c->message[i].text);
  c->count -= n;
  memmove(c->message + first, c->message + first + n, (c->count - first) * sizeof *c->message);
}

static size_t has_system(const conversation *c) {
  return c->count && c->message[0].role == TFM_SYSTEM;
}

static bool set_system(conversation *c, const char *text) {
  if (has_system(c)) remove_messages(c, 0, 1);
  return !*text || add_message(c, TFM_SYSTEM, text, true);
}

/* The ids of the conversation, without its oldest turns where they and an answer would not fit;
   NULL with a line on stderr: even then they do not, or the template refuses it. */
static int32_t *conversation_ids(conversation *c, size_t *count) {
  int32_t *ids;
  int64_t n;
  size_t first = has_system(c), reserve = (size_t)c->context / 4;
  for (;;) {
    n = tfm_chat_encode(c->tokenizer, &c->chat, c->message, c->count, true, NULL, 0);
    if (n < 0) return tool_fail(), NULL;
    if ((size_t)n + reserve <= (size_t)c->context) break;
    if (c->count < first + 3) {
      note("the message is too long for the context; shorten it, or raise --context");
      return NULL;
    }
    note("the context is full: the oldest message and its answer are forgotten");
    remove_messages(c, first, 2);
  }
  *count = (size_t)n;
  ids = (int32_t *)malloc(((size_t)n + 1) * sizeof *ids);
  if (ids) tfm_chat_encode(c->tokenizer, &c->chat, c->message, c->count, true, ids, (size_t)n);
  else note("out of memory");
  return ids;
}

/* Feeds what the session does not hold already: all but the new turn, as a rule. */
static tfm_status feed_conversation(conversation *c, const int32_t *ids, size_t n) {
  size_t held, same = 0;
  const int32_t *before = tfm_session_tokens(c->session, &held);
  tfm_status status;
  while (same < held && same + 1 < n && before[same] == ids[same]) same++;
  status = tfm_session_rewind(c->session, same);
  if (status != TFM_OK) return status;
  do status = tfm_feed(c->session, ids + same, n - same);
  while (status == TFM_E_CANCELLED && !interrupted); /* meant for the answer before */
  return status;
}

static bool is_end(const conversation *c, int32_t id) {
  int i;
  for (i = 0; i < c->chat.end_count; i++)
    if (c->chat.end[i] == id) return true;
  return false;
}

/* Prints and keeps what an id completes; id -1: what is left. */
static bool say(conversation *c, tfm_decoder *state, int32_t id) {
  int64_t n = tfm_decode_next(c->tokenizer, state, id, c->piece, c->piece_bytes);
  if (n < 0) return false;
  if (c->answer_bytes + (size_t)n + 1 > c->answer_room) {
    size_t room = 2 * (c->answer_room + (size_t)n + 1);
    char *grown = (char *)realloc(c->answer, room);
    if (!grown) return false;
    c->answer = grown;
    c->answer_room = room;
  }
  memcpy(c->answer + c->answer_bytes, c->piece, (size_t)n + 1);
  c->answer_bytes += (size_t)n;
  return print_text(NULL, c->piece, (size_t)n);
}

/* Generates until the turn ends: TFM_END, an id when there were enough, or a status. */
static int32_t answer_turn(conversation *c) {
  const tfm_generate_config *g = &c->o->generate;
  tfm_decoder state;
  int32_t id = 0, n;
  memset(&state, 0, sizeof state);
  c->answer_bytes = 0;
  for (n = 0; !g->max_tokens || n < g->max_tokens; n++) {
    id = tfm_next(c->session, &g->sampling);
    if (id >= 0 && is_end(c, id)) id = TFM_END;
    if (id < 0 || !say(c, &state, id)) break;
  }
  say(c, &state, -1);
  putchar('\n');
  fflush(stdout);
  return id;
}

static bool ends_program(int32_t id) { /* and tells what ended the turn, if that is unusual */
  if (id == TFM_E_FULL) note("the context is full: the answer ends here");
  if (id == TFM_E_CANCELLED) note("stopped");
  return id < 0 && id != TFM_END && id != TFM_E_FULL && id != TFM_E_CANCELLED;
}

/* One message and its answer; false when the conversation cannot go on. */
static bool take_turn(conversation *c, const char *text) {
  size_t n = 0;
  int32_t *ids, id;
  bool fed;
  interrupted = 0;
  if (!add_message(c, TFM_USER, text, false)) return note("out of memory"), false;
  ids = conversation_ids(c, &n);
  in_session = c->session;
  id = ids ? feed_conversation(c, ids, n) : TFM_OK;
  fed = ids && id == TFM_OK;
  if (fed) id = answer_turn(c);
  in_session = NULL;
  free(ids);
  if (ends_program(id)) return tool_fail(), false;
  if (fed) return add_message(c, TFM_ASSISTANT, c->answer, false);
  remove_messages(c, c->count - 1, 1); /* nobody has read it */
  return true;
}

/* Whether the line was a command; "//" begins a message with one "/". */
static bool obey(conversation *c, const char *line) {
  size_t first = has_system(c);
  if (line[0] != '/' || line[1] == '/') return false;
  if (!strcmp(line, "/reset")) {
    remove_messages(c, first, c->count - first);
    note("all messages are forgotten");
  } else if (!strncmp(line, "/system", 7) && (!line[7] || line[7] == ' ')) {
    if (!c->chat.system) note("this model's template has no place for a system message");
    else if (set_system(c, line + (line[7] ? 8 : 7))) note("it holds from the next message on");
  } else {
    note("/system TEXT  instructions to the model; without TEXT: none");
    note("/reset        forgets all messages, and begins again");
    note("Ctrl-C stops an answer, Ctrl-D ends; //... is a message that begins with /");
  }
  return true;
}

/* A line without its line feed; NULL at the end of the input. */
static char *read_line(char **line, size_t *room) {
  ssize_t n;
  for (;;) {
    if (isatty(STDIN_FILENO)) fputs("> ", stderr);
    n = getline(line, room, stdin);
    if (n >= 0) break;
    if (feof(stdin) || errno != EINTR) return NULL;
    clearerr(stdin); /* Ctrl-C */
    fputs("\n", stderr);
    note("Ctrl-D ends");
  }
  if (n && (*line)[n - 1] == '\n') (*line)[n - 1] = 0;
  return *line;
}

static bool converse(conversation *c) {
  char *line = NULL;
  size_t room = 0;
  bool goes_on = true;
  if (c->o->system && !set_system(c, c->o->system)) goes_on = false;
  if (goes_on && *c->o->prompt) goes_on = take_turn(c, c->o->prompt);
  while (goes_on && read_line(&line, &room))
    if (*line && !obey(c, line)) goes_on = take_turn(c, line + (line[0] == '/'));
  free(line);
  return goes_on;
}

static int talk(tfm_session *s, const tfm_tokenizer *t, const options *o,
                const tfm_model_info *info) {
  conversation c;
  bool goes_on;
  memset(&c, 0, sizeof c);
  c.session = s;
  c.tokenizer = t;
  c.o = o;
  c.context = o->engine.context ? o->engine.context : info->context < 4096 ? info->context : 4096;
  c.piece_bytes = tfm_decode_bound(t);
  c.piece = (char *)malloc(c.piece_bytes);
  if (tfm_chat_find(t, o->path, o->chat_template, &c.chat) != TFM_OK) {
    free(c.piece);
    return tool_fail();
  }
  fprintf(stderr, TOOL ": template %s; /help tells more\n", c.chat.name);
  goes_on = c.piece && converse(&c);
  remove_messages(&c, 0, c.count);
  free(c.message);
  free(c.answer);
  free(c.piece);
  print_speed(s, info);
  interrupted = 0;
  return goes_on ? 0 : TOOL_FAILED;
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
  status = !s ? tool_fail() : o->chat ? talk(s, t, o, &info) : continue_text(s, t, o, &info);
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
  /* a second Ctrl-C ends the program at once, but not a conversation */
  catch_interrupt(o.chat ? 0 : (int)SA_RESETHAND);
  return tool_finish(run(&o));
}
