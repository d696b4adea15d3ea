/* Vocabularies built from text and saved, and texts encoded in batches: against goldens of the
   reference (make_vocabulary_goldens.py), for any number of threads, with failing memory. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include "files.h"
#include "test.h"

#define STRINGS DATA "tokenizers/strings.txt"
#define SAVED "build/test_vocabulary.json"

static const char *const special[] = {"<s>", "</s>", "<pad>", "<unk>"};

static tfm_vocabulary_config config_of(tfm_vocabulary kind, const char *pattern, int32_t size) {
  tfm_vocabulary_config c;
  memset(&c, 0, sizeof c);
  c.kind = kind;
  c.pattern = pattern;
  c.size = size;
  c.special = special;
  c.special_count = 4;
  return c;
}

static tfm_tokenizer *train(blob b, const tfm_vocabulary_config *c) {
  const char *text = (const char *)b.data;
  tfm_tokenizer *t = tfm_tokenizer_train(&text, &b.bytes, 1, c);
  if (!t) CHECK_STR(tfm_error(), "");
  return t;
}

static tfm_tokenizer *train_text(const char *text, const tfm_vocabulary_config *c) {
  return tfm_tokenizer_train(&text, NULL, 1, c);
}

static bool same_token(const tfm_tokenizer *t, int32_t id, const char *text, size_t n) {
  size_t bytes = 0;
  const char *spelled = tfm_token_text(t, id, &bytes);
  return spelled && bytes == n && memcmp(spelled, text, n) == 0;
}

/* Same tokens, merges and special ids. */
static void check_same(const tfm_tokenizer *a, const tfm_tokenizer *b) {
  tfm_tokenizer_info x = {0}, y = {0};
  int32_t i;
  uint64_t k;
  CHECK(a && b);
  if (!a || !b) return;
  tfm_tokenizer_describe(a, &x);
  tfm_tokenizer_describe(b, &y);
  CHECK_STR(x.kind, y.kind);
  CHECK(x.vocabulary == y.vocabulary && x.bos == y.bos && x.eos == y.eos && x.unk == y.unk);
  CHECK(x.pad == y.pad && x.adds_bos == y.adds_bos && x.adds_eos == y.adds_eos);
  for (i = 0; i < x.vocabulary && i < y.vocabulary; i++) {
    size_t n = 0;
    const char *text = tfm_token_text(a, i, &n);
    CHECK(text && same_token(b, i, text, n));
  }
  CHECK_EQ_INT(a->merges.ranks, b->merges.ranks);
  for (k = 0; k <= a->merges.mask; k++) {
    const tfmi_merge *m = &a->merges.slot[k];
    if (m->into >= 0) CHECK(tfmi_merge_slot_of(&b->merges, m->left, m->right)->rank == m->rank);
  }
}

/* ---- Against the reference ---- */

/* The merge of this rank is "left right". */
static void check_merge(const tfm_tokenizer *t, int64_t rank, const char *line, size_t n) {
  const char *blank = (const char *)memchr(line, ' ', n);
  uint64_t k;
  for (k = 0; k <= t->merges.mask; k++) {
    const tfmi_merge *m = &t->merges.slot[k];
    if (m->into < 0 || m->rank != rank) continue;
    CHECK(same_token(t, m->left, line, (size_t)(blank - line)));
    CHECK(same_token(t, m->right, blank + 1, (size_t)(line + n - blank - 1)));
    return;
  }
  CHECK(!"no such rank");
}

static void check_golden(const char *name, tfm_vocabulary kind, const char *pattern, int32_t size) {
  char path[256];
  tfm_vocabulary_config c = config_of(kind, pattern, size);
  blob strings = blob_read(STRINGS), golden;
  tfm_tokenizer *t = train(strings, &c);
  const char *at, *stop, *end;
  int32_t id = 0;
  int64_t rank = 0;
  bool merges = false;
  snprintf(path, sizeof path, DATA "tokenizers/trained-%s-%s.vocab", name, pattern);
  golden = blob_read(path);
  CHECK(golden.data != NULL);
  end = (char *)golden.data + golden.bytes;
  for (at = (char *)golden.data; t && at < end; at = stop + 1) {
    size_t n;
    stop = (const char *)memchr(at, 0xff, (size_t)(end - at));
    n = (size_t)(stop - at);
    if (n == 0) merges = true;
    else if (merges) check_merge(t, rank++, at, n);
    else CHECK(same_token(t, id++, at, n));
  }
  CHECK_EQ_INT(id, size);
  CHECK_EQ_INT(rank, kind == TFM_BPE ? size - 260 : 0);
  tfm_tokenizer_free(t);
  free(strings.data);
  free(golden.data);
}

TEST(vocabulary_goldens) {
  check_golden("bpe", TFM_BPE, "gpt2", 500);
  check_golden("bpe", TFM_BPE, "llama3", 400);
  check_golden("bpe", TFM_BPE, "qwen2", 400);
  check_golden("word", TFM_WORDS, "gpt2", 150);
}

/* ---- Threads, texts ---- */

static void check_threads(tfm_vocabulary kind, const char *pattern, int32_t size) {
  tfm_vocabulary_config c = config_of(kind, pattern, size);
  blob b = blob_read(STRINGS);
  const char *texts[40];
  size_t bytes[40], i;
  tfm_tokenizer *t, *u;
  c.threads = 1;
  t = train(b, &c);
  for (c.threads = 2; c.threads < 9; c.threads += 3) {
    u = train(b, &c);
    check_same(t, u);
    tfm_tokenizer_free(u);
  }
  tfm_tokenizer_free(t);
  for (i = 0; i < 40; i++) { /* texts of all sizes, some empty */
    texts[i] = (const char *)b.data + i * i * 4;
    bytes[i] = i % 3 ? (2 * i + 1) * 4 : 0;
  }
  c.kind = TFM_BPE; /* which takes texts that are cut within a character */
  c.size = 300;
  c.threads = 1;
  t = tfm_tokenizer_train(texts, bytes, 40, &c);
  for (c.threads = 2; c.threads < 9; c.threads += 3) {
    u = tfm_tokenizer_train(texts, bytes, 40, &c);
    check_same(t, u);
    tfm_tokenizer_free(u);
  }
  tfm_tokenizer_free(t);
  free(b.data);
}

TEST(vocabulary_threads) {
  check_threads(TFM_BPE, "gpt2", 500);
  check_threads(TFM_BPE, "llama3", 500);
  check_threads(TFM_WORDS, "qwen2", 500);
  check_threads(TFM_CHARACTERS, NULL, 200);
}

/* ---- Words and characters ---- */

TEST(vocabulary_characters) {
  static const char text[] = "hello \xc3\xa9\n";
  tfm_vocabulary_config c = config_of(TFM_CHARACTERS, NULL, 0);
  tfm_tokenizer *t;
  tfm_tokenizer_info info = {0};
  int32_t ids[16];
  char back[64];
  c.special_count = 0;
  t = train_text(text, &c);
  CHECK_EQ_INT(tfm_tokenizer_describe(t, &info), TFM_OK);
  CHECK_EQ_INT(info.vocabulary, 7);
  CHECK_STR(info.kind, "characters");
  CHECK_EQ_INT(tfm_encode(t, text, sizeof text - 1, 0, ids, 16), 8);
  CHECK_EQ_INT(ids[7], 0); /* the line feed is the lowest code point */
  CHECK_EQ_INT(tfm_decode(t, ids, 8, back, sizeof back), 9);
  CHECK_STR(back, text);
  CHECK_EQ_INT(tfm_encode(t, "hex", 3, 0, ids, 16), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "U+0078");
  tfm_tokenizer_free(t);
  c.special_count = 4;
  c.size = 6; /* the special ones, "l" and, of those that come once, the lowest */
  t = train_text(text, &c);
  CHECK_EQ_INT(tfm_encode(t, "hell\n", 5, 0, ids, 16), 5);
  CHECK(ids[0] == 3 && ids[1] == 3 && ids[2] == 5 && ids[3] == 5 && ids[4] == 4);
  tfm_tokenizer_free(t);
}

TEST(vocabulary_words) {
  tfm_vocabulary_config c = config_of(TFM_WORDS, NULL, 7);
  tfm_tokenizer *t = train_text("the cat, the dog and the end", &c);
  int32_t ids[16];
  char back[64];
  CHECK(same_token(t, 4, " the", 4)); /* twice; then by bytes */
  CHECK(same_token(t, 5, " and", 4));
  CHECK(same_token(t, 6, " cat", 4));
  CHECK_EQ_INT(tfm_encode(t, "a cat and the \xff", 15, 0, ids, 16), 5);
  CHECK(ids[0] == 3 && ids[1] == 6 && ids[2] == 5 && ids[3] == 4 && ids[4] == 3);
  CHECK_EQ_INT(tfm_decode(t, ids, 4, back, sizeof back), 17);
  CHECK_STR(back, "<unk> cat and the");
  tfm_tokenizer_free(t);
  c.special_count = 0;
  t = train_text("the cat", &c);
  CHECK_EQ_INT(tfm_encode(t, "the dog", 7, 0, ids, 16), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "\" dog\" is not in this vocabulary");
  tfm_tokenizer_free(t);
}

/* ---- Saving ---- */

static void check_same_ids(const tfm_tokenizer *t, const tfm_tokenizer *u, unsigned flags) {
  static int32_t a[40000], b[40000];
  blob s = blob_read(STRINGS);
  int64_t n = tfm_encode(t, (char *)s.data, s.bytes, flags, a, 40000);
  CHECK(n > 0 && n <= 40000);
  CHECK_EQ_INT(tfm_encode(u, (char *)s.data, s.bytes, flags, b, 40000), n);
  CHECK(!memcmp(a, b, (size_t)n * sizeof *a));
  free(s.data);
}

static void check_saved(tfm_tokenizer *t) { /* and frees it */
  tfm_tokenizer *u;
  CHECK_EQ_INT(tfm_tokenizer_save(t, SAVED), TFM_OK);
  u = tfm_tokenizer_load(SAVED, NULL);
  if (!u) CHECK_STR(tfm_error(), "");
  check_same(t, u);
  if (t && u) check_same_ids(t, u, TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL);
  if (t && u) check_same_ids(t, u, 0);
  tfm_tokenizer_free(t);
  tfm_tokenizer_free(u);
  remove(SAVED);
}

TEST(vocabulary_saved) {
  static const char *const patterns[] = {"gpt2", "llama3", "qwen2"};
  blob b = blob_read(STRINGS);
  int kind, i;
  for (kind = TFM_BPE; kind <= TFM_CHARACTERS; kind++)
    for (i = 0; i < 3; i++) {
      tfm_vocabulary_config c = config_of((tfm_vocabulary)kind, patterns[i], 500);
      c.adds_bos = i > 0;
      c.adds_eos = i > 1;
      check_saved(train(b, &c));
    }
  free(b.data);
  check_saved(tfm_tokenizer_load(DATA "tokenizers/llama3-kind", NULL));
  b = blob_read(SHARED "gpt2/vocab.json");
  if (b.data) check_saved(tfm_tokenizer_load(SHARED "gpt2/vocab.json", NULL));
  free(b.data);
}

/* Vocabularies of models: those of scored pieces become merges, and any splitting is written. */
TEST(vocabulary_of_models_saved) {
  static const char *const paths[] = {
    DATA "tokenizers/spm-bpe", SHARED "vocab-vectors/ggml-vocab-llama-spm.gguf",
    SHARED "vocab-vectors/ggml-vocab-refact.gguf", SHARED "tokenizers/qwen2"};
  int i;
  for (i = 0; i < TFMI_COUNT(paths); i++) {
    tfm_tokenizer *t = tfm_tokenizer_load(paths[i], NULL), *u;
    if (!t && i) SKIP("no " SHARED);
    CHECK_EQ_INT(tfm_tokenizer_save(t, SAVED), TFM_OK);
    u = tfm_tokenizer_load(SAVED, NULL);
    if (!u) CHECK_STR(tfm_error(), paths[i]);
    if (u) check_same_ids(t, u, TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL);
    if (u) check_same_ids(t, u, 0);
    tfm_tokenizer_free(t);
    tfm_tokenizer_free(u);
    remove(SAVED);
  }
}

TEST(vocabulary_save_refuses) {
  static const char unigram[] =
      "{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"?\",-1],[\"a\",-2]]}}";
  tfm_tokenizer *t = tfm_tokenizer_load_memory(unigram, sizeof unigram - 1, NULL);
  CHECK_EQ_INT(tfm_tokenizer_save(t, SAVED), TFM_E_UNSUPPORTED);
  CHECK_STR_HAS(tfm_error(), "Unigram");
  tfm_tokenizer_free(t);
  t = train_text("abc", NULL);
  CHECK_EQ_INT(tfm_tokenizer_save(t, NULL), TFM_E_ARG);
  CHECK_EQ_INT(tfm_tokenizer_save(NULL, SAVED), TFM_E_ARG);
  CHECK_EQ_INT(tfm_tokenizer_save(t, "no/such/folder/tokenizer.json"), TFM_E_IO);
  CHECK_EQ_INT(tfm_tokenizer_save(t, "/dev/full/x"), TFM_E_IO);
  tfm_tokenizer_free(t);
}

/* ---- What goes wrong ---- */

static void refuses(const char *text, const tfm_vocabulary_config *c, const char *sentence) {
  CHECK(!train_text(text, c));
  CHECK_EQ_INT(tfm_error_status(), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), sentence);
}

TEST(vocabulary_arguments) {
  static const char *const twice[] = {"<s>", "<s>"}, *const empty[] = {""};
  static const char *const broken[] = {"<\xff>"};
  tfm_vocabulary_config c = config_of(TFM_BPE, NULL, 0);
  const char *texts[] = {"abc", NULL};
  CHECK(!tfm_tokenizer_train(NULL, NULL, 1, NULL) && !tfm_tokenizer_train(texts, NULL, 0, NULL));
  CHECK(!tfm_tokenizer_train(texts, NULL, 2, NULL));
  CHECK_STR_HAS(tfm_error(), "text 1 is NULL");
  refuses("", &c, "empty");
  c.size = 259;
  refuses("abc", &c, "size is 259, expected at least 260");
  c.size = 4;
  refuses("abc", &c, "size is 4, expected at least 260");
  c = config_of((tfm_vocabulary)3, NULL, 0);
  refuses("abc", &c, "kind is 3");
  c = config_of(TFM_WORDS, "gpt3", 0);
  refuses("abc", &c, "expected gpt2, llama3 or qwen2");
  c = config_of(TFM_WORDS, NULL, 3);
  refuses("abc", &c, "size is 3, expected at least 4");
  c = config_of(TFM_WORDS, NULL, -1);
  refuses("abc", &c, "size is -1");
  c = config_of(TFM_WORDS, NULL, 0);
  c.threads = -1;
  refuses("abc", &c, "threads");
  refuses("abc\xff", (c.threads = 0, &c), "byte 3 of text 0 is not UTF-8");
  c.special = twice;
  c.special_count = 2;
  refuses("abc", &c, "special[1] is \"<s>\" again");
  c.special = empty;
  refuses("abc", &c, "special[0] is NULL or empty");
  c.special = broken;
  refuses("abc", &c, "special[0] is not UTF-8");
  c.special_count = 0;
  c.adds_eos = true;
  refuses("abc", &c, "adds_eos: no special token is named like one; expected \"</s>\"");
}

typedef struct phases {
  int calls, stop_at;
  char last[64];
} phases;

static bool count_phases(void *user, const char *phase, double done) {
  phases *p = (phases *)user;
  CHECK(done >= 0 && done <= 1);
  snprintf(p->last, sizeof p->last, "%s", phase);
  return ++p->calls != p->stop_at;
}

TEST(vocabulary_cancel) {
  tfm_vocabulary_config c = config_of(TFM_BPE, NULL, 600);
  blob b = blob_read(STRINGS);
  const char *text = (const char *)b.data;
  volatile int32_t flag = 1;
  phases p;
  int all, i;
  memset(&p, 0, sizeof p);
  c.host.user = &p;
  c.host.progress = count_phases;
  tfm_tokenizer_free(train(b, &c));
  all = p.calls;
  CHECK(all > 4);
  CHECK_STR(p.last, "merging");
  for (i = 1; i <= all; i++) {
    p.calls = 0;
    p.stop_at = i;
    CHECK(!tfm_tokenizer_train(&text, &b.bytes, 1, &c));
    CHECK_EQ_INT(tfm_error_status(), TFM_E_CANCELLED);
  }
  c.host.progress = NULL;
  c.host.cancel = &flag;
  CHECK(!tfm_tokenizer_train(&text, &b.bytes, 1, &c));
  CHECK_EQ_INT(tfm_error_status(), TFM_E_CANCELLED);
  free(b.data);
}

/* Every allocation fails in turn: an error, and nothing leaks. */
static void check_failing(tfm_vocabulary kind, const char *text) {
  tfm_vocabulary_config c = config_of(kind, NULL, kind == TFM_BPE ? 280 : 40);
  failing f;
  long all, i;
  memset(&f, 0, sizeof f);
  c.threads = 2;
  c.host.user = &f;
  c.host.alloc = failing_alloc;
  tfm_tokenizer_free(train_text(text, &c));
  all = f.calls;
  CHECK(f.live == 0 && all > 10);
  for (i = 1; i <= all; i++) {
    tfm_tokenizer *t;
    f.calls = 0;
    f.fail_at = i;
    t = train_text(text, &c);
    CHECK(!t);
    CHECK_EQ_INT(tfm_error_status(), TFM_E_MEMORY);
    tfm_tokenizer_free(t);
    CHECK_EQ_INT(f.live, 0);
  }
}

TEST(vocabulary_failing_memory) {
  static const char text[] = "the cat and the dog, and the end of the cat; and another end";
  tfm_vocabulary_config c = config_of(TFM_BPE, NULL, 280);
  failing f;
  tfm_tokenizer *t;
  check_failing(TFM_BPE, text);
  check_failing(TFM_WORDS, text);
  check_failing(TFM_CHARACTERS, text);
  memset(&f, 0, sizeof f);
  c.host.user = &f;
  c.host.alloc = failing_alloc;
  t = train_text(text, &c);
  f.calls = 0;
  f.fail_at = 1;
  CHECK_EQ_INT(tfm_tokenizer_save(t, SAVED), TFM_E_MEMORY);
  tfm_tokenizer_free(t);
  CHECK_EQ_INT(f.live, 0);
}

/* ---- Batches ---- */

static void check_batch(const tfm_tokenizer *t, int32_t threads, size_t n, unsigned flags) {
  static int32_t ids[64][512], alone[512];
  static tfm_encoding item[64];
  blob b = blob_read(STRINGS);
  size_t i;
  for (i = 0; i < n; i++) {
    item[i].text = (char *)b.data + 97 * i;
    item[i].bytes = i % 5 ? 11 * i : 0;
    item[i].ids = ids[i];
    item[i].cap = i % 7 ? 512 : 3;
  }
  CHECK_EQ_INT(tfm_encode_batch(t, item, n, flags, threads), TFM_OK);
  for (i = 0; i < n; i++) {
    int64_t count = tfm_encode(t, item[i].text, item[i].bytes, flags, alone, 512);
    size_t some = (size_t)count < item[i].cap ? (size_t)count : item[i].cap;
    CHECK_EQ_INT(item[i].count, count);
    CHECK(!memcmp(alone, ids[i], some * sizeof *alone));
  }
  free(b.data);
}

TEST(vocabulary_batch) {
  static const char *const paths[] = {DATA "tokenizers/llama3-kind", DATA "tokenizers/spm-bpe"};
  int32_t threads;
  int i;
  for (i = 0; i < 2; i++) {
    tfm_tokenizer *t = tfm_tokenizer_load(paths[i], NULL);
    for (threads = 0; threads < 9; threads += 2) {
      check_batch(t, threads, 64, 0);
      check_batch(t, threads, 3, TFM_ENCODE_SPECIAL | TFM_ENCODE_PARSE_SPECIAL);
      check_batch(t, threads, 0, 0);
    }
    tfm_tokenizer_free(t);
  }
}

TEST(vocabulary_batch_fails) {
  tfm_vocabulary_config c = config_of(TFM_CHARACTERS, NULL, 0);
  volatile int32_t flag = 0;
  tfm_encoding item[3];
  int32_t ids[4];
  tfm_tokenizer *t;
  c.special_count = 0;
  c.host.cancel = &flag;
  t = train_text("abc", &c);
  memset(item, 0, sizeof item);
  item[0].text = "cab";
  item[1].text = "xyz";
  item[2].text = "b";
  item[0].bytes = item[1].bytes = 3;
  item[2].bytes = 1;
  item[2].ids = ids;
  item[2].cap = 4;
  CHECK_EQ_INT(tfm_encode_batch(t, item, 3, 0, 3), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "U+0078");
  CHECK(item[0].count == 3 && item[1].count == TFM_E_ARG && item[2].count == 1 && ids[0] == 1);
  CHECK_EQ_INT(tfm_encode_batch(NULL, item, 3, 0, 1), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode_batch(t, NULL, 3, 0, 1), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode_batch(t, item, 3, 0, -1), TFM_E_ARG);
  CHECK_EQ_INT(tfm_encode_batch(t, item, 3, 64, 2), TFM_E_ARG);
  flag = 1;
  CHECK_EQ_INT(tfm_encode_batch(t, item, 3, 0, 2), TFM_E_CANCELLED);
  tfm_tokenizer_free(t);
}

TEST_MAIN
