/* Texts to sequences: documents and folders, the cache and when it is made anew, the order of
   sequences, what is held out; failures of memory, files and the disk. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "files.h"

#define FOLDER "build/test_data.texts"
#define CACHE FOLDER "/.ids"

static void write_text(const char *path, const char *text) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

/* a.txt, b/c.txt, b/d.txt, and what is passed over: a hidden file and an empty one. */
static void folder_make(void) {
  mkdir(FOLDER, 0777);
  mkdir(FOLDER "/b", 0777);
  remove(CACHE);
  write_text(FOLDER "/b/d.txt", "the fourth text");
  write_text(FOLDER "/a.txt", "first;second");
  write_text(FOLDER "/b/c.txt", "third\n");
  write_text(FOLDER "/.hidden", "never");
  write_text(FOLDER "/z", "");
}

static const char *const folder[] = {FOLDER};

/* The tiny model's vocabulary: BOS 1, EOS 2 or what it says. */
static tfm_tokenizer *words(void) {
  tfm_tokenizer *t = tfm_tokenizer_load(DATA "models/tiny", NULL);
  CHECK(t != NULL);
  return t;
}

/* All ids of the data, by a context that holds nothing back. */
static int64_t ids_of(const tfm_data *d, int32_t *ids) {
  const tfmi_data *whole = (const tfmi_data *)d;
  int64_t i;
  for (i = 0; i < d->tokens; i++) ids[i] = tfmi_data_id(whole, i);
  return d->tokens;
}

static void expect(const tfm_tokenizer *t, int32_t *ids, int64_t *n, const char *text) {
  tfm_tokenizer_info info = {0};
  CHECK_EQ_INT(tfm_tokenizer_describe(t, &info), TFM_OK);
  if (info.bos >= 0 && info.bos != info.eos) ids[(*n)++] = info.bos;
  *n += tfm_encode(t, text, strlen(text), 0, ids + *n, 100);
  if (info.eos >= 0) ids[(*n)++] = info.eos;
}

TEST(documents_in_the_order_of_names) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  tfm_data *d;
  int32_t ids[400], want[400];
  int64_t n = 0;
  memset(&c, 0, sizeof c);
  folder_make();
  c.context = 4;
  c.separator = ";";
  d = tfm_data_open(folder, 1, t, &c);
  if (!d) fprintf(stderr, "%s\n", tfm_error());
  CHECK(d != NULL);
  if (!d) return;
  expect(t, want, &n, "first");
  expect(t, want, &n, "second");
  expect(t, want, &n, "third\n");
  expect(t, want, &n, "the fourth text");
  CHECK_EQ_INT(d->documents, 4);
  CHECK_EQ_INT(ids_of(d, ids), n);
  CHECK(!memcmp(ids, want, (size_t)n * sizeof *ids));
  tfm_data_free(d);
  tfm_tokenizer_free(t);
}

/* ---- A text is read a piece at a time: its tokens are those of the whole ---- */

/* Tokenizers that put a blank before a text; those of SentencePiece's files do it as the first. */
static const char *const leads[] = {
  "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":\"_\"},"
  "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"}]}",
  "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"always\"}",
  "\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\"}"};

static tfm_tokenizer *leading(const char *lead) {
  char json[1000];
  tfm_tokenizer *t;
  snprintf(json, sizeof json, "{\"version\":\"1.0\",\"added_tokens\":[],%s,\"model\":{"
           "\"type\":\"BPE\",\"vocab\":{\"_\":0,\"a\":1,\"b\":2,\"\\n\":3,\"_a\":4},"
           "\"merges\":[[\"_\",\"a\"]]}}", lead);
  t = tfm_tokenizer_load_memory(json, strlen(json), NULL);
  if (!t) fprintf(stderr, "%s\n", tfm_error());
  CHECK(t != NULL);
  return t;
}

static void check_pieces(const tfm_tokenizer *t, const char *path, const char *text) {
  size_t bytes = strlen(text);
  int32_t *want = (int32_t *)malloc((bytes + 2) * sizeof *want);
  int64_t count = tfm_encode(t, text, bytes, 0, want, bytes + 2), i = 0;
  tfm_data *d = tfm_data_open(&path, 1, t, NULL);
  CHECK(d != NULL);
  if (d) CHECK_EQ_INT(d->tokens, count);
  while (d && i < count && tfmi_data_id((const tfmi_data *)d, i) == want[i]) i++;
  CHECK_EQ_INT(i, count);
  tfm_data_free(d);
  free(want);
}

TEST(pieces_join_without_blanks) {
  static const char line[] = "a ba a\n";
  size_t n = sizeof line - 1, lines = (2 * TFMI_TEXT_PIECE + 1000) / n, i;
  char *text = (char *)malloc(lines * n + 1);
  for (i = 0; i < lines; i++) memcpy(text + i * n, line, n + 1);
  folder_make();
  write_text(FOLDER "/a.txt", text);
  for (i = 0; i < sizeof leads / sizeof *leads; i++) {
    tfm_tokenizer *t = leading(leads[i]);
    if (t) check_pieces(t, FOLDER "/a.txt", text);
    tfm_tokenizer_free(t);
  }
  free(text);
}

/* Every token is the first of a sequence's row, as a target, once in an epoch. */
TEST(an_epoch_visits_everything_once) {
  static const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 100, 1000, 4097};
  size_t s;
  for (s = 0; s < sizeof sizes / sizeof *sizes; s++) {
    char *seen = (char *)calloc((size_t)sizes[s], 1);
    int64_t i, moved = 0;
    for (i = 0; i < sizes[s]; i++) {
      int64_t at = tfmi_permuted(i, sizes[s], 7, 3);
      CHECK(at >= 0 && at < sizes[s] && !seen[at]);
      if (at >= 0 && at < sizes[s]) seen[at] = 1;
      moved += at != i;
    }
    CHECK(sizes[s] < 100 || moved > sizes[s] * 9 / 10);
    free(seen);
  }
}

static tfm_tokenizer *characters_of(const char *text, size_t bytes) {
  tfm_vocabulary_config c;
  memset(&c, 0, sizeof c);
  c.kind = TFM_CHARACTERS;
  return tfm_tokenizer_train(&text, &bytes, 1, &c);
}

static tfm_data *characters(tfm_tokenizer **t, const tfm_data_config *c) {
  blob b = blob_read("README.md");
  static const char *const readme[] = {"README.md"};
  tfm_data *d;
  *t = characters_of((const char *)b.data, b.bytes);
  d = tfm_data_open(readme, 1, *t, c);
  if (!d) fprintf(stderr, "%s\n", tfm_error());
  CHECK(d && d->tokens > 3000);
  free(b.data);
  return d;
}

TEST(sequences) {
  tfm_data_config c;
  tfm_tokenizer *t;
  tfm_data *d;
  int32_t a[3 * 16], b[3 * 16], again[16], targets[16], i;
  int64_t k, differ = 0;
  int counts[512] = {0};
  memset(&c, 0, sizeof c);
  c.context = 16;
  c.held_out = 0.1f;
  c.seed = 5;
  d = characters(&t, &c);
  if (!d) return;
  CHECK_EQ_INT(d->held_out, d->tokens / 10);
  CHECK_EQ_INT(d->sequences, (d->tokens - d->held_out) / 16);
  CHECK_EQ_INT(tfm_data_read(d, false, 41, 3, a, b), TFM_OK);
  for (i = 0; i < 3 * 16; i++) CHECK(i % 16 == 15 || b[i] == a[i + 1]);
  CHECK_EQ_INT(tfm_data_read(d, false, 42, 1, again, targets), TFM_OK);
  CHECK(!memcmp(a + 16, again, sizeof again) && !memcmp(b + 16, targets, sizeof targets));
  for (k = 0; k < d->sequences; k++) { /* every token as often as it occurs, but for the rest */
    CHECK_EQ_INT(tfm_data_read(d, false, k, 1, again, targets), TFM_OK);
    for (i = 0; i < 16; i++) counts[again[i]]++;
    CHECK_EQ_INT(tfm_data_read(d, false, k + d->sequences, 1, targets, b), TFM_OK);
    differ += memcmp(again, targets, sizeof again) != 0;
  }
  for (k = 0; k < d->tokens - d->held_out; k++) counts[tfmi_data_id((tfmi_data *)d, k)]--;
  for (i = 0, k = 0; i < 512; i++) k += abs(counts[i]);
  CHECK(k < 16 && differ > d->sequences * 9 / 10);
  CHECK_EQ_INT(tfm_data_read(d, true, 3, 1, a, b), TFM_OK);
  CHECK_EQ_INT(tfm_data_read(d, true, 3 + d->held_sequences, 1, again, targets), TFM_OK);
  CHECK(!memcmp(a, again, sizeof again));
  CHECK_EQ_INT(tfm_data_read(d, true, -1, 1, a, b), TFM_E_ARG);
  tfm_data_free(d);
  tfm_tokenizer_free(t);
  c.held_out = 1;
  d = characters(&t, &c);
  CHECK(d && d->sequences == 0 && d->held_out == d->tokens);
  CHECK_EQ_INT(tfm_data_read(d, false, 0, 1, a, b), TFM_E_ARG);
  CHECK_EQ_INT(tfm_data_read(d, true, 0, 1, a, b), TFM_OK);
  tfm_data_free(d);
  tfm_tokenizer_free(t);
}

/* ---- The cache ---- */

static tfm_data *cached(const tfm_tokenizer *t, const char *separator, bool expected) {
  tfm_data_config c;
  tfm_data *d;
  memset(&c, 0, sizeof c);
  c.context = 4;
  c.cache = CACHE;
  c.separator = separator;
  d = tfm_data_open(folder, 1, t, &c);
  if (!d) fprintf(stderr, "%s\n", tfm_error());
  CHECK(d && d->cached == expected);
  return d;
}

static uint64_t mark_of(const tfm_tokenizer *t, const char *separator, bool expected) {
  tfm_data *d = cached(t, separator, expected);
  uint64_t mark = d ? d->mark : 0;
  tfm_data_free(d);
  return mark;
}

TEST(the_cache_is_made_anew_when_stale) {
  static const char alphabet[] = " ;abcdefghijklmnopqrstuvwxyz\n";
  tfm_tokenizer *t = words(), *letters = characters_of(alphabet, 29);
  uint64_t mark;
  blob b;
  FILE *f;
  folder_make();
  mark = mark_of(t, NULL, false);
  CHECK(mark && mark == mark_of(t, NULL, true));
  CHECK(mark != mark_of(t, ";", false));
  CHECK(mark == mark_of(t, NULL, false));
  CHECK(mark != mark_of(letters, NULL, false));
  CHECK(mark == mark_of(t, NULL, false));
  write_text(FOLDER "/a.txt", "first;secont");
  CHECK(mark != mark_of(t, NULL, false));
  write_text(FOLDER "/b/e.txt", "a fifth");
  CHECK(mark != mark_of(t, NULL, false));
  remove(FOLDER "/b/e.txt");
  mark = mark_of(t, NULL, false);
  b = blob_read(CACHE);
  b.data[b.bytes / 2] ^= 1; /* damaged */
  f = fopen(CACHE, "wb");
  CHECK(f && fwrite(b.data, 1, b.bytes, f) == b.bytes && fclose(f) == 0);
  CHECK(mark == mark_of(t, NULL, false));
  CHECK(mark == mark_of(t, NULL, true));
  CHECK(truncate(CACHE, 30) == 0);
  CHECK(mark == mark_of(t, NULL, false));
  free(b.data);
  tfm_tokenizer_free(t), tfm_tokenizer_free(letters);
}

TEST(the_cache_and_memory_hold_the_same) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  tfm_data *a, *b;
  int32_t one[400], other[400];
  memset(&c, 0, sizeof c);
  folder_make();
  c.context = 4;
  a = tfm_data_open(folder, 1, t, &c);
  b = cached(t, NULL, false);
  CHECK(a && b && a->tokens == b->tokens && ids_of(a, one) == ids_of(b, other));
  CHECK(!memcmp(one, other, (size_t)a->tokens * sizeof *one));
  tfm_data_free(a), tfm_data_free(b);
  tfm_tokenizer_free(t);
}

TEST(a_cache_is_no_text) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  int64_t tokens = 0;
  tfm_data *d;
  blob b;
  int i;
  memset(&c, 0, sizeof c);
  folder_make();
  c.context = 4;
  c.cache = FOLDER "/b/ids"; /* not hidden, and in the folder that is read */
  write_text(FOLDER "/b/ids.part", "half a cache, when the machine stopped");
  for (i = 0; i < 3; i++) {
    d = tfm_data_open(folder, 1, t, &c);
    CHECK(d && d->documents == 3 && d->cached == (i > 0) && (i == 0 || d->tokens == tokens));
    if (d) tokens = d->tokens;
    tfm_data_free(d);
  }
  remove(FOLDER "/b/ids");
  c.cache = FOLDER "/a.txt";
  CHECK(!tfm_data_open(folder, 1, t, &c));
  CHECK_STR_HAS(tfm_error(), "a.txt is there and is no cache of ids");
  b = blob_read(FOLDER "/a.txt");
  CHECK_STR((char *)b.data, "first;second");
  free(b.data);
  tfm_tokenizer_free(t);
}

TEST(nothing_held_out_is_not_read) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  int32_t tokens[4], targets[4];
  tfm_data *d;
  memset(&c, 0, sizeof c);
  folder_make();
  c.context = 4;
  d = tfm_data_open(folder, 1, t, &c);
  CHECK(d && d->held_out == 0 && d->held_sequences == 0);
  CHECK_EQ_INT(tfm_data_read(d, true, 0, 1, tokens, targets), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "no tokens are held out");
  tfm_data_free(d);
  tfm_tokenizer_free(t);
}

/* ---- Failures ---- */

TEST(what_cannot_be_read_is_told) {
  static const char *const missing[] = {"no/such"}, *const empty[] = {FOLDER "/z"};
  tfm_tokenizer *t = words();
  tfm_data_config c;
  memset(&c, 0, sizeof c);
  folder_make();
  CHECK(!tfm_data_open(missing, 1, t, NULL));
  CHECK_STR_HAS(tfm_error(), "no/such");
  CHECK(!tfm_data_open(empty, 1, t, NULL));
  CHECK_STR_HAS(tfm_error(), "0 tokens");
  CHECK(!tfm_data_open(folder, 0, t, NULL));
  CHECK_STR_HAS(tfm_error(), "no file");
  c.cache = "no/such/cache";
  CHECK(!tfm_data_open(folder, 1, t, &c));
  CHECK_STR_HAS(tfm_error(), "no/such/cache");
  c.cache = NULL;
  c.context = 4;
  c.held_out = 0.01f;
  CHECK(!tfm_data_open(folder, 1, t, &c));
  CHECK_STR_HAS(tfm_error(), "held out");
  c.held_out = 2;
  CHECK(!tfm_data_open(folder, 1, t, &c));
  CHECK_EQ_INT(tfm_error_status(), TFM_E_ARG);
  CHECK(!tfm_data_open(NULL, 1, t, &c));
  tfm_tokenizer_free(t);
}

TEST(a_full_disk_is_told) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  struct stat st;
  if (stat("/dev/full", &st) != 0) SKIP("there is no /dev/full");
  memset(&c, 0, sizeof c);
  folder_make();
  c.context = 4;
  c.cache = CACHE;
  CHECK(symlink("/dev/full", CACHE ".part") == 0);
  CHECK(!tfm_data_open(folder, 1, t, &c));
  CHECK_STR_HAS(tfm_error(), "disk");
  CHECK(stat(CACHE ".part", &st) != 0);
  tfm_tokenizer_free(t);
}

static bool stop_reading(void *user, const char *phase, double done) {
  (void)user, (void)done;
  return strcmp(phase, "tokenize") != 0;
}

TEST(reading_is_cancelled) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  struct stat st;
  memset(&c, 0, sizeof c);
  folder_make();
  c.context = 4;
  c.cache = CACHE;
  c.host.progress = stop_reading;
  CHECK(!tfm_data_open(folder, 1, t, &c));
  CHECK_EQ_INT(tfm_error_status(), TFM_E_CANCELLED);
  CHECK(stat(CACHE, &st) != 0 && stat(CACHE ".part", &st) != 0);
  tfm_tokenizer_free(t);
}

TEST(every_failing_allocation_is_told) {
  tfm_tokenizer *t = words();
  tfm_data_config c;
  failing f;
  long n;
  int with;
  folder_make();
  for (with = 0; with < 2; with++)
    for (n = 1;; n++) {
      tfm_data *d;
      memset(&c, 0, sizeof c);
      memset(&f, 0, sizeof f);
      c.context = 4;
      c.cache = with ? CACHE : NULL;
      c.host.user = &f;
      c.host.alloc = failing_alloc;
      f.fail_at = n;
      remove(CACHE);
      d = tfm_data_open(folder, 1, t, &c);
      tfm_data_free(d);
      CHECK_EQ_INT(f.live, 0);
      if (d) break;
      CHECK_EQ_INT(tfm_error_status(), TFM_E_MEMORY);
    }
  CHECK(n > 8);
  tfm_tokenizer_free(t);
}

TEST_MAIN
