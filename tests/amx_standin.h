/* AMX's tiles in C, for processors without them: what Intel's manual (volume 2, chapter 3 of the
   instruction set extensions) says of LDTILECFG, TILELOADD and TILELOADDT1, TILESTORED, TILEZERO,
   TDPBF16PS and TDPBSUD, bit for bit. transformer_cpu.c includes it where TFM_CPU_AMX_STANDIN names
   it; the names are those of the compilers' intrinsics, which it replaces. */
#ifndef AMX_STANDIN_H
#define AMX_STANDIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct standin_tile {
  int rows, bytes; /* of a row */
  uint8_t row[16][64];
} standin_tile;

static __thread standin_tile standin_tiles[8];
static __thread int standin_palette; /* 0: not configured, when an instruction would fault */

static void standin_expect(int holds) {
  if (!holds) __builtin_trap();
}

static void standin_loadconfig(const void *config) {
  const uint8_t *c = (const uint8_t *)config;
  int i;
  standin_palette = c[0];
  standin_expect(c[0] == 1 && c[1] == 0);
  memset(standin_tiles, 0, sizeof standin_tiles);
  for (i = 0; i < 8; i++) {
    standin_tiles[i].bytes = c[16 + 2 * i] | c[17 + 2 * i] << 8;
    standin_tiles[i].rows = c[48 + i];
    standin_expect(standin_tiles[i].bytes <= 64 && standin_tiles[i].rows <= 16);
  }
}

static void standin_release(void) {
  standin_palette = 0;
  memset(standin_tiles, 0, sizeof standin_tiles);
}

static void standin_zero(int tile) {
  standin_expect(standin_palette);
  memset(standin_tiles[tile].row, 0, sizeof standin_tiles[tile].row);
}

static void standin_load(int tile, const void *from, size_t stride) {
  standin_tile *t = &standin_tiles[tile];
  int i;
  standin_zero(tile);
  for (i = 0; i < t->rows; i++)
    memcpy(t->row[i], (const uint8_t *)from + (size_t)i * stride, (size_t)t->bytes);
}

static void standin_store(int tile, void *to, size_t stride) {
  const standin_tile *t = &standin_tiles[tile];
  int i;
  standin_expect(standin_palette);
  for (i = 0; i < t->rows; i++)
    memcpy((uint8_t *)to + (size_t)i * stride, t->row[i], (size_t)t->bytes);
}

/* Denormals are zeros, as operands and as results. */
static float standin_flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0, x) : x; }

static float standin_bf16(const uint8_t *row, int at) {
  uint32_t bits = (uint32_t)row[2 * at] << 16 | (uint32_t)row[2 * at + 1] << 24;
  float x;
  memcpy(&x, &bits, sizeof x);
  return standin_flush(x);
}

/* Of a product y += x w; a processor faults on others. */
static void standin_expect_shapes(const standin_tile *y, const standin_tile *x,
                                  const standin_tile *w) {
  standin_expect(standin_palette && x->rows == y->rows && w->bytes == y->bytes);
  standin_expect(x->bytes / 4 == w->rows);
}

/* c [m][n] += a [m][k] b [k][n]; the two terms of a pair in sums of their own, from 0. */
static void standin_dpbf16ps(int c, int a, int b) {
  standin_tile *y = &standin_tiles[c];
  const standin_tile *x = &standin_tiles[a], *w = &standin_tiles[b];
  int m, k, n, i;
  standin_expect_shapes(y, x, w);
  for (m = 0; m < y->rows; m++)
    for (n = 0; n < y->bytes / 4; n++) {
      float sum[2] = {0, 0}, both, was;
      for (k = 0; k < x->bytes / 4; k++)
        for (i = 0; i < 2; i++)
          sum[i] = standin_flush(fmaf(standin_bf16(x->row[m], 2 * k + i),
                                      standin_bf16(w->row[k], 2 * n + i), sum[i]));
      both = standin_flush(sum[0] + sum[1]);
      memcpy(&was, y->row[m] + 4 * n, sizeof was);
      both = standin_flush(standin_flush(was) + both);
      memcpy(y->row[m] + 4 * n, &both, sizeof both);
    }
}

/* c [m][n] += a [m][k] b [k][n], of fours of bytes: signed ones times unsigned ones. */
static void standin_dpbsud(int c, int a, int b) {
  standin_tile *y = &standin_tiles[c];
  const standin_tile *x = &standin_tiles[a], *w = &standin_tiles[b];
  int m, k, n, i;
  standin_expect_shapes(y, x, w);
  for (m = 0; m < y->rows; m++)
    for (n = 0; n < y->bytes / 4; n++) {
      int32_t sum;
      memcpy(&sum, y->row[m] + 4 * n, sizeof sum);
      for (k = 0; k < x->bytes / 4; k++)
        for (i = 0; i < 4; i++)
          sum += (int8_t)x->row[m][4 * k + i] * (int32_t)w->row[k][4 * n + i];
      memcpy(y->row[m] + 4 * n, &sum, sizeof sum);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig standin_loadconfig
#define _tile_release standin_release
#define _tile_zero standin_zero
#define _tile_loadd standin_load
#define _tile_stream_loadd standin_load
#define _tile_stored standin_store
#define _tile_dpbf16ps standin_dpbf16ps
#define _tile_dpbsud standin_dpbsud

#endif
