/* For tests of tables of kernels: a table with threads; matrices on its device, between guards;
   packed weights. Include after the implementation. */
#ifndef TABLES_H
#define TABLES_H

#include "test.h"

#define TABLES __attribute__((unused)) static

/* ---- A device under test ---- */

typedef struct device {
  tfmi_heap heap;
  tfm_dev d;
  const tfm_backend *b;
  size_t work_bytes;
} device;

TABLES bool device_open(device *t, tfm_device which, int32_t threads) {
  tfm_net net;
  memset(t, 0, sizeof *t);
  if (tfmi_dev_open(&t->d, &t->heap, which, 0, threads, NULL, true) != TFM_OK) return false;
  t->d.deterministic = true;
  t->b = t->d.table;
  memset(&net, 0, sizeof net);
  net.width = net.ffn_width = 2400; /* as much as any test below has */
  net.heads = 16;
  net.head_width = 64;
  net.embed.roles = TFM_ROLE_GRADIENT;
  t->d.products = t->d.has_bf16 ? TFM_BF16 : TFM_TYPE_DEFAULT; /* memory for these too */
  t->work_bytes = t->b->work_bytes(&t->d, &net, 256, 4, 2048);
  t->d.products = TFM_TYPE_DEFAULT;
  if (t->work_bytes) t->d.work = t->b->alloc(&t->d, t->work_bytes);
  return true;
}

TABLES void device_close(device *t) {
  CHECK_EQ_INT(t->b->sync(&t->d), TFM_OK);
  if (t->d.work) t->b->release(&t->d, t->d.work, t->work_bytes);
  tfmi_dev_close(&t->d, &t->heap);
  CHECK_EQ_INT(t->heap.used, 0);
}

/* Runs a test on each table, or the one that TABLE names, with three threads. */
TABLES void on_tables(void (*test)(device *)) {
  static const tfm_device all[] = {TFM_REF, TFM_CPU, TFM_CUDA};
  static const char *const names[] = {"ref", "cpu", "cuda"};
  static bool opened[3]; /* a device that was there does not go */
  const char *only = getenv("TABLE");
  device t;
  int i;
  for (i = 0; i < 3; i++)
    if (only && strcmp(only, names[i])) {
      continue;
    } else if (!device_open(&t, all[i], 3)) {
      CHECK(!opened[i]);
    } else {
      int before = test_failures;
      opened[i] = true;
      test(&t);
      device_close(&t);
      if (test_failures > before) fprintf(stderr, "  ... on table %d\n", (int)all[i]);
    }
}

/* ---- Numbers ---- */

TABLES uint64_t counter;
TABLES double uniform(void) { /* -1 to 1 */
  return tfmi_philox(7, counter++, 0).word[0] / 2147483648.0 - 1;
}
TABLES int below(int n) { return (int)(tfmi_philox(8, counter++, 0).word[0] % (uint32_t)n); }

TABLES double tolerance(tfm_type type) {
  return type == TFM_F32 ? 1e-5 : type == TFM_F16 ? 3e-3 : 2e-2;
}

TABLES double dot(const float *a, const float *b, int n) {
  double sum = 0;
  while (n--) sum += (double)a[n] * (double)b[n];
  return sum;
}

/* ---- Matrices on the device, between guards ---- */

typedef struct matrix {
  tfm_mat m;
  void *base;
  uint8_t *raw;   /* the whole allocation as it was put there */
  size_t bytes;
  float *v;       /* [rows, cols], decoded */
} matrix;

enum { GUARD = 3 }; /* rows before and after */

TABLES size_t at(const matrix *x, int row, int col) {
  return tfmi_span(x->m.type, (row + GUARD) * x->m.stride + col);
}

TABLES void matrix_put(device *t, matrix *x) {
  int i;
  for (i = 0; i < x->m.rows; i++) {
    tfmi_codecs[x->m.type].encode(x->raw + at(x, i, 0), x->v + i * x->m.cols, x->m.cols);
    tfmi_codecs[x->m.type].decode(x->v + i * x->m.cols, x->raw + at(x, i, 0), x->m.cols);
  }
  t->b->put(&t->d, x->base, x->raw, x->bytes);
}

TABLES matrix matrix_typed(device *t, int rows, int cols, int gap, tfm_type type) {
  matrix x;
  int i;
  x.m.type = type;
  x.m.rows = rows;
  x.m.cols = cols;
  x.m.stride = cols + gap;
  x.bytes = tfmi_span(type, (rows + 2 * GUARD) * x.m.stride);
  x.base = t->b->alloc(&t->d, x.bytes);
  x.raw = (uint8_t *)malloc(x.bytes);
  memset(x.raw, 0x7b, x.bytes);
  x.m.data = (uint8_t *)x.base + tfmi_span(type, GUARD * x.m.stride);
  x.v = (float *)malloc((size_t)rows * (size_t)cols * sizeof *x.v + 1);
  for (i = 0; i < rows * cols; i++) x.v[i] = (float)uniform();
  matrix_put(t, &x);
  return x;
}

TABLES matrix matrix_new(device *t, int rows, int cols, int gap) {
  return matrix_typed(t, rows, cols, gap, t->b->activation);
}

TABLES uint64_t matrix_hash; /* of all that was read back */

/* Reads it back into v; everything around it must be as it was. */
TABLES void matrix_get(device *t, matrix *x) {
  uint8_t *now = (uint8_t *)malloc(x->bytes);
  size_t row = tfmi_span(x->m.type, x->m.cols);
  int i;
  t->b->get(&t->d, now, x->base, x->bytes);
  for (i = 0; i < x->m.rows; i++) {
    tfmi_codecs[x->m.type].decode(x->v + i * x->m.cols, now + at(x, i, 0), x->m.cols);
    memcpy(x->raw + at(x, i, 0), now + at(x, i, 0), row);
  }
  CHECK(memcmp(x->raw, now, x->bytes) == 0);
  for (i = 0; i < (int)x->bytes; i++)
    matrix_hash = (matrix_hash ^ now[i]) * UINT64_C(1099511628211);
  free(now);
}

TABLES void matrix_free(device *t, matrix *x) {
  t->b->release(&t->d, x->base, x->bytes);
  free(x->raw);
  free(x->v);
}

TABLES void expect(const matrix *y, int row, int col, double want, double scale) {
  double got = y->v[row * y->m.cols + col];
  char text[160];
  if (fabs(got - want) <= tolerance(y->m.type) * scale) return;
  snprintf(text, sizeof text, "[%d, %d] is %.9g, expected %.9g", row, col, got, want);
  test_fail(__FILE__, __LINE__, text);
}

TABLES void *array(device *t, const void *host, size_t bytes) { /* on the device */
  void *p = t->b->alloc(&t->d, bytes);
  t->b->put(&t->d, p, host, bytes);
  return p;
}

TABLES tfm_mat none(void) {
  tfm_mat m;
  memset(&m, 0, sizeof m);
  return m;
}

/* ---- Weights ---- */

typedef struct weight {
  tfm_weight w;
  tfm_pack_size size;
  float *v; /* [experts * rows, cols] as they should be */
  uint8_t *file;
} weight;

TABLES tfm_scales weight_scales; /* shape of those that weight_new gives its parts; 0: none */
TABLES unsigned weight_roles = (unsigned)TFM_ROLE_MATMUL | (unsigned)TFM_ROLE_GATHER;

/* Values as a file would hold them. Where nothing encodes: any bytes, with scales of about 0.01. */
TABLES void file_values(tfm_type type, uint8_t *to, const float *x, int n) {
  const int values = tfmi_types[type].block_values, size = tfmi_types[type].block_bytes;
  int i, j, scale = type == TFM_Q6_K ? size - 2 : 0;
  if (tfmi_codecs[type].encode) {
    tfmi_codecs[type].encode(to, x, n);
    return;
  }
  for (i = 0; i < n / values; i++, to += size) {
    for (j = 0; j < size; j++) to[j] = (uint8_t)below(values > 1 ? 256 : 120); /* F8: no NaN */
    for (j = 0; j < 4 && values > 1; j += 2)
      if (scale + j + 2 <= size) tfmi_put16(to + scale + j, tfmi_to_f16((float)uniform() * 0.01f));
  }
}

/* What a table keeps values of a type as: no F8 whose scales belong to less than 64 columns. */
TABLES tfm_type kept_as(tfm_type type) {
  return type == TFM_F8_E4M3 && weight_scales.wide % 64 ? TFM_BF16 : type;
}

/* The CUDA table rounds scales and offsets to halves where a block has two scales. From then on,
   its values are what they became: off by less than 1,000th of the largest of the 32 that they are
   among, and half a subnormal half's unit for each of 32 steps. */
TABLES void weight_rounded(device *t, weight *x, tfm_type type, int rows, int cols) {
  bool two_scales = type == TFM_Q4_1 || type == TFM_Q5_1 || (type >= TFM_Q4_K && type <= TFM_Q6_K);
  matrix y;
  int i, j;
  if (!two_scales || strcmp(t->b->name, "cuda")) return;
  y = matrix_typed(t, rows, cols, 0, TFM_F32);
  t->b->unpack(&t->d, y.m, &x->w, 0);
  matrix_get(t, &y);
  for (i = 0; i < rows * cols; i += 32) {
    double most = 0;
    for (j = i; j < i + 32; j++) most = fmax(most, fabs((double)x->v[j]));
    for (j = i; j < i + 32; j++)
      CHECK(fabs((double)y.v[j] - (double)x->v[j]) <= most / 1000 + ldexp(1, -20));
  }
  memcpy(x->v, y.v, (size_t)rows * (size_t)cols * sizeof *x->v);
  matrix_free(t, &y);
}

/* Scales of 5 bits for a matrix [rows, cols], which it is multiplied by; the caller frees them. */
TABLES tfm_scales scales_new(float *v, int rows, int cols) {
  tfm_scales s = weight_scales;
  int across = s.wide ? (cols + s.wide - 1) / s.wide : 0, i, j;
  float *at;
  if (!s.tall) return s;
  s.at = at = (float *)malloc((size_t)((rows + s.tall - 1) / s.tall * across) * sizeof *at);
  for (i = 0; i < (rows + s.tall - 1) / s.tall * across; i++)
    at[i] = (float)ldexp(16 + below(16), -10);
  for (i = 0; i < rows; i++)
    for (j = 0; j < cols; j++) v[i * cols + j] *= at[i / s.tall * across + j / s.wide];
  return s;
}

TABLES weight weight_new(device *t, int rows, int cols, int experts, tfm_type from, tfm_type to,
                         bool transposed, int parts, int offset) {
  int all = rows * (experts ? experts : 1), count = parts * (experts ? experts : 1), i, j;
  tfm_part *part = (tfm_part *)calloc((size_t)count, sizeof *part);
  tfm_weight_source s = {part, count, rows, cols, experts, transposed, true,
                         false, weight_roles, to};
  weight x;
  float *plain = (float *)malloc((size_t)all * (size_t)cols * sizeof *plain);
  uint8_t *end;
  memset(&x, 0, sizeof x);
  for (i = 0; i < all * cols; i++) plain[i] = (float)(uniform() * 0.5);
  x.v = (float *)malloc((size_t)all * (size_t)cols * sizeof *x.v);
  x.file = end = (uint8_t *)malloc((size_t)all * (size_t)cols * 4 + 64);
  end += offset;
  for (i = j = 0; i < count; i++) { /* uneven parts */
    int left = rows - j % rows, n = (i + 1) % parts == 0 ? left : left / 2;
    float *block = (float *)malloc((size_t)n * (size_t)cols * sizeof *block);
    int r, c;
    for (r = 0; r < n; r++)
      for (c = 0; c < cols; c++)
        block[transposed ? c * n + r : r * cols + c] = plain[(j + r) * cols + c];
    part[i].data = end;
    part[i].type = from;
    part[i].rows = n;
    file_values(from, end, block, n * cols);
    tfmi_codecs[from].decode(block, end, n * cols);
    part[i].scales = scales_new(block, n, cols);
    for (r = 0; r < n; r++)
      for (c = 0; c < cols; c++)
        plain[(j + r) * cols + c] = block[transposed ? c * n + r : r * cols + c];
    end += tfmi_span(from, (int64_t)n * cols);
    free(block);
    j += n;
  }
  x.size = t->b->pack_size(&t->d, &s);
  CHECK(x.size.host_bytes % 64 == 0 && x.size.device_bytes % 64 == 0);
  t->b->pack(&t->d, &x.w, &s, malloc(x.size.host_bytes + 1),
             x.size.device_bytes ? t->b->alloc(&t->d, x.size.device_bytes) : NULL);
  for (i = 0; i < all; i++) { /* what the file says, and what converting leaves of it */
    uint8_t bytes[8192];
    float *v = x.v + i * cols;
    memcpy(v, plain + i * cols, (size_t)cols * sizeof *v);
    if (to == TFM_TYPE_DEFAULT) to = kept_as(from);
    if (to == from) continue;
    tfmi_codecs[to].encode(bytes, v, cols);
    tfmi_codecs[to].decode(v, bytes, cols);
  }
  weight_rounded(t, &x, to == TFM_TYPE_DEFAULT ? from : to, all, cols);
  for (i = 0; i < count; i++) free((void *)(uintptr_t)part[i].scales.at);
  free(plain);
  free(part);
  return x;
}

TABLES void weight_free(device *t, weight *x) {
  if (x->w.device) t->b->release(&t->d, x->w.device, x->size.device_bytes);
  free(x->w.host);
  free(x->v);
  free(x->file);
}

TABLES const tfm_type types[] = {TFM_F32, TFM_F16, TFM_BF16, TFM_Q8_0, TFM_Q4_0};

/* Those that a table may decline: see `computes`. */
TABLES const tfm_type more_types[] = {TFM_Q4_1, TFM_Q5_0, TFM_Q5_1, TFM_Q4_K, TFM_Q5_K, TFM_Q6_K};

/* Whether a table packs matrices of a type, converted to another where `to` says so. */
TABLES bool computes(device *t, tfm_type from, tfm_type to) {
  tfm_part part = {NULL, from, 4, {NULL, 0, 0}};
  tfm_weight_source s = {&part, 1, 4, 256, 0, false, true, false, TFM_ROLE_MATMUL, to};
  t->b->pack_size(&t->d, &s);
  return t->b->sync(&t->d) == TFM_OK;
}

#endif
