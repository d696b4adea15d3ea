/* Models written again: there and back through both formats, refusals, failures that leave nothing
   half written. That others read what is written is convert_check.py's to show. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include <unistd.h>
#include "files.h"

enum { IDS = 9 };

static char folder[] = "/tmp/tfm_convert_XXXXXX"; /* of this run */

static const char *in_folder(const char *name) {
  static char path[4][300];
  static int next;
  next = (next + 1) % 4;
  snprintf(path[next], sizeof path[next], "%s/%s", folder, name);
  return path[next];
}

__attribute__((constructor)) static void make_folder(void) {
  if (!mkdtemp(folder)) abort();
}
__attribute__((destructor)) static void remove_folder(void) {
  char command[400];
  snprintf(command, sizeof command, "rm -rf '%s'", folder);
  if (system(command) != 0) fprintf(stderr, "%s is left\n", folder);
}

/* [IDS, *vocabulary] or NULL. */
static float *logits_of(const char *path, int32_t *vocabulary) {
  tfm_model_config c;
  tfm_model *m;
  tfm_model_info info;
  tfm_session *s;
  float *all;
  int i;
  memset(&c, 0, sizeof c);
  c.device = TFM_REF;
  m = tfm_model_load(path, &c);
  if (tfm_model_describe(m, &info) != TFM_OK) {
    CHECK_STR(tfm_error(), "");
    return NULL;
  }
  s = tfm_session_create(m, NULL);
  all = (float *)malloc(sizeof *all * IDS * (size_t)info.vocabulary);
  for (i = 0; i < IDS; i++) {
    int32_t id = (5 * i + 3) % info.vocabulary;
    const float *logits = NULL;
    if (tfm_feed(s, &id, 1) == TFM_OK) logits = tfm_logits(s);
    CHECK(logits != NULL);
    if (logits) memcpy(all + i * info.vocabulary, logits, sizeof *all * (size_t)info.vocabulary);
  }
  *vocabulary = info.vocabulary;
  tfm_session_free(s);
  tfm_model_free(m);
  return all;
}

/* Largest difference in units of the range. */
static double apart(const char *a, const char *b) {
  int32_t n = 0, other = 0, i;
  float *x = logits_of(a, &n), *y = logits_of(b, &other);
  float low = INFINITY, high = -INFINITY, most = 0;
  CHECK_EQ_INT(n, other);
  for (i = 0; x && y && n == other && i < IDS * n; i++) {
    low = fminf(low, x[i]);
    high = fmaxf(high, x[i]);
    most = fmaxf(most, fabsf(x[i] - y[i]));
  }
  free(x);
  free(y);
  return high > low ? (double)(most / (high - low)) : 1;
}

static tfm_status convert(const char *from, const char *to, tfm_type type) {
  tfm_convert_config c;
  memset(&c, 0, sizeof c);
  c.type = type;
  c.overwrite = true;
  return tfm_convert(from, to, &c);
}

static const char *const models[] = {
  "gpt2-a", "gpt2-b", "gpt2-c", "llama-a", "llama-b", "llama-c", "qwen2-a", "qwen2-b", "qwen3-a",
  "qwen3-b", "mistral-a", "mistral-b", "gemma-a", "gemma-b", "gemma2-a", "gemma2-b", "gemma3-a",
  "gemma3-b", "phi3-a", "phi3-b", "llama-d", "llama-e", "mixtral-a", "mixtral-b", "qwen2moe-a",
  "qwen2moe-b", "qwen3moe-a", "qwen3moe-b", "gpt2moe-a", "gpt2moe-b", "qwen3-c", "llama-f"};

/* Of those that are not written as GGUF. */
static const char *why_not(const char *model) {
  if (!strncmp(model, "gpt2moe", 7)) return "GGUF has no architecture for gpt2_moe";
  if (!strncmp(model, "qwen2moe", 8) || !strcmp(model, "qwen3moe-a"))
    return "GGUF has no word for layers without experts";
  return "GGUF cannot tell";
}

/* Whatever a format cannot tell is refused; the rest comes back as it was. */
TEST(there_and_back) {
  char from[100];
  int i, told = 0;
  for (i = 0; i < COUNT(models); i++) {
    snprintf(from, sizeof from, DATA "models/%s", models[i]);
    CHECK_EQ_INT(convert(from, in_folder("a"), TFM_TYPE_DEFAULT), TFM_OK);
    CHECK(apart(from, in_folder("a")) == 0);
    if (convert(from, in_folder("a.gguf"), TFM_TYPE_DEFAULT) != TFM_OK) {
      CHECK_EQ_INT(tfm_error_status(), TFM_E_UNSUPPORTED);
      CHECK_STR_HAS(tfm_error(), why_not(models[i]));
      continue;
    }
    told++;
    CHECK(apart(from, in_folder("a.gguf")) < (strcmp(models[i], "gemma-b") ? 2e-6 : 2e-3));
    if (convert(in_folder("a.gguf"), in_folder("b"), TFM_TYPE_DEFAULT) == TFM_OK)
      CHECK(apart(from, in_folder("b")) < 2e-6);
    else CHECK_STR_HAS(tfm_error(), "config.json cannot tell the rotation");
    CHECK_EQ_INT(convert(in_folder("a.gguf"), in_folder("c.gguf"), TFM_TYPE_DEFAULT), TFM_OK);
    CHECK(apart(in_folder("a.gguf"), in_folder("c.gguf")) == 0);
  }
  CHECK_EQ_INT(told, 9); /* the others are odd on purpose: activations, windows, scales, caps */
}

/* What was F8 with scales is whole in the new folder, whose config.json says so. */
TEST(scales_are_gone) {
  blob config;
  CHECK_EQ_INT(convert(DATA "models/qwen3-c", in_folder("a"), TFM_F32), TFM_OK);
  config = blob_read(in_folder("a/config.json"));
  CHECK(config.data && strstr((const char *)config.data, "\"float32\""));
  CHECK(config.data && !strstr((const char *)config.data, "quantization"));
  free(config.data);
  CHECK(apart(DATA "models/qwen3-c", in_folder("a")) < 2e-6);
}

/* The vocabulary and the template of a GGUF file become files of the folder. */
TEST(vocabulary_there_and_back) {
  static const char text[] = "Once upon a time, 12 <s>\n  x";
  static const char *const names[] = {"", "v.gguf", "v"};
  int32_t ids[3][64];
  int64_t n[3];
  blob config;
  int i;
  CHECK_EQ_INT(convert(DATA "models/tiny", in_folder("v.gguf"), TFM_TYPE_DEFAULT), TFM_OK);
  CHECK_EQ_INT(convert(in_folder("v.gguf"), in_folder("v"), TFM_TYPE_DEFAULT), TFM_OK);
  for (i = 0; i < 3; i++) {
    tfm_tokenizer *t = tfm_tokenizer_load(i ? in_folder(names[i]) : DATA "models/tiny", NULL);
    if (!t) CHECK_STR(tfm_error(), names[i]);
    n[i] = tfm_encode(t, text, strlen(text), TFM_ENCODE_SPECIAL, ids[i], 64);
    CHECK(n[i] == n[0] && n[0] > 0 && !memcmp(ids[i], ids[0], (size_t)n[0] * sizeof **ids));
    tfm_tokenizer_free(t);
  }
  config = blob_read(in_folder("v/tokenizer_config.json"));
  CHECK(config.data && strstr((char *)config.data, "PreTrainedTokenizerFast"));
  free(config.data);
}

TEST(shorter_types) {
  static const struct { tfm_type type; double most; } rows[] = {
    {TFM_F16, 2e-3}, {TFM_BF16, 2e-2}, {TFM_Q8_0, 4e-2}, {TFM_Q5_1, 0.3}, {TFM_Q4_0, 0.5}};
  int i;
  for (i = 0; i < COUNT(rows); i++) {
    CHECK_EQ_INT(convert(DATA "models/llama-a", in_folder("a.gguf"), rows[i].type), TFM_OK);
    CHECK(apart(DATA "models/llama-a", in_folder("a.gguf")) < rows[i].most);
    if (rows[i].type > TFM_BF16) {
      CHECK_EQ_INT(convert(DATA "models/llama-a", in_folder("a"), rows[i].type), TFM_E_ARG);
      CHECK_STR_HAS(tfm_error(), "a Hugging Face folder cannot hold");
      continue;
    }
    CHECK_EQ_INT(convert(DATA "models/llama-a", in_folder("a"), rows[i].type), TFM_OK);
    CHECK(apart(DATA "models/llama-a", in_folder("a")) < rows[i].most);
  }
  CHECK_EQ_INT(convert(DATA "models/llama-a", in_folder("a.gguf"), TFM_Q4_K), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "Q4_K cannot be written");
}

typedef struct seen {
  int count;
  double error;
  uint64_t bytes;
} seen;

static void see(void *user, const tfm_tensor_info *t) {
  seen *s = (seen *)user;
  s->count++;
  s->bytes += t->bytes;
  if (t->error > s->error) s->error = t->error;
}

TEST(errors_are_told) {
  tfm_convert_config c;
  seen s;
  blob one, three;
  memset(&c, 0, sizeof c);
  memset(&s, 0, sizeof s);
  c.overwrite = true;
  c.type = TFM_Q8_0;
  c.visitor = see;
  c.user = &s;
  c.threads = 1;
  CHECK_EQ_INT(tfm_convert(DATA "models/llama-a", in_folder("one.gguf"), &c), TFM_OK);
  CHECK(s.error > 1e-4 && s.error < 1e-2);
  c.threads = 3;
  CHECK_EQ_INT(tfm_convert(DATA "models/llama-a", in_folder("three.gguf"), &c), TFM_OK);
  one = blob_read(in_folder("one.gguf"));
  three = blob_read(in_folder("three.gguf"));
  CHECK(one.bytes == three.bytes && memcmp(one.data, three.data, one.bytes) == 0);
  free(one.data);
  free(three.data);
}

TEST(tensors_are_listed) {
  seen s;
  memset(&s, 0, sizeof s);
  CHECK_EQ_INT(tfm_model_tensors(DATA "models/tiny", NULL, see, &s), TFM_OK);
  CHECK(s.count > 10 && s.bytes > 1000);
  memset(&s, 0, sizeof s);
  CHECK_EQ_INT(tfm_model_tensors(DATA "models/llama-a/model.safetensors", NULL, see, &s), TFM_OK);
  CHECK(s.count > 10);
  CHECK_EQ_INT(tfm_model_tensors(DATA "models/llama-a/config.json", NULL, see, &s), TFM_E_FORMAT);
  CHECK_EQ_INT(tfm_model_tensors(NULL, NULL, see, &s), TFM_E_ARG);
}

TEST(nothing_is_overwritten) {
  blob b;
  FILE *f = fopen(in_folder("there.gguf"), "w");
  if (f) fputs("precious", f), fclose(f);
  CHECK_EQ_INT(tfm_convert(DATA "models/tiny", in_folder("there.gguf"), NULL), TFM_E_IO);
  CHECK_STR_HAS(tfm_error(), "is there already; remove it or ask to overwrite");
  b = blob_read(in_folder("there.gguf"));
  CHECK_STR((char *)b.data, "precious");
  free(b.data);
  CHECK_EQ_INT(tfm_convert(DATA "models/tiny", in_folder("no/such/place"), NULL), TFM_E_IO);
  CHECK_EQ_INT(tfm_convert(DATA "models/tiny", in_folder("no/such.gguf"), NULL), TFM_E_IO);
  CHECK_EQ_INT(tfm_convert(DATA "models/none", in_folder("x.gguf"), NULL), TFM_E_IO);
  CHECK_EQ_INT(tfm_convert(NULL, NULL, NULL), TFM_E_ARG);
}

/* A model that the format cannot tell is refused, and what was there stays; whatever is named. */
static int refused_over(const char *from, const char *to, const char *file) {
  blob before = blob_read(file), after;
  tfm_status status = convert(from, to, TFM_TYPE_DEFAULT);
  after = blob_read(file);
  if (status != TFM_OK)
    CHECK(before.bytes == after.bytes && !memcmp(before.data, after.data, before.bytes));
  free(before.data);
  free(after.data);
  return status == TFM_E_UNSUPPORTED && strstr(tfm_error(), "cannot tell");
}

TEST(a_refusal_keeps_what_was_there) {
  char from[100];
  int i, files = 0, folders = 0;
  CHECK_EQ_INT(convert(DATA "models/tiny", in_folder("k.gguf"), TFM_F16), TFM_OK);
  CHECK_EQ_INT(convert(DATA "models/tiny", in_folder("k"), TFM_F16), TFM_OK);
  for (i = 0; i < COUNT(models); i++) {
    snprintf(from, sizeof from, DATA "models/%s", models[i]);
    files += refused_over(from, in_folder("k.gguf"), in_folder("k.gguf"));
    folders += refused_over(in_folder("k.gguf"), in_folder("k"), in_folder("k/model.safetensors"));
  }
  CHECK(files > 5 && folders > 0);
  CHECK(access(in_folder("k.gguf.part"), F_OK) != 0);
  CHECK(access(in_folder("k.part"), F_OK) != 0);
}

/* What is converted is not written over, and neither are files beside the model's own. */
TEST(the_source_is_kept) {
  tfm_convert_config c;
  FILE *f;
  blob b;
  memset(&c, 0, sizeof c);
  c.overwrite = true;
  CHECK_EQ_INT(tfm_convert(DATA "models/tiny", in_folder("src"), &c), TFM_OK);
  CHECK_EQ_INT(tfm_convert(DATA "models/tiny", in_folder("src.gguf"), &c), TFM_OK);
  CHECK_EQ_INT(tfm_convert(in_folder("src"), in_folder("src/"), &c), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "is what is to be converted");
  CHECK_EQ_INT(tfm_convert(in_folder("src.gguf"), in_folder("./src.gguf"), &c), TFM_E_ARG);
  CHECK_EQ_INT(tfm_convert(in_folder("src.gguf"), in_folder("src"), &c), TFM_OK);
  mkdir(in_folder("own"), 0777);
  f = fopen(in_folder("own/generation_config.json"), "w");
  if (f) fputs("precious", f), fclose(f);
  c.overwrite = false;
  unlink(in_folder("own/model.safetensors"));
  unlink(in_folder("own/config.json"));
  CHECK_EQ_INT(tfm_convert(DATA "models/llama-a", in_folder("own"), &c), TFM_E_IO);
  CHECK_STR_HAS(tfm_error(), "generation_config.json is there already");
  CHECK(access(in_folder("own/model.safetensors"), F_OK) != 0);
  b = blob_read(in_folder("own/generation_config.json"));
  CHECK_STR((char *)b.data, "precious");
  free(b.data);
}

static bool stop_half_way(void *user, const char *phase, double done) {
  (void)user;
  return strcmp(phase, "convert") != 0 || done < 0.5;
}

TEST(cancelled) {
  tfm_convert_config c;
  memset(&c, 0, sizeof c);
  c.host.progress = stop_half_way;
  CHECK_EQ_INT(tfm_convert(DATA "models/llama-a", in_folder("stop.gguf"), &c), TFM_E_CANCELLED);
  CHECK(access(in_folder("stop.gguf"), F_OK) != 0);
  CHECK(access(in_folder("stop.gguf.part"), F_OK) != 0);
  CHECK_EQ_INT(tfm_convert(DATA "models/llama-a", in_folder("stop"), &c), TFM_E_CANCELLED);
  CHECK(access(in_folder("stop/model.safetensors"), F_OK) != 0);
  CHECK(access(in_folder("stop/config.json"), F_OK) != 0);
}

static void every_allocation(const char *to) {
  tfm_convert_config c;
  failing f;
  long at;
  tfm_status status = TFM_E_MEMORY;
  for (at = 1; status != TFM_OK && at < 5000; at++) {
    memset(&c, 0, sizeof c);
    memset(&f, 0, sizeof f);
    f.fail_at = at;
    c.host.alloc = failing_alloc;
    c.host.user = &f;
    c.overwrite = true;
    c.threads = 1;
    status = tfm_convert(DATA "models/tiny", to, &c);
    if (status != TFM_OK) CHECK_EQ_INT(status, TFM_E_MEMORY);
    CHECK_EQ_INT(f.live, 0);
  }
  CHECK_EQ_INT(status, TFM_OK);
}

TEST(every_allocation_may_fail) {
  every_allocation(in_folder("f.gguf"));
  every_allocation(in_folder("f"));
}

TEST_MAIN
