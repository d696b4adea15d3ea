/* entries.c - how fast single entries of a table of kernels are: attention over prompts, sampling.

   build:   make CUDA=1 B=build/cuda build/cuda/entries
   run:     build/cuda/entries [cuda|cpu|ref]
   output:  lines of JSON: the median of REPEAT timings of enough calls, beside what an H200's
            memory (4.3 TB/s, as copies measure) or tensor cores (790 TFLOP/s) would allow. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"

enum { REPEAT = 5, PAGE = 64 };

typedef struct device {
  tfmi_heap heap;
  tfm_dev d;
  tfm_type type; /* of q, keys and values: of 16 bits on a GPU */
} device;

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Device memory, filled from host where that is given. */
static void *room(device *t, size_t bytes, const void *host) {
  void *p = t->d.table->alloc(&t->d, bytes);
  if (!p) {
    fprintf(stderr, "entries: out of memory for %llu bytes\n", (unsigned long long)bytes);
    exit(1);
  }
  if (host) t->d.table->put(&t->d, p, host, bytes);
  else t->d.table->zero(&t->d, p, bytes);
  return p;
}

static void give(device *t, void *p, size_t bytes) { t->d.table->release(&t->d, p, bytes); }

/* Numbers from -1 to 1, in a type. */
static void *numbers(device *t, tfm_type type, size_t n) {
  size_t bytes = n * (size_t)tfmi_types[type].block_bytes, i;
  float *plain = (float *)malloc(n * sizeof *plain);
  uint8_t *coded = (uint8_t *)malloc(bytes);
  void *p;
  for (i = 0; i < n; i++)
    plain[i] = (float)(i * 2654435761u % 65536) / 32768.0f - 1;
  tfmi_codecs[type].encode(coded, plain, (int32_t)n);
  p = room(t, bytes, coded);
  free(plain);
  free(coded);
  return p;
}

typedef void (*work)(device *t, void *context);

/* Seconds of one call, so many being waited for at once that waiting does not count. */
static double timed(device *t, work run, void *context) {
  double found[REPEAT], start, once;
  int times, i, k;
  run(t, context); /* warm */
  t->d.table->sync(&t->d);
  start = tfmi_seconds();
  run(t, context);
  t->d.table->sync(&t->d);
  once = tfmi_seconds() - start;
  times = once > 0.05 ? 1 : once > 0.002 ? 10 : 200;
  for (k = 0; k < REPEAT; k++) {
    start = tfmi_seconds();
    for (i = 0; i < times; i++) run(t, context);
    if (t->d.table->sync(&t->d) != TFM_OK) fprintf(stderr, "entries: %s\n", t->d.message), exit(1);
    found[k] = (tfmi_seconds() - start) / times;
  }
  qsort(found, REPEAT, sizeof *found, by_value);
  return found[REPEAT / 2];
}

/* ---- Attention ---- */

typedef struct attention {
  tfm_mat y, q;
  tfm_kv kv;
  tfm_rows rows;
  tfm_attn p;
} attention;

static void run_attention(device *t, void *context) {
  const attention *a = (const attention *)context;
  t->d.table->attn(&t->d, a->y, a->q, &a->kv, &a->rows, NULL, &a->p);
}

static tfm_mat matrix(void *data, tfm_type type, int32_t rows, int32_t cols) {
  tfm_mat m = {data, type, rows, cols, cols};
  return m;
}

/* `sequences` prompts of n tokens in one pass, over a cache that holds them already. */
static void measure_attention(device *t, int32_t sequences, int32_t n, int32_t heads, int32_t d) {
  int32_t all = sequences * n, pages = all / PAGE, i;
  size_t values = (size_t)all * (size_t)heads * (size_t)d, ints = (size_t)all * sizeof(int32_t),
         bytes = values * (size_t)tfmi_types[t->type].block_bytes;
  int32_t *pos = (int32_t *)malloc(ints), *seq = (int32_t *)malloc(ints),
          *table = (int32_t *)malloc(ints);
  double spent, flops = 2.0 * sequences * n * (double)n * heads * d;
  attention a;
  memset(&a, 0, sizeof a);
  for (i = 0; i < all; i++) pos[i] = i % n, seq[i] = i / n;
  for (i = 0; i < pages; i++) table[i] = i;
  a.q = matrix(numbers(t, t->type, values), t->type, all, heads * d);
  a.y = matrix(room(t, bytes, NULL), t->type, all, heads * d);
  a.kv.k = numbers(t, t->type, values);
  a.kv.v = numbers(t, t->type, values);
  a.kv.type = t->type;
  a.kv.table = (int32_t *)room(t, ints, table);
  a.kv.max_pages = n / PAGE;
  a.kv.page_tokens = PAGE;
  a.kv.heads = heads;
  a.kv.width = d;
  a.rows.n = all;
  a.rows.pos = (int32_t *)room(t, ints, pos);
  a.rows.seq = (int32_t *)room(t, ints, seq);
  a.p.heads = heads;
  a.p.scale = 1 / sqrtf((float)d);
  spent = timed(t, run_attention, &a);
  printf("{\"entry\": \"attn\", \"backend\": \"%s\", \"head\": %d, \"tokens\": %d, "
         "\"sequences\": %d, \"ms\": %.3f, \"tflops\": %.1f, \"floor_tflops\": 790}\n",
         t->d.table->name, (int)d, (int)n, (int)sequences, 1e3 * spent, flops / spent / 1e12);
  give(t, a.q.data, bytes);
  give(t, a.y.data, bytes);
  give(t, a.kv.k, bytes);
  give(t, a.kv.v, bytes);
  give(t, (void *)(uintptr_t)a.kv.table, ints);
  give(t, (void *)(uintptr_t)a.rows.pos, ints);
  give(t, (void *)(uintptr_t)a.rows.seq, ints);
  free(pos);
  free(seq);
  free(table);
}

/* ---- Sampling ---- */

typedef struct sampling {
  int32_t *ids;
  tfm_mat logits;
  tfm_sampler s;
} sampling;

static void run_sampling(device *t, void *context) {
  const sampling *s = (const sampling *)context;
  t->d.table->sample(&t->d, s->ids, NULL, s->logits, &s->s);
}

/* Everything that follows the projection: softmax, top-p and the draw. */
static void measure_sampling(device *t, int32_t rows, int32_t vocabulary) {
  size_t values = (size_t)rows * (size_t)vocabulary, ints = (size_t)rows * sizeof(int32_t);
  tfm_sampling *how = (tfm_sampling *)calloc((size_t)rows, sizeof *how);
  int32_t *seq = (int32_t *)malloc(ints), i;
  double spent;
  sampling s;
  memset(&s, 0, sizeof s);
  for (i = 0; i < rows; i++) {
    seq[i] = i;
    how[i].temperature = 0.8f;
    how[i].top_p = 0.95f;
    how[i].seed = 1;
  }
  s.ids = (int32_t *)room(t, ints, NULL);
  s.logits = matrix(numbers(t, TFM_F32, values), TFM_F32, rows, vocabulary);
  s.s.params = (tfm_sampling *)room(t, (size_t)rows * sizeof *how, how);
  s.s.pos = (int32_t *)room(t, ints, NULL);
  s.s.seq = (int32_t *)room(t, ints, seq);
  s.s.history = (int32_t *)room(t, ints, NULL);
  s.s.history_stride = 1;
  s.s.work = (float *)room(t, 2 * values * sizeof(float), NULL);
  spent = timed(t, run_sampling, &s);
  printf("{\"entry\": \"sample top-p\", \"backend\": \"%s\", \"rows\": %d, \"vocabulary\": %d, "
         "\"us\": %.1f, \"floor_us\": %.1f}\n",
         t->d.table->name, (int)rows, (int)vocabulary, 1e6 * spent,
         (double)values * 4 / 4.3e12 * 1e6);
  give(t, s.ids, ints);
  give(t, s.logits.data, values * sizeof(float));
  give(t, (void *)(uintptr_t)s.s.params, (size_t)rows * sizeof *how);
  give(t, (void *)(uintptr_t)s.s.pos, ints);
  give(t, (void *)(uintptr_t)s.s.seq, ints);
  give(t, (void *)(uintptr_t)s.s.history, ints);
  give(t, s.s.work, 2 * values * sizeof(float));
  free(how);
  free(seq);
}

int main(int argc, char **argv) {
  static const struct { const char *name; tfm_device device; } names[] = {
    {"cuda", TFM_CUDA}, {"cpu", TFM_CPU}, {"ref", TFM_REF}};
  tfm_device which = TFM_CUDA;
  tfm_net net;
  size_t work_bytes;
  device t;
  int i;
  for (i = 0; i < 3; i++)
    if (argc > 1 && !strcmp(argv[1], names[i].name)) which = names[i].device;
  memset(&t, 0, sizeof t);
  memset(&net, 0, sizeof net);
  if (tfmi_dev_open(&t.d, &t.heap, which, 0, 0, NULL, true) != TFM_OK) {
    fprintf(stderr, "entries: %s\n", tfm_error());
    return 1;
  }
  t.type = which == TFM_CUDA ? TFM_BF16 : t.d.table->activation;
  net.width = net.ffn_width = 2048;
  work_bytes = t.d.table->work_bytes(&t.d, &net, 65536, 64, 1024);
  if (work_bytes) t.d.work = room(&t, work_bytes, NULL);
  if (which == TFM_CUDA) {
    measure_attention(&t, 1, 16384, 16, 128);
    measure_attention(&t, 64, 1024, 12, 64);
  }
  measure_attention(&t, 1, 1024, 4, 64);
  measure_sampling(&t, 1, 128256);
  measure_sampling(&t, 64, 128256);
  if (work_bytes) give(&t, t.d.work, work_bytes);
  tfmi_dev_close(&t.d, &t.heap);
  return 0;
}
