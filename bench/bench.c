/* bench.c - how fast prompts are read and text is written, beside what the machine could do.

   build:   make bench
   run:     build/bench ../shared/data/stories260K/stories260K.bin
            build/bench shape:llama-110m --type q8_0 --threads 2 --json
            build/bench train:char
            build/bench ceilings
   output:  one line per workload. pp512 reads a prompt of 512 tokens and chooses one (tfm_feed,
            then tfm_next); tg128 writes 128 tokens after a single one (tfm_next), as generate does
            at the same --temperature.

   "shape:" names an architecture: small random weights, made in memory. The limit of a workload is
   the slower of: its bytes at the read bandwidth measured over as many bytes, and its operations at
   the peak of fused float32 multiply-adds; or of products of BF16 in tiles, for prompts by AMX; or
   of products of bytes, for weights in blocks on a processor with AVX-512 VNNI; all measured with
   the same threads. --write gives a shape to other
   programs, as llama2.c (with FILE.tokenizer) or safetensors (with config.json). */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#define TOOL "bench"
#include "../examples/common.h"
#include <pthread.h>
#include <time.h>

enum { REPEAT_MAX = 100, THREADS_MAX = 256 };

typedef struct options {
  tfm_model_config model;
  const char *path, *write;
  int32_t prompt, tokens, batch, repeat, rows, depth;
  tfm_type cache;
  double memory_rate, product_rate; /* a GPU's limits, bytes and operations a second, or 0 */
  float temperature;
  bool json, check, load, deterministic;
} options;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* ---- Ceilings: threads that start together and do one thing ---- */

typedef float lanes __attribute__((vector_size(64)));

typedef enum product_kind { FLOATS, BYTES, TILES, PRODUCTS } product_kind;

static const struct {
  const char *bound, *title, *key, *unit;
  double each; /* multiplications and additions in a count */
} product_kinds[PRODUCTS] = {
  {"fma", "float32 FMA", "gflops", "GFLOP/s", 2.0 * 16 * 12},
  {"int8", "bytes, VNNI", "gops", "GOP/s", 2.0 * 64 * 24},
  {"tiles", "bf16, AMX", "gflops", "GFLOP/s", 4 * 2.0 * 16 * 16 * 32}};

typedef struct ceiling_job {
  pthread_barrier_t *start;
  const lanes *data; /* to read; NULL: multiply and add */
  product_kind product;
  size_t count;
  float result;      /* kept, or the compiler would leave the work out */
  double began, ended;
} ceiling_job;

static float add_up(const lanes sums[8]) {
  float total = 0;
  int i, j;
  for (i = 0; i < 8; i++)
    for (j = 0; j < 16; j++) total += sums[i][j];
  return total;
}

static float read_once(const lanes *data, size_t count) {
  lanes sums[8] = {{0}};
  size_t i;
  int j;
  for (i = 0; i + 8 <= count; i += 8)
    for (j = 0; j < 8; j++) sums[j] += data[i + (size_t)j];
  return add_up(sums);
}

/* 12 independent chains hide the latency of one; contracted to fused multiply-adds. */
static float multiply_add(size_t count) {
  lanes x[12], a, b;
  size_t i;
  int j;
  for (j = 0; j < 16; j++) a[j] = 0.999f, b[j] = 0.001f;
  for (j = 0; j < 12; j++) x[j] = a + (float)j;
  for (i = 0; i < count; i++)
    for (j = 0; j < 12; j++) x[j] = x[j] * a + b;
  for (j = 8; j < 12; j++) x[0] += x[j];
  return add_up(x);
}

/* Sums of four products of bytes: 64 multiply-adds an instruction. */
static float multiply_bytes(size_t count) {
#ifdef __AVX512VNNI__
  int32_t sums[24][16] __attribute__((aligned(64))) = {{0}};
  typedef int32_t dwords __attribute__((vector_size(64)));
  dwords x[24] = {{0}}, a = {0x01010101}, b = {0x01010101};
  float total = 0;
  size_t i;
  int j;
#pragma GCC unroll 24
  for (i = 0; i < count; i++)
#pragma GCC unroll 24
    for (j = 0; j < 24; j++) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(x[j]) : "v"(a), "v"(b));
  memcpy(sums, x, sizeof sums);
  for (j = 0; j < 24; j++) total += (float)sums[j][0];
  return total;
#else
  (void)count;
  return 0;
#endif
}

#if defined(__x86_64__) && defined(__linux__) && \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <immintrin.h>
/* Four products a count, and as many loads, which is what a block of 32 x 32 sums takes: all from
   the first cache. */
__attribute__((target("amx-tile,amx-bf16"))) static float multiply_tiles(size_t count) {
  uint8_t data[4][1024] __attribute__((aligned(64))) = {{0}};
  uint8_t config[64] __attribute__((aligned(64))) = {1};
  size_t i;
  for (i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
  __asm__ volatile("" : : "r"(config) : "memory");
  _tile_loadconfig(config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (i = 0; i < count; i++) {
    _tile_loadd(4, data[0], 64);
    _tile_loadd(6, data[1], 64);
    _tile_loadd(5, data[2], 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, data[3], 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 0;
}
#else
static float multiply_tiles(size_t count) { return 0 * (float)count; }
#endif

static void *ceiling_thread(void *context) {
  ceiling_job *job = (ceiling_job *)context;
  pthread_barrier_wait(job->start);
  job->began = seconds();
  job->result = job->data               ? read_once(job->data, job->count)
                : job->product == BYTES ? multiply_bytes(job->count)
                : job->product == TILES ? multiply_tiles(job->count)
                                        : multiply_add(job->count);
  job->ended = seconds();
  return NULL;
}

/* Seconds from the first thread's beginning to the last one's end. */
static double ceiling_time(int32_t threads, const lanes *data, size_t count_each,
                           product_kind product) {
  pthread_t thread[THREADS_MAX];
  ceiling_job job[THREADS_MAX];
  pthread_barrier_t start;
  double began = 0, ended = 0;
  int32_t i;
  pthread_barrier_init(&start, NULL, (unsigned)threads);
  for (i = 0; i < threads; i++) {
    job[i].start = &start;
    job[i].data = data ? data + (size_t)i * count_each : NULL;
    job[i].count = count_each;
    job[i].product = product;
    if (pthread_create(&thread[i], NULL, ceiling_thread, &job[i]) != 0) {
      fprintf(stderr, TOOL ": the system gave %d threads of %d\n", (int)i, (int)threads);
      exit(TOOL_FAILED);
    }
  }
  for (i = 0; i < threads; i++) {
    pthread_join(thread[i], NULL);
    if (i == 0 || job[i].began < began) began = job[i].began;
    if (i == 0 || job[i].ended > ended) ended = job[i].ended;
  }
  pthread_barrier_destroy(&start);
  return ended - began;
}

/* Bytes per second, best of several, over a working set of about `bytes`; 0 without memory. */
static double read_ceiling(int32_t threads, uint64_t bytes) {
  size_t each = (size_t)(bytes / (uint64_t)threads / sizeof(lanes) + 8) / 8 * 8;
  size_t whole = each * (size_t)threads * sizeof(lanes);
  lanes *data = (lanes *)aligned_alloc(sizeof(lanes), whole);
  double best = 0, spent = 0;
  int i;
  if (!data) return 0;
  memset(data, 0, whole);
  for (i = 0; i < 5 || (spent < 0.2 && i < 1000); i++) {
    double time = ceiling_time(threads, data, each, FLOATS), rate = (double)whole / time;
    spent += time;
    if (rate > best) best = rate;
  }
  free(data);
  return best;
}

/* Multiplications and additions per second, best of several. */
static double product_ceiling(int32_t threads, product_kind product) {
  const size_t count = 1 << 21;
  const double all = product_kinds[product].each * (double)count * threads;
  double best = 0;
  int i;
  for (i = 0; i < 7; i++) {
    double rate = all / ceiling_time(threads, NULL, count, product);
    if (rate > best) best = rate;
  }
  return best;
}

static bool multiplies_bytes(void) {
#ifdef __AVX512VNNI__
  return true;
#else
  return false;
#endif
}

/* Whether the tuned CPU table has tiles: the system saves them for a process that asked. */
static bool multiplies_tiles(void) {
  tfmi_heap heap;
  tfm_dev d;
  bool tiles;
  memset(&heap, 0, sizeof heap);
  if (tfmi_dev_open(&d, &heap, TFM_CPU, 0, 1, NULL, true) != TFM_OK) return false;
  tiles = d.has_bf16;
  tfmi_dev_close(&d, &heap);
  return tiles;
}

static bool has_product(product_kind product) {
  return product == FLOATS || (product == BYTES ? multiplies_bytes() : multiplies_tiles());
}

static void do_nothing(void *context, int32_t begin, int32_t end, int32_t worker) {
  (void)context, (void)begin, (void)end, (void)worker;
}

/* Seconds that threads take to start on a job together and to finish it, at best; 0 on failure. */
static double dispatch_time(int32_t threads) {
  enum { TIMES = 10000 };
  tfmi_heap heap;
  tfm_dev d;
  double best = 0;
  int i, repeat;
  memset(&heap, 0, sizeof heap);
  if (tfmi_dev_open(&d, &heap, TFM_REF, 0, threads, NULL, true) != TFM_OK) return 0;
  for (repeat = 0; repeat < 7; repeat++) {
    double start = seconds(), time;
    for (i = 0; i < TIMES; i++) tfm_parallel_for(&d, threads, 1, do_nothing, NULL);
    time = (seconds() - start) / TIMES;
    if (repeat == 0 || time < best) best = time;
  }
  tfmi_dev_close(&d, &heap);
  return best;
}

static int32_t cores_or(int32_t threads) {
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (threads == 0) threads = cores < 1 ? 1 : cores < THREADS_MAX ? (int32_t)cores : THREADS_MAX;
  return threads < THREADS_MAX ? threads : THREADS_MAX;
}

static int print_ceilings(const options *o) {
  static const int mebibytes[] = {1, 16, 64, 256, 1024};
  int32_t threads = cores_or(o->model.threads);
  size_t i;
  for (i = 0; i < sizeof mebibytes / sizeof *mebibytes; i++) {
    double rate = read_ceiling(threads, (uint64_t)mebibytes[i] << 20) / 1e9;
    if (o->json)
      printf("{\"ceiling\": \"read\", \"mebibytes\": %d, \"threads\": %d, \"gb_per_s\": %.1f}\n",
             mebibytes[i], (int)threads, rate);
    else printf("read, %4d MiB  %3d threads  %9.1f GB/s\n", mebibytes[i], (int)threads, rate);
  }
  for (i = 0; i < PRODUCTS; i++) {
    const product_kind product = (product_kind)i;
    double rate = has_product(product) ? product_ceiling(threads, product) / 1e9 : 0;
    if (rate == 0) continue;
    if (o->json)
      printf("{\"ceiling\": \"%s\", \"threads\": %d, \"%s\": %.1f}\n", product_kinds[i].bound,
             (int)threads, product_kinds[i].key, rate);
    else printf("%-14s  %3d threads  %9.1f %s\n", product_kinds[i].title, (int)threads, rate,
                product_kinds[i].unit);
  }
  printf(o->json ? "{\"ceiling\": \"dispatch\", \"threads\": %d, \"microseconds\": %.2f}\n"
                 : "empty dispatch  %3d threads  %9.2f us\n",
         (int)threads, dispatch_time(threads) * 1e6);
  return 0;
}

/* ---- Shapes: files with random weights, in memory ---- */

typedef enum layout { LLAMA2C, GPT2, LLAMA } layout; /* llama2.c; safetensors in F32; in F16 */

typedef struct shape {
  const char *name;
  layout layout;
  int32_t width, ffn, layers, heads, kv_heads, vocabulary, context;
  bool tied;
  int32_t experts, used; /* Mixtral's, in each layer; 0: none */
} shape;

static const shape shapes[] = {
  {"stories15m", LLAMA2C, 288, 768, 6, 6, 6, 32000, 2048, true, 0, 0},
  {"llama-110m", LLAMA2C, 768, 2048, 12, 12, 12, 32000, 2048, true, 0, 0},
  {"gpt2-124m", GPT2, 768, 3072, 12, 12, 12, 50257, 1024, true, 0, 0},
  {"tinyllama-1.1b", LLAMA2C, 2048, 5632, 22, 32, 4, 32000, 2048, false, 0, 0},
  {"llama-1b", LLAMA, 2048, 8192, 16, 32, 8, 128256, 8192, true, 0, 0},
  {"llama-8b", LLAMA, 4096, 14336, 32, 32, 8, 128256, 8192, false, 0, 0},
  {"experts-1b", LLAMA, 1024, 512, 24, 16, 8, 32000, 4096, true, 32, 8}};

typedef struct image { /* a file being written to memory */
  char *data;
  size_t used, room;
  uint32_t random;
} image;

static void image_grow(image *f, size_t bytes) {
  char *grown;
  if (bytes <= f->room - f->used) return;
  while (bytes > f->room - f->used) f->room = f->room * 2 + 65536;
  grown = (char *)realloc(f->data, f->room);
  if (!grown) {
    fprintf(stderr, TOOL ": out of memory for the shape's weights\n");
    exit(TOOL_FAILED);
  }
  f->data = grown;
}

static void image_add(image *f, const void *data, size_t bytes) {
  image_grow(f, bytes);
  memcpy(f->data + f->used, data, bytes);
  f->used += bytes;
}

/* count halves like image_random's, of which the first million are drawn and the rest repeat. */
static void image_halves(image *f, size_t count) {
  enum { DRAWN = 1 << 20 };
  size_t from, done;
  image_grow(f, count * 2);
  from = f->used;
  for (done = 0; done < count && done < DRAWN; done++, f->used += 2) {
    uint16_t half;
    f->random = f->random * 1664525u + 1013904223u;
    half = tfmi_to_f16(((float)(f->random >> 8) / 8388608.0f - 1) * 0.0346f);
    memcpy(f->data + f->used, &half, sizeof half);
  }
  for (; done < count; f->used += 2 * from) {
    from = count - done < DRAWN - 1 ? count - done : DRAWN - 1; /* rows do not repeat in step */
    memcpy(f->data + f->used, f->data + f->used - 2 * (size_t)(DRAWN - 1), 2 * from);
    done += from;
  }
}

/* count floats around `centre`, uniform, deviation 0.02. */
static void image_random(image *f, size_t count, float centre) {
  size_t i;
  image_grow(f, count * sizeof(float));
  for (i = 0; i < count; i++, f->used += sizeof(float)) {
    float value;
    f->random = f->random * 1664525u + 1013904223u;
    value = centre + ((float)(f->random >> 8) / 8388608.0f - 1) * 0.0346f;
    memcpy(f->data + f->used, &value, sizeof value);
  }
}

/* llama2.c's version 0: seven integers, then all tensors of a kind in a row. */
static void image_llama(image *f, const shape *s) {
  int32_t header[7] = {s->width, s->ffn, s->layers, s->heads, s->kv_heads,
                       s->tied ? s->vocabulary : -s->vocabulary, s->context};
  size_t c = (size_t)s->width, l = (size_t)s->layers, head = c / (size_t)s->heads;
  size_t kv = head * (size_t)s->kv_heads, ffn = (size_t)s->ffn, v = (size_t)s->vocabulary;
  image_add(f, header, sizeof header);
  image_random(f, v * c, 0);                            /* embedding */
  image_random(f, l * c, 1);                            /* norm before attention */
  image_random(f, l * c * (c + 2 * kv + c), 0);         /* q, k, v, out */
  image_random(f, l * c, 1);                            /* norm before feed-forward */
  image_random(f, l * c * ffn * 3, 0);                  /* gate, down, up */
  image_random(f, c, 1);                                /* final norm */
  image_random(f, (size_t)s->context * (head / 2) * 2, 0); /* tables that nobody reads any more */
  if (!s->tied) image_random(f, v * c, 0);              /* head */
}

typedef struct tensor {
  const char *name; /* %d: the layer; a kind without it is not per layer */
  int32_t rows, cols; /* cols 0: a vector */
} tensor;

typedef struct tensor_list { /* of a safetensors file */
  const tensor *whole, *each; /* once; for each layer */
  int32_t whole_count, each_count, layers;
  bool halves;
} tensor_list;

/* Tensor i of the list, and its layer, or -1; NULL after the last. */
static const tensor *tensor_at(const tensor_list *list, int32_t i, int32_t *layer) {
  *layer = -1;
  if (i < list->whole_count) return &list->whole[i];
  i -= list->whole_count;
  *layer = i / list->each_count;
  return *layer < list->layers ? &list->each[i % list->each_count] : NULL;
}

static size_t tensor_values(const tensor *t) {
  return (size_t)t->rows * (size_t)(t->cols ? t->cols : 1);
}

/* Writes the description of one tensor to the header; returns where its data ends. */
static size_t describe(image *header, const tensor *t, bool halves, int32_t layer, size_t at) {
  char name[64], text[200], dims[40];
  size_t end = at + tensor_values(t) * (halves ? 2 : 4);
  snprintf(name, sizeof name, t->name, (int)layer);
  if (t->cols) snprintf(dims, sizeof dims, "%d, %d", (int)t->rows, (int)t->cols);
  else snprintf(dims, sizeof dims, "%d", (int)t->rows);
  snprintf(text, sizeof text,
           "%s\"%s\": {\"dtype\": \"%s\", \"shape\": [%s], \"data_offsets\": [%zu, %zu]}",
           header->used > 1 ? ", " : "", name, halves ? "F16" : "F32", dims, at, end);
  image_add(header, text, strlen(text));
  return end;
}

/* safetensors. Everything, norms too, is small and random. */
static void image_tensors(image *f, const tensor_list *list) {
  image header = {NULL, 0, 0, 0};
  const tensor *t;
  size_t at = 0;
  uint64_t bytes;
  int32_t layer, i;
  image_add(&header, "{", 1);
  for (i = 0; (t = tensor_at(list, i, &layer)) != NULL; i++)
    at = describe(&header, t, list->halves, layer, at);
  image_add(&header, "}       ", 8);
  bytes = header.used / 8 * 8; /* the blanks beyond are padding */
  image_grow(f, at + (size_t)bytes + sizeof bytes);
  image_add(f, &bytes, sizeof bytes);
  image_add(f, header.data, (size_t)bytes);
  if (list->halves) image_halves(f, at / 2);
  else image_random(f, at / sizeof(float), 0);
  free(header.data);
}

/* As Hugging Face saves GPT-2. */
static void image_gpt2(image *f, const shape *s) {
  const int32_t c = s->width, ffn = s->ffn;
  const tensor whole[] = {{"wte.weight", s->vocabulary, c}, {"wpe.weight", s->context, c},
                          {"ln_f.weight", c, 0}, {"ln_f.bias", c, 0}};
  const tensor each[] = {
    {"h.%d.ln_1.weight", c, 0}, {"h.%d.ln_1.bias", c, 0}, {"h.%d.attn.c_attn.weight", c, 3 * c},
    {"h.%d.attn.c_attn.bias", 3 * c, 0}, {"h.%d.attn.c_proj.weight", c, c},
    {"h.%d.attn.c_proj.bias", c, 0}, {"h.%d.ln_2.weight", c, 0}, {"h.%d.ln_2.bias", c, 0},
    {"h.%d.mlp.c_fc.weight", c, ffn}, {"h.%d.mlp.c_fc.bias", ffn, 0},
    {"h.%d.mlp.c_proj.weight", ffn, c}, {"h.%d.mlp.c_proj.bias", c, 0}};
  const tensor_list list = {whole, each, 4, 12, s->layers, false};
  image_tensors(f, &list);
}

enum { MOST_EXPERTS = 32, MOST_EACH = 10 + 3 * MOST_EXPERTS };

/* Mixtral's router and experts, in place of the three matrices of Llama's feed-forward. */
static int32_t add_experts(const shape *s, tensor *each, int32_t n, char (*name)[64]) {
  const char *const part[] = {"w1", "w3", "w2"};
  const tensor router = {"model.layers.%d.block_sparse_moe.gate.weight", s->experts, s->width};
  int32_t e, i;
  each[n++] = router;
  for (e = 0; e < s->experts; e++)
    for (i = 0; i < 3; i++, name++, n++) {
      snprintf(*name, sizeof *name, "model.layers.%%d.block_sparse_moe.experts.%d.%s.weight",
               (int)e, part[i]);
      each[n].name = *name;
      each[n].rows = i < 2 ? s->ffn : s->width;
      each[n].cols = i < 2 ? s->width : s->ffn;
    }
  return n;
}

/* ... and Llama, or Mixtral. */
static void image_llama_halves(image *f, const shape *s) {
  const int32_t c = s->width, ffn = s->ffn, kv = c / s->heads * s->kv_heads;
  char names[3 * MOST_EXPERTS][64];
  const tensor whole[] = {{"model.embed_tokens.weight", s->vocabulary, c},
                          {"model.norm.weight", c, 0},
                          {"lm_head.weight", s->vocabulary, c}};
  tensor each[MOST_EACH] = {
    {"model.layers.%d.input_layernorm.weight", c, 0},
    {"model.layers.%d.self_attn.q_proj.weight", c, c},
    {"model.layers.%d.self_attn.k_proj.weight", kv, c},
    {"model.layers.%d.self_attn.v_proj.weight", kv, c},
    {"model.layers.%d.self_attn.o_proj.weight", c, c},
    {"model.layers.%d.post_attention_layernorm.weight", c, 0},
    {"model.layers.%d.mlp.gate_proj.weight", ffn, c},
    {"model.layers.%d.mlp.up_proj.weight", ffn, c},
    {"model.layers.%d.mlp.down_proj.weight", c, ffn}};
  tensor_list list = {whole, each, s->tied ? 2 : 3, 9, s->layers, true};
  if (s->experts) list.each_count = add_experts(s, each, 6, names);
  image_tensors(f, &list);
}

static const char *llama_config(const shape *s, char *text, size_t cap) {
  snprintf(text, cap,
           "{\"model_type\": \"%s\", \"num_local_experts\": %d, \"num_experts_per_tok\": %d, "
           "\"hidden_size\": %d, \"intermediate_size\": %d, \"num_hidden_layers\": %d, "
           "\"num_attention_heads\": %d, \"num_key_value_heads\": %d, \"vocab_size\": %d, "
           "\"max_position_embeddings\": %d, \"hidden_act\": \"silu\", \"rms_norm_eps\": 1e-05, "
           "\"rope_theta\": 500000.0, \"tie_word_embeddings\": %s, \"eos_token_id\": 128001}",
           s->experts ? "mixtral" : "llama", (int)s->experts, (int)s->used, (int)s->width,
           (int)s->ffn, (int)s->layers, (int)s->heads, (int)s->kv_heads, (int)s->vocabulary,
           (int)s->context, s->tied ? "true" : "false");
  return text;
}

static const char *gpt2_config(const shape *s, char *text, size_t cap) {
  snprintf(text, cap,
           "{\"model_type\": \"gpt2\", \"architectures\": [\"GPT2LMHeadModel\"], \"n_embd\": %d, "
           "\"n_inner\": %d, \"n_layer\": %d, \"n_head\": %d, \"vocab_size\": %d, "
           "\"n_positions\": %d, \"n_ctx\": %d, \"activation_function\": \"gelu_new\", "
           "\"layer_norm_epsilon\": 1e-05, \"bos_token_id\": 50256, \"eos_token_id\": 50256}",
           (int)s->width, (int)s->ffn, (int)s->layers, (int)s->heads, (int)s->vocabulary,
           (int)s->context, (int)s->context);
  return text;
}

static const shape *find_shape(const char *name) {
  size_t i;
  for (i = 0; i < sizeof shapes / sizeof *shapes; i++)
    if (!strcmp(name, shapes[i].name)) return &shapes[i];
  fprintf(stderr, TOOL ": there is no shape \"%s\"; expected one of", name);
  for (i = 0; i < sizeof shapes / sizeof *shapes; i++) fprintf(stderr, " %s", shapes[i].name);
  fprintf(stderr, "\n");
  return NULL;
}

static int save(const char *path, const void *data, size_t bytes) {
  FILE *f = fopen(path, "wb");
  bool good = f && fwrite(data, 1, bytes, f) == bytes;
  if (f && fclose(f) != 0) good = false;
  if (!good) fprintf(stderr, TOOL ": %s cannot be written\n", path);
  return good ? 0 : TOOL_FAILED;
}

/* config.json beside the model, unless it is there already. */
static int save_config(const char *model_path, const char *text) {
  const char *slash = strrchr(model_path, '/');
  char path[1024];
  FILE *f;
  snprintf(path, sizeof path, "%.*sconfig.json", slash ? (int)(slash + 1 - model_path) : 0,
           model_path);
  f = fopen(path, "rb");
  if (f) fclose(f);
  return f ? 0 : save(path, text, strlen(text));
}

/* Token i of Llama's vocabularies as far as they are fixed; the rest is made up. */
static int32_t token_name(int32_t i, char *text, size_t cap) {
  static const char *const special[] = {"<unk>", "\n<s>\n", "\n</s>\n"};
  if (i < 3) return (int32_t)snprintf(text, cap, "%s", special[i]);
  if (i < 259) return (int32_t)snprintf(text, cap, "<0x%02X>", (unsigned)i - 3);
  return (int32_t)snprintf(text, cap, " t%d", (int)i);
}

/* A llama2.c tokenizer: programs insist on having one. */
static int save_tokenizer(const char *model_path, int32_t vocabulary) {
  image f = {NULL, 0, 0, 0};
  char path[1024];
  int32_t longest = 12, i;
  int status;
  image_add(&f, &longest, sizeof longest);
  for (i = 0; i < vocabulary; i++) {
    char text[16];
    int32_t bytes = token_name(i, text, sizeof text);
    float score = 0;
    image_add(&f, &score, sizeof score);
    image_add(&f, &bytes, sizeof bytes);
    image_add(&f, text, (size_t)bytes);
  }
  snprintf(path, sizeof path, "%s.tokenizer", model_path);
  status = save(path, f.data, f.used);
  free(f.data);
  return status;
}

/* ---- Measuring ---- */

typedef struct workload {
  const char *kind; /* "pp" or "tg" */
  int32_t tokens;   /* of each sequence */
  double bytes, flops; /* per token */
} workload;

/* Of the matrices of one layer that a token is multiplied by. */
static double elements_of_layer(const tfm_net *n) {
  double c = n->width, d = n->head_width, ffn = n->ffn_width;
  if (n->experts) ffn = (double)n->experts_used * n->expert_width;
  return c * d * (2.0 * n->heads + 2.0 * n->kv_heads) + (n->gated ? 3 : 2) * c * ffn;
}

/* Bytes of weights that a pass of so many rows reads: of each expert that a row is for. */
static double bytes_of_pass(const tfm_model *m, double rows) {
  const tfm_net *n = &m->net;
  double experts = 0, more;
  int32_t i;
  for (i = 0; i < n->layers && n->experts; i++)
    experts += (double)(n->layer[i].expert_up.bytes + n->layer[i].expert_down.bytes);
  more = n->experts ? fmin(1, rows * n->experts_used / n->experts) : 0;
  if (n->experts) more -= (double)n->experts_used / n->experts;
  return (double)m->token_bytes + experts * more;
}

/* What a token of the workload costs at the least. mean: positions that it sees on average. */
static workload workload_of(const char *kind, int32_t tokens, const options *o,
                            const tfm_model *m, const tfm_model_info *i) {
  workload w = {kind, tokens, 0, 0};
  bool prompt = kind[0] == 'p';
  int32_t most = o->rows ? o->rows : 256;
  double heads, mean = 0.5 * tokens, rows = prompt ? (tokens < most ? tokens : most) : o->batch;
  bool halves = !strcmp(i->device, "cuda") && i->weights != TFM_F32; /* by default */
  double cache = o->cache == TFM_Q8_0                           ? 34 / 32.0
                 : (o->cache ? o->cache != TFM_F32 : halves) ? 2 : 4;
  if (!prompt) mean += o->depth;
  heads = prompt ? 1.0 / tokens : 1; /* of a prompt, only the last token needs logits */
  w.bytes = bytes_of_pass(m, rows) / rows;
  w.bytes += 2.0 * i->layers * i->kv_heads * i->head_width * cache * (prompt ? 1 : mean);
  w.flops = 2 * (i->layers * elements_of_layer(&m->net) + heads * i->width * (double)i->vocabulary);
  w.flops += 4.0 * i->layers * i->heads * i->head_width * mean;
  return w;
}

typedef struct run_state {
  tfm_engine *engine;
  tfm_session **sessions;
  tfm_sampling *how; /* of each */
  int32_t *ids;      /* prompt of each, and results */
  int32_t batch, vocabulary, depth;
} run_state;

/* Any ids but the lowest few, which tend to be special. */
static void fill_ids(int32_t *ids, int32_t n, int32_t vocabulary) {
  int32_t i, low = vocabulary > 16 ? 8 : 0;
  for (i = 0; i < n; i++) ids[i] = low + (int32_t)((int64_t)i * 7919 % (vocabulary - low));
}

/* A prompt for each sequence and its first token chosen; false on failure. */
static bool run_prompt(const run_state *r, int32_t tokens) {
  int32_t i, next;
  for (i = 0; i < r->batch; i++) {
    if (tfm_session_rewind(r->sessions[i], 0) != TFM_OK) return false;
    if (tfm_feed(r->sessions[i], r->ids, (size_t)tokens) != TFM_OK) return false;
    next = tfm_next(r->sessions[i], &r->how[i]);
    if (next < 0 && next != TFM_END) return false;
  }
  return true;
}

/* `tokens` more for each sequence. Random weights may choose an end token; another is fed then. */
static bool run_decode(const run_state *r, int32_t tokens, int32_t *results) {
  int32_t i, t;
  for (t = 0; t < tokens; t++) {
    if (tfm_next_batch(r->sessions, (size_t)r->batch, r->how, results) != TFM_OK) return false;
    for (i = 0; i < r->batch; i++)
      if (results[i] == TFM_END && tfm_feed(r->sessions[i], r->ids, 1) != TFM_OK) return false;
      else if (results[i] < 0 && results[i] != TFM_END) return false;
  }
  return true;
}

/* Seconds of one run of the workload; below zero on failure. */
static double run_once(const run_state *r, const workload *w, int32_t *results) {
  double start;
  bool prompt = w->kind[0] == 'p', good;
  if (!prompt && !run_prompt(r, r->depth)) return -1;
  start = seconds();
  good = prompt ? run_prompt(r, w->tokens) : run_decode(r, w->tokens, results);
  return good ? seconds() - start : -1;
}

typedef struct figure {
  double median, best;         /* tokens per second */
  double gb_per_s, gflops;     /* at the median */
  double share;                /* of the limit; below zero: no ceiling was measured */
  const char *bound;           /* "read", one of products, or a GPU's "products" */
} figure;

static figure figure_of(const workload *w, double *rates, int32_t n, double read, double multiply,
                        const char *unit) {
  figure f = {0, 0, 0, 0, -1, "none"};
  qsort(rates, (size_t)n, sizeof *rates, by_value);
  f.median = n % 2 ? rates[n / 2] : 0.5 * (rates[n / 2 - 1] + rates[n / 2]);
  f.best = rates[n - 1];
  f.gb_per_s = f.median * w->bytes / 1e9;
  f.gflops = f.median * w->flops / 1e9;
  if (read > 0 && multiply > 0) {
    double by_read = read / w->bytes, by_multiply = multiply / w->flops;
    f.bound = by_read < by_multiply ? "read" : unit;
    f.share = f.median / (by_read < by_multiply ? by_read : by_multiply);
  }
  return f;
}

static void print_figure(const options *o, const tfm_model_info *info, const workload *w,
                         const figure *f, int32_t threads) {
  char share[32] = "null", name[32];
  const char *slash = strrchr(o->path, '/');
  snprintf(name, sizeof name, o->batch > 1 ? "%s%dx%d" : "%s%d", w->kind, (int)w->tokens,
           (int)o->batch);
  if (f->share >= 0) snprintf(share, sizeof share, "%.3f", f->share);
  if (o->json)
    printf("{\"model\": \"%s\", \"type\": \"%s\", \"backend\": \"%s\", \"threads\": %d, "
           "\"batch\": %d, \"deterministic\": %s, \"temperature\": %g, \"workload\": \"%s\", "
           "\"tokens_per_s\": %.2f, \"best_tokens_per_s\": %.2f, \"bytes_per_token\": %.0f, "
           "\"gb_per_s\": %.2f, \"flops_per_token\": %.0f, \"gflops\": %.2f, \"bound\": \"%s\", "
           "\"share_of_ceiling\": %s, \"version\": \"%s\"}\n",
           slash ? slash + 1 : o->path, tfm_type_name(info->weights), info->device, (int)threads,
           (int)o->batch, o->deterministic ? "true" : "false", (double)o->temperature, name,
           f->median, f->best, w->bytes, f->gb_per_s, w->flops, f->gflops, f->bound, share,
           tfm_version());
  else
    printf("%-6s %10.1f tokens/s (best %.1f)  %.2f MB and %.2f MFLOP a token: %.1f GB/s, "
           "%.1f GFLOP/s, %s of the limit (%s)\n",
           name, f->median, f->best, w->bytes / 1e6, w->flops / 1e6, f->gb_per_s, f->gflops, share,
           f->bound);
  fflush(stdout);
}

/* What multiplies in a workload. */
static product_kind product_of(const options *o, const tfm_model_info *info, const workload *w) {
  const bool blocks = tfmi_types[info->weights].block_values > 1;
  if (strcmp(info->device, "cpu")) return FLOATS;
  if (w->kind[0] == 'p' && info->weights != TFM_F32 && !o->deterministic && has_product(TILES))
    return TILES;
  return blocks && has_product(BYTES) ? BYTES : FLOATS;
}

static int measure(const options *o, const tfm_model_info *info, const run_state *r,
                   const workload *w) {
  double rates[REPEAT_MAX], read = 0, multiply = 0, each = (double)w->tokens * o->batch;
  const product_kind product = product_of(o, info, w);
  tfm_stats stats;
  figure f;
  int32_t i;
  if (tfm_session_stats(r->sessions[0], &stats) != TFM_OK) return tool_fail();
  read = o->memory_rate; /* a GPU's ceilings are not measured here */
  multiply = o->product_rate;
  if (strcmp(info->device, "cuda")) {
    uint64_t set = info->token_bytes < 1 << 20 ? 1 << 20 : info->token_bytes;
    read = read_ceiling(cores_or(stats.threads), set < 1 << 30 ? set : 1 << 30);
    multiply = product_ceiling(cores_or(stats.threads), product);
  }
  if (run_once(r, w, r->ids + w->tokens) < 0) return tool_fail(); /* warm */
  for (i = 0; i < o->repeat; i++) {
    double time = run_once(r, w, r->ids + w->tokens);
    if (time < 0) return tool_fail();
    rates[i] = each / time;
  }
  f = figure_of(w, rates, o->repeat, read, multiply,
                o->product_rate > 0 ? "products" : product_kinds[product].bound);
  print_figure(o, info, w, &f, stats.threads);
  return 0;
}

static tfm_status open_sessions(run_state *r, const tfm_model *m, const options *o, int32_t most) {
  tfm_engine_config config;
  int32_t i;
  memset(&config, 0, sizeof config);
  config.batch_rows = o->rows;
  /* besides, the token that a run begins with, and the one that a prompt ends with */
  config.context = most + o->depth + 2;
  config.sequences = o->batch;
  config.threads = o->model.threads;
  config.cache = o->cache;
  config.deterministic = o->deterministic;
  config.host.log = o->model.host.log;
  r->engine = tfm_engine_create(m, &config);
  for (i = 0; r->engine && i < r->batch; i++)
    if (!(r->sessions[i] = tfm_session_open(r->engine))) return tfm_error_status();
  return r->engine ? TFM_OK : tfm_error_status();
}

static int measure_all(const options *o, const tfm_model *m) {
  int32_t longest = o->prompt > o->tokens ? o->prompt : o->tokens, i;
  int32_t most = longest > o->depth ? longest : o->depth;
  tfm_model_info info;
  run_state r = {NULL, NULL, NULL, NULL, 0, 0, 0};
  workload pp, tg;
  int status = 0;
  r.batch = o->batch;
  r.depth = o->depth;
  if (tfm_model_describe(m, &info) != TFM_OK) return tool_fail();
  r.vocabulary = info.vocabulary;
  r.sessions = (tfm_session **)calloc((size_t)o->batch, sizeof *r.sessions);
  r.how = (tfm_sampling *)calloc((size_t)o->batch, sizeof *r.how);
  r.ids = (int32_t *)calloc((size_t)most + (size_t)o->batch + 1, sizeof *r.ids);
  if (!r.sessions || !r.how || !r.ids)
    status = (fprintf(stderr, TOOL ": out of memory\n"), TOOL_FAILED);
  else if (open_sessions(&r, m, o, most) != TFM_OK) status = tool_fail();
  for (i = 0; status == 0 && i < r.batch; i++) {
    r.how[i].temperature = o->temperature;
    r.how[i].top_p = 0.95f;
    r.how[i].sequence = (uint64_t)i;
  }
  if (status == 0) fill_ids(r.ids, most, info.vocabulary);
  pp = workload_of("pp", o->prompt, o, m, &info);
  tg = workload_of("tg", o->tokens, o, m, &info);
  if (status == 0 && o->prompt) status = measure(o, &info, &r, &pp);
  if (status == 0 && o->tokens) status = measure(o, &info, &r, &tg);
  for (i = 0; r.sessions && i < r.batch; i++) tfm_session_free(r.sessions[i]);
  tfm_engine_free(r.engine);
  free(r.sessions);
  free(r.how);
  free(r.ids);
  return status;
}

/* ---- Checking: the same weights through the reference ---- */

enum { CHECK_TOKENS = 160 };

/* [CHECK_TOKENS, V] logits, to be freed; NULL on failure. */
static float *logits_of(const options *o, const tfm_model *m, int32_t vocabulary) {
  int32_t ids[CHECK_TOKENS];
  tfm_engine_config config;
  tfm_session *s;
  float *logits = (float *)calloc((size_t)CHECK_TOKENS * (size_t)vocabulary, sizeof *logits);
  fill_ids(ids, CHECK_TOKENS, vocabulary);
  memset(&config, 0, sizeof config);
  config.cache = o->cache;
  config.context = CHECK_TOKENS;
  s = tfm_session_create(m, &config);
  if (!s || !logits || tfm_eval(s, ids, CHECK_TOKENS, logits) != TFM_OK) {
    free(logits);
    logits = NULL;
  }
  tfm_session_free(s);
  return logits;
}

/* Prints how far apart the two models' logits are, as shares of the reference's range. */
static int compare(const options *o, const tfm_model *m, const tfm_model *reference) {
  tfm_model_info info;
  float *a = NULL, *b = NULL;
  double low = INFINITY, high = -INFINITY, worst = 0, squares = 0, range;
  size_t i, n;
  if (tfm_model_describe(m, &info) == TFM_OK) a = logits_of(o, m, info.vocabulary);
  if (a) b = logits_of(o, reference, info.vocabulary);
  if (!b) {
    free(a);
    return tool_fail();
  }
  n = (size_t)CHECK_TOKENS * (size_t)info.vocabulary;
  for (i = 0; i < n; i++) {
    double d = fabs((double)a[i] - (double)b[i]), value = (double)b[i];
    low = value < low ? value : low;
    high = value > high ? value : high;
    worst = d <= worst ? worst : d == d ? d : INFINITY;
    squares += d * d;
  }
  range = high - low;
  printf(o->json ? "{\"check\": \"%s\", \"type\": \"%s\", \"device\": \"%s\", "
                   "\"largest_over_range\": %.2e, \"rms_over_range\": %.2e}\n"
                 : "%s %s on %s: logits differ from the reference's by %.2e of their range at "
                   "most, %.2e in the mean\n",
         o->path, tfm_type_name(info.weights), info.device, worst / range,
         sqrt(squares / (double)n) / range);
  free(a);
  free(b);
  return 0;
}

/* ---- Training ---- */

typedef struct training {
  const char *name;
  tfm_shape shape;
  int32_t batch, context;
} training;

static const training trainings[] = {
  {"char", {"gpt2", 4, 128, 4, 65, 64, 0, 0, 0, 0, 0, 0, 0, false, 1, NULL}, 16, 64},
  {"own", {"llama", 7, 256, 4, 4096, 256, 2, 0, 768, 0, 0, 0, 0, false, 1, NULL}, 16, 256},
  {"gpt2-124m-64", {"gpt2", 12, 768, 12, 50257, 1024, 0, 0, 0, 0, 0, 0, 0, false, 1, NULL}, 4, 64},
  {"gpt2-124m-256", {"gpt2", 12, 768, 12, 50257, 1024, 0, 0, 0, 0, 0, 0, 0, false, 1, NULL},
   4, 256}};

typedef enum phase { WHOLE, FORWARD, BACKWARD, CLIP, UPDATE, PHASES } phase;

/* A table whose optimiser tells the time: the two calls are not passed what else to write to. */
static struct timed {
  const tfm_backend *table;
  tfm_backend own;
  double clip, update;
} timed;

static void timed_sumsq(tfm_dev *d, float *out, const void *x, tfm_type type, int64_t n) {
  double began = seconds();
  timed.table->sumsq(d, out, x, type, n);
  timed.clip += seconds() - began;
}

static void timed_adamw(tfm_dev *d, void *w, tfm_type type, float *master, float *m, float *v,
                        const void *g, tfm_type gtype, int64_t n, const float *sumsq,
                        const tfm_adamw *p) {
  double began = seconds();
  timed.table->adamw(d, w, type, master, m, v, g, gtype, n, sumsq, p);
  timed.update += seconds() - began;
}

static bool train_once(tfm_trainer *t, const int32_t *ids, const int32_t *targets,
                       double *spent) {
  double began = seconds();
  if (tfm_trainer_eval(t, ids, targets, NULL, NULL) != TFM_OK) return false;
  spent[FORWARD] = seconds() - began;
  timed.clip = timed.update = 0;
  began = seconds();
  if (tfm_trainer_step(t, ids, targets, NULL, NULL) != TFM_OK) return false;
  spent[WHOLE] = seconds() - began;
  spent[CLIP] = timed.clip;
  spent[UPDATE] = timed.update;
  spent[BACKWARD] = spent[WHOLE] - spent[FORWARD] - spent[CLIP] - spent[UPDATE];
  return true;
}

/* Of products and of attention to what precedes: forward, and twice as much backward. */
static double train_operations(const training *g, uint64_t parameters) {
  const tfm_shape *s = &g->shape;
  double tokens = (double)g->batch * g->context;
  double products = (double)parameters;
  if (!strcmp(s->family, "gpt2")) products -= (double)s->context * s->width; /* are gathered */
  return 6 * tokens * (products + (double)s->layers * s->width * g->context);
}

static void print_training(const options *o, const training *g, const double *ms,
                           const tfm_trainer_info *info) {
  double rate = (double)g->batch * g->context / ms[WHOLE] * 1e3;
  double share = 100 * train_operations(g, info->parameters) / ms[WHOLE] * 1e3 /
                 product_ceiling(cores_or(o->model.threads), FLOATS);
  printf(o->json ? "{\"workload\": \"train:%s\", \"ms\": %.2f, \"forward\": %.2f, \"backward\": "
                   "%.2f, \"clip\": %.2f, \"adamw\": %.2f, \"tokens_per_s\": %.0f, "
                   "\"percent_of_fma\": %.0f, \"memory_bytes\": %llu, \"precision\": \"%s\"}\n"
                 : "train:%s  %.2f ms a step: forward %.2f, backward %.2f, clip %.2f, AdamW %.2f; "
                   "%.0f tokens/s, %.0f%% of FMA's peak, %llu bytes, %s\n",
         g->name, ms[WHOLE], ms[FORWARD], ms[BACKWARD], ms[CLIP], ms[UPDATE], rate, share,
         (unsigned long long)info->memory_bytes, tfm_type_name(info->precision));
}

/* Medians of each phase. */
static int measure_steps(const options *o, const training *g, tfm_trainer *t, int32_t *ids) {
  double spent[PHASES], all[PHASES][REPEAT_MAX], ms[PHASES];
  int32_t n = g->batch * g->context, i, p;
  tfm_trainer_info info;
  fill_ids(ids, 2 * n, g->shape.vocabulary);
  for (i = -2; i < o->repeat; i++) { /* the first touch memory for the first time */
    if (!train_once(t, ids, ids + n, spent)) return tool_fail();
    for (p = 0; p < PHASES && i >= 0; p++) all[p][i] = spent[p];
  }
  for (p = 0; p < PHASES; p++) {
    qsort(all[p], (size_t)o->repeat, sizeof all[p][0], by_value);
    ms[p] = 1e3 * all[p][o->repeat / 2];
  }
  if (tfm_trainer_describe(t, &info) != TFM_OK) return tool_fail();
  print_training(o, g, ms, &info);
  return 0;
}

static int measure_training(const options *o, const training *g) {
  int32_t *ids = (int32_t *)malloc(2 * sizeof *ids * (size_t)(g->batch * g->context));
  tfm_trainer_config c;
  tfm_trainer *t;
  int status = TOOL_FAILED;
  memset(&c, 0, sizeof c);
  c.device = o->model.device;
  c.threads = o->model.threads;
  c.precision = o->model.weights;
  c.batch = g->batch;
  c.context = g->context;
  t = ids ? tfm_trainer_init(&g->shape, &c) : NULL;
  if (t) {
    timed.table = t->dev.table;
    timed.own = *timed.table;
    timed.own.sumsq = timed_sumsq;
    timed.own.adamw = timed_adamw;
    t->dev.table = &timed.own;
    status = measure_steps(o, g, t, ids);
  } else tool_fail();
  tfm_trainer_free(t);
  free(ids);
  return status;
}

static const training *find_training(const char *name) {
  size_t i;
  for (i = 0; i < sizeof trainings / sizeof *trainings; i++)
    if (!strcmp(trainings[i].name, name)) return &trainings[i];
  fprintf(stderr, TOOL ": train:%s is unknown; expected train:char, train:own, "
          "train:gpt2-124m-64 or train:gpt2-124m-256\n", name);
  return NULL;
}

/* ---- The command line ---- */

static int measure_shape(const options *o, const shape *s) {
  image f = {NULL, 0, 0, 1};
  tfm_model_config config = o->model;
  char text[640];
  int status;
  if (s->layout == GPT2) config.config_json = gpt2_config(s, text, sizeof text);
  if (s->layout == LLAMA) config.config_json = llama_config(s, text, sizeof text);
  if (s->layout == GPT2) image_gpt2(&f, s);
  else if (s->layout == LLAMA) image_llama_halves(&f, s);
  else image_llama(&f, s);
  if (o->write) {
    status = save(o->write, f.data, f.used);
    if (status == 0 && s->layout == LLAMA2C) status = save_tokenizer(o->write, s->vocabulary);
    if (status == 0 && config.config_json) status = save_config(o->write, config.config_json);
  } else {
    tfm_model *m = tfm_model_load_memory(f.data, f.used, &config), *reference = NULL;
    status = m ? measure_all(o, m) : tool_fail();
    if (status == 0 && o->check) {
      config.device = TFM_REF;
      reference = tfm_model_load_memory(f.data, f.used, &config);
      status = compare(o, m, reference);
    }
    tfm_model_free(reference);
    tfm_model_free(m);
  }
  free(f.data);
  return status;
}

/* Seconds from nothing to the first token, the file being in memory already; below zero: failed. */
static double load_once(const options *o) {
  tfm_engine_config config;
  double start = seconds();
  tfm_model *m = tfm_model_load(o->path, &o->model);
  tfm_session *s;
  const int32_t id = 1;
  bool good;
  memset(&config, 0, sizeof config);
  config.context = 64;
  config.threads = o->model.threads;
  s = m ? tfm_session_create(m, &config) : NULL;
  good = s && tfm_feed(s, &id, 1) == TFM_OK && tfm_next(s, NULL) >= TFM_END;
  start = seconds() - start;
  tfm_session_free(s);
  tfm_model_free(m);
  return good ? start : -1;
}

static int measure_load(const options *o) {
  double spent[REPEAT_MAX];
  tfm_plan plan;
  int32_t i;
  if (tfm_plan_memory(o->path, &o->model, NULL, &plan) != TFM_OK) return tool_fail();
  for (i = -1; i < o->repeat; i++) { /* the first reads the file */
    double once = load_once(o);
    if (once < 0) return tool_fail();
    if (i >= 0) spent[i] = once;
  }
  qsort(spent, (size_t)o->repeat, sizeof *spent, by_value);
  printf(o->json ? "{\"model\": \"%s\", \"workload\": \"load\", \"seconds\": %.3f, "
                   "\"gb_per_s\": %.2f}\n"
                 : "%s: %.3f s to the first token, %.2f GB/s\n",
         o->path, spent[o->repeat / 2],
         (double)plan.mapped_bytes / spent[o->repeat / 2] / 1e9);
  return 0;
}

static int measure_file(const options *o) {
  tfm_model_config config = o->model;
  tfm_model *m = tfm_model_load(o->path, &config), *reference = NULL;
  int status = m ? measure_all(o, m) : tool_fail();
  if (status == 0 && o->check) {
    config.device = TFM_REF;
    reference = tfm_model_load(o->path, &config);
    status = compare(o, m, reference);
  }
  tfm_model_free(reference);
  tfm_model_free(m);
  return status;
}

static int run(const options *o) {
  bool is_shape = !strncmp(o->path, "shape:", 6);
  const shape *s = is_shape ? find_shape(o->path + 6) : NULL;
  const training *g;
  if (!strncmp(o->path, "train:", 6)) {
    g = find_training(o->path + 6);
    return g ? measure_training(o, g) : TOOL_FAILED;
  }
  if (!strcmp(o->path, "ceilings")) return print_ceilings(o);
  if (!is_shape) return o->load ? measure_load(o) : measure_file(o);
  return s ? measure_shape(o, s) : TOOL_FAILED;
}

enum {
  KEY_BATCH = 256 + 32, KEY_REPEAT, KEY_ROWS, KEY_DEPTH, KEY_JSON, KEY_CACHE, KEY_WRITE, KEY_CHECK,
  KEY_LOAD, KEY_DETERMINISTIC, KEY_MEMORY, KEY_PRODUCTS
};

static const struct argp_option option_list[] = {
  {"prompt", 'p', "N", 0, "Read prompts of N tokens, default 512; 0: none", 0},
  {"tokens", 'n', "N", 0, "Write N tokens, default 128; 0: none", 0},
  {"batch", KEY_BATCH, "N", 0, "N sequences at a time, default 1; rates are of all together", 0},
  {"repeat", KEY_REPEAT, "N", 0, "Measure N times, default 5; median and best are printed", 0},
  {"rows", KEY_ROWS, "N", 0,
   "Run prompts in passes of up to N tokens; default 256, on a GPU 2048", 0},
  {"depth", KEY_DEPTH, "N", 0, "Write after prompts of N tokens, default 1", 0},
  {"type", 'w', "TYPE", 0, "The same as --weights; of training, its precision", 0},
  {"temperature", 't', "T", 0,
   "Choose tokens as generate does, --top-p 0.95; default 0: the most probable", 0},
  {"cache", KEY_CACHE, "TYPE", 0, "Keep keys and values as f32, f16, bf16 or q8_0", 0},
  {"check", KEY_CHECK, NULL, 0, "Also compare logits with the reference's on the same weights", 0},
  {"deterministic", KEY_DETERMINISTIC, NULL, 0, "Bits do not depend on the batch", 0},
  {"load", KEY_LOAD, NULL, 0, "Only how long a MODEL takes to load, up to its first token", 0},
  {"memory", KEY_MEMORY, "GB/S", 0, "What a GPU's memory gives: figures are held against it", 0},
  {"products", KEY_PRODUCTS, "TFLOP/S", 0, "The same of its products of matrices", 0},
  {"json", KEY_JSON, NULL, 0, "One JSON object per line", 0},
  {"write", KEY_WRITE, "FILE", 0, "Only write the shape to FILE, for other programs", 0},
  {NULL, 0, NULL, 0, NULL, 0}};

static error_t set_option(int key, char *arg, struct argp_state *state) {
  options *o = (options *)state->input;
  switch (key) {
  case 'p': o->prompt = (int32_t)tool_integer(state, "-p", arg, 0, 1 << 20); return 0;
  case 'n': o->tokens = (int32_t)tool_integer(state, "-n", arg, 0, 1 << 20); return 0;
  case 'w': o->model.weights = tool_type(state, "--type", arg); return 0;
  case 't': o->temperature = tool_number(state, "-t", arg, 0, 1e6f); return 0;
  case KEY_BATCH: o->batch = (int32_t)tool_integer(state, "--batch", arg, 1, 1 << 16); return 0;
  case KEY_REPEAT:
    o->repeat = (int32_t)tool_integer(state, "--repeat", arg, 1, REPEAT_MAX);
    return 0;
  case KEY_CACHE: o->cache = tool_type(state, "--cache", arg); return 0;
  case KEY_ROWS: o->rows = (int32_t)tool_integer(state, "--rows", arg, 1, 1 << 16); return 0;
  case KEY_DEPTH: o->depth = (int32_t)tool_integer(state, "--depth", arg, 1, 1 << 20); return 0;
  case KEY_JSON: o->json = true; return 0;
  case KEY_CHECK: o->check = true; return 0;
  case KEY_MEMORY:
    o->memory_rate = 1e9 * (double)tool_number(state, "--memory", arg, 0, 1e6f);
    return 0;
  case KEY_PRODUCTS:
    o->product_rate = 1e12 * (double)tool_number(state, "--products", arg, 0, 1e6f);
    return 0;
  case KEY_LOAD: o->load = true; return 0;
  case KEY_DETERMINISTIC: o->deterministic = true; return 0;
  case KEY_WRITE: o->write = arg; return 0;
  case ARGP_KEY_INIT: state->child_inputs[0] = &o->model; return 0;
  case ARGP_KEY_ARG: return tool_only_argument(state, arg, &o->path);
  case ARGP_KEY_NO_ARGS:
    argp_error(state, "expected a MODEL, shape:NAME or \"ceilings\"");
    return 0;
  default: return ARGP_ERR_UNKNOWN;
  }
}

static const struct argp parser = {
  option_list, set_option, "MODEL",
  "Measures how fast a model reads prompts (pp) and writes text (tg).\v"
  "MODEL is a model's folder or file; or shape:stories15m, shape:llama-110m, shape:gpt2-124m, "
  "shape:tinyllama-1.1b, shape:llama-1b, shape:llama-8b: that architecture with random weights, "
  "shape:experts-1b: Mixtral's with 32 experts, 8 of them for each token; or "
  "train:char, train:own, train:gpt2-124m-64, train:gpt2-124m-256: steps of training; or "
  "\"ceilings\", which prints the read bandwidth and the multiply-add peak of the machine.",
  tool_model_child, NULL, NULL};

int main(int argc, char **argv) {
  options o;
  memset(&o, 0, sizeof o);
  o.prompt = 512;
  o.tokens = 128;
  o.batch = 1;
  o.repeat = 5;
  o.depth = 1;
  tool_parse(&parser, argc, argv, &o);
  return tool_finish(run(&o));
}
