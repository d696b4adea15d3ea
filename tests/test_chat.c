/* Conversations: texts and ids against goldens of the published templates (make_chat_goldens.py),
   messages that try to be more than text, how templates are found. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include "files.h"
#include "test.h"

#define FOLDER "build/test_chat.files"

/* Every special token that a template needs, in one byte-level vocabulary. */
static tfm_tokenizer *vocabulary(void) {
  static const char *const special[] = {
    "<s>",         "</s>",    "<|im_start|>",       "<|im_end|>",       "<|endoftext|>",
    "<|eot_id|>",  "<bos>",   "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|user|>", "<|assistant|>",   "<|end|>",          "<|begin_of_text|>",
    "<eos>",       "[INST]",  "[/INST]",            "[SYSTEM_PROMPT]",  "[/SYSTEM_PROMPT]",
    "<|system|>"};
  const char *text = "the answer, the user and the system; the user, the assistant, the end";
  tfm_vocabulary_config c;
  tfm_tokenizer *t;
  memset(&c, 0, sizeof c);
  c.special = special;
  c.special_count = TFMI_COUNT(special);
  c.size = 320;
  t = tfm_tokenizer_train(&text, NULL, 1, &c);
  if (!t) CHECK_STR(tfm_error(), "");
  return t;
}

typedef struct conversation {
  tfm_message m[5];
  size_t n;
} conversation;

#define S(text) {TFM_SYSTEM, text}
#define U(text) {TFM_USER, text}
#define A(text) {TFM_ASSISTANT, text}
#define NO {TFM_SYSTEM, NULL}

static const conversation conversations[] = { /* those of make_chat_goldens.py */
  {{U("Hello, who are you?"), NO, NO, NO, NO}, 1},
  {{S("Be brief."), U("Hi"), NO, NO, NO}, 2},
  {{U("One"), A("Two"), U("Three"), NO, NO}, 3},
  {{S("  Talk\nlike a pirate. \n"), U(" \tAhoy! "), A("  Arr \n"), U("\xc2\xa0" "Bye\x1d "), NO},
   4},
  {{U(""), A(""), U("again"), NO, NO}, 3},
  {{S(""), U("x"), NO, NO, NO}, 2},
  {{U("a"), U("b"), A("c"), A("d"), U("e")}, 5},
  {{U("\xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80"), A("\xc3\xa9t\xc3\xa9"), NO, NO, NO}, 2},
};

static bool is_there(const char *path) {
  struct stat st;
  return stat(path, &st) == 0;
}

typedef struct record { /* of chat.txt */
  char *name, *text;
  int number;
  bool answer;
} record;

static char *field(char **at) {
  char *begin = *at, *stop = strchr(begin, 0x1e);
  *stop = 0;
  *at = stop + 1;
  return begin;
}

static bool next_record(char **at, record *r) {
  if (!**at) return false;
  r->name = field(at);
  r->number = atoi(field(at));
  r->answer = atoi(field(at)) != 0;
  r->text = field(at);
  return true;
}

/* ---- Against the published templates ---- */

static void check_record(const tfm_tokenizer *t, const record *r) {
  static int32_t ids[2048], expected[2048];
  static char text[8192];
  const conversation *c = &conversations[r->number];
  tfm_chat chat;
  int64_t n, m;
  CHECK_EQ_INT(tfm_chat_find(t, NULL, r->name, &chat), TFM_OK);
  n = tfm_chat_encode(t, &chat, c->m, c->n, r->answer, ids, 2048);
  m = tfm_encode(t, r->text, strlen(r->text), TFM_ENCODE_PARSE_SPECIAL, expected, 2048);
  if (n < 0) CHECK_STR(tfm_error(), "");
  if (n == m && !memcmp(ids, expected, (size_t)n * sizeof *ids)) return;
  if (n >= 0) tfm_decode(t, ids, (size_t)n, text, sizeof text);
  fprintf(stderr, "%s, conversation %d\n", r->name, r->number);
  CHECK_STR(text, r->text);
  CHECK(!"ids differ");
}

static int check_goldens(const tfm_tokenizer *t, const char *only) {
  blob b = blob_read(DATA "chat.txt");
  char *at = (char *)b.data;
  record r;
  int compared = 0;
  while (next_record(&at, &r)) {
    if (only && strcmp(r.name, only) != 0) continue;
    check_record(t, &r);
    compared++;
  }
  free(b.data);
  return compared;
}

TEST(chat_goldens) {
  tfm_tokenizer *t = vocabulary();
  CHECK(check_goldens(t, NULL) > 150);
  tfm_tokenizer_free(t);
}

/* Vocabularies that put blanks before text, or whose special tokens take those around them. */
TEST(chat_goldens_sentencepiece) {
  tfm_tokenizer *t;
  if (!is_there(SHARED "tokenizers/phi-3/tokenizer.json")) SKIP("no " SHARED "tokenizers");
  t = tfm_tokenizer_load(SHARED "tokenizers/llama2/tokenizer.model", NULL);
  CHECK(check_goldens(t, "llama2") > 5 && check_goldens(t, "mistral-v1") > 3);
  tfm_tokenizer_free(t);
  t = tfm_tokenizer_load(SHARED "tokenizers/phi-3/tokenizer.json", NULL);
  CHECK(check_goldens(t, "phi3") > 5 && check_goldens(t, "phi3-first") > 5);
  tfm_tokenizer_free(t);
}

TEST(chat_none) {
  static const tfm_message m[] = {S("a"), U("b"), A("c")};
  tfm_tokenizer *t = vocabulary();
  tfm_chat chat;
  int32_t ids[8];
  CHECK_EQ_INT(tfm_chat_find(t, NULL, "none", &chat), TFM_OK);
  CHECK(chat.end_count == 0 && chat.system);
  CHECK_EQ_INT(tfm_chat_encode(t, &chat, m, 3, true, ids, 8), 3);
  CHECK_EQ_INT(tfm_chat_encode(t, &chat, NULL, 0, true, NULL, 0), 0);
  tfm_tokenizer_free(t);
}

/* ---- Messages that try to be more than text ---- */

static int count_special(const tfm_tokenizer *t, const int32_t *ids, int64_t n) {
  int64_t i;
  int count = 0, set;
  for (i = 0; i < n; i++) count += tfmi_added_of(t, ids[i], &set) != NULL;
  return count;
}

/* Whatever the messages say, the special tokens are those that "x" has, in the same order. */
static void check_harmless(const tfm_tokenizer *t, const char *name, const char *text) {
  static int32_t ids[4096], plain[4096];
  static char back[16384];
  tfm_message m[3] = {U(""), A(""), U("")}, x[3] = {U("x"), A("x"), U("x")};
  tfm_chat chat;
  int64_t n, k, i, at = 0;
  int set;
  m[0].text = m[1].text = m[2].text = text;
  CHECK_EQ_INT(tfm_chat_find(t, NULL, name, &chat), TFM_OK);
  n = tfm_chat_encode(t, &chat, m, 3, true, ids, 4096);
  k = tfm_chat_encode(t, &chat, x, 3, true, plain, 4096);
  CHECK(n > 0 && n <= 4096);
  if (count_special(t, ids, n) != count_special(t, plain, k)) CHECK_STR(text, name);
  for (i = 0; i < n; i++) {
    if (!tfmi_added_of(t, ids[i], &set)) continue;
    while (at < k && !tfmi_added_of(t, plain[at], &set)) at++;
    CHECK(at < k && plain[at++] == ids[i]);
  }
  tfm_decode(t, ids, (size_t)n, back, sizeof back);
  CHECK_STR_HAS(back, text);
}

/* Random messages of what special tokens are made of, under each of the templates. */
static void check_injection(const tfm_tokenizer *t, const char *const *names, int n,
                            uint32_t count) {
  static const char *const parts[] = {"<|im_end|>", "<|im_start|>", "<s>",    "[/INST]", "<|",
                                      "im_end|>",   "<|eot_id|>",   "</s",    ">",       "x",
                                      "<end_of_",   "turn>",        "|>",     "<|e",     "[INST",
                                      "<|end|>",    "\n",           "<|user|>"};
  char text[256];
  uint32_t i, k;
  for (i = 0; i < count; i++) {
    tfmi_random r = tfmi_philox(7, i, 0);
    text[0] = 0;
    for (k = 0; k < 1 + i % 4; k++) strcat(text, parts[r.word[k] % TFMI_COUNT(parts)]);
    strcat(text, "!"); /* nothing for trimming */
    memmove(text + 1, text, strlen(text) + 1);
    text[0] = '!';
    check_harmless(t, names[i % (uint32_t)n], text);
  }
  for (i = 0; i < (uint32_t)TFMI_COUNT(parts); i++)
    if (parts[i][0] != '\n') check_harmless(t, names[0], parts[i]);
}

TEST(chat_injection) { /* every template there is */
  const char *names[TFMI_COUNT(tfmi_chats)];
  tfm_tokenizer *t = vocabulary();
  int i;
  for (i = 1; i < TFMI_COUNT(tfmi_chats); i++) names[i - 1] = tfmi_chats[i].name; /* 0: "none" */
  check_injection(t, names, TFMI_COUNT(tfmi_chats) - 1, 3000);
  tfm_tokenizer_free(t);
}

TEST(chat_injection_into_real_vocabularies) {
  static const struct { const char *path, *names[3]; int n; } rows[] = {
    {"llama2/tokenizer.model", {"llama2", "mistral-v1"}, 2},
    {"phi-3/tokenizer.json", {"phi3", "phi3.5", "phi3-first"}, 3},
    {"qwen2/vocab.json", {"chatml", "qwen2", "qwen2.5"}, 3}};
  char path[200];
  int i, there = 0;
  for (i = 0; i < TFMI_COUNT(rows); i++) {
    tfm_tokenizer *t;
    snprintf(path, sizeof path, SHARED "tokenizers/%s", rows[i].path);
    if (!is_there(path)) continue;
    t = tfm_tokenizer_load(path, NULL);
    check_injection(t, rows[i].names, rows[i].n, 300);
    tfm_tokenizer_free(t);
    there++;
  }
  if (!there) SKIP("no " SHARED "tokenizers");
}

/* ---- Finding ---- */

static void write_file(const char *name, const void *data, size_t bytes) {
  char path[256];
  FILE *f;
  snprintf(path, sizeof path, FOLDER "/%s", name);
  f = fopen(path, "wb");
  CHECK(f && fwrite(data, 1, bytes, f) == bytes);
  if (f) fclose(f);
}

/* tokenizer_config.json with this template, alone or in a list. */
static void write_config(const char *template_text, bool list) {
  static char json[20000];
  const char *begin = "[{\"name\": \"tool_use\", \"template\": \"?\"}, "
                      "{\"name\": \"default\", \"template\": \"";
  char *to = json + sprintf(json, "{\"a\": 1, \"chat_template\": %s", list ? begin : "\"");
  for (; *template_text; template_text++)
    if (*template_text == '\n') to += sprintf(to, "\\n");
    else if (strchr("\"\\", *template_text)) to += sprintf(to, "\\%c", *template_text);
    else *to++ = *template_text;
  to += sprintf(to, list ? "\"}], \"b\": 2}" : "\", \"b\": 2}");
  write_file("tokenizer_config.json", json, (size_t)(to - json));
}

static size_t put_text(char *to, const char *text) {
  size_t n = strlen(text);
  memset(to, 0, 8);
  to[0] = (char)n;
  to[1] = (char)(n >> 8);
  memcpy(to + 8, text, n);
  return 8 + n;
}

static void write_gguf(const char *template_text) {
  static char file[20000];
  size_t n = 24;
  memcpy(file, "GGUF\3\0\0\0" "\0\0\0\0\0\0\0\0" "\1\0\0\0\0\0\0\0", n);
  n += put_text(file + n, "tokenizer.chat_template");
  memcpy(file + n, "\10\0\0\0", 4); /* a string */
  n += 4;
  n += put_text(file + n, template_text);
  write_file("model.gguf", file, n);
}

static void check_found(const tfm_tokenizer *t, const char *path, const char *name) {
  tfm_chat chat;
  memset(&chat, 0, sizeof chat);
  if (tfm_chat_find(t, path, NULL, &chat) != TFM_OK) CHECK_STR(tfm_error(), name);
  else CHECK_STR(chat.name, name);
}

TEST(chat_templates_found) {
  blob b = blob_read(DATA "chat-templates.txt");
  char *at = (char *)b.data;
  tfm_tokenizer *t = vocabulary();
  int found = 0;
  mkdir(FOLDER, 0777);
  while (*at) {
    const char *name = field(&at), *text = field(&at);
    remove(FOLDER "/chat_template.jinja");
    write_config(text, found % 2 == 0);
    write_gguf(text);
    check_found(t, FOLDER, name);
    check_found(t, FOLDER "/tokenizer_config.json", name); /* any file of the folder */
    check_found(t, FOLDER "/model.gguf", name);
    write_file("chat_template.jinja", text, strlen(text));
    write_config("other", false);
    check_found(t, FOLDER, name);
    found++;
  }
  CHECK(found > 15);
  tfm_tokenizer_free(t);
  free(b.data);
}

static void check_refused(const tfm_tokenizer *t, const char *path, tfm_status status,
                          const char *sentence) {
  tfm_chat chat;
  CHECK_EQ_INT(tfm_chat_find(t, path, NULL, &chat), status);
  CHECK_STR_HAS(tfm_error(), sentence);
}

TEST(chat_templates_refused) {
  tfm_tokenizer *t = vocabulary();
  mkdir(FOLDER, 0777);
  remove(FOLDER "/chat_template.jinja");
  write_config("{{ messages }}", true);
  check_refused(t, FOLDER, TFM_E_UNSUPPORTED, "of 14 bytes");
  write_file("tokenizer_config.json", "{\"chat_template\": null}", 23);
  check_refused(t, FOLDER, TFM_E_UNSUPPORTED, "no chat template");
  write_file("tokenizer_config.json", "{\"chat_template\": [1]}", 22);
  check_refused(t, FOLDER, TFM_E_FORMAT, "expected");
  write_file("tokenizer_config.json", "{\"chat_template\": \"", 19);
  check_refused(t, FOLDER, TFM_E_FORMAT, "tokenizer_config.json");
  remove(FOLDER "/tokenizer_config.json");
  check_refused(t, FOLDER, TFM_E_UNSUPPORTED, "no chat template");
  check_refused(t, FOLDER "/no/such", TFM_E_IO, "");
  if (is_there(SHARED "tokenizers/qwen2/tokenizer_config.json")) /* with a line of its own */
    check_refused(t, SHARED "tokenizers/qwen2", TFM_E_UNSUPPORTED, "hash");
  if (is_there(SHARED "tokenizers/phi-3/tokenizer_config.json"))
    check_found(t, SHARED "tokenizers/phi-3", "phi3-first");
  tfm_tokenizer_free(t);
}

TEST(chat_ends) {
  static const struct { const char *name, *first; int count; } rows[] = {
    {"chatml", "<|im_end|>", 2}, {"llama2", "</s>", 1},      {"llama3", "<|eot_id|>", 1},
    {"gemma", "<end_of_turn>", 2}, {"phi3", "<|end|>", 2},   {"mistral-v7", "</s>", 1}};
  tfm_tokenizer *t = vocabulary(), *u = tfm_tokenizer_load(DATA "tokenizers/spm-bpe", NULL);
  tfm_chat chat;
  int i;
  for (i = 0; i < TFMI_COUNT(rows); i++) {
    CHECK_EQ_INT(tfm_chat_find(t, NULL, rows[i].name, &chat), TFM_OK);
    CHECK_EQ_INT(chat.end_count, rows[i].count);
    CHECK_EQ_INT(chat.end[0], tfm_token_id(t, rows[i].first, strlen(rows[i].first)));
  }
  CHECK_EQ_INT(tfm_chat_find(u, NULL, "chatml", &chat), TFM_E_UNSUPPORTED);
  CHECK_STR_HAS(tfm_error(), "its token <|im_start|> is not in this vocabulary");
  tfm_tokenizer_free(t);
  tfm_tokenizer_free(u);
}

/* ---- Arguments, memory ---- */

static void encode_fails(const tfm_tokenizer *t, const char *name, const tfm_message *m, size_t n,
                         const char *sentence) {
  tfm_chat chat;
  CHECK_EQ_INT(tfm_chat_find(t, NULL, name, &chat), TFM_OK);
  CHECK(tfm_chat_encode(t, &chat, m, n, true, NULL, 0) < 0);
  CHECK_STR_HAS(tfm_error(), sentence);
}

TEST(chat_arguments) {
  static const tfm_message late[] = {U("a"), S("b")}, twice[] = {U("a"), U("b")}, empty[] = {NO},
                           system[] = {S("a"), U("b")}, alone[] = {S("a")},
                           answered[] = {S("a"), U("b"), A("c")};
  tfm_tokenizer *t = vocabulary();
  tfm_message odd = U("a");
  tfm_chat chat;
  CHECK_EQ_INT(tfm_chat_find(NULL, NULL, "chatml", &chat), TFM_E_ARG);
  CHECK_EQ_INT(tfm_chat_find(t, NULL, NULL, &chat), TFM_E_ARG);
  CHECK_EQ_INT(tfm_chat_find(t, NULL, "chatml", NULL), TFM_E_ARG);
  CHECK_EQ_INT(tfm_chat_find(t, NULL, "chat", &chat), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "expected none, chatml");
  encode_fails(t, "chatml", late, 2, "message 1 is the system's");
  encode_fails(t, "chatml", empty, 1, "message 0 has no text");
  encode_fails(t, "llama2", twice, 2, "message 1 is the user's; expected user and");
  encode_fails(t, "gemma", system, 2, "no place for a system message");
  encode_fails(t, "llama2", alone, 1, "without a user's");
  encode_fails(t, "mistral-v3", answered, 3, "without a user's");
  odd.role = (tfm_role)3;
  encode_fails(t, "chatml", &odd, 1, "role 3");
  memset(&chat, 0, sizeof chat);
  CHECK_EQ_INT(tfm_chat_encode(t, &chat, late, 1, true, NULL, 0), TFM_E_ARG);
  CHECK_EQ_INT(tfm_chat_encode(NULL, &chat, late, 1, true, NULL, 0), TFM_E_ARG);
  tfm_tokenizer_free(t);
}

TEST(chat_failing_memory) {
  static const tfm_message m[] = {S("a"), U("b")};
  failing f;
  tfm_tokenizer_config c;
  tfm_tokenizer *t = vocabulary();
  tfm_chat chat;
  long all, i;
  mkdir(FOLDER, 0777);
  CHECK_EQ_INT(tfm_tokenizer_save(t, FOLDER "/tokenizer.json"), TFM_OK);
  tfm_tokenizer_free(t);
  remove(FOLDER "/chat_template.jinja");
  write_config("{{ messages }}", true);
  memset(&f, 0, sizeof f);
  memset(&c, 0, sizeof c);
  c.host.user = &f;
  c.host.alloc = failing_alloc;
  t = tfm_tokenizer_load(FOLDER, &c);
  for (all = 1, i = 0; i <= all; i++) {
    long live = f.live;
    f.calls = 0;
    f.fail_at = i;
    CHECK(tfm_chat_find(t, FOLDER, NULL, &chat) == (i ? TFM_E_MEMORY : TFM_E_UNSUPPORTED));
    CHECK_EQ_INT(f.live, live);
    if (i == 0) all = f.calls;
  }
  f.fail_at = 0;
  CHECK_EQ_INT(tfm_chat_find(t, NULL, "chatml", &chat), TFM_OK);
  for (i = 1; i <= 2; i++) {
    f.calls = 0;
    f.fail_at = i;
    CHECK_EQ_INT(tfm_chat_encode(t, &chat, m, 2, true, NULL, 0), TFM_E_MEMORY);
  }
  f.fail_at = 0;
  tfm_tokenizer_free(t);
  CHECK_EQ_INT(f.live, 0);
}

TEST_MAIN
