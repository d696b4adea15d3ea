/* Every forward entry of every table that is compiled in, against naive loops in double precision:
   odd sizes, all types, views with gaps between rows whose bytes must survive, padding rows, pages.
   And rule 7 of >>backend, bit by bit: alone or in a batch, with one thread or three. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "tables.h"
#include "files.h"

/* Of a sum of products: rounding errors grow with it. */
static double length_of_terms(const float *x, const float *w, int n) {
  double squares = 0;
  int i;
  for (i = 0; i < n; i++) squares += (double)x[i] * (double)x[i] * (double)w[i] * (double)w[i];
  return sqrt(squares);
}

/* Whether the tuned CPU table may multiply so many rows by a weight of a type in tiles of BF16. */
static bool in_tiles(const device *t, tfm_type type, int rows) {
  return !strcmp(t->b->name, "cpu") && t->d.has_bf16 && !t->d.deterministic && type != TFM_F32 &&
         rows >= (type < TFM_Q8_0 ? 16 : 40);
}

/* What products of so many rows may be off by, in units of `tolerance`. In the tuned CPU table's
   tiles both factors are rounded to BF16, each off by 2^-8 of itself at most; 6 deviations of a sum
   of these. Else it multiplies quantised weights by activations rounded to 8 bits, and a GPU to 16:
   6 deviations of a sum whose terms are off by up to half a step each. A group of 128 values has
   steps of a 127th of its largest, or a 32,639th. A GPU with a workspace may take x in two parts of
   16 bits, off by 2^-16, or of F16 by 2^-20 where a value is small beside the largest. */
static double rounding(const device *t, tfm_type type, int rows, const float *x, const float *w,
                       int n) {
  const double steps = !strcmp(t->b->name, "cpu") ? 127 : !strcmp(t->b->name, "cuda") ? 32639 : 0;
  double variance = 0, top = 0, squares = 0;
  int i;
  if (in_tiles(t, type, rows))
    return 6 * length_of_terms(x, w, n) * sqrt(2.0 / 3) / 256 / tolerance(t->b->activation);
  if (!strcmp(t->b->name, "cuda") && t->d.work && (type == TFM_F16 || type == TFM_BF16))
    return 6 * length_of_terms(x, w, n) / (type == TFM_F16 ? 1 << 20 : 1 << 16) /
           tolerance(t->b->activation);
  if (type < TFM_Q8_0 || steps == 0) return 0;
  for (i = 0; i < n; i++) {
    if (i % 128 == 0) top = squares = 0;
    if (fabs((double)x[i]) > top) top = fabs((double)x[i]);
    squares += (double)w[i] * (double)w[i];
    if (i % 128 == 127 || i == n - 1) variance += squares * top * top / (steps * steps * 12);
  }
  return 6 * sqrt(variance) / tolerance(t->b->activation);
}

static void pack_and_back(device *t, tfm_type from, tfm_type to, bool transposed, int offset) {
  bool blocks = from >= TFM_Q8_0 || to >= TFM_Q8_0;
  int cols = from >= TFM_Q4_K && from <= TFM_Q6_K ? 512 : from == TFM_F8_E4M3 ? 192
                                                        : blocks              ? 96 : 83;
  weight w = weight_new(t, 37, cols, 0, from, to, transposed, 3, offset);
  matrix y = matrix_typed(t, 20, w.w.cols, 2, TFM_F32);
  int i, j;
  t->b->unpack(&t->d, y.m, &w.w, 9);
  matrix_get(t, &y);
  for (i = 0; i < 20; i++)
    for (j = 0; j < y.m.cols; j++)
      CHECK(y.v[i * y.m.cols + j] == w.v[(i + 9) * y.m.cols + j]);
  matrix_free(t, &y);
  weight_free(t, &w);
}

static void test_pack(device *t) {
  int from, to;
  for (from = 0; from < 5; from++) {
    pack_and_back(t, types[from], TFM_TYPE_DEFAULT, false, 0);
    pack_and_back(t, types[from], TFM_TYPE_DEFAULT, false, 1);
    for (to = 0; to < 5; to++) pack_and_back(t, types[from], types[to], false, 4);
    for (to = 0; to < 5 && from < 3; to++) pack_and_back(t, types[from], types[to], true, 1);
  }
}
TEST(pack_unpacks) { on_tables(test_pack); }

static void refuse(device *t, tfm_type from, tfm_type to, int cols, bool transposed) {
  tfm_part part = {NULL, from, 4, {NULL, 0, 0}};
  tfm_weight_source s = {&part, 1, 4, cols, 0, transposed, true, false, TFM_ROLE_MATMUL, to};
  t->b->pack_size(&t->d, &s);
  CHECK(t->d.message[0] != 0);
  CHECK_EQ_INT(t->b->sync(&t->d), TFM_E_UNSUPPORTED);
  CHECK_EQ_INT(t->b->sync(&t->d), TFM_OK);
}

static void test_refusals(device *t) {
  refuse(t, TFM_Q4_K, TFM_TYPE_DEFAULT, 128, false);
  refuse(t, TFM_F32, TFM_Q4_K, 256, false);
  refuse(t, TFM_F32, TFM_F8_E4M3, t->b->f8 ? 96 : 256, false);
  refuse(t, TFM_F32, TFM_Q8_0, 33, false);
  refuse(t, TFM_Q8_0, TFM_TYPE_DEFAULT, 32, true);
}
TEST(pack_refuses) { on_tables(test_refusals); }

/* Known bytes, worked out by hand: ggml's blocks. */
TEST(quantises_as_ggml) {
  float x[32] = {0}, y[32];
  uint8_t q8[34], q4[18];
  x[0] = 127;
  x[1] = -63.5f;
  x[2] = 0.5f;
  tfmi_encode_q8_0(q8, x, 32);
  CHECK_EQ_INT(tfmi_u16(q8), 0x3c00);
  CHECK_EQ_INT((int8_t)q8[2], 127);
  CHECK_EQ_INT((int8_t)q8[3], -64);
  CHECK_EQ_INT((int8_t)q8[4], 1);
  x[0] = -8;
  x[1] = 3.4f;
  x[16] = 7.9f;
  tfmi_encode_q4_0(q4, x, 32); /* -8 leads: d = 1 */
  tfmi_decode_q4_0(y, q4, 32);
  CHECK_EQ_INT(tfmi_u16(q4), 0x3c00);
  CHECK_EQ_INT(q4[2] & 15, 0);
  CHECK_EQ_INT(q4[3] & 15, 11);
  CHECK_EQ_INT(q4[2] >> 4, 15);
  CHECK(y[0] == -8 && y[1] == 3 && y[16] == 7);
}

/* What others decode and encode, bit by bit: make_quants.py. */
TEST(codecs_equal_the_references) {
  blob b = blob_read("tests/data/quants.bin");
  uint8_t *at = b.data, *end = at ? at + b.bytes : at;
  int records = 0;
  while (at < end) {
    uint32_t n = tfmi_u32(at + 8), bytes = tfmi_u32(at + 12), encoded = tfmi_u32(at + 16), i;
    float *want = (float *)malloc(n * sizeof *want), *got = (float *)malloc(n * sizeof *got);
    uint8_t *data = (uint8_t *)malloc(bytes);
    int type = 1, same = 0;
    while (type < TFM_TYPE_COUNT && strcmp(tfm_type_name((tfm_type)type), (const char *)at)) type++;
    CHECK(type < TFM_TYPE_COUNT && tfmi_span((tfm_type)type, n) == bytes);
    for (i = 0; i < n; i++) want[i] = tfmi_f32(at + 20 + 4 * i);
    at += 20 + 4 * n;
    tfmi_little(at, bytes, tfmi_word_bytes((tfm_type)type));
    if (encoded) {
      tfmi_codecs[type].encode(data, want, (int32_t)n);
      CHECK(memcmp(data, at, bytes) == 0);
    } else {
      tfmi_codecs[type].decode(got, at, (int32_t)n);
      for (i = 0; i < n; i++) /* also in the sign of a zero; any NaN is one */
        same += memcmp(&got[i], &want[i], 4) == 0 || (isnan(got[i]) && isnan(want[i]));
      CHECK_EQ_INT(same, n);
    }
    free(want);
    free(got);
    free(data);
    at += bytes;
    records++;
  }
  CHECK_EQ_INT(records, 16);
  free(b.data);
}

TEST(f16_decodes_all) {
  uint32_t h;
  for (h = 0; h < 65536; h++) {
    uint16_t half = (uint16_t)h;
    float a = tfmi_from_f16(half), b;
    tfmi_decode_f16(&b, (const uint8_t *)&half, 1);
    CHECK(memcmp(&a, &b, 4) == 0);
  }
}

TEST(exp_is_accurate) {
  double worst = 0, x;
  for (x = -86.8; x < 88.7; x += 0.00117) {
    double want = exp((double)(float)x), got = (double)tfmi_exp((float)x);
    double ulps = fabs(got - want) / want * 8388608.0;
    if (ulps > worst) worst = ulps;
  }
  CHECK(worst < 2);
  CHECK(tfmi_exp(-INFINITY) == 0 && tfmi_exp(-1000) == 0 && tfmi_exp(0) == 1);
  CHECK(tfmi_exp(1000) == INFINITY && tfmi_exp(INFINITY) == INFINITY);
  CHECK(tfmi_exp(NAN) != tfmi_exp(NAN));
}

/* ---- matmul ---- */

static double activate(double x, tfm_act act) {
  switch (act) {
    case TFM_ACT_NONE: return x;
    case TFM_ACT_GELU: return 0.5 * x * (1 + erf(x / sqrt(2)));
    case TFM_ACT_GELU_TANH: return 0.5 * x * (1 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
    case TFM_ACT_SILU: return x / (1 + exp(-x));
    case TFM_ACT_RELU: return x > 0 ? x : 0;
  }
  return NAN;
}

static void matmul_plain(device *t, int m, int n, int k, tfm_type type, int parts, int offset) {
  weight w = weight_new(t, n, k, 0, type, TFM_TYPE_DEFAULT, false, parts, offset);
  matrix x = matrix_new(t, m, k, 3), y = matrix_new(t, m, n, 5);
  tfm_epilogue e;
  int i, j;
  memset(&e, 0, sizeof e);
  t->b->matmul(&t->d, y.m, x.m, &w.w, &e);
  matrix_get(t, &y);
  for (i = 0; i < m; i++)
    for (j = 0; j < n; j++)
      expect(&y, i, j, dot(x.v + i * k, w.v + j * k, k),
             0.3 * fmax(sqrt(k), length_of_terms(x.v + i * k, w.v + j * k, k)) + 1 +
               rounding(t, type, m, x.v + i * k, w.v + j * k, k));
  matrix_free(t, &x);
  matrix_free(t, &y);
  weight_free(t, &w);
}

static void test_matmul(device *t) {
  static const int ms[] = {1, 2, 3, 4, 7, 16, 17, 37}, ks[] = {1, 15, 16, 33, 130, 1031};
  int i, j;
  for (i = 0; i < 5; i++)
    for (j = 0; j < 8; j++) matmul_plain(t, ms[j], 77, 160, types[i], 3, j % 4);
  for (i = 0; i < 3; i++)
    for (j = 0; j < 6; j++) matmul_plain(t, 5, 9, ks[j], types[i], 1, 1);
  matmul_plain(t, 2, 1, 32, TFM_Q4_0, 1, 1);
  for (i = 2; i < 5; i++) matmul_plain(t, 70, 70, 1184, types[i], 2, 1); /* over a chunk's edge */
  for (i = 2; i < 5; i++) matmul_plain(t, 290, 40, 160, types[i], 1, 1); /* over a tile's rows */
}
TEST(matmul) { on_tables(test_matmul); }

static double keep(const tfm_dropout *p, const int32_t *pos, const int32_t *seq, int row, int col) {
  uint32_t word = tfmi_philox(p->seed, (uint64_t)(uint32_t)pos[row] << 32 | (uint32_t)col / 4,
                              (uint64_t)p->site << 32 | (uint32_t)seq[row]).word[col % 4];
  return (word >> 8) / 16777216.0 < (double)p->rate ? 0 : 1 / (1 - (double)p->rate);
}

static void epilogue(device *t, tfm_act act, bool alias) {
  enum { M = 19, N = 45, K = 64 };
  weight w = weight_new(t, N, K, 0, TFM_F32, TFM_TYPE_DEFAULT, true, 2, 0);
  matrix x = matrix_new(t, M, K, 1), y = matrix_new(t, M, N, 2), r = matrix_new(t, M, N, 3),
         aux = matrix_new(t, M, N, 4), bias = matrix_typed(t, 1, N, 0, TFM_F32);
  int32_t pos[M], seq[M];
  tfm_epilogue e;
  double drops = 0;
  int i, j;
  for (i = 0; i < M; i++) pos[i] = 3 * i, seq[i] = i % 4;
  memset(&e, 0, sizeof e);
  e.bias = (const float *)bias.m.data;
  e.act = act;
  e.softcap = 2.5f;
  e.residual = alias ? y.m : r.m;
  e.aux = aux.m;
  e.dropout.rate = 0.25f;
  e.dropout.seed = 99;
  e.dropout.site = 5;
  e.dropout.pos = (const int32_t *)array(t, pos, sizeof pos);
  e.dropout.seq = (const int32_t *)array(t, seq, sizeof seq);
  if (alias) memcpy(r.v, y.v, sizeof(float) * M * N);
  t->b->matmul(&t->d, y.m, x.m, &w.w, &e);
  matrix_get(t, &y);
  matrix_get(t, &aux);
  for (i = 0; i < M; i++)
    for (j = 0; j < N; j++) {
      double v = dot(x.v + i * K, w.v + j * K, K) + (double)bias.v[j];
      double k = keep(&e.dropout, pos, seq, i, j);
      expect(&aux, i, j, v, 8);
      expect(&y, i, j, 2.5 * tanh(activate(v, act) / 2.5) * k + (double)r.v[i * N + j], 8);
      drops += k == 0;
    }
  CHECK(fabs(drops / (M * N) - 0.25) < 0.06);
  t->b->release(&t->d, (void *)(uintptr_t)e.dropout.pos, sizeof pos);
  t->b->release(&t->d, (void *)(uintptr_t)e.dropout.seq, sizeof seq);
  matrix_free(t, &x);
  matrix_free(t, &y);
  matrix_free(t, &r);
  matrix_free(t, &aux);
  matrix_free(t, &bias);
  weight_free(t, &w);
}

static void test_epilogue(device *t) {
  int act;
  for (act = TFM_ACT_NONE; act <= TFM_ACT_RELU; act++) epilogue(t, (tfm_act)act, act % 2);
}
TEST(matmul_epilogue) { on_tables(test_epilogue); }

/* Bits of each row: alone, in a batch, and with another number of threads. */
static void same_bits(device *t, tfm_type type, int k) {
  enum { M = 67, N = 1000 };
  weight w = weight_new(t, N, k, 0, type, TFM_TYPE_DEFAULT, false, 3, 0);
  matrix x = matrix_new(t, M, k, 0), y = matrix_new(t, M, N, 0), one = matrix_new(t, 1, N, 0);
  int32_t threads = t->d.threads;
  tfm_epilogue e;
  int i;
  memset(&e, 0, sizeof e);
  e.act = TFM_ACT_SILU;
  t->b->matmul(&t->d, y.m, x.m, &w.w, &e);
  matrix_get(t, &y);
  for (i = 0; i < M; i += 3) {
    tfm_mat row = x.m;
    row.data = (uint8_t *)x.m.data + tfmi_span(x.m.type, i * x.m.stride);
    row.rows = 1;
    t->d.threads = 1 + i % threads;
    t->b->matmul(&t->d, one.m, row, &w.w, &e);
    matrix_get(t, &one);
    CHECK(memcmp(one.v, y.v + i * N, sizeof(float) * N) == 0);
  }
  t->d.threads = threads;
  matrix_free(t, &x);
  matrix_free(t, &y);
  matrix_free(t, &one);
  weight_free(t, &w);
}

static void embed_plain(device *t, tfm_type type) {
  int32_t id[3] = {4, 0, 18}, at[3] = {0, 0, 0};
  tfm_rows rows = {3, (int32_t *)array(t, id, sizeof id), (int32_t *)array(t, at, sizeof at),
                   (int32_t *)array(t, at, sizeof at), false};
  weight table = weight_new(t, 19, 512, 0, type, TFM_TYPE_DEFAULT, false, 2, 1);
  matrix y = matrix_new(t, 3, 512, 3);
  int i, j;
  t->b->embed(&t->d, y.m, &table.w, NULL, &rows, 1.5f);
  matrix_get(t, &y);
  for (i = 0; i < 3; i++)
    for (j = 0; j < 512; j++) expect(&y, i, j, 1.5 * (double)table.v[id[i] * 512 + j], 2);
  matrix_free(t, &y);
  weight_free(t, &table);
  t->b->release(&t->d, (void *)(uintptr_t)rows.id, sizeof id);
  t->b->release(&t->d, (void *)(uintptr_t)rows.pos, sizeof at);
  t->b->release(&t->d, (void *)(uintptr_t)rows.seq, sizeof at);
}

static void test_more_types(device *t) {
  tfm_type to;
  int i, m;
  for (i = 0; i < TFMI_COUNT(more_types); i++) {
    if (!computes(t, more_types[i], TFM_TYPE_DEFAULT)) continue;
    for (m = 1; m < 40; m = 3 * m + 1) matmul_plain(t, m, 45, 512, more_types[i], 3, m % 4);
    same_bits(t, more_types[i], 768);
    embed_plain(t, more_types[i]);
    for (to = TFM_F32; to <= TFM_Q5_1; to = (tfm_type)(to + 1))
      if (computes(t, more_types[i], to)) pack_and_back(t, more_types[i], to, false, 1);
  }
  for (to = TFM_F32; to <= TFM_BF16; to = (tfm_type)(to + 1)) { /* F8 becomes a longer float */
    pack_and_back(t, TFM_F8_E4M3, to, false, 1);
    pack_and_back(t, TFM_F8_E5M2, to, true, 0);
  }
}
TEST(other_block_types) { on_tables(test_more_types); }

/* A matrix of parts whose blocks differ, as q, k and v in files of K types. */
static void test_parts(device *t) {
  static const tfm_type of[] = {TFM_Q4_K, TFM_Q6_K, TFM_Q8_0};
  enum { ROWS = 11, COLS = 512, ALL = 3 * ROWS };
  float plain[ROWS * COLS], v[ALL * COLS];
  uint8_t file[3][ROWS * COLS * 2];
  tfm_part part[3];
  tfm_weight_source s = {part, 3, ALL, COLS, 0, false, true, false, TFM_ROLE_MATMUL,
                         TFM_TYPE_DEFAULT};
  matrix x = matrix_new(t, 1, COLS, 0), y = matrix_new(t, 1, ALL, 0);
  tfm_pack_size size;
  tfm_weight w;
  tfm_epilogue e;
  int i, j;
  for (i = 0; i < 3; i++) {
    tfm_part p = {file[i], of[i], ROWS, {NULL, 0, 0}};
    for (j = 0; j < ROWS * COLS; j++) plain[j] = (float)uniform();
    file_values(of[i], file[i], plain, ROWS * COLS);
    tfmi_codecs[of[i]].decode(v + i * ROWS * COLS, file[i], ROWS * COLS);
    part[i] = p;
  }
  memset(&e, 0, sizeof e);
  size = t->b->pack_size(&t->d, &s);
  t->b->pack(&t->d, &w, &s, malloc(size.host_bytes + 1),
             size.device_bytes ? t->b->alloc(&t->d, size.device_bytes) : NULL);
  t->b->matmul(&t->d, y.m, x.m, &w, &e);
  matrix_get(t, &y);
  for (i = 0; i < ALL; i++) {
    double sum = 0, length = length_of_terms(x.v, v + i * COLS, COLS);
    for (j = 0; j < COLS; j++) sum += (double)x.v[j] * (double)v[i * COLS + j];
    CHECK(fabs((double)y.v[i] - sum) <= length / 50); /* activations of 8 bits */
  }
  if (w.device) t->b->release(&t->d, w.device, size.device_bytes);
  free(w.host);
  matrix_free(t, &x);
  matrix_free(t, &y);
}
TEST(parts_of_several_types) { on_tables(test_parts); }

/* Scales of all, of rows, of blocks whose last are not whole, of less than 64 columns. */
static void test_f8(device *t) {
  static const tfm_scales shapes[] = {{NULL, 0, 0},     {NULL, 64, 192}, {NULL, 1, 512},
                                      {NULL, 128, 128}, {NULL, 5, 64},   {NULL, 3, 32}};
  static const tfm_type floats[] = {TFM_F32, TFM_F16, TFM_BF16, TFM_Q8_0};
  int i, j, m;
  for (i = 0; i < TFMI_COUNT(shapes); i++) {
    weight_scales = shapes[i];
    for (j = 0; j < TFMI_COUNT(floats); j++) pack_and_back(t, TFM_F8_E4M3, floats[j], false, j);
    if (t->b->f8) pack_and_back(t, TFM_F8_E4M3, TFM_TYPE_DEFAULT, false, i % 4);
    for (m = 1; m < 40 && t->b->f8; m = 3 * m + 1)
      matmul_plain(t, m, 45, 512, TFM_F8_E4M3, 3, m % 4);
    if (t->b->f8) embed_plain(t, TFM_F8_E4M3);
    if (t->b->f8) same_bits(t, TFM_F8_E4M3, 768);
    pack_and_back(t, TFM_F8_E5M2, TFM_F32, false, 1);
    memset(&weight_scales, 0, sizeof weight_scales);
  }
}
TEST(f8_with_scales) { on_tables(test_f8); }

/* 64 values share a scale, which brings the largest to 448; 3 bits follow the first. */
static void test_to_f8(device *t) {
  enum { ROWS = 37, COLS = 192 };
  float v[ROWS * COLS];
  tfm_part part = {v, TFM_F32, ROWS, {NULL, 0, 0}};
  tfm_weight_source s = {&part, 1, ROWS, COLS, 0, false, true, false, TFM_ROLE_MATMUL, TFM_F8_E4M3};
  matrix y = matrix_typed(t, ROWS, COLS, 2, TFM_F32);
  tfm_pack_size size;
  tfm_weight w;
  int i, j, same = 0;
  if (t->b->f8) {
    for (i = 0; i < ROWS * COLS; i++) v[i] = (float)(uniform() * ldexp(1, i / 64 % 30 - 14));
    size = t->b->pack_size(&t->d, &s);
    t->b->pack(&t->d, &w, &s, malloc(size.host_bytes), t->b->alloc(&t->d, size.device_bytes));
    t->b->unpack(&t->d, y.m, &w, 0);
    matrix_get(t, &y);
    CHECK(size.device_bytes < ROWS * COLS * 5 / 4);
    for (i = 0; i < ROWS * COLS; i++) {
      double top = 0, got = (double)y.v[i], want = (double)v[i];
      for (j = i / 64 * 64; j < i / 64 * 64 + 64; j++) top = fmax(top, fabs((double)v[j]));
      same += got == want;
      CHECK(fabs(got - want) <= 1.01 * fmax(fabs(want) / 16, top / 448 / 1024));
    }
    CHECK(same < ROWS * COLS / 8);
    t->b->release(&t->d, w.device, size.device_bytes);
    free(w.host);
  }
  matrix_free(t, &y);
}
TEST(becomes_f8) { on_tables(test_to_f8); }

static void test_bits(device *t) {
  int i;
  for (i = 0; i < 5; i++) same_bits(t, types[i], 288);
  same_bits(t, TFM_F32, 1300);
  same_bits(t, TFM_BF16, 83);
}
TEST(matmul_rows_are_independent) { on_tables(test_bits); }

/* What is made of some rows, the last: whatever the threads, and whatever other rows there are. */
static void some_bits(device *t, tfm_type type, int rows, int some, int n, int k) {
  const int first = rows - some;
  weight w = weight_new(t, n, k, 0, type, TFM_TYPE_DEFAULT, false, 2, 0);
  matrix x = matrix_new(t, rows, k, 3), y = matrix_new(t, rows, n, 0),
         z = matrix_new(t, some, n, 0);
  int32_t threads = t->d.threads;
  tfm_mat last = x.m;
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  last.data = (float *)x.m.data + first * x.m.stride;
  last.rows = some;
  t->b->matmul(&t->d, y.m, x.m, &w.w, &e);
  matrix_get(t, &y);
  for (t->d.threads = 1; t->d.threads <= threads; t->d.threads++) {
    t->b->matmul(&t->d, z.m, last, &w.w, &e);
    matrix_get(t, &z);
    CHECK(memcmp(z.v, y.v + first * n, sizeof(float) * (size_t)(some * n)) == 0);
  }
  t->d.threads = threads;
  matrix_free(t, &x);
  matrix_free(t, &y);
  matrix_free(t, &z);
  weight_free(t, &w);
}

static void test_tiles(device *t) {
  static const int ms[] = {16, 17, 40, 70}, ks[] = {1, 15, 34, 83};
  int i, j;
  if (strcmp(t->b->name, "cpu") || !t->d.has_bf16) return;
  t->d.deterministic = false;
  for (i = 0; i < 5; i++)
    for (j = 0; j < 4; j++) matmul_plain(t, ms[j], 77, 160, types[i], 3, j);
  for (i = 1; i < 3; i++)
    for (j = 0; j < 4; j++) matmul_plain(t, 19, 9, ks[j], types[i], 1, 1);
  for (i = 0; i < TFMI_COUNT(more_types); i++)
    matmul_plain(t, 40 + 3 * i, 45, 512, more_types[i], 3, i % 4);
  for (i = 2; i < 5; i++) matmul_plain(t, 290, 40, 160, types[i], 1, 1); /* rows in parts */
  some_bits(t, TFM_F16, 290, 43, 70, 83);
  some_bits(t, TFM_Q6_K, 52, 43, 70, 256);
  matmul_plain(t, 19, 70, 2400, TFM_BF16, 1, 0); /* columns in parts, */
  matmul_plain(t, 45, 600, 288, TFM_Q8_0, 2, 1); /* and more panels than wait */
  some_bits(t, TFM_Q8_0, 44, 43, 560, 2080);
  t->d.deterministic = true;
}
TEST(matmul_in_tiles) { on_tables(test_tiles); }

/* What a GPU multiplies by few rows at a time, or by one; a row's bits do not depend on which. */
static void test_few(device *t) {
  static const int some[] = {1, 2, 8, 33, 64, 65};
  enum { N = 4097, K = 1032 };
  size_t bytes;
  tfm_net net;
  int i, j;
  if (strcmp(t->b->name, "cuda")) return;
  memset(&net, 0, sizeof net);
  net.width = net.ffn_width = K;
  bytes = t->b->work_bytes(&t->d, &net, 130, 1, 1);
  t->d.work = t->b->alloc(&t->d, bytes);
  for (i = 1; i < 3; i++) {
    t->d.deterministic = true;
    for (j = 0; j < TFMI_COUNT(some); j++) some_bits(t, types[i], 130, some[j], N, K);
    matmul_plain(t, 2, N, K, types[i], 3, 1);
    t->d.deterministic = false;
    matmul_plain(t, 17, N, K, types[i], 1, 2);
    matmul_plain(t, 70, N, K, types[i], 3, 3);
  }
  t->b->sync(&t->d);
  t->b->release(&t->d, t->d.work, bytes);
  t->d.work = NULL;
}
TEST(matmul_of_few_rows) { on_tables(test_few); }

/* ---- cast, gather, embed ---- */

static void test_copies(device *t) {
  static const int32_t index[4] = {6, 0, 3, 3};
  int32_t *where = (int32_t *)array(t, index, sizeof index);
  int a, b, i, j;
  for (a = 0; a < 3; a++)
    for (b = 0; b < 3; b++) {
      matrix x = matrix_typed(t, 7, 301, 2, types[a]), y = matrix_typed(t, 7, 301, 0, types[b]);
      t->b->cast(&t->d, y.m, x.m);
      matrix_get(t, &y);
      for (i = 0; i < 7; i++)
        for (j = 0; j < 301; j++) expect(&y, i, j, (double)x.v[i * 301 + j], 1);
      matrix_free(t, &x);
      matrix_free(t, &y);
    }
  {
    matrix x = matrix_new(t, 7, 33, 2), y = matrix_new(t, 4, 33, 1);
    t->b->gather(&t->d, y.m, x.m, where);
    matrix_get(t, &y);
    for (i = 0; i < 4; i++) CHECK(!memcmp(y.v + i * 33, x.v + index[i] * 33, 33 * sizeof *y.v));
    matrix_free(t, &x);
    matrix_free(t, &y);
  }
  t->b->release(&t->d, where, sizeof index);
}
TEST(cast_and_gather) { on_tables(test_copies); }

static void test_embed(device *t) {
  enum { T = 5, C = 160 };
  static const int32_t id[T] = {4, 0, -7, 18, 4}, pos[T] = {0, 1, -9, 5, 2};
  static const int32_t seq[T] = {0, 0, -1, 1, 2};
  tfm_rows rows = {T, (int32_t *)array(t, id, sizeof id), (int32_t *)array(t, pos, sizeof pos),
                   (int32_t *)array(t, seq, sizeof seq), false};
  int i, j, k;
  for (k = 0; k < 5; k++) {
    weight table = weight_new(t, 19, C, 0, types[k], TFM_TYPE_DEFAULT, false, 2, 1);
    weight learned = weight_new(t, 6, C, 0, types[4 - k], TFM_TYPE_DEFAULT, false, 1, 0);
    matrix y = matrix_new(t, T, C, 3);
    t->b->embed(&t->d, y.m, &table.w, k % 2 ? &learned.w : NULL, &rows, 1.5f);
    matrix_get(t, &y);
    for (i = 0; i < T; i++)
      for (j = 0; j < C && seq[i] >= 0; j++)
        expect(&y, i, j, 1.5 * (double)table.v[id[i] * C + j] +
                             (k % 2 ? (double)learned.v[pos[i] * C + j] : 0), 2);
    matrix_free(t, &y);
    weight_free(t, &table);
    weight_free(t, &learned);
  }
  t->b->release(&t->d, (void *)(uintptr_t)rows.id, sizeof id);
  t->b->release(&t->d, (void *)(uintptr_t)rows.pos, sizeof pos);
  t->b->release(&t->d, (void *)(uintptr_t)rows.seq, sizeof seq);
}
TEST(embed) { on_tables(test_embed); }

/* ---- norm ---- */

static void norm_with(device *t, tfm_norm_kind kind, int groups, int width, int residual) {
  enum { T = 6 };
  int cols = groups * width, i, j, g;
  tfm_norm p = {kind, 1e-5f, kind == TFM_NORM_RMS ? 1.0f : 0.0f, groups};
  matrix x = matrix_new(t, T, cols, 5), y = matrix_new(t, T, cols, 0),
         r = matrix_new(t, T, cols, 2), w = matrix_typed(t, 1, width, 0, TFM_F32),
         b = matrix_typed(t, 1, width, 0, TFM_F32),
         stats = matrix_typed(t, T * groups, 2, 0, TFM_F32);
  float *before = (float *)malloc(sizeof(float) * (size_t)(T * cols));
  for (i = 0; i < T * cols; i++) x.v[i] += 3; /* a mean that one pass would trip over */
  matrix_put(t, &x);
  memcpy(before, x.v, sizeof(float) * (size_t)(T * cols));
  t->b->norm(&t->d, residual == 2 ? r.m : residual == 1 ? y.m : x.m, x.m, (float *)w.m.data,
             kind == TFM_NORM_LAYER ? (float *)b.m.data : NULL, residual ? r.m : none(),
             (float *)stats.m.data, &p);
  {
    matrix *out = residual == 2 ? &r : residual == 1 ? &y : &x;
    float *old = (float *)malloc(sizeof(float) * (size_t)(T * cols));
    memcpy(old, r.v, sizeof(float) * (size_t)(T * cols));
    matrix_get(t, out);
    matrix_get(t, &stats);
    for (i = 0; i < T; i++)
      for (g = 0; g < groups; g++) {
        const float *v = before + i * cols + g * width;
        double mean = 0, var = 0;
        for (j = 0; j < width && kind == TFM_NORM_LAYER; j++) mean += (double)v[j] / width;
        for (j = 0; j < width; j++) var += ((double)v[j] - mean) * ((double)v[j] - mean) / width;
        expect(&stats, i * groups + g, 0, mean, 3);
        expect(&stats, i * groups + g, 1, 1 / sqrt(var + 1e-5), 1 / sqrt(var + 1e-5));
        for (j = 0; j < width; j++)
          expect(out, i, g * width + j,
                 (residual ? (double)old[i * cols + g * width + j] : 0) +
                     ((double)v[j] - mean) / sqrt(var + 1e-5) * (double)(w.v[j] + p.offset) +
                     (kind == TFM_NORM_LAYER ? (double)b.v[j] : 0), 6);
      }
    free(old);
  }
  free(before);
  matrix_free(t, &x);
  matrix_free(t, &y);
  matrix_free(t, &r);
  matrix_free(t, &w);
  matrix_free(t, &b);
  matrix_free(t, &stats);
}

static void test_norm(device *t) {
  int r;
  for (r = 0; r < 3; r++) {
    norm_with(t, TFM_NORM_LAYER, 1, 768, r);
    norm_with(t, TFM_NORM_RMS, 1, 61, r);
    norm_with(t, TFM_NORM_RMS, 5, 48, r);
    norm_with(t, TFM_NORM_LAYER, 3, 17, r);
  }
}
TEST(norm) { on_tables(test_norm); }

/* ---- rope ---- */

static void rope_with(device *t, int width, int rot, bool interleaved) {
  enum { T = 5, HEADS = 3 };
  static const int32_t pos[T] = {0, 1, 77, 4000, 100000};
  float freq[128];
  matrix x = matrix_new(t, T, HEADS * width, 7);
  float *before = (float *)malloc(sizeof(float) * (size_t)(T * HEADS * width));
  int32_t *where = (int32_t *)array(t, pos, sizeof pos);
  tfm_rope p = {width, rot, interleaved, false, NULL, 1.25f};
  int i, h, j;
  for (j = 0; j < rot / 2; j++) freq[j] = (float)pow(10000, -2.0 * j / rot);
  p.inv_freq = (float *)array(t, freq, sizeof freq);
  memcpy(before, x.v, sizeof(float) * (size_t)(T * HEADS * width));
  t->b->rope(&t->d, x.m, where, &p);
  matrix_get(t, &x);
  for (i = 0; i < T; i++)
    for (h = 0; h < HEADS; h++)
      for (j = 0; j < width; j++) {
        int pairs = rot / 2, pair = interleaved ? j / 2 : j % pairs;
        int second = interleaved ? j % 2 : j >= pairs;
        int a = h * width + (interleaved ? 2 * pair : pair), b = a + (interleaved ? 1 : pairs);
        const float *v = before + i * HEADS * width;
        double angle = j < rot ? (double)((float)pos[i] * freq[pair]) : 0, u, w;
        if (j >= rot) {
          expect(&x, i, h * width + j, (double)v[h * width + j], 0);
          continue;
        }
        u = (double)v[a];
        w = (double)v[b];
        expect(&x, i, h * width + j,
               1.25 * (second ? w * cos(angle) + u * sin(angle)
                              : u * cos(angle) - w * sin(angle)), 2);
      }
  p.inverse = true;
  p.scale = 1 / 1.25f;
  t->b->rope(&t->d, x.m, where, &p);
  matrix_get(t, &x);
  for (i = 0; i < T; i++)
    for (j = 0; j < x.m.cols; j++) expect(&x, i, j, (double)before[i * x.m.cols + j], 4);
  t->b->release(&t->d, where, sizeof pos);
  t->b->release(&t->d, (void *)(uintptr_t)p.inv_freq, sizeof freq);
  free(before);
  matrix_free(t, &x);
}

static void test_rope(device *t) {
  rope_with(t, 48, 48, false);
  rope_with(t, 48, 48, true);
  rope_with(t, 10, 6, false);
  rope_with(t, 10, 6, true);
  rope_with(t, 256, 200, false);
}
TEST(rope) { on_tables(test_rope); }

/* ---- attn ---- */

typedef struct attention { /* a case */
  int heads, kv_heads, width, page, window, longest;
  float softcap;
  tfm_type cache;
  bool rows_only; /* no cache */
  tfm_type halves; /* of q and y; 0: the table's activations */
} attention;

enum { SEQS = 3, MAX_T = 220, MAX_ROWS = 2 * MAX_T };
#define NONE TFM_TYPE_DEFAULT

typedef struct cache {
  tfm_kv kv;
  int32_t pages[SEQS * MAX_T];
  size_t bytes, page_bytes;
} cache;

/* What is not written to is no number. */
static cache cache_new(device *t, const attention *a) {
  uint8_t *poison;
  cache c;
  int i, n = (MAX_T + a->page - 1) / a->page;
  memset(&c, 0, sizeof c);
  for (i = 0; i < SEQS * n; i++) c.pages[i] = i * 7 % (SEQS * n); /* n is no multiple of 7 */
  while (SEQS * n % 7 == 0) for (n++, i = 0; i < SEQS * n; i++) c.pages[i] = i * 7 % (SEQS * n);
  c.bytes = tfmi_span(a->cache, (int64_t)SEQS * n * a->page * a->kv_heads * a->width);
  c.kv.k = t->b->alloc(&t->d, c.bytes);
  c.kv.v = t->b->alloc(&t->d, c.bytes);
  poison = (uint8_t *)malloc(c.bytes);
  memset(poison, 0xff, c.bytes);
  t->b->put(&t->d, c.kv.k, poison, c.bytes);
  t->b->put(&t->d, c.kv.v, poison, c.bytes);
  free(poison);
  c.kv.type = a->cache;
  c.kv.max_pages = n;
  c.kv.page_tokens = a->page;
  c.kv.heads = a->kv_heads;
  c.kv.width = a->width;
  c.page_bytes = sizeof(int32_t) * (size_t)(SEQS * n);
  c.kv.table = (int32_t *)array(t, c.pages, c.page_bytes);
  return c;
}

static void cache_free(device *t, cache *c) {
  t->b->release(&t->d, c->kv.k, c->bytes);
  t->b->release(&t->d, c->kv.v, c->bytes);
  t->b->release(&t->d, (void *)(uintptr_t)c->kv.table, c->page_bytes);
}

typedef struct batch { int32_t pos[MAX_ROWS], seq[MAX_ROWS]; tfm_rows rows; } batch;

static void batch_put(device *t, batch *b, int n) {
  b->rows.n = n;
  b->rows.id = b->rows.pos = (int32_t *)array(t, b->pos, sizeof b->pos);
  b->rows.seq = (int32_t *)array(t, b->seq, sizeof b->seq);
}

static void batch_free(device *t, batch *b) {
  t->b->release(&t->d, (void *)(uintptr_t)b->rows.pos, sizeof b->pos);
  t->b->release(&t->d, (void *)(uintptr_t)b->rows.seq, sizeof b->seq);
}

typedef struct attended { /* one row and head, in double; and what rounding to BF16 makes of it */
  double out[256], prob[MAX_T], lse;
  double about_out[256], about_lse; /* variances */
} attended;

/* product: the variance of a product of two numbers that are rounded, as a share of its square. */
static void attend(attended *to, const attention *a, const matrix *q, const matrix *k,
                   const matrix *v, const batch *b, int row, int head, float scale,
                   double product) {
  int kh = head / (a->heads / a->kv_heads), r, j, width = a->width;
  double top = -INFINITY, sum = 0, s[MAX_ROWS], about[MAX_ROWS];
  const float *query = q->v + row * q->m.cols + head * width;
  memset(to, 0, sizeof *to);
  for (r = 0; r < b->rows.n; r++) {
    const float *key = k->v + r * k->m.cols + kh * width;
    bool seen = b->seq[r] == b->seq[row] && b->pos[r] <= b->pos[row] &&
                (!a->window || b->pos[r] > b->pos[row] - a->window);
    s[r] = -INFINITY;
    if (!seen) continue;
    s[r] = (double)scale * dot(query, key, width);
    about[r] = product * pow((double)scale * length_of_terms(query, key, width), 2);
    if (a->softcap != 0) s[r] = (double)a->softcap * tanh(s[r] / (double)a->softcap);
    if (s[r] > top) top = s[r];
  }
  for (r = 0; r < b->rows.n; r++) sum += exp(s[r] - top);
  for (r = 0; r < b->rows.n; r++) {
    double p = exp(s[r] - top) / sum;
    if (p > 0) to->prob[b->pos[r]] = p, to->about_lse += p * p * about[r];
    for (j = 0; j < width; j++) to->out[j] += p * (double)v->v[r * v->m.cols + kh * width + j];
  }
  for (r = 0; r < b->rows.n; r++)
    for (j = 0; j < width && s[r] > -INFINITY; j++) {
      double p = exp(s[r] - top) / sum, value = (double)v->v[r * v->m.cols + kh * width + j];
      to->about_out[j] += p * p * (pow(value - to->out[j], 2) * about[r] +
                                   value * value * product);
    }
  to->lse = top + log(sum);
}

/* 6 deviations, in units of `tolerance`. */
static double deviations(const device *t, double variance) {
  return 6 * sqrt(variance) / tolerance(t->b->activation);
}

static void round_to(matrix *x, tfm_type type) { /* as the cache will hold it */
  const int n = tfmi_types[type].block_values;
  uint8_t bytes[64];
  int i;
  for (i = 0; i < x->m.rows * x->m.cols; i += n) {
    tfmi_codecs[type].encode(bytes, x->v + i, n);
    tfmi_codecs[type].decode(x->v + i, bytes, n);
  }
}

/* plain: as a model calls it, a sequence's rows one after the other. */
static void attn_with(device *t, attention a, bool plain, int sequences) {
  cache c = cache_new(t, &a);
  tfm_attn p;
  batch b;
  int n = 0, s, i, j, h, inner = a.kv_heads * a.width;
  tfm_type type = a.halves ? a.halves : t->b->activation;
  const double product = t->d.products == TFM_BF16 ? 2.0 / 3 / 65536 : 0; /* as `rounding` */
  bool wants_lse = !plain || !a.halves;
  matrix q, k, v, y, probs, lse;
  for (i = 0; i < a.longest && !plain; i++) /* sequences of different lengths, interleaved */
    for (s = 0; s < sequences; s++)
      if (i * (s + 1) < a.longest) b.pos[n] = i, b.seq[n] = s, n++;
  for (s = 0; s < sequences && plain; s++)
    for (i = 0; i * (s + 1) < a.longest; i++) b.pos[n] = i, b.seq[n] = s, n++;
  b.pos[n] = -5, b.seq[n] = -1, n++;
  batch_put(t, &b, n);
  q = matrix_typed(t, n, a.heads * a.width, a.halves ? 8 : 3, type);
  k = matrix_new(t, n, inner, 5);
  v = matrix_new(t, n, inner, 5);
  y = matrix_typed(t, n, a.heads * a.width, a.halves ? 8 : 2, type);
  probs = matrix_typed(t, n * a.heads, MAX_T, 0, TFM_F32);
  lse = matrix_typed(t, n, a.heads, 0, TFM_F32);
  memset(&p, 0, sizeof p);
  p.heads = a.heads;
  p.scale = 1.7f / sqrtf((float)a.width) * 3;
  p.softcap = a.softcap;
  p.window = a.window;
  p.probs = plain ? NULL : (float *)probs.m.data;
  p.probs_stride = MAX_T;
  t->b->kv_put(&t->d, &c.kv, k.m, v.m, &b.rows);
  round_to(&k, a.rows_only ? TFM_F32 : a.cache);
  round_to(&v, a.rows_only ? TFM_F32 : a.cache);
  if (a.rows_only) {
    t->b->release(&t->d, (void *)(uintptr_t)c.kv.table, c.page_bytes);
    c.kv.table = NULL;
    c.kv.key_rows = k.m;
    c.kv.value_rows = v.m;
  }
  t->b->attn(&t->d, y.m, q.m, &c.kv, &b.rows, wants_lse ? (float *)lse.m.data : NULL, &p);
  matrix_get(t, &y);
  matrix_get(t, &probs);
  matrix_get(t, &lse);
  for (i = 0; i < n - 1; i++)
    for (h = 0; h < a.heads; h++) {
      attended to;
      attend(&to, &a, &q, &k, &v, &b, i, h, p.scale, product);
      for (j = 0; j < a.width; j++)
        expect(&y, i, h * a.width + j, to.out[j], 1 + deviations(t, to.about_out[j]));
      for (j = 0; j < MAX_T && !plain; j++)
        expect(&probs, i * a.heads + h, j, to.prob[j], to.prob[j] > 0 ? 1 : 0);
      if (wants_lse) expect(&lse, i, h, to.lse, 10 + deviations(t, to.about_lse));
    }
  batch_free(t, &b);
  if (c.kv.table) cache_free(t, &c);
  else t->b->release(&t->d, c.kv.k, c.bytes), t->b->release(&t->d, c.kv.v, c.bytes);
  matrix_free(t, &q);
  matrix_free(t, &k);
  matrix_free(t, &v);
  matrix_free(t, &y);
  matrix_free(t, &probs);
  matrix_free(t, &lse);
}

static void test_attn(device *t) {
  static const attention cases[] = {
    {4, 4, 48, 16, 0, 40, 0, TFM_F32, false, NONE}, {6, 2, 17, 5, 0, 90, 0, TFM_F32, false, NONE},
    {9, 1, 33, 64, 0, 35, 0, TFM_F16, false, NONE},
    {4, 2, 64, MAX_T, 0, 70, 0, TFM_BF16, false, NONE},
    {4, 2, 32, 7, 11, 80, 0, TFM_F32, false, NONE},
    {2, 1, 256, 33, 0, 20, 1.5f, TFM_F32, false, NONE},
    {5, 5, 20, 1, 1, 20, 0, TFM_F16, false, NONE}, {6, 2, 24, 8, 0, 70, 0, TFM_F32, true, NONE},
    {3, 3, 48, 8, 13, 70, 2, TFM_F32, true, NONE},
    {4, 2, 64, 9, 0, 70, 0, TFM_Q8_0, false, NONE},
    {3, 1, 96, 5, 17, 50, 0, TFM_Q8_0, false, NONE},
    {5, 1, 128, 16, 0, 90, 0, TFM_Q8_0, false, NONE},
    {2, 1, 256, 7, 0, 40, 2, TFM_Q8_0, false, NONE}};
  int i;
  for (i = 0; i < TFMI_COUNT(cases); i++) {
    attn_with(t, cases[i], false, SEQS);
    attn_with(t, cases[i], true, SEQS);
  }
}
TEST(attn) { on_tables(test_attn); }

/* Prompts on a GPU's tensor cores, keys and all of 16 bits, or keys of 8: tiles of up to 128 rows
   of a sequence, and rows left over. Pages that are no multiple of 8 are not for Hopper's way. */
static void test_attn_halves(device *t) {
  static const attention cases[] = {
    {4, 2, 64, 16, 0, 215, 0, TFM_F16, false, TFM_F16},
    {2, 2, 128, 64, 50, 150, 0, TFM_BF16, false, TFM_BF16},
    {3, 1, 128, 64, 0, 129, 1.5f, TFM_F16, false, TFM_F16},
    {2, 1, 64, 64, 70, 220, 2, TFM_BF16, false, TFM_BF16},
    {2, 1, 64, 64, 0, 17, 0, TFM_F16, false, TFM_F16},
    {2, 1, 64, 5, 70, 220, 2, TFM_BF16, false, TFM_BF16},
    {2, 2, 128, 7, 0, 150, 0, TFM_F16, false, TFM_F16},
    {2, 1, 128, MAX_T, 0, 217, 0, TFM_BF16, false, TFM_BF16},
    {2, 1, 8, 8, 0, 90, 0, TFM_F16, false, TFM_F16},
    {3, 3, 80, 24, 0, 130, 0, TFM_F16, false, TFM_F16},
    {2, 1, 96, 128, 33, 200, 0, TFM_BF16, false, TFM_BF16},
    {4, 2, 256, 64, 0, 215, 0, TFM_BF16, false, TFM_BF16},
    {2, 2, 200, 40, 61, 180, 2, TFM_F16, false, TFM_F16},
    {4, 2, 64, 16, 0, 215, 0, TFM_Q8_0, false, TFM_F16},
    {2, 1, 128, 5, 50, 150, 0, TFM_Q8_0, false, TFM_BF16},
    {2, 2, 96, 64, 0, 129, 1.5f, TFM_Q8_0, false, TFM_F16},
    {2, 1, 256, MAX_T, 0, 130, 0, TFM_Q8_0, false, TFM_BF16}};
  tfm_net net;
  int i;
  if (strcmp(t->b->name, "cuda")) return;
  memset(&net, 0, sizeof net);
  net.width = net.ffn_width = 64;
  for (i = 0; i < 4 * TFMI_COUNT(cases); i++) {
    const attention *a = &cases[i / 4];
    size_t bytes;
    net.kv_heads = a->kv_heads;
    net.head_width = a->width;
    t->d.cache = a->cache;
    bytes = t->b->work_bytes(&t->d, &net, SEQS * MAX_T, SEQS, MAX_T);
    t->d.work = t->b->alloc(&t->d, bytes);
    t->d.deterministic = i % 2;
    attn_with(t, *a, true, i % 4 < 2 ? 1 : SEQS);
    t->b->sync(&t->d);
    t->b->release(&t->d, t->d.work, bytes);
  }
  t->d.deterministic = false;
  t->d.work = NULL;
}
TEST(attn_of_halves) { on_tables(test_attn_halves); }

/* In the tuned CPU table's tiles of BF16, where an engine asks for them: blocks of 128 queries and
   keys, or fewer, and sequences of few rows, which are left to vectors. */
static void test_attn_tiles(device *t) {
  static const attention cases[] = {
    {4, 4, 48, 16, 0, 200, 0, TFM_F32, false, NONE}, {6, 2, 17, 5, 0, 90, 0, TFM_F32, false, NONE},
    {9, 1, 33, 64, 0, 35, 0, TFM_F16, false, NONE},
    {4, 2, 64, MAX_T, 0, 215, 0, TFM_BF16, false, NONE},
    {8, 1, 32, 7, 11, 180, 0, TFM_F32, false, NONE},
    {2, 1, 256, 33, 0, 150, 1.5f, TFM_F32, false, NONE},
    {64, 1, 20, 1, 1, 20, 0, TFM_F16, false, NONE}, {6, 2, 24, 8, 0, 140, 0, TFM_F32, true, NONE},
    {3, 3, 80, 8, 130, 220, 2, TFM_F32, false, NONE},
    {4, 2, 64, 9, 0, 150, 0, TFM_Q8_0, false, NONE},
    {5, 1, 128, 16, 70, 219, 0, TFM_Q8_0, false, NONE},
    {2, 1, 256, 7, 0, 17, 2, TFM_Q8_0, false, NONE}};
  int i;
  if (!t->d.has_bf16) return;
  t->d.products = TFM_BF16;
  for (i = 0; i < TFMI_COUNT(cases); i++) attn_with(t, cases[i], true, 1 + i % SEQS);
  attn_with(t, cases[0], false, SEQS);
  t->d.products = TFM_TYPE_DEFAULT;
}
TEST(attn_in_tiles) { on_tables(test_attn_tiles); }

/* The bits of a row: whatever the page size, the form, the batch and the threads. `some` rows are
   taken by themselves. */
static void attn_bits(device *t, int kv_heads, int some) {
  enum { N = 75, H = 4, D = 40 };
  static const int pages[] = {1, 5, 16, 32, MAX_T};
  matrix q = matrix_new(t, N, H * D, 0), k = matrix_new(t, N, kv_heads * D, 0),
         v = matrix_new(t, N, kv_heads * D, 0), y = matrix_new(t, N, H * D, 0),
         first = matrix_new(t, N, H * D, 0);
  int32_t threads = t->d.threads;
  batch b;
  tfm_attn p;
  int i, j;
  memset(&p, 0, sizeof p);
  p.heads = H;
  p.scale = 0.5f;
  p.window = 41;
  for (i = 0; i < N; i++) b.pos[i] = i, b.seq[i] = 1;
  batch_put(t, &b, N);
  for (j = 0; j < 5; j++) {
    attention a = {H, kv_heads, D, 0, 0, N, 0, t->b->activation, false, NONE};
    cache c;
    a.page = pages[j];
    c = cache_new(t, &a);
    t->d.threads = 1 + j % threads;
    t->b->kv_put(&t->d, &c.kv, k.m, v.m, &b.rows);
    t->b->attn(&t->d, j ? y.m : first.m, q.m, &c.kv, &b.rows, NULL, &p);
    matrix_get(t, j ? &y : &first);
    if (j) CHECK(memcmp(y.v, first.v, sizeof(float) * N * H * D) == 0);
    for (i = 0; i + some <= N; i += 9) {
      tfm_rows alone = {some, b.rows.pos + i, b.rows.pos + i, b.rows.seq + i, some == 1};
      tfm_mat qi = q.m, yi = y.m;
      qi.data = (uint8_t *)q.m.data + tfmi_span(q.m.type, i * q.m.stride);
      yi.data = (uint8_t *)y.m.data + tfmi_span(y.m.type, i * y.m.stride);
      qi.rows = yi.rows = some;
      t->b->attn(&t->d, yi, qi, &c.kv, &alone, NULL, &p);
      matrix_get(t, &y);
      CHECK(memcmp(y.v + i * H * D, first.v + i * H * D,
                   sizeof(float) * H * D * (size_t)some) == 0);
    }
    cache_free(t, &c);
  }
  t->d.threads = threads;
  batch_free(t, &b);
  matrix_free(t, &q);
  matrix_free(t, &k);
  matrix_free(t, &v);
  matrix_free(t, &y);
  matrix_free(t, &first);
}

/* In tiles, too, if 16 of a sequence are together: fewer are left to vectors. */
static void test_attn_bits(device *t) {
  attn_bits(t, 2, 1);
  attn_bits(t, 4, 1); /* a query alone with its keys */
  if (!t->d.has_bf16) return;
  t->d.products = TFM_BF16;
  attn_bits(t, 2, 16);
  attn_bits(t, 2, 23);
  t->d.products = TFM_TYPE_DEFAULT;
}
TEST(attn_rows_are_independent) { on_tables(test_attn_bits); }

/* Rows of a long sequence, whose positions threads share where there is little else to share: the
   bits that they have in a prompt, on one thread, and near what `attend` tells. */
static void attn_long(device *t, int window, float softcap) {
  enum { N = 1300, H = 3, D = 24, PAGE = 48 };
  static const int at[] = {0, 63, 511, 512, 513, 900, 1023, 1024, 1299};
  matrix q = matrix_new(t, N, H * D, 0), k = matrix_new(t, N, D, 0), v = matrix_new(t, N, D, 0),
         y = matrix_new(t, N, H * D, 0), one = matrix_new(t, 1, H * D, 0);
  int32_t pos[N], seq[N] = {0}, pages[N / PAGE + 1], threads = t->d.threads;
  const size_t bytes = sizeof(float) * D * PAGE * TFMI_COUNT(pages);
  tfm_rows rows = {N, NULL, NULL, (int32_t *)array(t, seq, sizeof seq), false};
  tfm_kv kv;
  tfm_attn p;
  int i, j, h;
  memset(&kv, 0, sizeof kv);
  memset(&p, 0, sizeof p);
  for (i = 0; i < N; i++) pos[i] = i;
  for (i = 0; i < TFMI_COUNT(pages); i++) pages[i] = TFMI_COUNT(pages) - 1 - i;
  rows.id = rows.pos = (int32_t *)array(t, pos, sizeof pos);
  kv.k = t->b->alloc(&t->d, bytes);
  kv.v = t->b->alloc(&t->d, bytes);
  kv.type = TFM_F32;
  kv.table = (int32_t *)array(t, pages, sizeof pages);
  kv.max_pages = TFMI_COUNT(pages);
  kv.page_tokens = PAGE;
  kv.heads = 1;
  kv.width = D;
  p.heads = H;
  p.scale = 1.5f;
  p.window = window;
  p.softcap = softcap;
  t->b->kv_put(&t->d, &kv, k.m, v.m, &rows);
  t->d.threads = 1;
  t->b->attn(&t->d, y.m, q.m, &kv, &rows, NULL, &p);
  matrix_get(t, &y);
  for (i = 0; i < TFMI_COUNT(at) * threads; i++) {
    const int r = at[i / threads];
    tfm_rows alone = {1, rows.pos + r, rows.pos + r, rows.seq + r, true};
    tfm_mat row = q.m;
    row.data = (float *)q.m.data + r * q.m.stride;
    row.rows = 1;
    t->d.threads = 1 + i % threads;
    t->b->attn(&t->d, one.m, row, &kv, &alone, NULL, &p);
    matrix_get(t, &one);
    CHECK(memcmp(one.v, y.v + r * H * D, sizeof(float) * H * D) == 0);
    for (h = 0; h < H && t->d.threads == 1; h++) {
      double sum = 0, out[D] = {0};
      int other, first = window && r >= window ? r - window + 1 : 0;
      for (other = first; other <= r; other++) {
        double s = 1.5 * dot(q.v + r * H * D + h * D, k.v + other * D, D), e;
        if (softcap != 0) s = (double)softcap * tanh(s / (double)softcap);
        for (sum += e = exp(s), j = 0; j < D; j++) out[j] += e * (double)v.v[other * D + j];
      }
      for (j = 0; j < D; j++) expect(&one, 0, h * D + j, out[j] / sum, 1);
    }
  }
  t->d.threads = threads;
  t->b->release(&t->d, (void *)(uintptr_t)rows.pos, sizeof pos);
  t->b->release(&t->d, (void *)(uintptr_t)rows.seq, sizeof seq);
  t->b->release(&t->d, (void *)(uintptr_t)kv.table, sizeof pages);
  t->b->release(&t->d, kv.k, bytes);
  t->b->release(&t->d, kv.v, bytes);
  matrix_free(t, &q);
  matrix_free(t, &k);
  matrix_free(t, &v);
  matrix_free(t, &y);
  matrix_free(t, &one);
}

static void test_attn_long(device *t) {
  if (!strcmp(t->b->name, "cuda")) return; /* its memory is not the test's */
  attn_long(t, 0, 0);
  attn_long(t, 600, 0);
  attn_long(t, 40, 2);
}
TEST(attn_of_long_rows) { on_tables(test_attn_long); }

/* ---- glu ---- */

static void test_glu(device *t) {
  int act, i, j;
  for (act = TFM_ACT_NONE; act <= TFM_ACT_RELU; act++) {
    matrix x = matrix_new(t, 3, 2 * 1037, 3), y = matrix_new(t, 3, 1037, 1);
    for (i = 0; i < 3 * 2 * 1037; i++) x.v[i] *= 12;
    matrix_put(t, &x);
    t->b->glu(&t->d, y.m, x.m, (tfm_act)act);
    matrix_get(t, &y);
    for (i = 0; i < 3; i++)
      for (j = 0; j < 1037; j++) {
        double gate = (double)x.v[i * 2074 + j], up = (double)x.v[i * 2074 + 1037 + j];
        expect(&y, i, j, activate(gate, (tfm_act)act) * up, 1 + fabs(gate * up) / 10);
      }
    matrix_free(t, &x);
    matrix_free(t, &y);
  }
}
TEST(glu) { on_tables(test_glu); }

/* Bit by bit what matmul and glu make of it; whether it was done at all. */
static bool matmul_glu(device *t, tfm_type type, int m, int f, int k, int parts) {
  weight w = weight_new(t, 2 * f, k, 0, type, TFM_TYPE_DEFAULT, false, parts, 0);
  matrix x = matrix_new(t, m, k, 3), both = matrix_new(t, m, 2 * f, 1);
  matrix y = matrix_new(t, m, f, 5), z = matrix_new(t, m, f, 2);
  bool done = t->b->matmul_glu(&t->d, y.m, x.m, &w.w, TFM_ACT_SILU);
  t->b->matmul(&t->d, both.m, x.m, &w.w, NULL);
  t->b->glu(&t->d, z.m, both.m, TFM_ACT_SILU);
  matrix_get(t, &y);
  matrix_get(t, &z);
  if (done) CHECK(!memcmp(y.v, z.v, (size_t)m * (size_t)f * sizeof *y.v));
  matrix_free(t, &x);
  matrix_free(t, &both);
  matrix_free(t, &y);
  matrix_free(t, &z);
  weight_free(t, &w);
  return done;
}

static void test_matmul_glu(device *t) {
  if (!t->b->matmul_glu) return;
  t->d.deterministic = false;
  CHECK(matmul_glu(t, TFM_BF16, 41, 32, 100, 1) == in_tiles(t, TFM_BF16, 41));
  CHECK(matmul_glu(t, TFM_Q8_0, 45, 320, 544, 1) == in_tiles(t, TFM_Q8_0, 45));
  CHECK(matmul_glu(t, TFM_Q8_0, 45, 330, 544, 2) == in_tiles(t, TFM_Q8_0, 45));
  CHECK(matmul_glu(t, TFM_Q4_K, 300, 160, 256, 2) == in_tiles(t, TFM_Q4_K, 300));
  CHECK(matmul_glu(t, TFM_F16, 40, 300, 2080, 2) == in_tiles(t, TFM_F16, 40));
  CHECK(!matmul_glu(t, TFM_BF16, 41, 48, 100, 1)); /* gate's last panel is up's first */
  CHECK(!matmul_glu(t, TFM_BF16, 41, 48, 100, 3));
  CHECK(!matmul_glu(t, TFM_F32, 41, 32, 100, 2));
  t->d.deterministic = true;
  CHECK(!matmul_glu(t, TFM_BF16, 41, 32, 100, 2));
}
TEST(gate_and_up_at_once) { on_tables(test_matmul_glu); }

/* ---- Mixture of experts ---- */

/* MOST tokens all choose expert 1. */
static void moe_case(device *t, int T, bool normalise, bool after, tfm_type type) {
  enum { MOST = 300, E = 7, K = 3, C = 64, N = 35 };
  tfm_moe p = {E, K, normalise, after, 1.5f};
  matrix logits = matrix_typed(t, T, E, 2, TFM_F32), x = matrix_new(t, T, C, 1),
         mid = matrix_new(t, T * K, N, 0), out = matrix_new(t, T * K, C, 0),
         y = matrix_new(t, T, C, 2),
         r = matrix_new(t, T, C, 0), probs = matrix_typed(t, T, E, 0, TFM_F32),
         weights = matrix_typed(t, T, K, 0, TFM_F32);
  weight up = weight_new(t, N, C, E, type, TFM_TYPE_DEFAULT, false, 2, 0);
  weight down = weight_new(t, C, 32, E, type, TFM_TYPE_DEFAULT, false, 1, 0);
  int32_t expert[MOST * K], order[MOST * K], begin[E + 1];
  tfm_routing g = {T, K, E, NULL, (float *)weights.m.data, NULL, NULL, (float *)probs.m.data, NULL,
                   NULL};
  tfm_mat mid32 = mid.m;
  int i, j, s, e, many = T * K / E;
  g.expert = (int32_t *)array(t, expert, sizeof expert);
  g.order = (int32_t *)array(t, order, sizeof order);
  g.begin = (int32_t *)array(t, begin, sizeof begin);
  for (i = 0; i < T; i++) logits.v[i * E + i % E] = logits.v[i * E + (i + 2) % E]; /* ties */
  for (i = 0; i < T; i++) logits.v[i * E + 4] = -9;                                /* hardly used */
  for (i = 0; i < T && T == MOST; i++) logits.v[i * E + 1] = 9;
  matrix_put(t, &logits);
  t->b->route(&t->d, &g, logits.m, &p);
  t->b->matmul_moe(&t->d, mid.m, x.m, &up.w, &g, true);
  mid32.cols = 32;
  t->b->matmul_moe(&t->d, out.m, mid32, &down.w, &g, false);
  t->b->combine(&t->d, y.m, out.m, normalise ? r.m : none(), &g);
  t->b->get(&t->d, expert, g.expert, sizeof expert);
  t->b->get(&t->d, order, g.order, sizeof order);
  t->b->get(&t->d, begin, g.begin, sizeof begin);
  matrix_get(t, &weights);
  matrix_get(t, &probs);
  matrix_get(t, &mid);
  matrix_get(t, &out);
  matrix_get(t, &y);
  for (i = 0; i < T; i++) {
    const float *l = logits.v + i * E;
    double sum = 0, chosen = 0;
    for (e = 0; e < E; e++) sum += exp((double)l[e]);
    for (e = 0; e < E; e++) expect(&probs, i, e, exp((double)l[e]) / sum, 1);
    for (j = 0; j < K; j++) chosen += exp((double)l[expert[i * K + j]]) / sum;
    for (j = 0; j < K; j++) {
      int best = expert[i * K + j], rank = 0;
      for (e = 0; e < E; e++) rank += l[e] > l[best] || (l[e] == l[best] && e < best);
      CHECK_EQ_INT(rank, j);
      expect(&weights, i, j,
             1.5 * exp((double)l[best]) / sum / (normalise || after ? chosen : 1), 1);
    }
  }
  for (e = 0; e < E; e++)
    for (s = begin[e]; s < begin[e + 1]; s++) {
      CHECK_EQ_INT(expert[order[s]], e);
      CHECK(s == begin[e] || order[s] > order[s - 1]);
    }
  CHECK_EQ_INT(begin[0], 0);
  CHECK_EQ_INT(begin[E], T * K);
  for (s = 0; s < T * K; s++) {
    for (j = 0; j < N; j++) {
      const float *a = x.v + s / K * C, *b = up.v + (expert[s] * N + j) * C;
      expect(&mid, s, j, dot(a, b, C), 4 + rounding(t, type, many, a, b, C));
    }
    for (j = 0; j < C; j++) {
      const float *a = mid.v + s * N, *b = down.v + (expert[s] * C + j) * 32;
      expect(&out, s, j, dot(a, b, 32), 8 + rounding(t, type, many, a, b, 32));
    }
  }
  for (i = 0; i < T; i++)
    for (j = 0; j < C; j++) {
      double v = normalise ? (double)r.v[i * C + j] : 0;
      for (s = 0; s < K; s++)
        v += (double)weights.v[i * K + s] * (double)out.v[(i * K + s) * C + j];
      expect(&y, i, j, v, 8);
    }
  t->b->release(&t->d, g.expert, sizeof expert);
  t->b->release(&t->d, g.order, sizeof order);
  t->b->release(&t->d, g.begin, sizeof begin);
  weight_free(t, &up);
  weight_free(t, &down);
  matrix_free(t, &logits);
  matrix_free(t, &x);
  matrix_free(t, &mid);
  matrix_free(t, &out);
  matrix_free(t, &y);
  matrix_free(t, &r);
  matrix_free(t, &probs);
  matrix_free(t, &weights);
}

static void moe_bias_case(device *t, tfm_act act, bool biased) {
  enum { T = 13, E = 5, K = 2, N = 37 };
  matrix x = matrix_new(t, T * K, N, 3), y = matrix_new(t, T * K, N, 1);
  matrix bias = matrix_typed(t, E, N, 0, TFM_F32);
  int32_t expert[T * K], s, j;
  tfm_routing g;
  memset(&g, 0, sizeof g);
  for (s = 0; s < T * K; s++) expert[s] = below(E);
  g.tokens = T, g.top_k = K, g.experts = E;
  g.expert = (int32_t *)array(t, expert, sizeof expert);
  t->b->moe_bias(&t->d, y.m, x.m, biased ? (const float *)bias.m.data : NULL, &g, act);
  t->b->moe_bias(&t->d, x.m, x.m, biased ? (const float *)bias.m.data : NULL, &g, act);
  for (s = 0; s < T * K; s++)
    for (j = 0; j < N; j++) {
      double v = (double)x.v[s * N + j] + (biased ? (double)bias.v[expert[s] * N + j] : 0);
      x.v[s * N + j] = (float)activate(v, act);
    }
  matrix_get(t, &y);
  for (s = 0; s < T * K; s++)
    for (j = 0; j < N; j++) expect(&y, s, j, (double)x.v[s * N + j], 1);
  memcpy(y.v, x.v, sizeof *y.v * T * K * N);
  matrix_get(t, &x); /* in place */
  for (s = 0; s < T * K; s++)
    for (j = 0; j < N; j++) expect(&x, s, j, (double)y.v[s * N + j], 1);
  t->b->release(&t->d, g.expert, sizeof expert);
  matrix_free(t, &x), matrix_free(t, &y), matrix_free(t, &bias);
}

static void add_gated_case(device *t, int rows, int cols) {
  matrix x = matrix_new(t, rows, cols, 3), y = matrix_new(t, rows, cols, 1);
  matrix gate = matrix_typed(t, rows, 1, 2, TFM_F32);
  float *before = (float *)malloc((size_t)(rows * cols) * sizeof *before);
  int i, j;
  for (i = 0; i < rows; i++) gate.v[i] *= 8;
  matrix_put(t, &gate);
  memcpy(before, y.v, (size_t)(rows * cols) * sizeof *before);
  t->b->add_gated(&t->d, y.m, x.m, gate.m);
  matrix_get(t, &y);
  for (i = 0; i < rows; i++)
    for (j = 0; j < cols; j++)
      expect(&y, i, j, (double)before[i * cols + j] +
                           (double)x.v[i * cols + j] / (1 + exp(-(double)gate.v[i])), 2);
  free(before);
  matrix_free(t, &x), matrix_free(t, &y), matrix_free(t, &gate);
}

static void test_moe_parts(device *t) {
  int act;
  if (!t->b->moe_bias || !t->b->add_gated) return;
  for (act = TFM_ACT_NONE; act <= TFM_ACT_RELU; act++) {
    moe_bias_case(t, (tfm_act)act, true);
    moe_bias_case(t, (tfm_act)act, false);
  }
  add_gated_case(t, 1, 1);
  add_gated_case(t, 23, 133);
}
TEST(experts_biases_and_the_gate) { on_tables(test_moe_parts); }

/* Few tokens; and so many that tiles multiply, by parts, in just the memory asked for. */
static void test_moe(device *t) {
  void *work = t->d.work;
  tfm_net net;
  size_t bytes;
  int i;
  memset(&net, 0, sizeof net);
  net.width = net.ffn_width = net.expert_width = 64;
  net.experts = 7;
  net.experts_used = 3;
  for (i = 0; i < 5; i++) moe_case(t, 21, i % 2, i % 3 == 0, types[i]);
  bytes = t->b->work_bytes(&t->d, &net, 300, 4, 300);
  if (bytes) t->d.work = t->b->alloc(&t->d, bytes);
  t->d.deterministic = false;
  for (i = 1; i < 5; i++) moe_case(t, 300, i % 2, i % 3 == 0, types[i]);
  t->b->sync(&t->d);
  if (bytes) t->b->release(&t->d, t->d.work, bytes);
  t->d.work = work;
  t->d.deterministic = true;
}
TEST(experts) { on_tables(test_moe); }

/* What passes of many rows are given is enough for those of fewer. */
static void test_work_bytes(device *t) {
  tfm_net net;
  size_t least = 0, bytes;
  int rows;
  memset(&net, 0, sizeof net);
  net.width = net.ffn_width = 8192;
  for (rows = 1; rows < 400; rows++, least = bytes) {
    bytes = t->b->work_bytes(&t->d, &net, rows, 1, 64);
    CHECK(bytes >= least);
  }
}
TEST(memory_grows_with_rows) { on_tables(test_work_bytes); }

/* ---- Choosing ---- */

enum { V = 997, PAST = 6 };

/* The definition, with a sort: which ids are left, and their probabilities. */
static void survivors(const float *logits, const tfm_sampling *s, const int32_t *history, int past,
                      double *p) {
  double l[V], top = -INFINITY, sum = 0, least = 0;
  int i, j;
  for (i = 0; i < V; i++) l[i] = (double)logits[i];
  for (i = 0; i < past && s->repetition_penalty != 0; i++) {
    double from = (double)logits[history[i]], by = (double)s->repetition_penalty;
    l[history[i]] = from < 0 ? from * by : from / by;
  }
  for (i = 0; i < V; i++) top = l[i] > top ? l[i] : top;
  for (i = 0; i < V; i++) p[i] = exp((l[i] - top) / (double)s->temperature);
  for (i = 0; i < V && s->top_k > 0; i++) { /* keep those with fewer than k above them */
    int above = 0;
    for (j = 0; j < V; j++) above += l[j] > l[i];
    if (above >= s->top_k && p[i] >= least) least = nextafter(p[i], 2);
  }
  for (i = 0; i < V; i++) p[i] = p[i] >= least ? p[i] : 0;
  for (i = 0; i < V; i++) sum += p[i];
  for (i = 0; i < V && s->top_p > 0 && s->top_p < 1; i++) { /* mass above decides */
    double above = 0;
    for (j = 0; j < V; j++) above += p[j] > p[i] ? p[j] : 0;
    if (above >= sum * (double)s->top_p && p[i] >= least) least = nextafter(p[i], 2);
  }
  for (i = 0; i < V; i++) p[i] = p[i] >= least && p[i] >= (double)s->min_p ? p[i] : 0;
}

static void test_sample(device *t) {
  static const tfm_sampling settings[] = {
    {0, 0, 0, 0, 0, 1, 1},      {1, 0, 0, 0, 0, 2, 1},      {0.7f, 5, 0, 0, 0, 3, 2},
    {1, 0, 0.6f, 0, 0, 4, 3},   {1.3f, 0, 0, 0.3f, 0, 5, 4}, {0.8f, 40, 0.9f, 0.02f, 1.3f, 6, 5},
    {0, 0, 0, 0, 1.8f, 7, 6},   {0.01f, 0, 0.99f, 0, 0, 8, 7}, {1, 1, 0, 0, 0, 9, 8},
    {1, 2000, 1, 0, 1, 10, 9},  {1, 0, 0.999f, 0, 0.5f, 11, 10}};
  enum { R = 11 };
  const int rounds = getenv("QUICK") ? 2 : 30; /* under a GPU's sanitizer one takes seconds */
  matrix logits = matrix_typed(t, R, V, 3, TFM_F32), work = matrix_typed(t, R, 2 * V, 0, TFM_F32),
         logp = matrix_typed(t, 1, R, 0, TFM_F32);
  int32_t pos[R], seq[R], history[R * 8], ids[R], round, i, j;
  tfm_sampler s;
  int32_t *out = (int32_t *)t->b->alloc(&t->d, sizeof ids);
  for (i = 0; i < R; i++) seq[i] = R - 1 - i;
  memset(&s, 0, sizeof s);
  s.params = (tfm_sampling *)array(t, settings, sizeof settings);
  s.seq = (int32_t *)array(t, seq, sizeof seq);
  s.history_stride = 8;
  s.work = (float *)work.m.data;
  for (round = 0; round < rounds; round++) {
    for (i = 0; i < R * V; i++)
      logits.v[i] = (float)(below(40) * 0.2 - round % 3 * 3 + (round % 2 ? uniform() : 0));
    matrix_put(t, &logits);
    for (i = 0; i < R * 8; i++) history[i] = below(V);
    for (i = 0; i < R; i++) pos[i] = round % (PAST + 1);
    s.pos = (int32_t *)array(t, pos, sizeof pos);
    s.history = (int32_t *)array(t, history, sizeof history);
    t->b->sample(&t->d, out, (float *)logp.m.data, logits.m, &s);
    t->b->get(&t->d, ids, out, sizeof ids);
    matrix_get(t, &logits);
    matrix_get(t, &logp);
    for (i = 0; i < R; i++) {
      const float *l = logits.v + i * V;
      tfm_sampling set = settings[i];
      double p[V], sum = 0, run = 0;
      double u = (double)tfmi_uniform(set.seed, set.sequence, (uint64_t)pos[i]);
      if (set.temperature == 0) set.temperature = 1, set.top_k = 1;
      survivors(l, &set, history + seq[i] * 8, pos[i], p);
      for (j = 0; j < V; j++) sum += p[j];
      CHECK(ids[i] >= 0 && ids[i] < V && p[ids[i]] > 0);
      for (j = 0; j < ids[i]; j++) run += p[j];
      if (settings[i].temperature == 0) CHECK(run == 0); /* the lowest of equals */
      else CHECK(run <= u * sum + 1e-4 * sum && run + p[ids[i]] >= u * sum - 1e-4 * sum);
      for (sum = 0, j = 0; j < V; j++) sum += exp((double)l[j]);
      expect(&logp, 0, i, (double)l[ids[i]] - log(sum), 10);
    }
    t->b->release(&t->d, (void *)(uintptr_t)s.pos, sizeof pos);
    t->b->release(&t->d, (void *)(uintptr_t)s.history, sizeof history);
  }
  t->b->release(&t->d, (void *)(uintptr_t)s.params, sizeof settings);
  t->b->release(&t->d, (void *)(uintptr_t)s.seq, sizeof seq);
  t->b->release(&t->d, out, sizeof ids);
  matrix_free(t, &logits);
  matrix_free(t, &work);
  matrix_free(t, &logp);
}
TEST(sample) { on_tables(test_sample); }

/* How near the random number is to a step of the cumulative sum, as a share of the whole. */
static double nearest_step(const float *logits, const tfm_sampling *s, int32_t pos) {
  double p[V], sum = 0, run = 0, nearest = 1, u;
  int j;
  survivors(logits, s, NULL, 0, p);
  for (j = 0; j < V; j++) sum += p[j];
  u = (double)tfmi_uniform(s->seed, s->sequence, (uint64_t)pos);
  for (j = 0; j < V; j++) {
    run += p[j];
    nearest = fmin(nearest, fabs(run / sum - u));
  }
  return nearest;
}

/* A token for each of `rows` rows of n logits; nothing came before them. */
static void draw(device *t, int32_t *ids, const float *values, int rows, int n,
                 const tfm_sampling *how, const int32_t *pos, const int32_t *seq) {
  const size_t ints = sizeof(int32_t) * (size_t)rows, all = sizeof(float) * (size_t)(rows * n);
  matrix logits = matrix_typed(t, rows, n, 0, TFM_F32);
  int32_t *out = (int32_t *)t->b->alloc(&t->d, ints);
  tfm_sampler s = {(tfm_sampling *)array(t, how, sizeof *how * (size_t)rows),
                   (int32_t *)array(t, pos, ints), (int32_t *)array(t, seq, ints),
                   (int32_t *)array(t, seq, ints), 1, (float *)t->b->alloc(&t->d, 2 * all)};
  memcpy(logits.v, values, all);
  matrix_put(t, &logits);
  t->b->sample(&t->d, out, NULL, logits.m, &s);
  t->b->get(&t->d, ids, out, ints);
  t->b->release(&t->d, out, ints);
  t->b->release(&t->d, (void *)(uintptr_t)s.params, sizeof *how * (size_t)rows);
  t->b->release(&t->d, (void *)(uintptr_t)s.pos, ints);
  t->b->release(&t->d, (void *)(uintptr_t)s.seq, ints);
  t->b->release(&t->d, (void *)(uintptr_t)s.history, ints);
  t->b->release(&t->d, s.work, 2 * all);
  matrix_free(t, &logits);
}

/* On the same logits every table draws the reference's token, but beside a step. */
static void test_same_draws(device *t) {
  enum { R = 64, ROUNDS = 40 };
  tfm_sampling how[R];
  int32_t pos[R], seq[R], ids[2][R], round, i, k, differ = 0;
  device other[2];
  memset(how, 0, sizeof how);
  if (t->b == tfm_backend_ref() || !device_open(&other[1], TFM_REF, 1)) return;
  other[0] = *t;
  for (i = 0; i < R; i++) {
    how[i].temperature = 0.5f + 0.02f * (float)i;
    how[i].top_k = i % 3 == 1 ? 50 : 0;
    how[i].top_p = i % 3 == 2 ? 0.95f : 0;
    how[i].sequence = (uint64_t)i;
    seq[i] = i;
  }
  for (round = 0; round < ROUNDS; round++) {
    float values[R * V];
    for (i = 0; i < R * V; i++) values[i] = (float)(4 * uniform());
    for (i = 0; i < R; i++) pos[i] = round + 1;
    for (k = 0; k < 2; k++) draw(&other[k], ids[k], values, R, V, how, pos, seq);
    for (i = 0; i < R; i++) {
      if (ids[0][i] == ids[1][i]) continue;
      differ++;
      CHECK(nearest_step(values + i * V, &how[i], pos[i]) <= 1e-6);
    }
  }
  printf("  %s draws another token than the reference %d times of %d\n", t->b->name, (int)differ,
         R * ROUNDS);
  device_close(&other[1]);
}
TEST(draws_are_the_references) { on_tables(test_same_draws); }

static int downwards(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x < y) - (x > y);
}

/* nearest_step for n logits, with a sort: an id is left when it is among the top_k, and the mass of
   those of them above it is less than top_p of theirs. */
static double nearest_step_of(const float *logits, int n, const tfm_sampling *s, int32_t pos) {
  double *p = (double *)malloc(2 * sizeof *p * (size_t)n), *sorted = p + n;
  double top = -INFINITY, least = 0, all = 0, above = 0, run = 0, nearest = 1, u;
  int i;
  for (i = 0; i < n; i++) top = fmax(top, (double)logits[i]);
  for (i = 0; i < n; i++) p[i] = exp(((double)logits[i] - top) / (double)s->temperature);
  memcpy(sorted, p, sizeof *p * (size_t)n);
  qsort(sorted, (size_t)n, sizeof *p, downwards);
  if (s->top_k > 0) least = sorted[s->top_k - 1];
  for (i = 0; i < n && sorted[i] >= least; i++) all += sorted[i];
  for (i = 0; i < n && sorted[i] >= least && s->top_p > 0; i++) {
    if (i && sorted[i] < sorted[i - 1]) above = run;
    if (above >= all * (double)s->top_p) least = sorted[i - 1];
    else run += sorted[i];
  }
  for (all = run = 0, i = 0; i < n; i++) all += p[i] >= least ? p[i] : 0;
  u = (double)tfmi_uniform(s->seed, s->sequence, (uint64_t)pos);
  for (i = 0; i < n; i++) {
    run += p[i] >= least ? p[i] : 0;
    nearest = fmin(nearest, fabs(run / all - u));
  }
  free(p);
  return nearest;
}

/* The same over a large vocabulary, and however many rows there are. */
static void test_large_draws(device *t) {
  enum { R = 6, MANY = 6 * R, N = 128256 };
  static const float spread[] = {1, 4, 12};
  float *values = (float *)malloc(sizeof(float) * MANY * N);
  tfm_sampling how[MANY];
  int32_t pos[MANY] = {3, 1, 4, 1, 5, 9}, seq[MANY] = {0}, ids[2][R], many[MANY], round, i, k,
          differ = 0;
  device other[2];
  memset(how, 0, sizeof how);
  if (t->b == tfm_backend_ref() || !device_open(&other[1], TFM_REF, 1)) return free(values);
  other[0] = *t;
  for (i = 0; i < R; i++) {
    how[i].temperature = 0.8f;
    how[i].top_k = i % 4 == 1 ? 50 : i == 5 ? 20000 : 0;
    how[i].top_p = i == 2 ? 0.95f : i == 4 ? 0.999f : i == 5 ? 0.6f : 0;
    how[i].sequence = (uint64_t)i;
  }
  for (i = R; i < MANY; i++) how[i] = how[i - R], pos[i] = pos[i - R];
  for (round = 0; round < 3; round++) {
    for (i = 0; i < R * N; i++) values[i] = spread[round] * (float)(uniform() + uniform());
    for (k = 0; k < 2; k++) draw(&other[k], ids[k], values, R, N, how, pos, seq);
    for (i = 0; i < R; i++) {
      if (ids[0][i] == ids[1][i]) continue;
      differ++;
      CHECK(nearest_step_of(values + (size_t)i * N, N, &how[i], pos[i]) <= 1e-6);
    }
  }
  for (i = R; i < MANY; i++)
    memcpy(values + (size_t)i * N, values + (size_t)(i - R) * N, sizeof(float) * N);
  for (k = MANY / 2; k <= MANY; k += MANY / 2) {
    draw(t, many, values, k, N, how, pos, seq);
    for (i = 0; i < k; i++) CHECK_EQ_INT(many[i], ids[0][i % R]);
  }
  printf("  %s draws another token of 128,256 than the reference %d times of %d\n", t->b->name,
         (int)differ, R * 3);
  device_close(&other[1]);
  free(values);
}
TEST(draws_of_many_are_the_references) { on_tables(test_large_draws); }

/* A row whose passes threads share has the token that one of them draws. */
static void test_shared_draws(device *t) {
  enum { N = 40001, ROUNDS = 12 };
  float *values = (float *)malloc(sizeof(float) * N);
  const int32_t threads = t->d.threads, seq = 0;
  int32_t round, id, first = -1;
  for (round = 0; round < ROUNDS * threads; round++) {
    const int32_t i = round / threads, pos = i;
    tfm_sampling how = {i % 4 ? 0.8f : 0, i % 3 ? 0 : 50, i % 2 ? 0.95f : 0, 0, 0, 7, (uint64_t)i};
    int32_t j;
    t->d.threads = 1 + round % threads;
    for (j = 0; j < N && t->d.threads == 1; j++) values[j] = (float)(4 * uniform());
    draw(t, &id, values, 1, N, &how, &pos, &seq);
    if (t->d.threads == 1) first = id;
    CHECK_EQ_INT(id, first);
  }
  t->d.threads = threads;
  free(values);
}
TEST(draws_do_not_depend_on_threads) { on_tables(test_shared_draws); }

/* NaN and infinity have an answer. */
static int32_t sample_one(device *t, matrix *logits, float temperature) {
  tfm_sampling set = {temperature, 3, 0.9f, 0.1f, 1.2f, 1, 1};
  int32_t zero = 0, id = -1, *out = (int32_t *)array(t, &id, sizeof id);
  matrix work = matrix_typed(t, 1, 2 * logits->m.cols, 0, TFM_F32);
  tfm_sampler s = {NULL, NULL, NULL, NULL, 1, (float *)work.m.data};
  s.params = (tfm_sampling *)array(t, &set, sizeof set);
  s.pos = s.seq = s.history = (int32_t *)array(t, &zero, sizeof zero);
  matrix_put(t, logits);
  t->b->sample(&t->d, out, NULL, logits->m, &s);
  t->b->get(&t->d, &id, out, sizeof id);
  t->b->release(&t->d, out, sizeof id);
  t->b->release(&t->d, (void *)(uintptr_t)s.params, sizeof set);
  t->b->release(&t->d, (void *)(uintptr_t)s.pos, sizeof zero);
  matrix_free(t, &work);
  return id;
}

static void test_odd_logits(device *t) {
  matrix l = matrix_typed(t, 1, 20, 0, TFM_F32);
  int i, hot;
  for (hot = 0; hot < 2; hot++) {
    for (i = 0; i < 20; i++) l.v[i] = NAN;
    CHECK_EQ_INT(sample_one(t, &l, (float)hot), 0);
    l.v[3] = l.v[5] = -INFINITY;
    CHECK_EQ_INT(sample_one(t, &l, (float)hot), 3);
    l.v[7] = 1;
    CHECK_EQ_INT(sample_one(t, &l, (float)hot), 7);
    l.v[9] = l.v[11] = INFINITY;
    CHECK_EQ_INT(sample_one(t, &l, (float)hot), 9);
    for (i = 0; i < 20; i++) l.v[i] = -INFINITY;
    CHECK_EQ_INT(sample_one(t, &l, (float)hot), 0);
  }
  matrix_free(t, &l);
}
TEST(sample_with_nan_and_infinity) { on_tables(test_odd_logits); }

static void test_top(device *t) {
  static const int ks[] = {1, 2, 7, 100, V};
  enum { R = 3 };
  matrix logits = matrix_typed(t, R, V, 1, TFM_F32);
  int c, i, j, e;
  for (i = 0; i < R * V; i++) logits.v[i] = (float)below(60) * 0.25f;
  logits.v[5] = NAN;
  logits.v[V + 9] = -INFINITY;
  matrix_put(t, &logits);
  for (c = 0; c < 5; c++) {
    int k = ks[c];
    size_t bytes = sizeof(int32_t) * (size_t)(R * k);
    int32_t *ids = (int32_t *)malloc(bytes), *out = (int32_t *)t->b->alloc(&t->d, bytes);
    matrix logp = matrix_typed(t, R, k, 0, TFM_F32);
    t->b->top(&t->d, out, (float *)logp.m.data, logits.m, k);
    t->b->get(&t->d, ids, out, bytes);
    matrix_get(t, &logp);
    for (i = 0; i < R; i++) {
      const float *l = logits.v + i * V;
      double sum = 0;
      for (e = 0; e < V; e++) sum += l[e] == l[e] ? exp((double)l[e]) : 0;
      for (j = 0; j < k; j++) {
        int id = ids[i * k + j], rank = 0;
        float mine = l[id] == l[id] ? l[id] : -INFINITY;
        for (e = 0; e < V; e++) {
          float other = l[e] == l[e] ? l[e] : -INFINITY;
          rank += other > mine || (other == mine && e < id);
        }
        CHECK_EQ_INT(rank, j);
        if (mine > -INFINITY) expect(&logp, i, j, (double)l[id] - log(sum), 20);
      }
    }
    t->b->release(&t->d, out, bytes);
    free(ids);
    matrix_free(t, &logp);
  }
  matrix_free(t, &logits);
}
TEST(top) { on_tables(test_top); }

/* ---- Opening, threads, overrides ---- */

static void count(void *context, int32_t begin, int32_t end, int32_t worker) {
  uint8_t *seen = (uint8_t *)context;
  (void)worker;
  while (begin < end) seen[begin++]++;
}

static void apart(void *user, int32_t workers, void (*job)(void *, int32_t), void *context) {
  while (workers--) job(context, workers);
  ++*(int *)user;
}

#if defined(__linux__)
#ifndef __USE_GNU
extern int sched_setaffinity(int, size_t, const unsigned long *);
extern int sched_getaffinity(int, size_t, unsigned long *);
#define MASK unsigned long *
#else
#define MASK cpu_set_t *
#endif
TEST(threads_default_to_the_cores_allowed) {
  unsigned long all[16] = {0}, one[16] = {0};
  int i = 0;
  if (sched_getaffinity(0, sizeof all, (MASK)all) < 0) return;
  while (!all[i]) i++;
  one[i] = all[i] & (~all[i] + 1);
  CHECK_EQ_INT(sched_setaffinity(0, sizeof one, (MASK)one), 0);
  CHECK_EQ_INT(tfmi_cores(), 1);
  CHECK_EQ_INT(sched_setaffinity(0, sizeof all, (MASK)all), 0);
}
#endif

TEST(parallel_for_covers_each_once) {
  static const int32_t threads[] = {1, 2, 3, 9, 70};
  static const struct timespec nap = {0, 20000000};
  int32_t i, n, grain, used = 0;
  uint8_t seen[300];
  for (i = 0; i < 6; i++) {
    tfmi_heap heap;
    tfm_dev d;
    memset(&heap, 0, sizeof heap);
    if (i == 5) heap.host.parallel = apart, heap.host.user = &used;
    CHECK_EQ_INT(tfmi_dev_open(&d, &heap, TFM_REF, 0, i == 5 ? 4 : threads[i], NULL, false),
                 TFM_OK);
    for (n = 0; n < 300; n += 13)
      for (grain = 0; grain < 40; grain += 9) {
        int32_t j;
        memset(seen, 0, sizeof seen);
        tfm_parallel_for(&d, n, grain, count, seen);
        for (j = 0; j < 300; j++) CHECK_EQ_INT(seen[j], j < n);
      }
    if (i == 1) nanosleep(&nap, NULL); /* long enough to fall asleep */
    tfm_parallel_for(&d, 300, 1, count, seen);
    tfmi_dev_close(&d, &heap);
    CHECK_EQ_INT(heap.used, 0);
  }
  CHECK(used > 0);
}

/* Pools of fewer and of more workers than cores, while other threads take all of the cores. */
static void *take_a_core(void *stop) {
  while (!tfmi_atomic_load((uint32_t *)stop)) continue;
  return NULL;
}

typedef struct shares { /* of a dispatch: which share computed what */
  int32_t by[300], busy[16];
} shares;

static void sign(void *context, int32_t begin, int32_t end, int32_t worker) {
  shares *s = (shares *)context;
  CHECK_EQ_INT(s->busy[worker]++, 0); /* by one thread at a time: it is a share's scratch */
  while (begin < end) s->by[begin++] += 1 + worker;
  s->busy[worker]--;
}

TEST(pools_work_while_cores_are_taken) {
  static const int32_t workers[] = {1, 2, 7, 15};
  static const struct timespec nap = {0, 2000000};
  uint32_t stop = 0;
  pthread_t other[2];
  int32_t i, j, n;
  for (i = 0; i < 2; i++) CHECK_EQ_INT(pthread_create(&other[i], NULL, take_a_core, &stop), 0);
  for (i = 0; i < TFMI_COUNT(workers); i++) {
    tfmi_heap heap;
    tfm_dev d;
    memset(&heap, 0, sizeof heap);
    memset(&d, 0, sizeof d);
    d.host = &heap.host;
    d.threads = i % 2 ? 16 : workers[i] + 1;
    CHECK_EQ_INT(tfmi_pool_start(&d, &heap, workers[i]), TFM_OK);
    for (n = 1; n < 300; n++) {
      int32_t cut = n < d.threads ? n : d.threads;
      shares s;
      memset(&s, 0, sizeof s);
      tfm_parallel_for(&d, n, 1, sign, &s);
      for (j = 0; j < 300; j++) /* share k has n k / cut and on */
        CHECK_EQ_INT(s.by[j], j < n ? ((j + 1) * cut - 1) / n + 1 : 0);
      if (n % 100 == 0) nanosleep(&nap, NULL); /* long enough to fall asleep */
    }
    tfmi_pool_close(&d, &heap);
    CHECK_EQ_INT(heap.used, 0);
  }
  tfmi_atomic_store(&stop, 1);
  for (i = 0; i < 2; i++) pthread_join(other[i], NULL);
}

static tfm_status try_open(tfm_device which, int32_t threads, const char *override) {
  tfmi_heap heap;
  tfm_dev d;
  tfm_status status;
  memset(&heap, 0, sizeof heap);
  status = tfmi_dev_open(&d, &heap, which, 0, threads, override, true);
  if (status == TFM_OK) tfmi_dev_close(&d, &heap);
  CHECK_EQ_INT(heap.used, 0);
  return status;
}

TEST(open_says_what_is_wrong) {
  CHECK_EQ_INT(try_open(TFM_AUTO, 0, NULL), TFM_OK);
  CHECK_EQ_INT(try_open(TFM_REF, 0, " attn,norm ,, all"), TFM_OK);
  CHECK_EQ_INT(try_open(TFM_REF, -1, NULL), TFM_E_ARG);
  CHECK_EQ_INT(try_open(TFM_REF, 1025, NULL), TFM_E_ARG);
  CHECK_EQ_INT(try_open((tfm_device)17, 1, NULL), TFM_E_ARG);
  CHECK_EQ_INT(try_open(TFM_REF, 1, "attn,sync"), TFM_E_ARG);
  CHECK_STR_HAS(tfm_error(), "\"sync\"");
  CHECK_STR_HAS(tfm_error(), "attn");
#ifndef TFM_USE_CUDA
  CHECK_EQ_INT(try_open(TFM_CUDA, 1, NULL), TFM_E_UNSUPPORTED);
  CHECK_STR_HAS(tfm_error(), "TFM_USE_CUDA");
#endif
}

TEST_MAIN
