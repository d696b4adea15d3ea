/* Model files: what loads, and one test per way of being wrong. Files are composed in memory and
   served through tfm_io, so that every read can be made to fail too. */
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

static bool reads_are_short; /* of files; and every other one is interrupted */

static ssize_t hooked_read(int fd, void *to, size_t n) {
  static int calls;
  if (reads_are_short && calls++ & 1) {
    errno = EINTR;
    return -1;
  }
  return read(fd, to, reads_are_short && n > 7 ? 7 : n);
}
#define read hooked_read

static int threads_left = -1; /* counts down to where no more can be made; -1: never */
static int hooked_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                 void *(*run)(void *), void *context) {
  if (threads_left == 0) return EAGAIN;
  if (threads_left > 0) threads_left--;
  return pthread_create(thread, attributes, run, context);
}
#define pthread_create hooked_pthread_create

#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

#include "files.h"
#undef DATA

/* ---- Bytes ---- */

typedef struct bytes {
  uint8_t *at;
  size_t n;
} bytes;

static void put(bytes *b, const void *data, size_t n) {
  if (b->n == 0 || (b->n ^ (b->n + n)) > b->n) { /* doubles */
    size_t room = 64;
    while (room <= b->n + n) room *= 2;
    b->at = (uint8_t *)realloc(b->at, room);
  }
  if (data) memcpy(b->at + b->n, data, n);
  else memset(b->at + b->n, 0, n);
  b->n += n;
}
static void put_int(bytes *b, uint64_t value, int n) {
  for (; n; n--, value >>= 8) put(b, (uint8_t[]){(uint8_t)value}, 1);
}
static void put_text(bytes *b, const char *text) { put(b, text, strlen(text)); }
static void put_pad(bytes *b, size_t to) {
  while (b->n % to) put(b, NULL, 1);
}
static void drop(bytes *b) {
  free(b->at);
  b->at = NULL;
  b->n = 0;
}

/* `text` with the first `from` replaced; from NULL: as it is. */
static char *edit(const char *text, const char *from, const char *to) {
  const char *found = from ? strstr(text, from) : NULL;
  char *out = (char *)calloc(1, strlen(text) + (to ? strlen(to) : 0) + 1);
  if (from && !found) fprintf(stderr, "test: \"%s\" is not in the text\n", from), abort();
  if (!found) return strcpy(out, text);
  memcpy(out, text, (size_t)(found - text));
  strcat(out, to);
  return strcat(out, found + strlen(from));
}

/* ---- A file system in memory ---- */

typedef struct file_entry {
  const char *name;
  bytes data;
} file_entry;
static file_entry files[8];
static int file_total, open_files, calls_left = -1; /* counts down to a failure; -1: never */

static bool call_fails(void) { return calls_left >= 0 && calls_left-- == 0; }

static void *io_open(void *user, const char *name, uint64_t *n) {
  int i;
  (void)user;
  if (call_fails()) return NULL;
  for (i = 0; i < file_total; i++)
    if (!strcmp(files[i].name, name)) {
      *n = files[i].data.n;
      open_files++;
      return &files[i];
    }
  return NULL;
}
static bool io_read(void *user, void *file, uint64_t offset, void *dst, size_t n) {
  (void)user;
  if (call_fails()) return false;
  if (n) memcpy(dst, ((file_entry *)file)->data.at + offset, n);
  return true;
}
static const void *io_map(void *user, void *file) {
  (void)user;
  if (call_fails()) return NULL;
  return ((file_entry *)file)->data.n ? ((file_entry *)file)->data.at : (const void *)"";
}
static void io_close(void *user, void *file) {
  (void)user, (void)file;
  open_files--;
}
static const tfm_io memory_io = {NULL, io_open, io_read, io_map, io_close};

static void add_file(const char *name, bytes data) {
  files[file_total].name = name;
  files[file_total++].data = data;
}
static void add_text_file(const char *name, const char *text) {
  bytes b = {NULL, 0};
  put_text(&b, text);
  add_file(name, b);
}
static void forget_files(void) {
  while (file_total) drop(&files[--file_total].data);
  CHECK_EQ_INT(open_files, 0);
  open_files = 0;
}

/* ---- An allocator that counts, and fails when told ---- */

static int64_t held_bytes, peak_bytes;
static int allocs_left = -1;

static void *count_alloc(void *user, void *old, size_t old_bytes, size_t n) {
  void *p;
  (void)user;
  if (n == 0) {
    held_bytes -= (int64_t)old_bytes;
    free(old);
    return NULL;
  }
  if (allocs_left >= 0 && allocs_left-- == 0) return NULL;
  p = realloc(old, n);
  if (p) held_bytes += (int64_t)n - (int64_t)old_bytes;
  if (held_bytes > peak_bytes) peak_bytes = held_bytes;
  return p;
}

static tfm_model_config test_config(void) {
  tfm_model_config c;
  memset(&c, 0, sizeof c);
  c.host.alloc = count_alloc;
  c.host.io = &memory_io;
  c.device = TFM_REF;
  c.threads = 1;
  return c;
}

static void expect_model(tfm_model *m, int status, const char *part) {
  if (status == TFM_OK && !m) CHECK_STR(tfm_error(), "");
  if (status != TFM_OK) {
    CHECK(m == NULL);
    if (!m) {
      CHECK_STR(tfm_status_name(tfm_error_status()), tfm_status_name(status));
      CHECK_STR_HAS(tfm_error(), part);
    }
  }
  tfm_model_free(m);
  CHECK_EQ_INT(held_bytes, 0);
  held_bytes = 0;
}

/* Loads from the files, mapped and read; then forgets them. */
static void expect(const char *path, int status, const char *part) {
  tfm_model_config c = test_config();
  calls_left = -1;
  expect_model(tfm_model_load(path, &c), status, part);
  c.no_mmap = true;
  expect_model(tfm_model_load(path, &c), status, part);
  forget_files();
}

/* ---- A small Llama as safetensors ---- */

static const char CONFIG[] =
    "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 4, "
    "\"intermediate_size\": 6, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, "
    "\"num_key_value_heads\": 1, \"vocab_size\": 5, \"max_position_embeddings\": 8, "
    "\"rms_norm_eps\": 1e-05, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\", "
    "\"tie_word_embeddings\": true, \"eos_token_id\": 2, \"bos_token_id\": 1}";

static const char HEADER[] =
    "{\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[5,4],\"data_offsets\":[0,80]},"
    "\"model.layers.0.input_layernorm.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[80,96]},"
    "\"model.layers.0.post_attention_layernorm.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[96,112]},"
    "\"model.layers.0.self_attn.q_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[4,4],\"data_offsets\":[112,176]},"
    "\"model.layers.0.self_attn.k_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[2,4],\"data_offsets\":[176,208]},"
    "\"model.layers.0.self_attn.v_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[2,4],\"data_offsets\":[208,240]},"
    "\"model.layers.0.self_attn.o_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[4,4],\"data_offsets\":[240,304]},"
    "\"model.layers.0.mlp.gate_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[6,4],\"data_offsets\":[304,400]},"
    "\"model.layers.0.mlp.up_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[6,4],\"data_offsets\":[400,496]},"
    "\"model.layers.0.mlp.down_proj.weight\":"
    "{\"dtype\":\"F32\",\"shape\":[4,6],\"data_offsets\":[496,592]},"
    "\"model.norm.weight\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[592,608]}}";
enum { DATA = 608 };

static bytes safetensors(const char *header, size_t data) {
  bytes b = {NULL, 0};
  put_int(&b, strlen(header), 8);
  put_text(&b, header);
  put(&b, NULL, data);
  return b;
}

static void expect_safetensors(bytes b, const char *config, int status, const char *part) {
  add_file("m/model.safetensors", b);
  add_text_file("m/config.json", config);
  expect("m/", status, part);
}

static void expect_header(const char *from, const char *to, int status, const char *part) {
  char *header = edit(HEADER, from, to);
  expect_safetensors(safetensors(header, DATA), CONFIG, status, part);
  free(header);
}

static void expect_config(const char *from, const char *to, int status, const char *part) {
  char *config = edit(CONFIG, from, to);
  expect_safetensors(safetensors(HEADER, DATA), config, status, part);
  free(config);
}

typedef struct replacement {
  const char *from, *to;
  int status;
  const char *part;
} replacement;

TEST(safetensors_loads) {
  expect_header(NULL, NULL, TFM_OK, "");
  expect_header("{\"model", "  \n{\"model", TFM_OK, ""); /* white space pads the header */
  expect_header("{\"model", "{\"__metadata__\":{\"format\":\"pt\"},\"model", TFM_OK, "");
}

TEST(safetensors_length) {
  static const uint64_t lengths[] = {100000001, UINT64_MAX, UINT64_MAX - 7, 1u << 20};
  int i;
  bytes b = {NULL, 0};
  expect_safetensors(b, CONFIG, TFM_E_FORMAT, "the file is empty");
  put(&b, NULL, 7);
  expect_safetensors(b, CONFIG, TFM_E_FORMAT, "7 bytes, expected 8 at least");
  expect_safetensors(safetensors("", 0), CONFIG, TFM_E_FORMAT, "expected an object");
  for (i = 0; i < TFMI_COUNT(lengths); i++) {
    b.at = NULL;
    b.n = 0;
    put_int(&b, lengths[i], 8);
    put_text(&b, HEADER);
    expect_safetensors(b, CONFIG, TFM_E_FORMAT,
                       i < 3 ? "at most 100000000" : "the file's own size");
  }
}

TEST(safetensors_padding) { /* blanks before and behind pass; a NUL does not */
  static const char ends[] = {' ', '\n', 0};
  int i;
  for (i = 0; i < 3; i++) {
    bytes b = {NULL, 0};
    put_int(&b, strlen(HEADER) + 1, 8);
    put_text(&b, HEADER);
    put(&b, &ends[i], 1);
    put(&b, NULL, DATA);
    expect_safetensors(b, CONFIG, i < 2 ? TFM_OK : TFM_E_FORMAT, "the end of the text");
  }
}

TEST(safetensors_data) {
  expect_safetensors(safetensors(HEADER, DATA + 1), CONFIG, TFM_E_FORMAT, "1 bytes follow");
  expect_safetensors(safetensors(HEADER, DATA - 1), CONFIG, TFM_E_FORMAT, "it may be cut off");
}

TEST(safetensors_header) {
  static const replacement cases[] = {
    {"model.embed", "model.\xff", TFM_E_FORMAT, "not UTF-8"},
    {"{\"model", "\xef\xbb\xbf{\"model", TFM_E_FORMAT, "found byte 0xef"},
    {"[592,608]}}", "[592,608]}}\x01", TFM_E_FORMAT, "the end of the text"},
    {"model.norm.weight", "model.embed_tokens.weight", TFM_E_FORMAT, "is there twice"},
    {"[0,80]},", "[0,80]},\"model.embed_tokens.weight\":{\"dtype\":\"F32\",\"shape\":[5,4],"
     "\"data_offsets\":[0,80]},", TFM_E_FORMAT, "overlaps"},
    {"\"shape\":[5,4]", "\"shape\":[5,4],\"shape\":[5,4]", TFM_E_FORMAT, "shape twice"},
    {"\"dtype\":\"F32\"", "\"dtype\":\"F32\",\"dtype\":\"F32\"", TFM_E_FORMAT, "dtype twice"},
    {"\"dtype\":\"F32\",", "", TFM_E_FORMAT, "has no dtype"},
    {"\"shape\":[5,4],", "", TFM_E_FORMAT, "has no shape"},
    {",\"data_offsets\":[0,80]", "", TFM_E_FORMAT, "has no data_offsets"},
    {"\"dtype\":\"F32\"", "\"x\":1,\"dtype\":\"F32\"", TFM_E_FORMAT, "unknown field \"x\""},
    {"\"F32\"", "\"f32\"", TFM_E_FORMAT, "unknown dtype \"f32\""},
    {"\"F32\"", "\"F128\"", TFM_E_FORMAT, "unknown dtype \"F128\""},
    {"\"F32\"", "\"BF16 \"", TFM_E_FORMAT, "unknown dtype \"BF16 \""},
    {"\"F32\",\"shape\":[5,4]", "\"F4\",\"shape\":[3]", TFM_E_FORMAT, "do not fill whole bytes"},
    {"[0,80]", "[80,0]", TFM_E_FORMAT, "do not span the 80 bytes"},
    {"[0,80]", "[-1,80]", TFM_E_FORMAT, "found -1"},
    {"[0,80]", "[0,-9223372036854775808]", TFM_E_FORMAT, "expected a whole number"},
    {"[0,80]", "[0,8e1]", TFM_E_FORMAT, "expected a whole number"},
    {"[0,80]", "[0,80.0]", TFM_E_FORMAT, "expected a whole number"},
    {"[0,80]", "[80]", TFM_E_FORMAT, "has 1 numbers, expected 2"},
    {"[0,80]", "[0,80,0]", TFM_E_FORMAT, "has 3 numbers, expected 2"},
    {"[0,80]", "[0,18446744073709551616]", TFM_E_FORMAT, "expected a whole number"},
    {"[0,80]", "[1,81]", TFM_E_FORMAT, "does not begin at offset 0"},
    {"[4],\"data_offsets\":[80,96]", "[3],\"data_offsets\":[84,96]", TFM_E_FORMAT, "leaves a hole"},
    {"[4],\"data_offsets\":[80,96]", "[5],\"data_offsets\":[76,96]", TFM_E_FORMAT, "overlaps"},
    {"[5,4]", "[4294967296,4294967296]", TFM_E_FORMAT, "more than 2^64 elements"},
    {"[5,4]", "[4611686018427387904,4,0]", TFM_E_FORMAT, "more than 2^64 elements"},
    {"[5,4]", "[1152921504606846976]", TFM_E_FORMAT, "more than 2^64 bits"},
    {"[5,4]", "[9223372036854775808]", TFM_E_FORMAT, "expected a whole number"},
    {"[5,4]", "[0,9223372036854775808]", TFM_E_FORMAT, "expected a whole number"},
    {"[5,4]", "[9223372036854775808,0]", TFM_E_FORMAT, "expected a whole number"},
    {"[5,4]", "[-5,-4]", TFM_E_FORMAT, "found -5"},
    {"[5,4]", "[4,5]", TFM_E_FORMAT, "has shape [4, 5], expected [5, 4]"},
    {"[5,4]", "[20]", TFM_E_FORMAT, "has shape [20], expected [5, 4]"},
    {"[5,4]", "[1,1,1,5,4]", TFM_E_FORMAT, "has shape [1, 1, 1, 5, ...], expected [5, 4]"},
    {"\"F32\"", "\"I32\"", TFM_E_UNSUPPORTED, "has type I32, expected F32"},
    {"{\"model", "{\"__metadata__\":{\"a\":1},\"model", TFM_E_FORMAT, "expected a string"},
    {"{\"model", "{\"__metadata__\":{\"a\":{}},\"model", TFM_E_FORMAT, "expected a string"},
    {"{\"model", "{\"__metadata__\":{\"a\":\"\",\"a\":\"\"},\"model", TFM_E_FORMAT, "twice"},
    {"{\"model", "{\"__metadata__\":{},\"__metadata__\":{},\"model", TFM_E_FORMAT, "twice"},
    {"model.embed", "\\ud800model.embed", TFM_E_FORMAT, "half of a surrogate pair"},
    {"layers.0.mlp.up_proj", "layers.0.mlp.\\u0000", TFM_E_FORMAT, "up_proj.weight is missing"},
    {"model.embed_tokens.weight", "", TFM_E_FORMAT, "embed_tokens.weight is missing"},
    {"}}", "}", TFM_E_FORMAT, "expected ',' or '}'"},
  };
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++)
    expect_header(cases[i].from, cases[i].to, cases[i].status, cases[i].part);
}

TEST(safetensors_of_8_bits) { /* the rest of the embedding's room is another tensor's */
  static const char whole[] = "{\"dtype\":\"F32\",\"shape\":[5,4],\"data_offsets\":[0,80]}";
  static const char eighth[] = "{\"dtype\":\"F8_E%s\",\"shape\":[5,4],\"data_offsets\":[0,20]},"
                               "\"x\":{\"dtype\":\"I8\",\"shape\":[60],\"data_offsets\":[20,80]}";
  static const char *const kinds[] = {"4M3", "5M2"};
  char text[200];
  int i;
  for (i = 0; i < 2; i++) {
    snprintf(text, sizeof text, eighth, kinds[i]);
    expect_header(whole, text, TFM_OK, "");
  }
  snprintf(text, sizeof text, eighth, "8M0");
  expect_header(whole, text, TFM_E_UNSUPPORTED, "has type F8_E8M0, expected F32, F16, BF16, F8");
}

TEST(scales_beside_weights) {
  static const char whole[] = "{\"dtype\":\"F32\",\"shape\":[5,4],\"data_offsets\":[0,80]}";
  static const struct { const char *type, *shape; int bytes; tfm_status status; const char *part; }
    cases[] = {{"F32", "", 4, TFM_OK, ""},
               {"BF16", "1", 2, TFM_OK, ""},
               {"F16", "1,1", 2, TFM_OK, ""},
               {"F32", "5", 20, TFM_OK, ""},
               {"F32", "5,1", 20, TFM_OK, ""},
               {"F32", "0", 0, TFM_E_FORMAT, "weight_scale_inv has shape [0], expected [1, 1]"},
               {"F32", "1,5", 20, TFM_E_FORMAT, "has shape [1, 5], expected [1, 1]"},
               {"F32", "2,2", 16, TFM_E_FORMAT, "has shape [2, 2], expected [1, 1]"},
               {"I32", "1", 4, TFM_E_UNSUPPORTED, "has type I32, expected F32"}};
  static const struct { const char *size; tfm_status status; const char *part; }
    blocks[] = {{"[3,2]", TFM_OK, ""},
                {"[3,4]", TFM_E_FORMAT, "has shape [2, 2], expected [2, 1]"},
                {"[0,4]", TFM_E_FORMAT, "expected a number from 1 to"},
                {"4", TFM_E_FORMAT, "weight_block_size is a number, expected an array"}};
  char text[300], config[200], *header, *settings;
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++) {
    snprintf(text, sizeof text,
             "{\"dtype\":\"F8_E4M3\",\"shape\":[5,4],\"data_offsets\":[0,20]},"
             "\"model.embed_tokens.weight_scale_inv\":{\"dtype\":\"%s\",\"shape\":[%s],"
             "\"data_offsets\":[20,%d]},\"x\":{\"dtype\":\"I8\",\"shape\":[%d],"
             "\"data_offsets\":[%d,80]}",
             cases[i].type, cases[i].shape, 20 + cases[i].bytes, 60 - cases[i].bytes,
             20 + cases[i].bytes);
    expect_header(whole, text, cases[i].status, cases[i].part);
  }
  for (i = 0; i < TFMI_COUNT(blocks); i++) {
    snprintf(config, sizeof config,
             "\"silu\", \"quantization_config\": {\"quant_method\": \"fp8\", "
             "\"weight_block_size\": %s}", blocks[i].size);
    header = edit(HEADER, whole,
                  "{\"dtype\":\"F8_E4M3\",\"shape\":[5,4],\"data_offsets\":[0,20]},"
                  "\"model.embed_tokens.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[2,2],"
                  "\"data_offsets\":[20,36]},\"x\":{\"dtype\":\"I8\",\"shape\":[44],"
                  "\"data_offsets\":[36,80]}");
    settings = edit(CONFIG, "\"silu\"", config);
    expect_safetensors(safetensors(header, DATA), settings, blocks[i].status, blocks[i].part);
    free(settings);
    free(header);
  }
}

TEST(pickles_are_refused) {
  static const char *const begin[] = {"PK\3\4archive/data.pkl", "\x80\2\x8a\nl\xfc"};
  int i;
  for (i = 0; i < 2; i++) {
    add_text_file("m/pytorch_model.bin", begin[i]);
    expect("m/pytorch_model.bin", TFM_E_UNSUPPORTED, "save_pretrained");
    add_text_file("m/pytorch_model.bin", begin[i]);
    expect("m/", TFM_E_UNSUPPORTED, "a PyTorch pickle, which is a program");
  }
}

TEST(safetensors_empty_tensors) { /* a zero hides no overflow before it, and none follows it */
  const char *zero = "{\"a\":{\"dtype\":\"BOOL\",\"shape\":[0,4611686018427387904,8],"
                     "\"data_offsets\":[0,0]},\"model";
  expect_header("{\"model", zero, TFM_OK, "");
  expect_header("{\"model",
                "{\"a\":{\"dtype\":\"F32\",\"shape\":[1,0],\"data_offsets\":[0,0]},\"model", TFM_OK,
                "");
}

/* Whatever a tensor is called that nobody asks for; and one number has no dimensions. */
TEST(safetensors_odd_names) {
  static const char *const names[] = {"", "__metadata__2", "\\u0000", "\xf0\x9f\x98\x80"};
  char text[200], *long_one = (char *)malloc(1000100);
  int i;
  for (i = 0; i < TFMI_COUNT(names); i++) {
    snprintf(text, sizeof text, "{\"%s\":{\"dtype\":\"I64\",\"shape\":[0],"
             "\"data_offsets\":[0,0]},\"model", names[i]);
    expect_header("{\"model", text, TFM_OK, "");
  }
  expect_header("{\"model", "{\"a.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[0],"
                "\"data_offsets\":[0,0]},\"model", TFM_E_UNSUPPORTED,
                "tensor a.weight_scale_inv: scales are read beside matrices of F8 only");
  memset(long_one, 'x', 1000000);
  memcpy(long_one, "{\"", 2);
  strcpy(long_one + 1000000,
         "\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},\"model");
  expect_header("{\"model", long_one, TFM_OK, "");
  free(long_one);
  long_one = edit(HEADER, "[592,608]}}",
                  "[592,608]},\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[608,612]}}");
  expect_safetensors(safetensors(long_one, DATA + 4), CONFIG, TFM_OK, "");
  free(long_one);
}

/* Nothing in a file need lie where a float could: the header may have any length. */
TEST(safetensors_at_odd_addresses) {
  static const int32_t ids[] = {1, 2, 3};
  float logits[2][5];
  int i;
  for (i = 0; i < 2; i++) {
    char *header = edit(HEADER, "{\"model", i ? "   {\"model" : "{\"model");
    bytes b = safetensors(header, DATA);
    tfm_model_config c = test_config();
    tfm_session *s;
    tfm_model *m;
    size_t k;
    for (k = 0; k < DATA; k++) b.at[b.n - DATA + k] = k % 4 == 3 ? 0x3d : (uint8_t)(k * 37);
    c.config_json = CONFIG;
    c.host.io = NULL;
    m = tfm_model_load_memory(b.at, b.n, &c);
    s = tfm_session_create(m, NULL);
    CHECK_EQ_INT(tfm_feed(s, ids, 3), TFM_OK);
    if (s) memcpy(logits[i], tfm_logits(s), sizeof logits[i]);
    tfm_session_free(s);
    expect_model(m, TFM_OK, "");
    drop(&b);
    free(header);
  }
  CHECK(memcmp(logits[0], logits[1], sizeof logits[0]) == 0);
}

TEST(safetensors_deep_and_wide) {
  bytes b = {NULL, 0};
  char *header;
  int i;
  put_text(&b, "{\"__metadata__\":{\"\":\"\"");
  for (i = 0; i < 1000000; i++) {
    char pair[24];
    put(&b, pair, (size_t)snprintf(pair, sizeof pair, ",\"%d\":\"\"", i));
  }
  put(&b, "},\"model\0", 10);
  header = edit(HEADER, "{\"model", (char *)b.at);
  expect_safetensors(safetensors(header, DATA), CONFIG, TFM_OK, "");
  free(header);
  drop(&b);
  put_text(&b, "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0],\"shape\":[0");
  for (i = 0; i < 1000000; i++) put(&b, ",1", 2);
  put(&b, "]},\"model\0", 10);
  header = edit(HEADER, "{\"model", (char *)b.at);
  expect_safetensors(safetensors(header, DATA), CONFIG, TFM_OK, ""); /* rank 10^6 */
  free(header);
  drop(&b);
  for (i = 0; i < 100000; i++) put(&b, "{\"\":", 4);
  put(&b, "", 1);
  expect_safetensors(safetensors((char *)b.at, 0), CONFIG, TFM_E_FORMAT, "has an unknown field");
  drop(&b);
  for (i = 0; i < 100000; i++) put(&b, "[", 1);
  put(&b, "", 1);
  header = edit(CONFIG, "\"silu\"", (char *)b.at);
  expect_safetensors(safetensors(HEADER, DATA), header, TFM_E_FORMAT, "more than 64 deep");
  free(header);
  drop(&b);
}

static bool loads_tied(uint8_t last) { /* with a head that equals the embedding but for a byte */
  char *header = edit(HEADER, "[592,608]}}", "[592,608]},\"lm_head.weight\":{\"dtype\":\"F32\","
                      "\"shape\":[5,4],\"data_offsets\":[608,688]}}");
  bytes b = safetensors(header, DATA + 80);
  tfm_model_config c = test_config();
  tfm_model_info info;
  tfm_model *m;
  b.at[b.n - 1] = last;
  add_file("m/model.safetensors", b);
  add_text_file("m/config.json", CONFIG);
  m = tfm_model_load("m/", &c);
  memset(&info, 0, sizeof info);
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  expect_model(m, TFM_OK, "");
  forget_files();
  free(header);
  return info.tied;
}

TEST(safetensors_head_of_its_own) { /* CONFIG says tied; a repeated embedding is shared */
  CHECK(loads_tied(0));
  CHECK(!loads_tied(1));
}

TEST(safetensors_from_memory) {
  bytes b = safetensors(HEADER, DATA);
  tfm_model_config c = test_config();
  c.host.io = NULL;
  expect_model(tfm_model_load_memory(b.at, b.n, &c), TFM_E_ARG, "need config_json");
  c.config_json = CONFIG;
  expect_model(tfm_model_load_memory(b.at, b.n, &c), TFM_OK, "");
  expect_model(tfm_model_load_memory(NULL, 0, &c), TFM_E_ARG, "data is NULL");
  expect_model(tfm_model_load(NULL, &c), TFM_E_ARG, "path is NULL");
  c.weights = TFM_Q4_K;
  expect_model(tfm_model_load_memory(b.at, b.n, &c), TFM_E_ARG, "cannot be converted to Q4_K");
  c.weights = TFM_Q8_0;
  expect_model(tfm_model_load_memory(b.at, b.n, &c), TFM_E_UNSUPPORTED, "do not fill the blocks");
  drop(&b);
}

/* ---- Shards ---- */

static void expect_index(const char *index, int status, const char *part) {
  const char *second = strstr(HEADER, ",\"model.norm"); /* the last tensor alone in shard 2 */
  char *first = edit(HEADER, second, "}"), *other = edit(second, ",", "{");
  char *moved = edit(other, "[592,608]", "[0,16]");
  add_file("m/a.safetensors", safetensors(first, DATA - 16));
  add_file("m/b.safetensors", safetensors(moved, 16));
  add_text_file("m/model.safetensors.index.json", index);
  add_text_file("m/config.json", CONFIG);
  expect("m/", status, part);
  free(first);
  free(other);
  free(moved);
}

static char *index_text(void) { /* every tensor of HEADER but the norm in a, the norm in b */
  static const char *const names[] = {
    "embed_tokens", "layers.0.input_layernorm", "layers.0.post_attention_layernorm",
    "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj",
    "layers.0.self_attn.o_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj",
    "layers.0.mlp.down_proj", "norm"};
  char *text = (char *)calloc(1, 2000);
  int i;
  strcpy(text, "{\"metadata\":{\"total_size\":608},\"weight_map\":{");
  for (i = 0; i < TFMI_COUNT(names); i++)
    sprintf(text + strlen(text), "%s\"model.%s.weight\":\"%s.safetensors\"", i ? "," : "", names[i],
            i == TFMI_COUNT(names) - 1 ? "b" : "a");
  return strcat(text, "}}");
}

TEST(shards) {
  static const replacement cases[] = {
    {NULL, NULL, TFM_OK, ""},
    {"608", "1", TFM_OK, ""}, /* total_size binds nobody */
    {"a.safetensors", "../a.safetensors", TFM_E_FORMAT, "is not a plain file name"},
    {"a.safetensors", "/a.safetensors", TFM_E_FORMAT, "is not a plain file name"},
    {"a.safetensors", "..", TFM_E_FORMAT, "is not a plain file name"},
    {"a.safetensors", "", TFM_E_FORMAT, "is not a plain file name"},
    {"a.safetensors", "c.safetensors", TFM_E_IO, "m/c.safetensors: it cannot be opened"},
    {"a.safetensors", "model.safetensors.index.json", TFM_E_FORMAT, "header"},
    {"a.safetensors", "b.safetensors", TFM_E_FORMAT, "is not in b.safetensors"},
    {"\"model.embed_tokens.weight\":\"a.safetensors\",", "", TFM_E_FORMAT, "is not in weight_map"},
    {"\"model.norm", "\"x\":\"a.safetensors\",\"model.norm", TFM_E_FORMAT, "tensor x is not in"},
    {"\"model.norm", "\"model.embed_tokens.weight\":\"a.safetensors\",\"model.norm", TFM_E_FORMAT,
     "twice"},
    {"weight_map", "weights", TFM_E_FORMAT, "weight_map is missing"},
    {"\"a.safetensors\"", "7", TFM_E_FORMAT, "expected a string"},
  };
  int i;
  char *index = index_text();
  for (i = 0; i < TFMI_COUNT(cases); i++) {
    char *text = edit(index, cases[i].from, cases[i].to);
    expect_index(text, cases[i].status, cases[i].part);
    free(text);
  }
  free(index);
}

TEST(shards_with_a_tensor_in_two) {
  char *index = index_text(), *one = edit(HEADER, NULL, NULL);
  add_file("m/a.safetensors", safetensors(one, DATA));
  add_file("m/b.safetensors", safetensors(one, DATA));
  add_text_file("m/model.safetensors.index.json", index);
  add_text_file("m/config.json", CONFIG);
  expect("m/", TFM_E_FORMAT, "is there twice");
  free(index);
  free(one);
}

TEST(paths) {
  tfm_model_config c = test_config();
  add_text_file("m/config.json", CONFIG);
  expect("m/", TFM_E_IO, "has neither model.safetensors");
  add_file("m/model.safetensors", safetensors(HEADER, DATA));
  expect("m/", TFM_E_IO, "m/config.json cannot be opened");
  c.host.io = NULL;
  expect_model(tfm_model_load("/nonexistent/model", &c), TFM_E_IO, "cannot be opened");
  expect_model(tfm_model_load("/dev/zero", &c), TFM_E_IO, "is not a regular file");
  expect_model(tfm_model_load("/proc", &c), TFM_E_IO, "has neither model.safetensors");
}

#ifndef _WIN32
/* Nobody writes to it: opening it must not wait. */
TEST(a_pipe_is_refused) {
  tfm_model_config c = test_config();
  char path[64];
  c.host.io = NULL;
  snprintf(path, sizeof path, "/tmp/test_formats.%d.gguf", (int)getpid());
  CHECK_EQ_INT(mkfifo(path, 0600), 0);
  expect_model(tfm_model_load(path, &c), TFM_E_IO, "is not a regular file");
  CHECK(!tfm_tokenizer_load(path, NULL));
  unlink(path);
}

static void write_file(const char *path, bytes b) {
  FILE *f = fopen(path, "wb");
  CHECK(f && fwrite(b.at, 1, b.n, f) == b.n);
  if (f) fclose(f);
}

/* Hugging Face's cache is made of links; what may not be read is no model. */
TEST(links_and_permissions) {
  tfm_model_config c = test_config();
  bytes b = safetensors(HEADER, DATA);
  char folder[] = "/tmp/test_formats_XXXXXX", path[64], blob[64];
  CHECK(mkdtemp(folder) != NULL);
  c.host.io = NULL;
  c.config_json = CONFIG;
  snprintf(path, sizeof path, "%s/model.safetensors", folder);
  snprintf(blob, sizeof blob, "%s/blob", folder);
  write_file(blob, b);
  CHECK_EQ_INT(symlink("blob", path), 0);
  expect_model(tfm_model_load(folder, &c), TFM_OK, "");
  CHECK_EQ_INT(chmod(blob, 0), 0);
  if (geteuid() != 0) expect_model(tfm_model_load(folder, &c), TFM_E_IO, "cannot be opened");
  unlink(path);
  CHECK_EQ_INT(symlink("model.safetensors", path), 0); /* to itself */
  expect_model(tfm_model_load(path, &c), TFM_E_IO, "cannot be opened");
  unlink(path);
  unlink(blob);
  rmdir(folder);
  drop(&b);
}

/* The system may give less than was asked for, or nothing yet. */
TEST(reads_that_come_in_pieces) {
  char path[64];
  tfm_model_config c = test_config();
  bytes b = safetensors(HEADER, DATA);
  snprintf(path, sizeof path, "/tmp/test_formats.%d.safetensors", (int)getpid());
  write_file(path, b);
  c.host.io = NULL;
  c.config_json = CONFIG;
  c.no_mmap = true;
  reads_are_short = true;
  expect_model(tfm_model_load(path, &c), TFM_OK, "");
  reads_are_short = false;
  unlink(path);
  drop(&b);
}

/* HEADER behind a tensor of so many bytes. */
static char *header_behind(unsigned long long far) {
  static const char key[] = "\"data_offsets\":[";
  char *header = (char *)malloc(4 * sizeof HEADER), *out = header;
  const char *at = HEADER + 1, *next;
  out += sprintf(out, "{\"a\":{\"dtype\":\"U8\",\"shape\":[%llu],%s0,%llu]},", far, key, far);
  for (; (next = strstr(at, key)) != NULL; at = strchr(at, ']')) {
    unsigned long long begin, end;
    next += strlen(key);
    sscanf(next, "%llu,%llu", &begin, &end);
    out += sprintf(out, "%.*s%llu,%llu", (int)(next - at), at, far + begin, far + end);
    at = next;
  }
  strcpy(out, at);
  return header;
}

TEST(places_beyond_4_GiB) { /* 5 GiB of nothing, which a sparse file does not store */
  char path[64], *header = header_behind(5368709120u);
  tfm_model_config c = test_config();
  bytes b = safetensors(header, 0);
  FILE *f;
  if (sizeof(off_t) < 8) { /* such a file cannot be made here */
    free(header);
    drop(&b);
    return;
  }
  snprintf(path, sizeof path, "/tmp/test_formats.%d.safetensors", (int)getpid());
  f = fopen(path, "wb");
  fwrite(b.at, 1, b.n, f);
  CHECK_EQ_INT(ftruncate(fileno(f), (off_t)(b.n + 5368709120u + DATA)), 0);
  fclose(f);
  c.host.io = NULL;
  c.config_json = CONFIG;
  c.host.memory_limit_bytes = 1 << 20;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ /* others cannot use floats in place */
  expect_model(tfm_model_load(path, &c), sizeof(size_t) == 8 ? TFM_OK : TFM_E_IO, "");
#endif
  c.no_mmap = true; /* all of it would be read */
  expect_model(tfm_model_load(path, &c), sizeof(size_t) == 8 ? TFM_E_MEMORY : TFM_E_IO, "");
  unlink(path);
  free(header);
  drop(&b);
}

TEST(a_file_changed_while_it_is_used) { /* replaced: no harm; cut: none where it was read */
  char path[64];
  int i;
  snprintf(path, sizeof path, "/tmp/test_formats.%d.safetensors", (int)getpid());
  for (i = 0; i < 2; i++) {
    static const int32_t ids[] = {1, 2};
    tfm_model_config c = test_config();
    bytes b = safetensors(HEADER, DATA);
    tfm_session *s;
    tfm_model *m;
    write_file(path, b);
    c.host.io = NULL;
    c.config_json = CONFIG;
    c.no_mmap = i == 1;
    m = tfm_model_load(path, &c);
    if (!m) CHECK_STR(tfm_error(), "");
    if (i) CHECK_EQ_INT(truncate(path, 9), 0);
    else CHECK_EQ_INT(unlink(path), 0);
    s = tfm_session_create(m, NULL);
    CHECK_EQ_INT(tfm_feed(s, ids, 2), TFM_OK);
    tfm_session_free(s);
    expect_model(m, TFM_OK, "");
    drop(&b);
  }
  unlink(path);
}
#endif

/* ---- config.json ---- */

TEST(config_numbers) {
  static const replacement cases[] = {
      {"\"num_attention_heads\": 2", "\"num_attention_heads\": 0", TFM_E_FORMAT,
       "is 0, expected 1 to"},
      {"\"num_attention_heads\": 2", "\"num_attention_heads\": 3", TFM_E_FORMAT,
       "not divisible by 3"},
      {"\"num_key_value_heads\": 1", "\"num_key_value_heads\": 3", TFM_E_FORMAT,
       "2 heads are not divisible by 3"},
      {"\"num_key_value_heads\": 1", "\"num_key_value_heads\": 0", TFM_E_FORMAT,
       "is 0, expected 1"},
      {"\"vocab_size\"", "\"head_dim\": 0, \"vocab_size\"", TFM_E_FORMAT, "head_dim is 0"},
      {"\"vocab_size\"", "\"head_dim\": 3, \"vocab_size\"", TFM_E_FORMAT, "head width 3 are odd"},
      {"\"vocab_size\"", "\"head_dim\": 65536, \"vocab_size\"", TFM_E_FORMAT, "has shape"},
      {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 0", TFM_E_FORMAT,
       "num_hidden_layers is 0"},
      {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2147483648", TFM_E_FORMAT,
       "expected 1 to"},
      {"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2", TFM_E_FORMAT,
       "model.layers.1.input_layernorm.weight is missing"},
      {"\"num_hidden_layers\": 1, ", "", TFM_E_FORMAT, "num_hidden_layers is missing"},
      {"\"vocab_size\": 5", "\"vocab_size\": 0", TFM_E_FORMAT, "vocab_size is 0"},
      {"\"vocab_size\": 5", "\"vocab_size\": 2147483648", TFM_E_FORMAT, "vocab_size is"},
      {"\"vocab_size\": 5", "\"vocab_size\": 6", TFM_E_FORMAT, "has shape [5, 4], expected [6, 4]"},
      {"\"max_position_embeddings\": 8", "\"max_position_embeddings\": 0", TFM_E_FORMAT, "is 0"},
      {"\"max_position_embeddings\": 8", "\"max_position_embeddings\": 1", TFM_OK, ""},
      {"\"max_position_embeddings\": 8", "\"max_position_embeddings\": 2147483648", TFM_E_FORMAT,
       "expected 1 to"},
      {"1e-05", "0", TFM_E_FORMAT, "rms_norm_eps is 0"},
      {"1e-05", "-1e-5", TFM_E_FORMAT, "rms_norm_eps is -1e-05"},
      {"1e-05", "NaN", TFM_E_FORMAT, "expected a value, found 'N'"},
      {"10000.0", "0", TFM_E_FORMAT, "rope_theta is 0"},
      {"10000.0", "-1", TFM_E_FORMAT, "rope_theta is -1"},
      {"10000.0", "1e400", TFM_E_FORMAT, "too large for a double"},
      {"\"hidden_size\": 4", "\"hidden_size\": \"4\"", TFM_E_FORMAT, "is text, expected a number"},
      {"\"hidden_size\": 4", "\"hidden_size\": 4.0", TFM_E_FORMAT, "expected a whole number"},
      {"\"hidden_size\": 4", "\"hidden_size\": 4.5", TFM_E_FORMAT, "expected a whole number"},
      {"\"hidden_size\": 4", "\"hidden_size\": true", TFM_E_FORMAT, "is true or false, expected"},
      {"\"hidden_size\": 4", "\"hidden_size\": null", TFM_E_FORMAT, "hidden_size is missing"},
      {"\"hidden_size\": 4", "\"hidden_size\": 16777216", TFM_E_FORMAT, "expected [5, 16777216]"},
      {"\"hidden_size\": 4", "\"hidden_size\": 4, \"hidden_size\": 4", TFM_E_FORMAT,
       "is there twice"},
      {"\"num_key_value_heads\": 1", "\"num_key_value_heads\": null", TFM_E_FORMAT,
       "k_proj.weight has shape [2, 4], expected [4, 4]"},
      {"_embeddings\": true", "_embeddings\": false", TFM_E_FORMAT, "lm_head.weight is missing"},
      {"_embeddings\": true", "_embeddings\": 1", TFM_E_FORMAT, "expected true or false"},
      {"\"eos_token_id\": 2", "\"eos_token_id\": [2, 3]", TFM_OK, ""},
      {"\"eos_token_id\": 2", "\"eos_token_id\": 99", TFM_OK, ""}, /* a warning */
      {"\"eos_token_id\": 2", "\"eos_token_id\": \"2\"", TFM_E_FORMAT, "expected an array"},
      {"\"eos_token_id\": 2", "\"eos_token_id\": [1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]",
       TFM_E_UNSUPPORTED, "more than 16 ids"},
      {"{\"model_type\"", "[\"model_type\"", TFM_E_FORMAT, "expected an object"},
      {"\"bos_token_id\": 1}", "\"bos_token_id\": 1", TFM_E_FORMAT, "found the end of the text"},
  };
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++)
    expect_config(cases[i].from, cases[i].to, cases[i].status, cases[i].part);
}

TEST(config_refusals) {
  static const replacement cases[] = {
    {"\"llama\"", "\"mamba\"", TFM_E_UNSUPPORTED, "model_type \"mamba\" is not supported"},
    {"\"llama\"", "\"gpt2\"", TFM_E_UNSUPPORTED, "architecture \"LlamaForCausalLM\""},
    {"LlamaForCausalLM", "LlamaForTokenClassification", TFM_E_UNSUPPORTED, "is not supported"},
    {"\"model_type\": \"llama\", ", "", TFM_OK, ""}, /* architectures will do */
    {"\"silu\"", "\"gelu_fast\"", TFM_E_UNSUPPORTED, "hidden_act \"gelu_fast\""},
    {"\"silu\"", "\"gelu\"", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"rope_scaling\": {\"type\": \"3d\", \"factor\": 2.0}",
     TFM_E_UNSUPPORTED, "rope type \"3d\""},
    {"\"silu\"", "\"silu\", \"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 2.0}",
     TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1, 2]}",
     TFM_E_FORMAT, "short_factor has 2 at 1, expected 1 numbers"},
    {"\"silu\"", "\"silu\", \"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1]}",
     TFM_E_FORMAT, "rope_scaling.long_factor is missing"},
    {"\"silu\"", "\"silu\", \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5e5}",
     TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"rope_scaling\": null", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"rope_scaling\": \"linear\"", TFM_E_FORMAT,
     "rope_scaling is text, expected an object"},
    {"\"silu\"", "\"silu\", \"rope_scaling\": null, \"rope_parameters\": {}", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"rope_scaling\": {}, \"rope_parameters\": {}", TFM_E_UNSUPPORTED,
     "both there"},
    {"\"silu\"", "\"silu\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 0}",
     TFM_E_FORMAT, "rope_scaling.factor is 0"},
    {"\"silu\"", "\"silu\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8}",
     TFM_E_FORMAT, "rope_scaling.low_freq_factor is missing"},
    {"\"silu\"", "\"silu\", \"quantization_config\": {\"quant_method\": \"gptq\"}",
     TFM_E_UNSUPPORTED, "quantization_config"},
    {"\"silu\"", "\"silu\", \"quantization_config\": false", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"partial_rotary_factor\": 0.5", TFM_E_UNSUPPORTED,
     "partial_rotary_factor is 0.5"},
    {"\"silu\"", "\"silu\", \"sliding_window\": 4", TFM_E_UNSUPPORTED, "sliding_window is 4"},
    {"\"silu\"", "\"silu\", \"sliding_window\": null", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"use_bidirectional_attention\": true", TFM_E_UNSUPPORTED,
     "use_bidirectional_attention is true"},
    {"\"silu\"", "\"silu\", \"use_bidirectional_attention\": false", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"residual_multiplier\": 0.5", TFM_E_UNSUPPORTED, "is 0.5, which"},
    {"\"silu\"", "\"silu\", \"residual_multiplier\": 1.0", TFM_OK, ""},
    {"\"silu\"", "\"silu\", \"final_logit_softcapping\": 30.0", TFM_E_UNSUPPORTED, "is 30.0"},
    {"\"silu\"", "\"silu\", \"layer_types\": [\"linear_attention\"]", TFM_E_UNSUPPORTED,
     "layer_types has \"linear_attention\" for layer 0"},
    {"\"silu\"", "\"silu\", \"layer_types\": [\"full_attention\", \"full_attention\"]",
     TFM_E_FORMAT, "does not name the 1 layers"},
    {"\"silu\"", "\"silu\", \"attention_bias\": true", TFM_E_FORMAT, "q_proj.bias is missing"},
  };
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++)
    expect_config(cases[i].from, cases[i].to, cases[i].status, cases[i].part);
}

/* Experts: none, more asked for than there are, too many, and where a family has none. */
TEST(config_experts) {
  static const replacement cases[] = {
    {"\"num_local_experts\": 4", "\"num_local_experts\": 0", TFM_E_FORMAT, "is 0, expected 1 to"},
    {"\"num_local_experts\": 4", "\"num_local_experts\": 2147483648", TFM_E_FORMAT,
     "expected 1 to"},
    {"\"num_local_experts\": 4", "\"num_local_experts\": 5", TFM_E_FORMAT, "expected [5, 30]"},
    {"\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 5", TFM_E_FORMAT, "5 experts of 4"},
    {"\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": 0", TFM_E_FORMAT, "is 0, expected"},
    {"\"num_experts_per_tok\": 3", "\"num_experts_per_tok\": -1", TFM_E_FORMAT, "is -1, expected"},
    {NULL, NULL, TFM_OK, ""},
  };
  blob weights = blob_read("tests/data/models/mixtral-b/model.safetensors");
  blob config = blob_read("tests/data/models/mixtral-b/config.json");
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++) {
    tfm_model_config c = test_config();
    char *text = edit((char *)config.data, cases[i].from, cases[i].to);
    c.config_json = text;
    expect_model(tfm_model_load_memory(weights.data, weights.bytes, &c), cases[i].status,
                 cases[i].part);
    free(text);
  }
  expect_config("\"silu\"", "\"silu\", \"num_local_experts\": 8", TFM_E_UNSUPPORTED, "is 8");
  free(weights.data);
  free(config.data);
}

TEST(config_memory_follows_the_file) { /* inner keys do not repeat a name without end */
  enum { NAME = 20000, INNER = 4000 };
  char *group = (char *)calloc(1, NAME + 8 * INNER + 64), *config;
  int i;
  memset(group, 'x', NAME + 1);
  group[0] = '"';
  strcat(group, "\": {\"k\": 0");
  for (i = 0; i < INNER; i++) strcat(group + NAME, ",\"\":0");
  strcat(group, "}, \"hidden_size\"");
  config = edit(CONFIG, "\"hidden_size\"", group);
  peak_bytes = 0;
  expect_safetensors(safetensors(HEADER, DATA), config, TFM_OK, "");
  CHECK(peak_bytes < 4 * (int64_t)strlen(config));
  free(group);
  free(config);
}

/* ---- The tokenizer beside a model ---- */

TEST(tokenizer_beside_a_padded_header) { /* the model's file is known as one, whatever pads it */
  tfm_model_config c = test_config();
  tfm_tokenizer_config config;
  tfm_tokenizer *t;
  char *header = edit(HEADER, "{\"model", " \n{\"model");
  memset(&config, 0, sizeof config);
  config.host = c.host;
  add_file("m/model.weights", safetensors(header, DATA));
  add_text_file("m/tokenizer.json", "{\"decoder\":{\"type\":\"Fuse\"},"
                                    "\"model\":{\"vocab\":{\"a\":0}}}");
  t = tfm_tokenizer_load("m/model.weights", &config);
  if (!t) CHECK_STR(tfm_error(), "");
  tfm_tokenizer_free(t);
  CHECK_EQ_INT(held_bytes, 0);
  forget_files();
  free(header);
}

/* ---- GGUF ---- */

static void gguf_text(bytes *b, const char *text) {
  put_int(b, strlen(text), 8);
  put_text(b, text);
}
static void gguf_u32(bytes *b, const char *key, uint32_t value) {
  gguf_text(b, key);
  put_int(b, TFMI_GGUF_U32, 4);
  put_int(b, value, 4);
}
static void gguf_f32(bytes *b, const char *key, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  gguf_text(b, key);
  put_int(b, TFMI_GGUF_F32, 4);
  put_int(b, bits, 4);
}
static void gguf_string(bytes *b, const char *key, const char *value) {
  gguf_text(b, key);
  put_int(b, TFMI_GGUF_STRING, 4);
  gguf_text(b, value);
}
static void gguf_tensor(bytes *b, const char *name, uint64_t cols, uint64_t rows, uint32_t type,
                        uint64_t offset) {
  gguf_text(b, name);
  put_int(b, rows ? 2 : 1, 4);
  put_int(b, cols, 8);
  if (rows) put_int(b, rows, 8);
  put_int(b, type, 4);
  put_int(b, offset, 8);
}
static bytes gguf_begin(uint64_t tensors, uint64_t keys) {
  bytes b = {NULL, 0};
  put_text(&b, "GGUF");
  put_int(&b, 3, 4);
  put_int(&b, tensors, 8);
  put_int(&b, keys, 8);
  return b;
}
static void expect_gguf(bytes b, int status, const char *part) {
  add_file("m.gguf", b);
  expect("m.gguf", status, part);
}

typedef struct gguf_change { /* what a model differs in from a good one */
  const char *drop, *name; /* a tensor is left out; a tensor's name */
  uint32_t type;           /* of the embedding */
  uint64_t rows;           /* of the embedding */
  uint64_t shift;          /* of its offset */
  const char *architecture, *scaling;
  size_t cut;              /* bytes missing at the end */
  const char *real;        /* a key behind "llama." more, of value 2 */
} gguf_change;

static const struct gguf_row {
  const char *name;
  uint64_t cols, rows;
} gguf_rows[] = {
  {"token_embd.weight", 32, 5},         {"output_norm.weight", 32, 0},
  {"blk.0.attn_norm.weight", 32, 0},    {"blk.0.ffn_norm.weight", 32, 0},
  {"blk.0.attn_q.weight", 32, 32},      {"blk.0.attn_k.weight", 32, 16},
  {"blk.0.attn_v.weight", 32, 16},      {"blk.0.attn_output.weight", 32, 32},
  {"blk.0.ffn_gate.weight", 32, 8},     {"blk.0.ffn_up.weight", 32, 8},
  {"blk.0.ffn_down.weight", 8, 32},
};

static bytes gguf_model(const gguf_change *c) {
  int n = TFMI_COUNT(gguf_rows), i;
  uint64_t offset = 0;
  bytes b = gguf_begin((uint64_t)(n - (c->drop != NULL)),
                       8u + (c->scaling != NULL) + (c->real != NULL));
  gguf_string(&b, "general.architecture", c->architecture ? c->architecture : "llama");
  gguf_u32(&b, "llama.block_count", 1);
  gguf_u32(&b, "llama.embedding_length", 32);
  gguf_u32(&b, "llama.feed_forward_length", 8);
  gguf_u32(&b, "llama.attention.head_count", 2);
  gguf_u32(&b, "llama.attention.head_count_kv", 1);
  gguf_u32(&b, "llama.context_length", 16);
  gguf_f32(&b, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  if (c->scaling) gguf_string(&b, "llama.rope.scaling.type", c->scaling);
  if (c->real) gguf_f32(&b, c->real, 2);
  for (i = 0; i < n; i++) {
    uint64_t rows = i == 0 && c->rows ? c->rows : gguf_rows[i].rows;
    const char *name = i == 0 && c->name ? c->name : gguf_rows[i].name;
    if (c->drop && !strcmp(c->drop, gguf_rows[i].name)) continue;
    gguf_tensor(&b, name, gguf_rows[i].cols, rows, i == 0 ? c->type : 0,
                offset + (i == 0 ? c->shift : 0));
    offset += gguf_rows[i].cols * (gguf_rows[i].rows ? gguf_rows[i].rows : 1) * 4;
  }
  put_pad(&b, 32);
  put(&b, NULL, (size_t)offset);
  b.n -= c->cut;
  return b;
}

TEST(gguf_models) {
  static const struct {
    gguf_change change;
    int status;
    const char *part;
  } cases[] = {
      {{NULL, NULL, 0, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 1, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 2, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 8, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 30, 0, 0, NULL, "none", 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 0, 0, 0, NULL, NULL, 0, "llama.rope.scaling.factor"}, TFM_OK, ""},
      {{NULL, NULL, 0, 0, 0, NULL, NULL, 0, "llama.rope.scale_linear"}, TFM_E_FORMAT, "is 2"},
      {{NULL, NULL, 0, 0, 0, NULL, NULL, 0, "llama.attention.scale"}, TFM_E_FORMAT, "is 2"},
      {{NULL, NULL, 14, 0, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT,
       "do not fill blocks of Q6_K (256)"},
      {{NULL, NULL, 3, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 6, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 7, 0, 0, NULL, NULL, 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 9, 0, 0, NULL, NULL, 0, NULL}, TFM_E_UNSUPPORTED,
       "token_embd.weight has type Q8_1"},
      {{NULL, NULL, 20, 0, 0, NULL, NULL, 0, NULL}, TFM_E_UNSUPPORTED, "has type IQ4_NL"},
      {{NULL, NULL, 4, 0, 0, NULL, NULL, 0, NULL}, TFM_E_UNSUPPORTED, "type 4, which is not known"},
      {{NULL, NULL, 31, 0, 0, NULL, NULL, 0, NULL}, TFM_E_UNSUPPORTED,
       "type 31, which is not known"},
      {{NULL, NULL, 999, 0, 0, NULL, NULL, 0, NULL}, TFM_E_UNSUPPORTED,
       "type 999, which is not known"},
      {{NULL, NULL, UINT32_MAX, 0, 0, NULL, NULL, 0, NULL}, TFM_E_UNSUPPORTED,
       "which is not known"},
      {{NULL, NULL, 0, 6, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT, "overlap"},
      {{NULL, NULL, 0, UINT64_MAX, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT,
       "a dimension of 1844674407370"},
      {{NULL, NULL, 0, INT64_MAX, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT, "more than 2^64 elements"},
      {{NULL, NULL, 0, UINT64_C(1) << 58, 0, NULL, NULL, 0, NULL},
       TFM_E_FORMAT,
       "larger than the address"},
      {{NULL, NULL, 0, UINT64_C(1) << 50, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT,
       sizeof(size_t) > 4 ? "data section has" : "larger than the address"},
      {{NULL, NULL, 0, 0, 1, NULL, NULL, 0, NULL}, TFM_E_FORMAT,
       "offset 1, expected a multiple of 32"},
      {{NULL, NULL, 0, 0, 32, NULL, NULL, 0, NULL}, TFM_E_FORMAT, "overlap"},
      {{NULL, NULL, 0, 0, UINT64_MAX - 31, NULL, NULL, 0, NULL},
       TFM_E_FORMAT,
       "but the data section has"},
      {{NULL, NULL, 0, 0, 0, NULL, NULL, 1, NULL}, TFM_E_FORMAT, "may be cut off"},
      {{NULL, NULL, 0, 0, 0, "bert", NULL, 0, NULL}, TFM_E_UNSUPPORTED, "architecture \"bert\""},
      {{NULL, NULL, 0, 0, 0, NULL, "yarn", 0, NULL}, TFM_OK, ""},
      {{NULL, NULL, 0, 0, 0, NULL, "3d", 0, NULL}, TFM_E_UNSUPPORTED, "rope type \"3d\""},
      {{"blk.0.attn_k.weight", NULL, 0, 0, 0, NULL, NULL, 0, NULL},
       TFM_E_FORMAT,
       "attn_k.weight is missing"},
      {{NULL, "output_norm.weight", 0, 0, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT, "is there twice"},
      {{NULL, "", 0, 0, 0, NULL, NULL, 0, NULL}, TFM_E_FORMAT,
       "name has 0 bytes, expected 1 to 64"},
      {{NULL, "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 0, 0, 0, NULL,
        NULL, 0, NULL},
       TFM_E_FORMAT,
       "name has 65 bytes, expected 1 to 64"},
  };
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++)
    expect_gguf(gguf_model(&cases[i].change), cases[i].status, cases[i].part);
}

/* A vocabulary of two tokens, "a" and "<s>". pre NULL, add -1: the file does not say. */
static bytes gguf_vocabulary(const char *architecture, const char *pre, int add) {
  bytes b = gguf_begin(0, 6u + (pre != NULL) + (add >= 0));
  gguf_string(&b, "general.architecture", architecture);
  gguf_string(&b, "tokenizer.ggml.model", "gpt2");
  if (pre) gguf_string(&b, "tokenizer.ggml.pre", pre);
  gguf_u32(&b, "tokenizer.ggml.bos_token_id", 1);
  gguf_text(&b, "tokenizer.ggml.tokens");
  put_int(&b, TFMI_GGUF_ARRAY, 4), put_int(&b, TFMI_GGUF_STRING, 4), put_int(&b, 2, 8);
  gguf_text(&b, "a");
  gguf_text(&b, "<s>");
  gguf_text(&b, "tokenizer.ggml.token_type");
  put_int(&b, TFMI_GGUF_ARRAY, 4), put_int(&b, TFMI_GGUF_I32, 4), put_int(&b, 2, 8);
  put_int(&b, 1, 4), put_int(&b, 3, 4);
  gguf_text(&b, "tokenizer.ggml.merges");
  put_int(&b, TFMI_GGUF_ARRAY, 4), put_int(&b, TFMI_GGUF_STRING, 4), put_int(&b, 0, 8);
  if (add >= 0) {
    gguf_text(&b, "tokenizer.ggml.add_bos_token");
    put_int(&b, TFMI_GGUF_BOOL, 4), put_int(&b, (uint64_t)add, 1);
  }
  return b;
}

/* ---- A vocabulary of characters in GGUF, of which one thing is odd ---- */

typedef struct gguf_odd {
  const char *token;    /* of type `type` */
  uint32_t type, types; /* types: the element's of token_type */
  uint64_t scores;      /* how many */
  uint32_t bos, eos;
} gguf_odd;

static bytes gguf_characters(const gguf_odd *odd) {
  const char *const tokens[] = {"<unk>", "<s>", "a", odd->token};
  const uint32_t type[] = {2, 3, 1, odd->type};
  uint64_t i;
  bytes b = gguf_begin(0, 7);
  gguf_string(&b, "general.architecture", "llama");
  gguf_string(&b, "tokenizer.ggml.model", "llama");
  gguf_u32(&b, "tokenizer.ggml.bos_token_id", odd->bos);
  gguf_u32(&b, "tokenizer.ggml.eos_token_id", odd->eos);
  gguf_text(&b, "tokenizer.ggml.tokens");
  put_int(&b, TFMI_GGUF_ARRAY, 4), put_int(&b, TFMI_GGUF_STRING, 4), put_int(&b, 4, 8);
  for (i = 0; i < 4; i++) gguf_text(&b, tokens[i]);
  gguf_text(&b, "tokenizer.ggml.token_type");
  put_int(&b, TFMI_GGUF_ARRAY, 4), put_int(&b, odd->types, 4), put_int(&b, 4, 8);
  for (i = 0; i < 4; i++) put_int(&b, type[i], odd->types == TFMI_GGUF_U8 ? 1 : 4);
  gguf_text(&b, "tokenizer.ggml.scores");
  put_int(&b, TFMI_GGUF_ARRAY, 4), put_int(&b, TFMI_GGUF_F32, 4), put_int(&b, odd->scores, 8);
  put(&b, NULL, 4 * odd->scores);
  return b;
}

TEST(gguf_odd_vocabularies) {
  static const struct { gguf_odd odd; int status; const char *part; } cases[] = {
    {{"b", 1, TFMI_GGUF_I32, 4, 1, 1}, TFM_OK, ""},
    {{"b", 1, TFMI_GGUF_U8, 4, 1, 1}, TFM_OK, ""},
    {{"b", 1, TFMI_GGUF_F32, 4, 1, 1}, TFM_E_FORMAT, "is not an array of integers"},
    {{"b", 7, TFMI_GGUF_I32, 4, 1, 1}, TFM_E_FORMAT, "has type 7, expected 1 to 6"},
    {{"b", 1, TFMI_GGUF_I32, 3, 1, 1}, TFM_E_FORMAT, "scores has 3 elements, expected"},
    {{"b", 1, TFMI_GGUF_I32, 0, 1, 1}, TFM_E_FORMAT, "scores has 0 elements, expected"},
    {{"<0x41>", 6, TFMI_GGUF_I32, 4, 1, 1}, TFM_E_UNSUPPORTED, "1 byte tokens, expected all"},
    {{"<0x-1>", 6, TFMI_GGUF_I32, 4, 1, 1}, TFM_OK, ""}, /* text like any other */
    {{"<0xZZ>", 6, TFMI_GGUF_I32, 4, 1, 1}, TFM_OK, ""},
    {{"<0x100>", 6, TFMI_GGUF_I32, 4, 1, 1}, TFM_OK, ""},
    {{"b", 1, TFMI_GGUF_I32, 4, INT32_MAX, UINT32_MAX}, TFM_OK, ""}, /* as if not told */
    {{"b", 1, TFMI_GGUF_I32, 4, 4, 4}, TFM_OK, ""}};
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++) {
    bytes b = gguf_characters(&cases[i].odd);
    tfm_tokenizer *t = tfm_tokenizer_load_memory(b.at, b.n, NULL);
    tfm_tokenizer_info info;
    char text[32];
    int32_t id = 3;
    drop(&b);
    if (!t && cases[i].status == TFM_OK) CHECK_STR(tfm_error(), cases[i].odd.token);
    if (!t) {
      CHECK_EQ_INT(tfm_error_status(), cases[i].status);
      CHECK_STR_HAS(tfm_error(), cases[i].part);
      continue;
    }
    CHECK_EQ_INT(tfm_tokenizer_describe(t, &info), TFM_OK);
    CHECK_EQ_INT(info.bos, cases[i].odd.bos < 4 ? 1 : -1);
    CHECK_EQ_INT(info.eos, cases[i].odd.eos < 4 ? 1 : -1);
    CHECK(tfm_decode(t, &id, 1, text, sizeof text) > 0);
    CHECK_STR(text, cases[i].odd.token);
    CHECK(tfm_encode(t, "aA\xff", 3, 0, NULL, 0) > 0);
    tfm_tokenizer_free(t);
  }
}

static bool gguf_adds_bos(const char *pre, int add) {
  bytes b = gguf_vocabulary("llama", pre, add);
  tfm_tokenizer_info info;
  tfm_tokenizer *t = tfm_tokenizer_load_memory(b.at, b.n, NULL);
  memset(&info, 0, sizeof info);
  if (!t) CHECK_STR(tfm_error(), "");
  CHECK_EQ_INT(tfm_tokenizer_describe(t, &info), TFM_OK);
  tfm_tokenizer_free(t);
  drop(&b);
  return info.adds_bos;
}

TEST(gguf_bos) {
  CHECK(gguf_adds_bos("llama-bpe", -1));
  CHECK(gguf_adds_bos("llama3", -1));
  CHECK(gguf_adds_bos("llama-v3", -1));
  CHECK(!gguf_adds_bos("llama-bpe", 0));
  CHECK(!gguf_adds_bos("gpt-2", -1));
  CHECK(gguf_adds_bos("gpt-2", 1));
}

static void expect_vocabulary(const char *architecture, const char *pre, tfm_status status) {
  bytes b = gguf_vocabulary(architecture, pre, -1);
  tfm_tokenizer *t = tfm_tokenizer_load_memory(b.at, b.n, NULL);
  if (status == TFM_OK && !t) CHECK_STR(tfm_error(), pre ? pre : "no name");
  if (status != TFM_OK) CHECK(!t && tfm_error_status() == status);
  tfm_tokenizer_free(t);
  drop(&b);
}

TEST(gguf_names_of_splitting) { /* each can be compiled; without a name only GPT-2's is certain */
  int i;
  for (i = 0; i < TFMI_COUNT(tfmi_gguf_pres); i++)
    expect_vocabulary("llama", tfmi_gguf_pres[i].name, TFM_OK);
  expect_vocabulary("gpt2", NULL, TFM_OK);
  expect_vocabulary("gpt2", "default", TFM_OK);
  expect_vocabulary("llama", NULL, TFM_E_UNSUPPORTED);
  expect_vocabulary("llama", "default", TFM_E_UNSUPPORTED);
  expect_vocabulary("llama", "superbpe", TFM_E_UNSUPPORTED);
}

TEST(gguf_header) {
  static const char *const old[] = {"lmgg", "tjgg", "algg"};
  static const uint32_t versions[] = {0, 1, 2, 4, 0x03000000};
  static const uint64_t counts[] = {UINT64_C(1) << 63, UINT64_C(1) << 61, UINT64_MAX, 3};
  int i;
  for (i = 0; i < TFMI_COUNT(old); i++) {
    bytes b = {NULL, 0};
    put_text(&b, old[i]);
    put(&b, NULL, 39);
    expect_gguf(b, TFM_E_UNSUPPORTED, "an old GGML file");
  }
  for (i = 0; i < TFMI_COUNT(versions); i++) {
    bytes b = {NULL, 0};
    put_text(&b, "GGUF");
    put_int(&b, versions[i], 4);
    put(&b, NULL, 16);
    expect_gguf(b, TFM_E_UNSUPPORTED, i == 4 ? "big-endian" : "expected 3");
  }
  for (i = 0; i < TFMI_COUNT(counts); i++) {
    bytes b = gguf_begin(0, counts[i]);
    put(&b, NULL, 19);
    expect_gguf(b, TFM_E_FORMAT, "keys are announced");
    b = gguf_begin(counts[i], 0);
    put(&b, NULL, 19);
    expect_gguf(b, TFM_E_FORMAT, "tensors are announced");
  }
  for (i = 4; i < 24; i++) {
    bytes b = gguf_begin(0, 0);
    b.n = (size_t)i;
    expect_gguf(b, TFM_E_FORMAT, "the file ends after");
  }
  expect_gguf(gguf_begin(0, 0), TFM_E_FORMAT, "it is a vocabulary, not a model");
}

static void expect_value(uint32_t type, uint32_t element, uint64_t n, size_t room, int status,
                         const char *part) {
  bytes b = gguf_begin(0, 1);
  gguf_text(&b, "key");
  put_int(&b, type, 4);
  if (type == TFMI_GGUF_ARRAY) put_int(&b, element, 4);
  if (type == TFMI_GGUF_ARRAY || type == TFMI_GGUF_STRING) put_int(&b, n, 8);
  put(&b, NULL, room);
  expect_gguf(b, status, part);
}

TEST(gguf_values) {
  bytes b;
  expect_value(13, 0, 0, 99, TFM_E_FORMAT, "key key has type 13, expected 0 to 12");
  expect_value(TFMI_GGUF_STRING, 0, UINT64_C(1) << 63, 99, TFM_E_FORMAT, "a string needs");
  expect_value(TFMI_GGUF_STRING, 0, 100, 99, TFM_E_FORMAT, "a string needs 100 bytes");
  expect_value(TFMI_GGUF_STRING, 0, 99, 99, TFM_E_FORMAT, "it is a vocabulary");
  expect_value(TFMI_GGUF_ARRAY, TFMI_GGUF_STRING, UINT64_C(1) << 62, 99, TFM_E_FORMAT,
               "array elements are announced");
  expect_value(TFMI_GGUF_ARRAY, TFMI_GGUF_U64, UINT64_C(1) << 61, 99, TFM_E_FORMAT,
               "array elements are announced");
  expect_value(TFMI_GGUF_ARRAY, TFMI_GGUF_ARRAY, 1, 99, TFM_E_UNSUPPORTED, "an array of arrays");
  expect_value(TFMI_GGUF_ARRAY, 13, 1, 99, TFM_E_FORMAT, "an array of type 13");
  expect_value(TFMI_GGUF_U64, 0, 0, 7, TFM_E_FORMAT, "a value needs 8 bytes");
  b = gguf_begin(0, 1);
  gguf_text(&b, "key");
  put_int(&b, TFMI_GGUF_BOOL, 4);
  put_int(&b, 2, 2);
  expect_gguf(b, TFM_E_FORMAT, "key key is a bool of value 2");
}

TEST(gguf_keys) {
  static const struct { uint32_t type, value; } alignments[] = {
    {TFMI_GGUF_U32, 0}, {TFMI_GGUF_U32, 3}, {TFMI_GGUF_U32, 1}, {TFMI_GGUF_U32, 0x80000000},
    {TFMI_GGUF_F32, 32}, {TFMI_GGUF_I32, 32}};
  int i;
  bytes b = gguf_begin(0, 2);
  gguf_u32(&b, "a", 1);
  gguf_u32(&b, "a", 1);
  expect_gguf(b, TFM_E_FORMAT, "key a is there twice");
  b = gguf_begin(0, 1);
  gguf_u32(&b, "", 1);
  put(&b, NULL, 9);
  expect_gguf(b, TFM_E_FORMAT, "a key has 0 bytes");
  b = gguf_begin(0, 1);
  put_int(&b, 3, 8);
  put(&b, "a\0b", 3);
  put(&b, NULL, 8);
  expect_gguf(b, TFM_E_FORMAT, "\"a?b\" contains a NUL");
  for (i = 0; i < TFMI_COUNT(alignments); i++) {
    b = gguf_begin(0, 1);
    gguf_text(&b, "general.alignment");
    put_int(&b, alignments[i].type, 4);
    put_int(&b, alignments[i].value, 4);
    expect_gguf(b, TFM_E_FORMAT, i < 4 ? "expected a power of two" : "expected u32");
  }
  b = gguf_begin(0, 1);
  gguf_u32(&b, "general.architecture", 1);
  put_int(&b, 0, 8);
  expect_gguf(b, TFM_E_FORMAT, "it is a vocabulary");
}

TEST(gguf_a_million_keys) { /* in less than quadratic time */
  const uint32_t n = 300000;
  uint32_t i;
  bytes b = gguf_begin(0, n);
  for (i = 0; i < n; i++) {
    char name[16];
    snprintf(name, sizeof name, "k%07u", (unsigned)(i * 7919 % n));
    gguf_u32(&b, name, 0);
  }
  expect_gguf(b, TFM_E_FORMAT, "it is a vocabulary");
}

/* One tensor of a name, a dimension and a type, and no more. */
static bytes gguf_one_tensor(const char *name, size_t n, uint64_t dimension, uint32_t type) {
  bytes b = gguf_begin(1, 0);
  put_int(&b, n, 8);
  put(&b, name, n);
  put_int(&b, 1, 4);
  put_int(&b, dimension, 8);
  put_int(&b, type, 4);
  put_int(&b, 0, 8);
  put_pad(&b, 32);
  return b;
}

TEST(gguf_tensors) { /* names, dimensions of 0, no data */
  static const char name[] = "aaaaaaaabbbbbbbbccccccccddddddddeeeeeeeeffffffffgggggggghhhhhhhh";
  bytes b;
  expect_gguf(gguf_one_tensor(name, 64, 8, 0), TFM_E_FORMAT, "may be cut off");
  b = gguf_one_tensor(name, 64, 8, 0);
  put(&b, NULL, 32);
  expect_gguf(b, TFM_E_FORMAT, "general.architecture is missing");
  expect_gguf(gguf_one_tensor("a\0b", 3, 8, 0), TFM_E_FORMAT, "contains a NUL");
  expect_gguf(gguf_one_tensor("a", 1, 0, 0), TFM_E_FORMAT, "a dimension of 0");
}

/* Blocks whose scales are infinite or no numbers give such logits, and one of the ids. */
TEST(gguf_scales_that_are_no_numbers) {
  static const uint32_t types[] = {2, 3, 6, 7, 8};
  static const int32_t ids[] = {1, 2};
  static const uint8_t ends[] = {0x7c, 0xff};
  int i;
  for (i = 0; i < 2 * TFMI_COUNT(types); i++) {
    gguf_change change = {NULL, NULL, types[i / 2], 0, 0, NULL, NULL, 0, NULL};
    tfm_model_config c = test_config();
    bytes b = gguf_model(&change);
    tfm_session *s;
    tfm_model *m;
    int32_t id;
    memset(b.at + b.n - 16384, ends[i % 2], 640); /* the embedding's room, the first of all */
    c.host.io = NULL;
    m = tfm_model_load_memory(b.at, b.n, &c);
    s = tfm_session_create(m, NULL);
    CHECK_EQ_INT(tfm_feed(s, ids, 2), TFM_OK);
    CHECK(!isfinite(tfm_logits(s)[0]));
    id = tfm_next(s, NULL);
    CHECK(id < 5 && (id >= 0 || id == TFM_END || tfm_error()[0]));
    tfm_session_free(s);
    expect_model(m, TFM_OK, "");
    drop(&b);
  }
}

TEST(gguf_ranks) {
  static const uint32_t ranks[] = {0, 5, UINT32_MAX};
  int i;
  for (i = 0; i < TFMI_COUNT(ranks); i++) {
    bytes b = gguf_begin(1, 0);
    gguf_text(&b, "a");
    put_int(&b, ranks[i], 4);
    put(&b, NULL, 64);
    expect_gguf(b, TFM_E_FORMAT, "dimensions, expected 1 to 4");
  }
}

/* ---- llama2.c ---- */

static bytes llama2(int version, int vocabulary, int64_t extra) {
  static const int numbers[] = {4, 6, 1, 2, 1}; /* width, ffn, layers, heads, kv heads */
  int floats = 5 * 4 + 4 + 16 + 8 + 8 + 16 + 4 + 24 * 3 + 4, i;
  bytes b = {NULL, 0};
  if (version) put_int(&b, 0x616b3432, 4), put_int(&b, (uint64_t)version, 4);
  for (i = 0; i < 5; i++) put_int(&b, (uint64_t)numbers[i], 4);
  put_int(&b, (uint64_t)vocabulary, 4);
  put_int(&b, 8, 4);
  if (version) put_int(&b, 1, 1), put_pad(&b, 256);
  if (!version) floats += 2 * 8; /* rotation tables */
  if (vocabulary < 0) floats += 20;
  put(&b, NULL, (size_t)(4 * floats + extra));
  return b;
}

static void expect_llama2(bytes b, int status, const char *part) {
  add_file("m.bin", b);
  expect("m.bin", status, part);
}

TEST(llama2_checkpoints) {
  bytes b;
  expect_llama2(llama2(0, 5, 0), TFM_OK, "");
  expect_llama2(llama2(0, -5, 0), TFM_OK, ""); /* a head of its own */
  expect_llama2(llama2(1, 5, 0), TFM_OK, "");
  expect_llama2(llama2(0, 5, 1), TFM_E_FORMAT, "1 bytes follow the last tensor");
  expect_llama2(llama2(0, 5, -1), TFM_E_FORMAT, "the file ends after");
  expect_llama2(llama2(1, 5, 4), TFM_E_FORMAT, "4 bytes follow the last tensor");
  expect_llama2(llama2(2, 5, 0), TFM_E_UNSUPPORTED, "version 2, expected 1");
  expect_llama2(llama2(0, 0, 0), TFM_E_FORMAT, "the file is not recognised");
  expect_llama2(llama2(0, INT32_MIN, 0), TFM_E_FORMAT, "the file is not recognised");
  expect_llama2(llama2(1, 0, 0), TFM_E_FORMAT, "the header's numbers are no model's");
  b = llama2(1, 5, 0);
  b.n = 100;
  expect_llama2(b, TFM_E_FORMAT, "expected a header of 256");
  b = llama2(0, 5, 0);
  b.n = 27;
  expect_llama2(b, TFM_E_FORMAT, "the file is not recognised");
}

/* ---- Failing allocators, files and patience ---- */

static void fill_files(int kind) {
  static const gguf_change none = {NULL, NULL, 0, 0, 0, NULL, NULL, 0, NULL};
  if (kind == 0) add_file("m/model.safetensors", safetensors(HEADER, DATA));
  if (kind == 0) add_text_file("m/config.json", CONFIG);
  if (kind == 1) add_file("m.gguf", gguf_model(&none));
  if (kind == 2) add_file("m.bin", llama2(0, 5, 0));
}

static const char *const kind_paths[] = {"m/model.safetensors", "m.gguf", "m.bin"};

TEST(every_failure_unwinds) {
  int kind, n, read, what;
  for (kind = 0; kind < 3; kind++)
    for (what = 0; what < 4; what++) { /* an allocation fails once; a file call; mapped or read */
      tfm_model_config c = test_config();
      tfm_model *m = NULL;
      read = what & 1;
      c.no_mmap = read != 0;
      c.weights = TFM_F16;
      fill_files(kind);
      for (n = 0; !m && n < 1000; n++) {
        allocs_left = what < 2 ? n : -1;
        calls_left = what < 2 ? -1 : n;
        m = tfm_model_load(kind_paths[kind], &c);
        if (!m && what < 2) CHECK_STR(tfm_status_name(tfm_error_status()), "TFM_E_MEMORY");
        if (!m && what >= 2) CHECK_STR(tfm_status_name(tfm_error_status()), "TFM_E_IO");
        if (!m) CHECK_EQ_INT(held_bytes, 0);
        if (!m) CHECK_EQ_INT(open_files, 0);
      }
      allocs_left = calls_left = -1;
      expect_model(m, TFM_OK, "");
      forget_files();
    }
}

/* Where the system makes fewer threads than were asked for, those that there are do the work. */
TEST(threads_that_cannot_be_made) {
  static const int32_t ids[] = {1, 2, 3};
  float first[5];
  int left;
  for (left = 8; left >= 0; left--) {
    tfm_model_config c = test_config();
    tfm_engine_config e;
    tfm_session *s;
    tfm_model *m;
    memset(&e, 0, sizeof e);
    fill_files(0);
    c.threads = e.threads = 4;
    threads_left = left;
    m = tfm_model_load("m/", &c);
    s = tfm_session_create(m, &e);
    CHECK_EQ_INT(tfm_feed(s, ids, 3), TFM_OK);
    threads_left = -1;
    if (s && left == 8) memcpy(first, tfm_logits(s), sizeof first);
    CHECK(s && memcmp(first, tfm_logits(s), sizeof first) == 0);
    tfm_session_free(s);
    expect_model(m, TFM_OK, "");
    forget_files();
  }
}

static bool stop_at_once(void *user, const char *phase, double done) {
  CHECK_STR(phase, "load");
  CHECK(done > 0 && done <= 1);
  return ++*(int *)user < 3;
}

TEST(progress_cancels) {
  tfm_model_config c = test_config();
  int calls = 0;
  fill_files(2);
  c.host.user = &calls;
  c.host.progress = stop_at_once;
  expect_model(tfm_model_load("m.bin", &c), TFM_E_CANCELLED, "loading was cancelled");
  CHECK_EQ_INT(calls, 3);
  forget_files();
}

TEST(memory_limit) {
  tfm_model_config c = test_config();
  tfm_model_info info;
  tfm_model *m;
  fill_files(0);
  m = tfm_model_load("m/", &c);
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  tfm_model_free(m);
  c.host.memory_limit_bytes = info.peak_bytes;
  expect_model(tfm_model_load("m/", &c), TFM_OK, "");
  c.host.memory_limit_bytes = info.peak_bytes - 1;
  expect_model(tfm_model_load("m/", &c), TFM_E_MEMORY, "memory limit");
  forget_files();
}

/* ---- The plan is the load ---- */

static void expect_plan(const char *path, tfm_model_config *c) {
  tfm_plan plan;
  tfm_model_info info;
  tfm_model *m = tfm_model_load(path, c);
  if (!m) CHECK_STR(tfm_error(), "");
  if (!m) return;
  CHECK_EQ_INT(tfm_model_describe(m, &info), TFM_OK);
  CHECK_EQ_INT(tfm_plan_memory(path, c, NULL, &plan), TFM_OK);
  CHECK_EQ_INT(plan.load_peak_bytes, info.peak_bytes);
  CHECK_EQ_INT(plan.model_bytes, info.memory_bytes);
  CHECK_EQ_INT(plan.mapped_bytes, info.mapped_bytes);
  tfm_model_free(m);
}

TEST(plan_equals_load) {
  static const char *const paths[] = {
    "tests/data/models/gpt2-a", "tests/data/models/gpt2-b", "tests/data/models/llama-c",
    "tests/data/models/tiny", "../shared/data/stories260K/stories260K.gguf",
    "../shared/data/stories260K/stories260K.bin"};
  int i, k, found = 0;
  for (i = 0; i < TFMI_COUNT(paths); i++)
    for (k = 0; k < 6; k++) {
      tfm_model_config c = test_config();
      c.host.io = NULL;
      c.host.alloc = k & 1 ? count_alloc : NULL;
      c.no_mmap = k % 3 == 1;
      c.weights = k % 3 == 2 ? TFM_F16 : TFM_TYPE_DEFAULT;
      if (access(paths[i], R_OK) != 0) continue;
      found++;
      expect_plan(paths[i], &c);
      CHECK_EQ_INT(held_bytes, 0);
    }
  if (!found) SKIP("run from the top of the repository, with ../shared/data beside it");
}

TEST(plan_reads_through_callbacks) {
  tfm_model_config c = test_config();
  int k;
  for (k = 0; k < 2; k++) {
    fill_files(0);
    c.no_mmap = k == 1;
    expect_plan("m/", &c);
    forget_files();
  }
}

TEST_MAIN
