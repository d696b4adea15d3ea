/* Every backward and optimiser entry of every table that has it, against finite differences of
   naive forward loops in double precision, or naive loops themselves where the operation is linear:
   odd sizes, poisoned outputs, views with gaps between rows. Each test runs with one thread and
   with three, and both must read back the same bits. Products that may be of BF16 are tested as
   such too. */
#define TRANSFORMER_IMPLEMENTATION
#include "../transformer.h"
#include "tables.h"

static void on_threads(void (*test)(device *)) {
  static const tfm_device all[] = {TFM_REF, TFM_CPU, TFM_CUDA};
  int i, threads;
  for (i = 0; i < 3; i++) {
    uint64_t bits[2] = {0, 0};
    for (threads = 1; threads <= 3; threads += 2) {
      device t;
      if (!device_open(&t, all[i], threads)) break;
      counter = matrix_hash = 0;
      weight_roles |= (unsigned)TFM_ROLE_GRADIENT;
      if (!tfmi_entry_missing(t.b, TFMI_ENTRY_BACKWARD)) test(&t);
      device_close(&t);
      bits[threads / 2] = matrix_hash;
    }
    CHECK(bits[0] == bits[1]);
  }
}

/* ---- Numbers that are varied ---- */

typedef double (*objective)(void *context);

static double slope(objective f, void *context, double *x) {
  double was = *x, h = 1e-5, above, below;
  *x = was + h;
  above = f(context);
  *x = was - h;
  below = f(context);
  *x = was;
  return (above - below) / (2 * h);
}

static double *doubles(const float *v, int n) {
  double *out = (double *)malloc((size_t)n * sizeof *out + 1);
  int i;
  for (i = 0; i < n; i++) out[i] = (double)v[i];
  return out;
}

static double *of(const matrix *x) { return doubles(x->v, x->m.rows * x->m.cols); }

/* Reads back `got`, which is to be the gradient of f by x, plus `before` where that is given: looks
   at all elements, or at about `some` of them. */
static void expect_slopes(device *t, matrix *got, objective f, void *context, double *x,
                          const double *before, int some, double scale) {
  int n = got->m.rows * got->m.cols, step = n > some ? n / some : 1, i;
  matrix_get(t, got);
  for (i = 0; i < n; i += step)
    expect(got, i / got->m.cols, i % got->m.cols,
           slope(f, context, x + i) + (before ? before[i] : 0), scale);
}

static matrix vector_new(device *t, int n) { return matrix_typed(t, 1, n, 0, TFM_F32); }
static float *floats(const matrix *x) { return (float *)x->m.data; }

static int32_t *ints_put(device *t, const int *v, int n) {
  return (int32_t *)array(t, v, (size_t)n * sizeof *v);
}
static void ints_free(device *t, const int32_t *p, int n) {
  t->b->release(&t->d, (void *)(uintptr_t)p, (size_t)n * sizeof *p);
}

/* ---- Products ---- */

/* What rounding operands to BF16 may do to a sum of n products of a[i stride] and b[i stride], in
   units of `tolerance`: each of the two is off by at most 2^-8 of itself, evenly at worst, so a
   product by a deviation of at most 2^-8 sqrt(2/3) of itself; a sum by 6 of these. */
static double rounding(const device *t, const float *a, int a_stride, const float *b, int b_stride,
                       int n) {
  double squares = 0;
  int i;
  if (t->d.products != TFM_BF16) return 0;
  for (i = 0; i < n; i++) {
    double term = (double)a[i * a_stride] * (double)b[i * b_stride];
    squares += term * term;
  }
  return 6 * sqrt(squares * 2 / 3) / 256 / tolerance(TFM_F32);
}

typedef struct factor { /* of a product: its values, from line to line and from term to term */
  const float *v;
  int line, term;
} factor;

/* y = before + a b over `terms` terms; before NULL: 0. */
static void expect_product(device *t, matrix *y, const double *before, factor a, factor b,
                           int terms) {
  int i, j, s;
  matrix_get(t, y);
  for (i = 0; i < y->m.rows; i++)
    for (j = 0; j < y->m.cols; j++) {
      const float *u = a.v + i * a.line, *v = b.v + j * b.line;
      double want = before ? before[i * y->m.cols + j] : 0;
      for (s = 0; s < terms; s++) want += (double)u[s * a.term] * (double)v[s * b.term];
      expect(y, i, j, want,
             0.3 * sqrt(terms) + 1 + rounding(t, u, a.term, v, b.term, terms));
    }
}

/* y = x W^T of weights that learn, which a table may hold in another form. */
static void forward(device *t, matrix *x, const weight *w) {
  matrix y = matrix_new(t, x->m.rows, w->w.rows, 2);
  const int k = x->m.cols;
  const factor rows = {x->v, k, 1}, weights = {w->v, k, 1};
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  t->b->matmul(&t->d, y.m, x->m, &w->w, &e);
  expect_product(t, &y, NULL, rows, weights, k);
  matrix_free(t, &y);
}

static void products(device *t, int m, int n, int k, tfm_type type, int parts) {
  weight w = weight_new(t, n, k, 0, type, TFM_TYPE_DEFAULT, false, parts, 0);
  matrix x = matrix_new(t, m, k, 3), dy = matrix_new(t, m, n, 5), dx = matrix_new(t, m, k, 1);
  matrix dw = matrix_typed(t, n, k, 7, TFM_F32), db = vector_new(t, n);
  double *dx0 = of(&dx), *dw0 = of(&dw), *db0 = of(&db);
  int beta, i, s;
  if (type == TFM_F32) forward(t, &x, &w);
  for (beta = 1; beta >= 0; beta--) {
    const factor rows = {dy.v, n, 1}, weights = {w.v, 1, k};
    t->b->matmul_dx(&t->d, dx.m, dy.m, &w.w, (float)beta, NULL);
    expect_product(t, &dx, beta ? dx0 : NULL, rows, weights, n);
  }
  for (beta = 1; beta >= 0; beta--) {
    const factor columns = {dy.v, 1, n}, rows = {x.v, 1, k};
    t->b->matmul_dw(&t->d, dw.m, beta ? floats(&db) : NULL, dy.m, x.m, (float)beta);
    expect_product(t, &dw, beta ? dw0 : NULL, columns, rows, m);
  }
  matrix_get(t, &db);
  for (i = 0; i < n; i++) {
    double want = db0[i];
    for (s = 0; s < m; s++) want += (double)dy.v[s * n + i];
    expect(&db, 0, i, want, 0.6 * sqrt(m) + 1);
  }
  matrix_free(t, &x), matrix_free(t, &dy), matrix_free(t, &dx), matrix_free(t, &dw);
  matrix_free(t, &db);
  weight_free(t, &w);
  free(dx0), free(dw0), free(db0);
}

static void test_products(device *t) {
  static const int sizes[] = {1, 2, 3, 7, 16, 17, 33, 70};
  int i;
  for (i = 0; i < 30; i++)
    products(t, sizes[below(8)], 3 + sizes[below(8)], sizes[below(8)], TFM_F32, 1 + below(3));
  for (i = 1; i < 5; i++) products(t, 21, 37, 96, types[i], 2);
  products(t, 70, 140, 300, TFM_F32, 3);
  products(t, 270, 35, 530, TFM_F32, 1);
  products(t, 19, 530, 270, TFM_F32, 2);
  products(t, 530, 61, 40, TFM_F32, 1);
  products(t, 512, 200, 33, TFM_F32, 1); /* more rows of dw than are turned at a time */
  products(t, 35, 66, 555, TFM_BF16, 1);
}
TEST(matmul_dx_and_dw) { on_threads(test_products); }

/* The same with operands in BF16; and sizes beyond what is packed at once. */
static void test_products_of_bf16(device *t) {
  if (!t->d.has_bf16) return;
  t->d.products = TFM_BF16;
  test_products(t);
  products(t, 100, 33, 65, TFM_F32, 1);
  products(t, 2100, 5, 18, TFM_F32, 1);
  products(t, 18, 2100, 70, TFM_F32, 1);
  products(t, 3, 5, 15000, TFM_F32, 1); /* rows that no thread packs 32 of */
}
TEST(products_of_bf16) { on_threads(test_products_of_bf16); }

/* ---- Epilogues ---- */

static double activate(double x, tfm_act act) {
  switch (act) {
    case TFM_ACT_NONE: return x;
    case TFM_ACT_GELU: return 0.5 * x * (1 + erf(x / sqrt(2)));
    case TFM_ACT_GELU_TANH:
      return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    case TFM_ACT_SILU: return x / (1 + exp(-x));
    case TFM_ACT_RELU: return x > 0 ? x : 0;
  }
  return NAN;
}

typedef struct pointwise { /* sum of dy * cap(act(x)) over one element */
  double x, up, dy, cap;
  tfm_act act;
} pointwise;

static double pointwise_sum(void *context) {
  const pointwise *p = (const pointwise *)context;
  double v = activate(p->x, p->act);
  if (p->cap != 0) v = p->cap * tanh(v / p->cap);
  return p->dy * v * p->up;
}

static void epilogue(device *t, tfm_act act, float cap, float rate, bool fused) {
  int m = 37, n = 133, i, j, pos[37], seq[37];
  int32_t *d_pos, *d_seq;
  matrix aux = matrix_new(t, m, n, 2), dy = matrix_new(t, m, n, 3), dx = matrix_new(t, m, n, 4);
  weight w = weight_new(t, n, n, 0, TFM_F32, TFM_TYPE_DEFAULT, false, 1, 0);
  tfm_epilogue e;
  memset(&e, 0, sizeof e);
  for (i = 0; i < m * n; i++) aux.v[i] *= 4;
  matrix_put(t, &aux);
  for (i = 0; i < m; i++) pos[i] = i * 3, seq[i] = i / 5;
  e.act = act;
  e.softcap = cap;
  e.aux = aux.m;
  e.dropout.rate = rate;
  e.dropout.seed = 9;
  e.dropout.pos = d_pos = ints_put(t, pos, m);
  e.dropout.seq = d_seq = ints_put(t, seq, m);
  if (fused) t->b->matmul_dx(&t->d, dx.m, dy.m, &w.w, 0, &e);
  else t->b->epilogue_bwd(&t->d, dx.m, dy.m, &e);
  matrix_get(t, &dx);
  e.dropout.pos = pos;
  e.dropout.seq = seq;
  for (i = 0; i < m; i++)
    for (j = 0; j < n; j++) {
      pointwise p = {(double)aux.v[i * n + j], 1, (double)dy.v[i * n + j], (double)cap, act};
      double want;
      int s;
      for (s = 0, p.dy = fused ? 0 : p.dy; fused && s < n; s++)
        p.dy += (double)dy.v[i * n + s] * (double)w.v[s * n + j];
      want = slope(pointwise_sum, &p, &p.x);
      expect(&dx, i, j, rate > 0 ? want * (double)tfmi_dropout(&e.dropout, i, j) : want,
             fused ? 5 : 2);
    }
  ints_free(t, d_pos, m), ints_free(t, d_seq, m);
  matrix_free(t, &aux), matrix_free(t, &dy), matrix_free(t, &dx);
  weight_free(t, &w);
}

static void test_epilogues(device *t) {
  int act;
  for (act = TFM_ACT_NONE; act <= TFM_ACT_RELU; act++) {
    epilogue(t, (tfm_act)act, 0, 0, false);
    epilogue(t, (tfm_act)act, 1.5f, 0.3f, act % 2);
    epilogue(t, (tfm_act)act, 0, 0, true);
  }
}
TEST(epilogue_bwd) { on_threads(test_epilogues); }

static void glu(device *t, tfm_act act, int m, int n) {
  matrix gate_up = matrix_new(t, m, 2 * n, 2), dy = matrix_new(t, m, n, 3);
  matrix d = matrix_new(t, m, 2 * n, 5);
  int i, j;
  for (i = 0; i < m * 2 * n; i++) gate_up.v[i] *= 3;
  matrix_put(t, &gate_up);
  t->b->glu_bwd(&t->d, d.m, dy.m, gate_up.m, act);
  matrix_get(t, &d);
  for (i = 0; i < m; i++)
    for (j = 0; j < n; j++) {
      const float *v = gate_up.v + i * 2 * n + j;
      pointwise p = {(double)v[0], (double)v[n], (double)dy.v[i * n + j], 0, act};
      expect(&d, i, j, slope(pointwise_sum, &p, &p.x), 4);
      expect(&d, i, j + n, slope(pointwise_sum, &p, &p.up), 4);
    }
  matrix_free(t, &gate_up), matrix_free(t, &dy), matrix_free(t, &d);
}

static void test_glu(device *t) {
  int act;
  for (act = TFM_ACT_NONE; act <= TFM_ACT_RELU; act++) {
    glu(t, (tfm_act)act, 67, 150);
    glu(t, (tfm_act)act, 1, 1);
  }
}
TEST(glu_bwd) { on_threads(test_glu); }

/* ---- Norms ---- */

typedef struct normed {
  int rows, cols, groups;
  tfm_norm p;
  double *x, *w, *b, *dy;
} normed;

static double normed_sum(void *context) {
  const normed *c = (const normed *)context;
  int n = c->cols / c->groups, g, i;
  double sum = 0;
  for (g = 0; g < c->rows * c->groups; g++) {
    const double *x = c->x + g * n, *dy = c->dy + g * n;
    double mean = 0, square = 0;
    for (i = 0; i < n; i++) mean += x[i] / n;
    if (c->p.kind == TFM_NORM_RMS) mean = 0;
    for (i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
    for (i = 0; i < n; i++)
      sum += dy[i] * ((x[i] - mean) / sqrt(square + (double)c->p.eps) *
                          (c->w[i] + (double)c->p.offset) + c->b[i]);
  }
  return sum;
}

/* alias: 0 none, 1 dx over dy, 2 dx over the residual. */
static void norms(device *t, tfm_norm_kind kind, int rows, int cols, int groups, int alias) {
  tfm_norm p = {kind, 1e-3f, kind == TFM_NORM_RMS ? 1.0f : 0.0f, groups};
  matrix x = matrix_new(t, rows, cols, 2), dy = matrix_new(t, rows, cols, 3);
  matrix residual = matrix_new(t, rows, cols, 4), y = matrix_new(t, rows, cols, 0);
  matrix dx = alias == 1 ? dy : alias == 2 ? residual : matrix_new(t, rows, cols, 5);
  matrix w = vector_new(t, cols / groups), b = vector_new(t, cols / groups);
  matrix dw = vector_new(t, cols / groups), db = vector_new(t, cols / groups);
  matrix stats = matrix_typed(t, rows, 2 * groups, 0, TFM_F32);
  double *before = of(&residual), *dw0 = of(&dw), *db0 = of(&db);
  normed c = {rows, cols, groups, p, of(&x), of(&w), of(&b), of(&dy)};
  t->b->norm(&t->d, y.m, x.m, floats(&w), floats(&b), none(), floats(&stats), &p);
  t->b->norm_bwd(&t->d, dx.m, floats(&dw), floats(&db), dy.m, x.m, floats(&w), residual.m,
                 floats(&stats), &p);
  expect_slopes(t, &dx, normed_sum, &c, c.x, before, 300, 10);
  expect_slopes(t, &dw, normed_sum, &c, c.w, dw0, 50, 10 + sqrt(rows * groups));
  expect_slopes(t, &db, normed_sum, &c, c.b, db0, 50, 10 + sqrt(rows * groups));
  matrix_free(t, &x), matrix_free(t, &w), matrix_free(t, &b), matrix_free(t, &dw);
  matrix_free(t, &db), matrix_free(t, &stats), matrix_free(t, &y);
  matrix_free(t, &residual), matrix_free(t, &dy);
  if (alias == 0) matrix_free(t, &dx);
  free(c.x), free(c.w), free(c.b), free(c.dy), free(before), free(dw0), free(db0);
}

static void test_norms(device *t) {
  int alias;
  for (alias = 0; alias < 3; alias++) {
    norms(t, TFM_NORM_LAYER, 5, 37, 1, alias);
    norms(t, TFM_NORM_RMS, 5, 37, 1, alias);
  }
  norms(t, TFM_NORM_RMS, 9, 36, 4, 0);
  norms(t, TFM_NORM_LAYER, 1, 3, 1, 0);
  norms(t, TFM_NORM_LAYER, 130, 133, 1, 0);
  norms(t, TFM_NORM_RMS, 700, 48, 2, 1);
}
TEST(norm_bwd) { on_threads(test_norms); }

/* ---- Attention ---- */

typedef struct attended {
  int rows, heads, kv_heads, width;
  const int *pos, *seq;
  tfm_attn p;
  double *q, *k, *v, *dy; /* q [T, H*D]; k, v side by side [T, 2*K*D] */
} attended;

static double attended_score(const attended *c, int row, int head, int key) {
  int group = c->heads / c->kv_heads, i;
  const double *q = c->q + (row * c->heads + head) * c->width;
  const double *k = c->k + (key * 2 * c->kv_heads + head / group) * c->width;
  double s = 0, cap = (double)c->p.softcap;
  for (i = 0; i < c->width; i++) s += q[i] * k[i] * (double)c->p.scale;
  return cap != 0 ? cap * tanh(s / cap) : s;
}

static bool attended_sees(const attended *c, int row, int key) {
  return key <= row && c->seq[key] == c->seq[row] &&
         (c->p.window == 0 || c->pos[key] > c->pos[row] - c->p.window);
}

static double attended_head(const attended *c, int row, int head) {
  int group = c->heads / c->kv_heads, key, i;
  const double *dy = c->dy + (row * c->heads + head) * c->width;
  double all = 0, sum = 0;
  for (key = 0; key <= row; key++)
    if (attended_sees(c, row, key)) {
      const double *v = c->v + (key * 2 * c->kv_heads + head / group) * c->width;
      double e = exp(attended_score(c, row, head, key)), dot_v = 0;
      for (i = 0; i < c->width; i++) dot_v += dy[i] * v[i];
      all += e;
      if (c->p.dropout.rate > 0)
        e *= (double)tfmi_dropout(&c->p.dropout, row, head * (1 << 20) + c->pos[key]);
      sum += e * dot_v;
    }
  return sum / all;
}

static double attended_sum(void *context) {
  const attended *c = (const attended *)context;
  double sum = 0;
  int row, head;
  for (row = 0; row < c->rows; row++)
    for (head = 0; head < c->heads; head++) sum += attended_head(c, row, head);
  return sum;
}

/* What attention and its backward give, and, where products are of BF16, the squares of the
   deviations that rounding their operands causes, to first order. y and dq lie as q, dkv as k and
   v. */
typedef struct attended_all {
  double *y, *dq, *dkv, *about_y, *about_dq, *about_dkv;
} attended_all;

typedef struct attended_key { /* that a row sees */
  const double *k, *v;
  double p, dp, about_score;
  double *dk, *dv, *about_dk, *about_dv;
} attended_key;

static double square(double x) { return x * x; }

/* The keys that a head of a row sees; how many. product: what rounding does to one of 1. */
static int attended_keys(const attended *c, int row, int head, attended_key *all,
                         const attended_all *a, double product) {
  int group = c->heads / c->kv_heads, n = 0, key, i;
  const double *q = c->q + (row * c->heads + head) * c->width;
  const double *dy = c->dy + (row * c->heads + head) * c->width;
  double sum = 0;
  for (key = 0; key <= row; key++) {
    int at = (key * 2 * c->kv_heads + head / group) * c->width, v = c->kv_heads * c->width;
    attended_key s = {c->k + at, c->v + at, 0, 0, 0, a->dkv + at, a->dkv + at + v,
                      a->about_dkv + at, a->about_dkv + at + v};
    if (!attended_sees(c, row, key)) continue;
    s.p = exp(attended_score(c, row, head, key));
    for (i = 0; i < c->width; i++) {
      s.dp += dy[i] * s.v[i];
      s.about_score += square(q[i] * s.k[i] * (double)c->p.scale) * product;
    }
    sum += s.p;
    all[n++] = s;
  }
  for (i = 0; i < n; i++) all[i].p /= sum;
  return n;
}

/* Column i of one head of one row; errors of lse and of delta = dy . y are common to its keys. */
static void attended_column(const attended *c, int at, int i, const attended_key *all, int n,
                            const attended_all *a, double product) {
  const double *q = c->q + at, *dy = c->dy + at;
  double scale = (double)c->p.scale, delta = 0, lse = 0, about_delta = 0, by_lse = 0, by_delta = 0;
  int j, l;
  for (j = 0; j < n; j++) {
    a->y[at + i] += all[j].p * all[j].v[i];
    delta += all[j].p * all[j].dp, lse += square(all[j].p) * all[j].about_score;
  }
  for (j = 0; j < n; j++) {
    const attended_key *s = &all[j];
    double ds = s->p * (s->dp - delta) * scale, dp = 0, about;
    for (l = 0; l < c->width; l++) dp += square(dy[l] * s->v[l]) * product;
    about_delta += square(s->p) * (square(s->dp - delta) * s->about_score + dp +
                                   square(s->dp) * product);
    about = square(ds) * s->about_score + square(s->p * scale) * dp;
    by_lse += fabs(ds * s->k[i]), by_delta += fabs(s->p * s->k[i] * scale);
    a->dq[at + i] += ds * s->k[i], s->dk[i] += ds * q[i], s->dv[i] += s->p * dy[i];
    a->about_y[at + i] += square(s->p) * (square(s->v[i] - a->y[at + i]) * s->about_score +
                                          square(s->v[i]) * product);
    a->about_dq[at + i] += square(s->k[i]) * (about + square(ds) * product);
    s->about_dk[i] += square(q[i]) * (about + square(ds) * (lse + product));
    s->about_dv[i] += square(dy[i] * s->p) * (s->about_score + lse + product);
  }
  a->about_dq[at + i] += square(by_lse) * lse + square(by_delta) * about_delta;
  for (j = 0; j < n; j++)
    all[j].about_dk[i] += square(q[i] * all[j].p * scale) * about_delta;
}

static void expect_attended(device *t, matrix *got, const double *want, const double *about,
                            double scale) {
  int i;
  matrix_get(t, got);
  for (i = 0; i < got->m.rows * got->m.cols; i++)
    expect(got, i / got->m.cols, i % got->m.cols, want[i],
           scale + 6 * sqrt(about[i]) / tolerance(TFM_F32));
}

/* All of y, dq and dkv, without finite differences. */
static void expect_all_attended(device *t, const attended *c, matrix *y, matrix *dq, matrix *dkv) {
  const double product = t->d.products == TFM_BF16 ? 2.0 / 3 / 65536 : 0; /* see rounding */
  size_t of_q = (size_t)(c->rows * c->heads * c->width);
  size_t of_k = (size_t)(c->rows * 2 * c->kv_heads * c->width);
  double *all = (double *)calloc(4 * of_q + 2 * of_k, sizeof *all);
  attended_all a = {all, all + of_q, all + 4 * of_q, all + 2 * of_q, all + 3 * of_q,
                    all + 4 * of_q + of_k};
  attended_key keys[200];
  int row, head, i, n;
  for (row = 0; row < c->rows; row++)
    for (head = 0; head < c->heads; head++) {
      n = attended_keys(c, row, head, keys, &a, product);
      for (i = 0; i < c->width; i++)
        attended_column(c, (row * c->heads + head) * c->width, i, keys, n, &a, product);
    }
  expect_attended(t, y, a.y, a.about_y, 5);
  expect_attended(t, dq, a.dq, a.about_dq, 5);
  expect_attended(t, dkv, a.dkv, a.about_dkv, 5 + sqrt(c->rows));
  free(all);
}

/* some 0: all values, by their formulas.
   sequences below 0: so many, each in one piece; above: the first half interleaves them. */
static void attention(device *t, int rows, int heads, int kv_heads, int width, int sequences,
                      tfm_attn p, int some) {
  int q_width = heads * width, k_width = kv_heads * width, i, pos[200], seq[200], next[8] = {0};
  matrix q = matrix_new(t, rows, q_width, 3), kv = matrix_new(t, rows, 2 * k_width, 4);
  matrix y = matrix_new(t, rows, q_width, 1), dy = matrix_new(t, rows, q_width, 2);
  matrix dq = matrix_new(t, rows, q_width, 5), dkv = matrix_new(t, rows, 2 * k_width, 6);
  matrix lse = matrix_typed(t, rows, heads, 0, TFM_F32);
  int32_t *d_id, *d_pos, *d_seq;
  tfm_rows r;
  tfm_kv c;
  attended a;
  for (i = 0; i < rows; i++) {
    seq[i] = sequences < 0 ? -sequences * i / rows
             : i < rows / 2 ? below(sequences) : sequences - 1;
    pos[i] = next[seq[i]]++;
  }
  d_id = ints_put(t, pos, rows);
  d_pos = ints_put(t, pos, rows);
  d_seq = ints_put(t, seq, rows);
  r.n = rows;
  r.id = d_id;
  r.pos = d_pos;
  r.seq = d_seq;
  memset(&c, 0, sizeof c);
  c.heads = kv_heads;
  c.width = width;
  c.key_rows = tfmi_columns(kv.m, 0, k_width);
  c.value_rows = tfmi_columns(kv.m, k_width, k_width);
  p.heads = heads;
  p.dropout.pos = d_pos;
  p.dropout.seq = d_seq;
  t->b->attn(&t->d, y.m, q.m, &c, &r, floats(&lse), &p);
  t->b->attn_bwd(&t->d, dq.m, tfmi_columns(dkv.m, 0, k_width),
                 tfmi_columns(dkv.m, k_width, k_width), dy.m, y.m, q.m, &c, &r, floats(&lse), &p);
  p.dropout.pos = pos;
  p.dropout.seq = seq;
  a.rows = rows, a.heads = heads, a.kv_heads = kv_heads, a.width = width;
  a.pos = pos, a.seq = seq, a.p = p;
  a.q = of(&q), a.k = of(&kv), a.dy = of(&dy);
  a.v = a.k + k_width;
  if (some == 0) expect_all_attended(t, &a, &y, &dq, &dkv);
  else {
    expect_slopes(t, &dq, attended_sum, &a, a.q, NULL, some, 5);
    expect_slopes(t, &dkv, attended_sum, &a, a.k, NULL, some, 5 + sqrt(rows));
  }
  ints_free(t, d_id, rows), ints_free(t, d_pos, rows), ints_free(t, d_seq, rows);
  matrix_free(t, &q), matrix_free(t, &kv), matrix_free(t, &y), matrix_free(t, &dy);
  matrix_free(t, &dq), matrix_free(t, &dkv), matrix_free(t, &lse);
  free(a.q), free(a.k), free(a.dy);
}

static void test_attention(device *t) {
  tfm_attn p;
  memset(&p, 0, sizeof p);
  p.scale = 0.4f;
  attention(t, 1, 1, 1, 3, 1, p, 1000);
  attention(t, 23, 3, 3, 5, 1, p, 1000);
  attention(t, 29, 6, 2, 7, 3, p, 1000);
  attention(t, 31, 10, 2, 19, 2, p, 100);
  attention(t, 150, 2, 1, 16, 2, p, 40);
  attention(t, 29, 6, 2, 7, -3, p, 1000);
  attention(t, 31, 4, 4, 37, -2, p, 100);
  attention(t, 150, 2, 1, 64, -1, p, 40);
  p.window = 9;
  attention(t, 29, 6, 3, 7, -2, p, 300);
  attention(t, 150, 2, 1, 16, -1, p, 40);
  attention(t, 29, 6, 3, 7, 2, p, 300);
  p.softcap = 1.5f;
  attention(t, 29, 6, 3, 7, 2, p, 300);
  attention(t, 40, 6, 3, 7, -2, p, 300);
  p.dropout.rate = 0.25f;
  p.dropout.seed = 5;
  attention(t, 29, 6, 3, 7, 2, p, 300);
}
TEST(attn_bwd) { on_threads(test_attention); }

/* Of BF16 where the table has it: blocks of queries and of keys, windows, tiles that are not
   full. */
static void test_whole_attention(device *t) {
  tfm_attn p;
  if (t->d.has_bf16) t->d.products = TFM_BF16;
  memset(&p, 0, sizeof p);
  p.scale = 0.4f;
  attention(t, 1, 1, 1, 3, -1, p, 0);
  attention(t, 29, 6, 2, 7, -3, p, 0);
  attention(t, 70, 4, 4, 37, -2, p, 0);
  attention(t, 200, 2, 1, 40, -1, p, 0);
  p.window = 9;
  attention(t, 150, 2, 1, 16, -1, p, 0);
  p.window = 100;
  attention(t, 180, 1, 1, 20, -1, p, 0);
  p.softcap = 1.5f;
  attention(t, 29, 6, 3, 7, -2, p, 50);
}
TEST(attention_by_its_formulas) { on_threads(test_whole_attention); }

/* ---- Embedding ---- */

static void embedding(device *t, int rows, int width, int vocabulary, bool tables) {
  int id[300], pos[300], seq[300], i, j;
  matrix dy = matrix_new(t, rows, width, 2), table = matrix_typed(t, vocabulary, width, 3, TFM_F32);
  matrix positions = matrix_typed(t, rows, width, 1, TFM_F32);
  double *want = of(&table), *places = of(&positions);
  tfm_rows r;
  for (i = 0; i < rows; i++) {
    id[i] = below(vocabulary), pos[i] = i / 3, seq[i] = 0;
    for (j = 0; j < width; j++) {
      want[id[i] * width + j] += 1.5 * (double)dy.v[i * width + j];
      places[pos[i] * width + j] += (double)dy.v[i * width + j];
    }
  }
  r.n = rows;
  r.id = ints_put(t, id, rows);
  r.pos = ints_put(t, pos, rows);
  r.seq = ints_put(t, seq, rows);
  t->b->embed_bwd(&t->d, table.m, tables ? positions.m : none(), dy.m, &r, 1.5f);
  matrix_get(t, &table);
  matrix_get(t, &positions);
  for (i = 0; i < vocabulary; i++)
    for (j = 0; j < width; j++) expect(&table, i, j, want[i * width + j], 10);
  for (i = 0; tables && i < rows; i++)
    for (j = 0; j < width; j++) expect(&positions, i, j, places[i * width + j], 10);
  ints_free(t, r.id, rows), ints_free(t, r.pos, rows), ints_free(t, r.seq, rows);
  matrix_free(t, &dy), matrix_free(t, &table), matrix_free(t, &positions);
  free(want), free(places);
}

static void test_embedding(device *t) {
  embedding(t, 7, 5, 3, true);
  embedding(t, 290, 133, 40, true);
  embedding(t, 40, 33, 40, false);
}
TEST(embed_bwd) { on_threads(test_embedding); }

/* ---- Loss ---- */

typedef struct entropy {
  int n, target;
  double *x, weight;
} entropy;

static double entropy_loss(void *context) {
  const entropy *c = (const entropy *)context;
  double sum = 0;
  int i;
  if (c->target < 0) return 0;
  for (i = 0; i < c->n; i++) sum += exp(c->x[i]);
  return c->weight * (log(sum) - c->x[c->target]);
}

static void losses(device *t, int rows, int n, bool weighted) {
  matrix x = matrix_new(t, rows, n, 3), loss = vector_new(t, rows), hits = vector_new(t, rows);
  matrix weight = vector_new(t, rows);
  int target[100], i, j;
  int32_t *d_target;
  double *logits;
  for (i = 0; i < rows * n; i++) x.v[i] *= 5;
  for (i = 0; i < rows; i++) {
    target[i] = i % 4 == 3 ? -100 : below(n);
    if (i % 4 == 1) x.v[i * n + target[i]] = 6; /* a hit, though another may be as large */
    if (i % 8 == 5) x.v[i * n] = 6;
  }
  matrix_put(t, &x);
  logits = of(&x);
  d_target = ints_put(t, target, rows);
  t->b->loss(&t->d, floats(&loss), floats(&hits), x.m, d_target, weighted ? floats(&weight) : NULL,
             0.5f);
  matrix_get(t, &x), matrix_get(t, &loss), matrix_get(t, &hits);
  for (i = 0; i < rows; i++) {
    entropy c = {n, target[i], logits + i * n, weighted ? (double)weight.v[i] : 1};
    int best = 0;
    for (j = 1; j < n; j++)
      if (c.x[j] > c.x[best]) best = j;
    expect(&loss, 0, i, entropy_loss(&c), 10);
    CHECK(hits.v[i] == (best == target[i] ? (float)c.weight : 0.0f));
    for (j = 0; j < n; j++) expect(&x, i, j, 0.5 * slope(entropy_loss, &c, c.x + j), 1);
  }
  ints_free(t, d_target, rows);
  matrix_free(t, &x), matrix_free(t, &loss), matrix_free(t, &hits), matrix_free(t, &weight);
  free(logits);
}

static void test_losses(device *t) {
  losses(t, 1, 2, false);
  losses(t, 9, 77, false);
  losses(t, 50, 301, true);
}
TEST(loss_and_hits) { on_threads(test_losses); }

/* ---- Experts ---- */

typedef struct routed { /* one token: sum of dweight * weight, and the whole call's balance */
  int tokens, token;
  const tfm_routing *r;
  tfm_moe p;
  double *logits, *dweight, balance;
} routed;

static double routed_probability(const double *logits, int n, int i) {
  double sum = 0;
  int e;
  for (e = 0; e < n; e++) sum += exp(logits[e]);
  return exp(logits[i]) / sum;
}

static double routed_balance(const routed *c) {
  int E = c->p.experts, e, i;
  double sum = 0;
  for (e = 0; e < E; e++) {
    double mean = 0;
    for (i = 0; i < c->tokens; i++) mean += routed_probability(c->logits + i * E, E, e) / c->tokens;
    sum += mean * (c->r->begin[e + 1] - c->r->begin[e]) / c->tokens * E;
  }
  return sum;
}

static double routed_sum(void *context) {
  const routed *c = (const routed *)context;
  const double *logits = c->logits + c->token * c->p.experts;
  const int32_t *expert = c->r->expert + c->token * c->p.top_k;
  double sum = 0, all = 0, factor = c->p.scale != 0 ? (double)c->p.scale : 1;
  int j;
  for (j = 0; j < c->p.top_k; j++) all += exp(logits[expert[j]]);
  for (j = 0; j < c->p.top_k; j++) {
    bool own = c->p.normalise || c->p.softmax_after;
    double w = own ? exp(logits[expert[j]]) / all
                   : routed_probability(logits, c->p.experts, expert[j]);
    sum += c->dweight[c->token * c->p.top_k + j] * w * factor;
  }
  return sum + c->balance * routed_balance(c);
}

typedef struct routing { /* a routing on the device, and what it says */
  tfm_routing d, h;
  int tokens, top_k, experts;
} routing;

static routing routing_new(device *t, tfm_mat logits, const tfm_moe *p) {
  routing r;
  size_t slots = (size_t)(logits.rows * p->top_k);
  memset(&r, 0, sizeof r);
  r.d.expert = (int32_t *)t->b->alloc(&t->d, slots * 4);
  r.d.weight = (float *)t->b->alloc(&t->d, slots * 4);
  r.d.order = (int32_t *)t->b->alloc(&t->d, slots * 4);
  r.d.begin = (int32_t *)t->b->alloc(&t->d, ((size_t)p->experts + 1) * 4);
  r.d.probs = (float *)t->b->alloc(&t->d, (size_t)(logits.rows * p->experts) * 4);
  t->b->route(&t->d, &r.d, logits, p);
  r.h = r.d;
  r.h.expert = (int32_t *)malloc(slots * 4);
  r.h.weight = (float *)malloc(slots * 4);
  r.h.begin = (int32_t *)malloc(((size_t)p->experts + 1) * 4);
  t->b->get(&t->d, r.h.expert, r.d.expert, slots * 4);
  t->b->get(&t->d, r.h.weight, r.d.weight, slots * 4);
  t->b->get(&t->d, r.h.begin, r.d.begin, ((size_t)p->experts + 1) * 4);
  return r;
}

static void routing_free(device *t, routing *r) {
  size_t slots = (size_t)(r->d.tokens * r->d.top_k);
  t->b->release(&t->d, r->d.expert, slots * 4);
  t->b->release(&t->d, r->d.weight, slots * 4);
  t->b->release(&t->d, r->d.order, slots * 4);
  t->b->release(&t->d, r->d.begin, ((size_t)r->d.experts + 1) * 4);
  t->b->release(&t->d, r->d.probs, (size_t)(r->d.tokens * r->d.experts) * 4);
  free(r->h.expert), free(r->h.weight), free(r->h.begin);
}

static void routes(device *t, int tokens, tfm_moe p, float balance) {
  matrix logits = matrix_new(t, tokens, p.experts, 1), d = matrix_new(t, tokens, p.experts, 2);
  matrix dweight = matrix_typed(t, tokens, p.top_k, 0, TFM_F32), loss = vector_new(t, 1);
  routing r = routing_new(t, logits.m, &p);
  routed c = {tokens, 0, &r.h, p, of(&logits), of(&dweight), (double)balance};
  double before = (double)loss.v[0];
  int j;
  t->b->route_bwd(&t->d, d.m, floats(&dweight), &r.d, &p, balance, floats(&loss));
  matrix_get(t, &d), matrix_get(t, &loss);
  expect(&loss, 0, 0, before + routed_balance(&c), 2);
  for (; c.token < tokens; c.token++)
    for (j = 0; j < p.experts; j++)
      expect(&d, c.token, j, slope(routed_sum, &c, c.logits + c.token * p.experts + j), 2);
  matrix_free(t, &logits), matrix_free(t, &d), matrix_free(t, &dweight), matrix_free(t, &loss);
  routing_free(t, &r);
  free(c.logits), free(c.dweight);
}

static void test_routes(device *t) {
  tfm_moe plain = {7, 2, false, false, 0}, normalised = {5, 3, true, false, 2.5f};
  tfm_moe after = {6, 2, false, true, 0}, single = {4, 1, false, false, 0.5f};
  routes(t, 13, plain, 0.25f);
  routes(t, 13, normalised, 0);
  routes(t, 9, after, 0.5f);
  routes(t, 1, single, 1);
}
TEST(route_bwd) { on_threads(test_routes); }

static void experts(device *t, int tokens, int n, int k, tfm_moe p, bool spread) {
  int slots = tokens * p.top_k, rows = spread ? tokens : slots, s, i, j, e;
  weight w = weight_new(t, n, k, p.experts, TFM_F32, TFM_TYPE_DEFAULT, false, 1, 0);
  matrix logits = matrix_new(t, tokens, p.experts, 0), x = matrix_new(t, rows, k, 3);
  matrix dy = matrix_new(t, slots, n, 5), dx = matrix_new(t, rows, k, 1);
  matrix dw = matrix_typed(t, p.experts * n, k, 2, TFM_F32);
  routing r = routing_new(t, logits.m, &p);
  double *want = of(&dw), *from = (double *)calloc((size_t)(rows * k), sizeof *from);
  for (s = 0; s < slots; s++)
    for (e = r.h.expert[s], i = 0; i < n; i++)
      for (j = 0; j < k; j++) {
        int at = (spread ? s / p.top_k : s) * k + j;
        from[at] += (double)dy.v[s * n + i] * (double)w.v[(e * n + i) * k + j];
        want[(e * n + i) * k + j] += (double)dy.v[s * n + i] * (double)x.v[at];
      }
  t->b->moe_dx(&t->d, dx.m, dy.m, &w.w, &r.d, spread);
  t->b->moe_dw(&t->d, dw.m, dy.m, x.m, &r.d, spread);
  matrix_get(t, &dx), matrix_get(t, &dw);
  for (i = 0; i < rows; i++)
    for (j = 0; j < k; j++) expect(&dx, i, j, from[i * k + j], sqrt(n) + 1);
  for (i = 0; i < p.experts * n; i++)
    for (j = 0; j < k; j++) expect(&dw, i, j, want[i * k + j], sqrt(tokens) + 1);
  t->b->matmul_moe(&t->d, dy.m, x.m, &w.w, &r.d, spread);
  matrix_get(t, &dy);
  for (s = 0; s < slots; s++)
    for (e = r.h.expert[s], i = 0; i < n; i++)
      expect(&dy, s, i, dot(x.v + (spread ? s / p.top_k : s) * k, w.v + (e * n + i) * k, k),
             sqrt(k) + 1);
  matrix_free(t, &logits), matrix_free(t, &x), matrix_free(t, &dy), matrix_free(t, &dx);
  matrix_free(t, &dw);
  weight_free(t, &w);
  routing_free(t, &r);
  free(want), free(from);
}

static void test_experts(device *t) {
  tfm_moe some = {5, 2, true, false, 0}, one = {3, 1, false, false, 0};
  tfm_moe many = {9, 4, false, true, 0};
  experts(t, 11, 7, 19, some, true);
  experts(t, 11, 7, 19, some, false);
  experts(t, 3, 33, 17, one, true);
  experts(t, 60, 40, 150, many, true);
  experts(t, 60, 40, 150, many, false);
}
TEST(moe_dx_and_dw) { on_threads(test_experts); }

static void test_combine(device *t) {
  tfm_moe p = {6, 3, true, false, 0};
  int tokens = 41, n = 203, s, j;
  matrix logits = matrix_new(t, tokens, p.experts, 0), x = matrix_new(t, tokens * 3, n, 3);
  matrix dy = matrix_new(t, tokens, n, 2), dx = matrix_new(t, tokens * 3, n, 1);
  matrix dweight = vector_new(t, tokens * 3);
  routing r = routing_new(t, logits.m, &p);
  t->b->combine_bwd(&t->d, dx.m, floats(&dweight), dy.m, x.m, &r.d);
  matrix_get(t, &dx), matrix_get(t, &dweight);
  for (s = 0; s < tokens * 3; s++) {
    expect(&dweight, 0, s, dot(dy.v + s / 3 * n, x.v + s * n, n), 10);
    for (j = 0; j < n; j++)
      expect(&dx, s, j, (double)r.h.weight[s] * (double)dy.v[s / 3 * n + j], 1);
  }
  matrix_free(t, &logits), matrix_free(t, &x), matrix_free(t, &dy), matrix_free(t, &dx);
  matrix_free(t, &dweight);
  routing_free(t, &r);
}
TEST(combine_bwd) { on_threads(test_combine); }

static void biases(device *t, int tokens, int n, tfm_moe p) {
  int slots = tokens * p.top_k, s, j;
  matrix logits = matrix_new(t, tokens, p.experts, 0), dy = matrix_new(t, slots, n, 3);
  matrix db = matrix_typed(t, p.experts, n, 0, TFM_F32);
  routing r = routing_new(t, logits.m, &p);
  double *want = of(&db);
  for (s = 0; s < slots; s++)
    for (j = 0; j < n; j++) want[r.h.expert[s] * n + j] += (double)dy.v[s * n + j];
  t->b->moe_bias_bwd(&t->d, floats(&db), dy.m, &r.d);
  matrix_get(t, &db);
  for (s = 0; s < p.experts; s++)
    for (j = 0; j < n; j++) expect(&db, s, j, want[s * n + j], sqrt(tokens) + 1);
  matrix_free(t, &logits), matrix_free(t, &dy), matrix_free(t, &db);
  routing_free(t, &r);
  free(want);
}

typedef struct gated { /* one row: sum of dy * x / (1 + e^-gate) */
  int n;
  double *x, *dy, gate;
} gated;

static double gated_sum(void *context) {
  const gated *c = (const gated *)context;
  double sum = 0;
  int i;
  for (i = 0; i < c->n; i++) sum += c->dy[i] * c->x[i] / (1 + exp(-c->gate));
  return sum;
}

static void gate(device *t, int rows, int cols) {
  matrix x = matrix_new(t, rows, cols, 3), dy = matrix_new(t, rows, cols, 2);
  matrix dx = matrix_new(t, rows, cols, 1), g = matrix_typed(t, rows, 1, 2, TFM_F32);
  matrix dg = matrix_typed(t, rows, 1, 1, TFM_F32);
  double *xs, *dys;
  int i, j;
  for (i = 0; i < rows; i++) g.v[i] *= 4;
  matrix_put(t, &g);
  xs = of(&x), dys = of(&dy);
  t->b->add_gated_bwd(&t->d, dx.m, dg.m, dy.m, x.m, g.m);
  matrix_get(t, &dx), matrix_get(t, &dg);
  for (i = 0; i < rows; i++) {
    gated c = {cols, xs + i * cols, dys + i * cols, (double)g.v[i]};
    expect(&dg, i, 0, slope(gated_sum, &c, &c.gate), 3);
    for (j = 0; j < cols; j++) expect(&dx, i, j, slope(gated_sum, &c, c.x + j), 2);
  }
  matrix_free(t, &x), matrix_free(t, &dy), matrix_free(t, &dx), matrix_free(t, &g);
  matrix_free(t, &dg);
  free(xs), free(dys);
}

static void test_expert_parts(device *t) {
  tfm_moe some = {5, 2, true, false, 0}, one = {3, 1, false, false, 0};
  biases(t, 11, 7, some);
  biases(t, 1, 37, one);
  gate(t, 1, 1);
  gate(t, 19, 75);
}
TEST(moe_bias_bwd_and_add_gated_bwd) { on_threads(test_expert_parts); }

/* Two layers' routings counted together: the balance's share of the gradient, by differences. */
typedef struct balanced {
  int tokens, layers;
  const tfm_routing *r[2];
  tfm_moe p;
  double *logits[2];
} balanced;

static double balanced_loss(void *context) {
  const balanced *c = (const balanced *)context;
  int E = c->p.experts, e, i, k;
  double sum = 0, rows = c->tokens * c->layers;
  for (e = 0; e < E; e++) {
    double mean = 0, share = 0;
    for (k = 0; k < c->layers; k++) {
      for (i = 0; i < c->tokens; i++) mean += routed_probability(c->logits[k] + i * E, E, e) / rows;
      share += (c->r[k]->begin[e + 1] - c->r[k]->begin[e]) / rows;
    }
    sum += mean * share * E;
  }
  return sum;
}

static void test_balance_of_layers(device *t) {
  tfm_moe p = {6, 2, false, false, 0};
  int tokens = 13, k, i;
  matrix logits[2], d = matrix_new(t, tokens, p.experts, 2);
  matrix dweight = matrix_typed(t, tokens, p.top_k, 0, TFM_F32), loss = vector_new(t, 1);
  matrix counts = matrix_typed(t, 2, p.experts, 0, TFM_F32);
  routing r[2];
  balanced c = {tokens, 2, {NULL, NULL}, p, {NULL, NULL}};
  double before = (double)loss.v[0];
  memset(dweight.v, 0, sizeof *dweight.v * (size_t)(tokens * p.top_k));
  memset(counts.v, 0, sizeof *counts.v * (size_t)(2 * p.experts));
  matrix_put(t, &dweight), matrix_put(t, &counts);
  for (k = 0; k < 2; k++) {
    logits[k] = matrix_new(t, tokens, p.experts, 1);
    r[k] = routing_new(t, logits[k].m, &p);
    r[k].d.count = floats(&counts);
    r[k].d.mass = floats(&counts) + p.experts;
    t->b->route(&t->d, &r[k].d, logits[k].m, &p);
    c.r[k] = &r[k].h;
    c.logits[k] = of(&logits[k]);
  }
  for (k = 0; k < 2; k++) {
    t->b->route_bwd(&t->d, d.m, floats(&dweight), &r[k].d, &p, 0.7f, k ? floats(&loss) : NULL);
    matrix_get(t, &d);
    for (i = 0; i < tokens * p.experts; i++)
      expect(&d, i / p.experts, i % p.experts, 0.7 * slope(balanced_loss, &c, c.logits[k] + i), 1);
  }
  matrix_get(t, &loss);
  expect(&loss, 0, 0, before + balanced_loss(&c), 2);
  for (k = 0; k < 2; k++) {
    routing_free(t, &r[k]);
    matrix_free(t, &logits[k]);
    free(c.logits[k]);
  }
  matrix_free(t, &d), matrix_free(t, &dweight), matrix_free(t, &loss), matrix_free(t, &counts);
}
TEST(balance_of_several_layers) { on_threads(test_balance_of_layers); }

/* ---- The optimiser ---- */

static void test_sumsq(device *t) {
  static const int sizes[] = {1, 15, 1000, 70001};
  int i, j, type;
  for (type = 0; type < 3; type++)
    for (i = 0; i < 4; i++) {
      matrix x = matrix_typed(t, 1, sizes[i], 0, types[type]), out = vector_new(t, 1);
      double want = (double)out.v[0];
      for (j = 0; j < sizes[i]; j++) want += (double)x.v[j] * (double)x.v[j];
      t->b->sumsq(&t->d, floats(&out), x.m.data, types[type], sizes[i]);
      matrix_get(t, &out);
      expect(&out, 0, 0, want, 1 + sizes[i] / 10);
      x.v[sizes[i] / 2] = INFINITY;
      matrix_put(t, &x);
      t->b->sumsq(&t->d, floats(&out), x.m.data, types[type], sizes[i]);
      matrix_get(t, &out);
      CHECK(!isfinite(out.v[0]));
      matrix_free(t, &x), matrix_free(t, &out);
    }
}
TEST(sumsq) { on_threads(test_sumsq); }

/* Three steps beside double precision; a fourth with a gradient that is not a number. */
static void adamw(device *t, int n, tfm_type type, tfm_type gtype, float clip) {
  tfm_adamw p = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, clip, 1};
  matrix w = matrix_typed(t, 1, n, 0, type), master = vector_new(t, n), m = vector_new(t, n);
  matrix v = vector_new(t, n), norm = vector_new(t, 1);
  bool own = type != TFM_F32;
  matrix *result = own ? &w : &master;
  double *ws = of(&master), *ms = of(&m), *vs;
  int i;
  for (i = 0; i < n; i++) v.v[i] = fabsf(v.v[i]);
  matrix_put(t, &v);
  vs = of(&v);
  for (p.step = 1; p.step <= 4; p.step++) {
    matrix g = matrix_typed(t, 1, n, 0, gtype);
    double length = 0, factor;
    for (i = 0; i < n; i++) length += (double)g.v[i] * (double)g.v[i];
    factor = clip > 0 && sqrt(length) > (double)clip ? (double)clip / sqrt(length) : 1;
    norm.v[0] = p.step < 4 ? (float)length : NAN;
    matrix_put(t, &norm);
    t->b->adamw(&t->d, own ? w.m.data : master.m.data, type, floats(&master), floats(&m),
                floats(&v), g.m.data, gtype, n, floats(&norm), &p);
    for (i = 0; p.step < 4 && i < n; i++) {
      double slope_i = (double)g.v[i] * factor, b1 = 0.9, b2 = 0.95;
      ms[i] = b1 * ms[i] + (1 - b1) * slope_i;
      vs[i] = b2 * vs[i] + (1 - b2) * slope_i * slope_i;
      ws[i] -= 1e-2 * (ms[i] / (1 - pow(b1, p.step)) /
                           (sqrt(vs[i] / (1 - pow(b2, p.step))) + 1e-8) + 0.1 * ws[i]);
    }
    matrix_free(t, &g);
  }
  matrix_get(t, result), matrix_get(t, &m), matrix_get(t, &v);
  for (i = 0; i < n; i++) {
    expect(result, 0, i, ws[i], 2);
    expect(&m, 0, i, ms[i], 1);
    expect(&v, 0, i, vs[i], 1);
  }
  matrix_free(t, &w), matrix_free(t, &master), matrix_free(t, &m), matrix_free(t, &v);
  matrix_free(t, &norm);
  free(ws), free(ms), free(vs);
}

static void test_adamw(device *t) {
  adamw(t, 1, TFM_F32, TFM_F32, 0);
  adamw(t, 77, TFM_BF16, TFM_BF16, 1);
  adamw(t, 40003, TFM_F32, TFM_F32, 0.5f);
  adamw(t, 1001, TFM_F16, TFM_F32, 1000);
}
TEST(adamw_steps) { on_threads(test_adamw); }

TEST_MAIN
