/* transformer_cpu.c - tuned CPU kernels for transformer.h                    MIT licence: LICENSE

   Optional: cc -O3 -DTFM_USE_CPU app.c transformer_cpu.c -lm -lpthread

   How it works. transformer.h computes through a table of kernels (see >>backend there). This file
   hands out such a table, tfm_backend_cpu. Its memory is the application's own, as the reference's
   is, so what is not written here forwards to the reference: only entries that take weights must
   all be here, as the weights are laid out differently.

   No compiler flags are needed. The kernels at the end of this file are compiled once per
   instruction set, by including the file into itself: on x86-64 for AVX2 with FMA and F16C, and for
   AVX-512 with VNNI; on AArch64 for NEON, which all have, with its products of bytes (DotProd), and
   of matrices of bytes (I8MM). An instruction set is a vocabulary of vectors, sums of products of
   bytes, and a list of tiles; all else is common. tfm_backend_cpu asks the processor, or the
   system, which to hand out. On a processor that has none the table lacks its matmul, and TFM_AUTO
   passes it over, with a line in the log. Define TFM_CPU_AVX2_ONLY as 1 to hide AVX-512, as a test
   does.

   Weights. A matrix lies in panels of 32 rows, dealt out like cards: unit 0 of each of the 32 rows,
   then unit 1, and so on; a unit is a value of a float type, or four bytes of a quantised block. So
   a vector holds neighbouring rows of W at one column. The product keeps one sum per lane, which
   runs along the columns in order, and needs no sum across lanes. Its bits therefore depend on
   nothing but the two rows multiplied: not on how many rows of x share a tile, nor on threads.

   Quantised weights are multiplied by activations quantised to 8 bits, in groups of 128 columns
   with a scale each, as exact integers within a block of W. Some rows of x take the numbers of W
   as they are packed. More share what is unpacked, a chunk of a panel at a time, to numbers of
   a byte and scales in floats: three forms for all types, and the same bits, as integers are exact.
   Nothing mutable is static: quantised activations, chunks, and the tiles of keys and values that
   attention works on, lie in tfm_dev.work.

   Where the processor has AMX, a device asks Linux once, for the whole process, to save its tiles.
   Then training in BF16 is multiplied by them, and so are prompts: many rows of x, by weights of
   every type but F32, and then attention of 16 rows of a sequence and more. Factors are rounded to
   BF16 for it, so the bits of a row depend on whether it is one of many: for attention, of its own
   sequence. While tfm_dev.deterministic is set, vectors multiply all. */

#ifndef CPU_LEVEL /* the file itself; further down, it is read again once per instruction set */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include "transformer.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if !defined(_WIN32)
#include <sys/mman.h>
#endif

/* Not with gcc for Windows: it spills vectors to a stack that it aligns to 16 bytes only. */
#if defined(__GNUC__) && defined(__x86_64__) && (!defined(_WIN32) || defined(__clang__))
#define CPU_X86 1
#elif defined(__GNUC__) && defined(__aarch64__) && !defined(__AARCH64EB__)
#define CPU_ARM 1
#elif defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function" /* no kernels, nobody who calls */
#endif

#ifndef TFM_CPU_SCRATCH
#define TFM_CPU_SCRATCH (3 << 19) /* bytes: they fit a core's second cache; a test has fewer */
#endif
#ifndef TFM_CPU_AVX2_ONLY
#define TFM_CPU_AVX2_ONLY 0
#endif

enum {
  CPU_ALIGN = 64,         /* a cache line, and what tfm_backend.alloc promises */
  CPU_ROWS = 32,          /* rows of W in a panel; columns in a block of quantised values */
  CPU_OUT = 128,          /* columns of y that a tile may have */
  CPU_TILE = 8,           /* rows of x that a tile may have */
  CPU_GROUP = 128,        /* columns of x that share a scale when they are quantised */
  CPU_CHUNK = 512,        /* columns of a panel that are multiplied by several rows of x, */
  CPU_MANY = 64,          /* these at most, while they stay in the first cache */
  CPU_AHEAD = 1024,       /* bytes: how far ahead of its use a weight is asked for, */
  CPU_ASKING = 16,        /* or, of rows of x, while so many are multiplied by the chunk before; */
  CPU_BYTES_ASKED = 8,    /* in tiles of bytes so many times with a block of half a panel */
  CPU_SCRATCH = TFM_CPU_SCRATCH, /* for quantised activations; rows are worked off in parts of it */
  CPU_TAKEN = 4,          /* panels that a thread takes at a time, at least */
  CPU_WIDTH = 256,        /* widest head of attention here */
  CPU_QUERIES = 64,       /* query heads that share a tile of keys, */
  CPU_KEYS = 64,          /* of so many positions */
  CPU_PIECE = 512,        /* positions that are summed up by themselves: threads may share a row */
  CPU_SUMS = 16,          /* floats before a piece's sum of values: largest score, sum, unused */
  CPU_PARTS = 4 << 20,    /* bytes of such sums at most */
  CPU_TILE_BYTES = 208 << 10, /* of each thread: keys, values, sums; or sums and panels */
  CPU_TILED_FLOATS = 16,  /* prompts by AMX: rows of x from which on it is faster than vectors, */
  CPU_TILED_BLOCKS = 40,  /* where W is in blocks; */
  CPU_TILED_ROWS = 256,   /* rows at a time, */
  CPU_TILED_SLOTS = CPU_SCRATCH / 1024 + 512, /* of experts' rows: made tiles at a time, */
  CPU_TILED_WHOLE = 2048, /* whole, if they have no more columns: the second cache keeps them; */
  CPU_TILED_COLS = 256,   /* else by so many columns, which of a panel the first cache keeps, */
  CPU_TILED_PANELS = 16,  /* panels whose sums wait together for more parts, */
  CPU_TILED_FEW = 4,      /* or only to be written; even: gates, and what they let through */
  CPU_TILED_TAKEN = 8,    /* panels that a thread takes at a time, at least */
  CPU_TILED_SUMS = CPU_TILED_ROWS * (CPU_TILED_PANELS * CPU_ROWS + CPU_ALIGN / 4),
  CPU_TILED_BYTES = 2 * 64 * CPU_TILED_WHOLE + 2 * 4 * CPU_TILED_SUMS, /* of each thread */
  CPU_DEPTH = 512,        /* training: terms of a sum that are added in registers, */
  CPU_PANELS = 8,         /* panels of a product that are packed together, */
  CPU_BLOCK = 264,        /* rows whose sums are kept meanwhile, */
  CPU_TURNED = 1 << 15,   /* floats of a matrix that are transposed at a time, */
  CPU_SIDE = 4 << 20,     /* in bf16: bytes of an operand that are packed together, */
  CPU_DEEP = 2048,        /* terms that are, of the backward products */
  CPU_ABREAST = 256,      /* columns that an item may have */
  CPU_PIECES = 64,        /* of rows whose parts of a norm's gradient are added up apart */
  CPU_TRAIN_BYTES = 4 * (CPU_PANELS * CPU_ROWS * (CPU_DEPTH + CPU_BLOCK) + CPU_TURNED), /* of all */
  CPU_HUGE = 4 << 20      /* bytes from which memory is worth huge pages */
};

#define CPU_INLINE static inline __attribute__((always_inline, unused))

/* ---- Device ---- */

static void *cpu_realloc(const tfm_host *host, void *old, size_t old_bytes, size_t bytes) {
  if (host->alloc) return host->alloc(host->user, old, old_bytes, bytes);
  if (bytes) return malloc(bytes);
  free(old);
  return NULL;
}

/* Whole pages of a large block may become huge: reading weights then misses fewer translations. */
static void cpu_advise(char *p, size_t bytes) {
  const uintptr_t page = 4096;
  uintptr_t first = ((uintptr_t)p + page - 1) & ~(page - 1);
  uintptr_t end = ((uintptr_t)p + bytes) & ~(page - 1);
#ifdef MADV_HUGEPAGE
  if (bytes >= CPU_HUGE) madvise((void *)first, end - first, MADV_HUGEPAGE); /* it may refuse */
#endif
  (void)first, (void)end;
}

/* One alignment's worth more than asked for; the block's start is kept just before the result. */
static void *cpu_alloc(tfm_dev *d, size_t bytes) {
  char *raw, *p;
  if (bytes > SIZE_MAX / 2) return NULL;
  raw = (char *)cpu_realloc(d->host, NULL, 0, bytes + 2 * CPU_ALIGN);
  if (!raw) return NULL;
  cpu_advise(raw, bytes);
  p = raw + 2 * CPU_ALIGN - (uintptr_t)raw % CPU_ALIGN;
  memcpy(p - sizeof raw, &raw, sizeof raw);
  return p;
}

static void cpu_release(tfm_dev *d, void *p, size_t bytes) {
  char *raw;
  if (!p) return;
  memcpy(&raw, (char *)p - sizeof raw, sizeof raw);
  cpu_realloc(d->host, raw, bytes + 2 * CPU_ALIGN, 0);
}

static bool cpu_has_amx(void);

static tfm_status cpu_open(tfm_dev *d) {
  static const char amx[] = "tiles";
  d->has_bf16 = cpu_has_amx();
  d->state = d->has_bf16 ? (void *)(uintptr_t)amx : NULL; /* all that is to be known */
  return TFM_OK;
}

static void cpu_close(tfm_dev *d) { (void)d; }

/* The rest of a device in host memory is the reference's. */
static tfm_status cpu_sync(tfm_dev *d) { return tfm_backend_ref()->sync(d); }

static void cpu_put(tfm_dev *d, void *dst, const void *host, size_t bytes) {
  tfm_backend_ref()->put(d, dst, host, bytes);
}

static void cpu_zero(tfm_dev *d, void *dst, size_t bytes) {
  tfm_backend_ref()->zero(d, dst, bytes);
}

static bool cpu_replay(tfm_dev *d, uint64_t key) { return tfm_backend_ref()->replay(d, key); }

static bool cpu_record(tfm_dev *d, uint64_t key, bool begin) {
  return tfm_backend_ref()->record(d, key, begin);
}

/* ---- Small things ---- */

static int32_t cpu_min(int32_t a, int32_t b) { return a < b ? a : b; }
static int32_t cpu_max(int32_t a, int32_t b) { return a > b ? a : b; }
/* Of n, the largest of so many even shares; or how many shares there are of so much at most. */
static int32_t cpu_shares(int32_t n, int32_t shares) { return (n + shares - 1) / shares; }

static size_t cpu_align(size_t n) { return (n + CPU_ALIGN - 1) & ~(size_t)(CPU_ALIGN - 1); }

typedef struct cpu_group { /* columns of a row of activations, quantised */
  int8_t value[CPU_GROUP];
  /* Of each 32: -128 times their sum, that of the first 16, and of the rest. */
  int32_t whole[CPU_GROUP / 32], half[2][CPU_GROUP / 32];
  float sum[CPU_GROUP / 32];
  float scale;
} cpu_group;

/* Bytes that a row of activations takes when it is quantised. */
static size_t cpu_quantised_bytes(int32_t cols) { /* never 0 */
  return cpu_align(((size_t)cols / CPU_GROUP + 1) * sizeof(cpu_group));
}

/* Rows of x are worked off in even parts, of `most` rows at most. */
static int32_t cpu_even_part(int32_t rows, int64_t most) {
  int64_t parts = most > 1 ? (rows + most - 1) / most : rows;
  return parts > 0 ? (int32_t)((rows + parts - 1) / parts) : 1;
}

/* Rows that are quantised at a time, at most. */
static int32_t cpu_quantised_most(int32_t cols) {
  const int32_t most = (int32_t)(CPU_SCRATCH / cpu_quantised_bytes(cols));
  return most > 0 ? most : 1;
}

/* Tiles of bf16 of so many rows of x, whole 16s of them. */
static size_t cpu_tiled_bytes(int32_t rows, int32_t cols) {
  return ((size_t)rows + 15) / 16 * 16 * cpu_align(2 * (size_t)cols);
}

/* tfm_dev.work: a tile for each thread, then quantised activations, or what training packs. */
static uint8_t *cpu_quantised_at(const tfm_dev *d) {
  return (uint8_t *)d->work + (size_t)d->threads * CPU_TILE_BYTES;
}

static size_t cpu_work_bytes(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                             int32_t context) {
  const int32_t cols[] = {net->width, net->heads * net->head_width, net->ffn_width,
                          net->expert_width};
  const size_t of_piece = (size_t)net->heads * (CPU_SUMS + (size_t)net->head_width) * sizeof(float);
  const size_t rooms = (size_t)d->threads * CPU_TILED_BYTES;
  size_t most = 0, bytes, i;
  int32_t slots = rows > sequences ? rows : sequences, tiled;
  if (d->threads > 1 && context > CPU_PIECE) most = of_piece * (size_t)(context / CPU_PIECE + 1);
  if (most > CPU_PARTS) most = CPU_PARTS; /* or else attention's threads do not share */
  if (slots < 16) slots = 16; /* rows that the engine turns to logits together */
  tiled = cpu_min(slots, CPU_TILED_ROWS);
  if (net->experts_used > 1) slots *= net->experts_used;
  if (net->experts) tiled = cpu_min(slots, CPU_TILED_SLOTS) + 16 * net->experts;
  for (i = 0; i < sizeof cols / sizeof *cols; i++) {
    bytes = (size_t)cpu_min(slots, cpu_quantised_most(cols[i])) * cpu_quantised_bytes(cols[i]);
    if (bytes > most) most = bytes;
    bytes = rooms + cpu_tiled_bytes(tiled, cols[i]);
    if (bytes > most && d->state) most = bytes;
  }
  if (net->embed.roles & TFM_ROLE_GRADIENT) {
    if (most < (size_t)d->threads * CPU_TRAIN_BYTES) most = (size_t)d->threads * CPU_TRAIN_BYTES;
    if (d->products == TFM_BF16) most += 2 * CPU_SIDE;
  }
  return (size_t)d->threads * CPU_TILE_BYTES + most;
}

static float *cpu_row(tfm_mat m, int64_t row) { return (float *)m.data + row * m.stride; }

/* As the reference's: philox(seed; pos, col / 4; site, seq), word col % 4 (Salmon et al. 2011). */
static float cpu_dropout(const tfm_dropout *p, int32_t row, int32_t col) {
  uint32_t c[4] = {(uint32_t)col / 4, (uint32_t)p->pos[row], (uint32_t)p->seq[row], p->site};
  uint32_t k0 = (uint32_t)p->seed, k1 = (uint32_t)(p->seed >> 32);
  int round;
  for (round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
    c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
    c[1] = (uint32_t)b;
    c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
    c[3] = (uint32_t)a;
  }
  return (float)(c[col % 4] >> 8) * (1.0f / 16777216.0f) < p->rate ? 0.0f : 1 / (1 - p->rate);
}

/* ---- Weights ---- */

/* Of a float type, the values of 32 rows at one column lie together. Of a block type, 32 columns of
   32 rows do: scales and offsets (f16), scales and offsets in bytes, the fifth and sixth bits, then
   the rest of the numbers, in dwords. Dword u of the rest holds columns 4 u to 4 u + 3, a byte
   each; or, of 4 bits, these below and columns 4 u + 16 to 4 u + 19 above. A dword of the bits has
   those of columns 4 u + k in byte k, at bit u, or in pairs of bits, of dword u / 4. The f16 of
   blocks of 256 stand before the first of eight such pieces. */
enum { /* panels in a thread's memory that block types are unpacked to: numbers of a byte */
  CPU_UNPACKED = TFM_TYPE_COUNT, CPU_UNPACKED_LOW, CPU_UNPACKED_HALVES, CPU_FORMS
};

/* The shift, see below, of numbers of 8 bits: x86 multiplies unsigned bytes by signed ones. */
#if defined(__aarch64__)
#define CPU_SHIFT 0
#else
#define CPU_SHIFT 7
#endif

static const struct cpu_layout {
  uint16_t cols;   /* of a block in a file; 0: a type that is not computed with */
  uint8_t bytes;   /* of it; of a value of a float type */
  uint8_t f16, byte, high, low; /* in a panel: of a block; of 32 columns; dwords of these; others */
  uint8_t shift;   /* 1 << shift is what a number is more than it stands for; 0: as it is */
  uint8_t form;    /* CPU_UNPACKED... */
} cpu_layouts[CPU_FORMS] = {
  {0, 0, 0, 0, 0, 0, 0, 0}, {1, 4, 0, 0, 0, 0, 0, 0}, {1, 2, 0, 0, 0, 0, 0, 0},
  {1, 2, 0, 0, 0, 0, 0, 0},
  {32, 34, 1, 0, 0, 8, CPU_SHIFT, 0},             /* Q8_0 */
  {32, 18, 1, 0, 0, 4, 3, CPU_UNPACKED},          /* Q4_0 */
  {32, 20, 2, 0, 0, 4, 0, CPU_UNPACKED_LOW},      /* Q4_1 */
  {32, 22, 1, 0, 1, 4, 4, CPU_UNPACKED},          /* Q5_0 */
  {32, 24, 2, 0, 1, 4, 0, CPU_UNPACKED_LOW},      /* Q5_1 */
  {256, 144, 2, 2, 0, 4, 0, CPU_UNPACKED_LOW},    /* Q4_K */
  {256, 176, 2, 2, 1, 4, 0, CPU_UNPACKED_LOW},    /* Q5_K */
  {256, 210, 1, 2, 2, 4, 5, CPU_UNPACKED_HALVES}, /* Q6_K */
  {1, 1, 0, 0, 0, 0, 0, 0}, {1, 1, 0, 0, 0, 0, 0, 0}, /* F8: converted from, only */
  {32, 0, 2, 0, 0, 8, CPU_SHIFT, 0}, {32, 0, 4, 0, 0, 8, 0, 0}, {32, 0, 4, 0, 0, 8, CPU_SHIFT, 0}};

/* What a number is more than it stands for. */
CPU_INLINE int32_t cpu_more(int type) {
  return cpu_layouts[type].shift ? 1 << cpu_layouts[type].shift : 0;
}

CPU_INLINE bool cpu_has_blocks(int type) { return cpu_layouts[type].cols > 1; }

typedef struct cpu_stripe { /* consecutive rows in one type */
  const uint8_t *data;
  size_t bytes;        /* of a panel, or a row */
  int64_t first;       /* row of the whole weight, all experts stacked */
  int32_t rows, panel; /* its first panel, counted within the expert */
  tfm_type type;
  bool panels;         /* false: rows as in a file, for weights that are only gathered from */
} cpu_stripe;

typedef struct cpu_weight { /* tfm_weight.host */
  int32_t stripes, panels;  /* of an expert */
  cpu_stripe *stripe;       /* [experts * stripes] */
} cpu_weight;

static const cpu_weight *cpu_weight_of(const tfm_weight *w) { return (const cpu_weight *)w->host; }

/* Bytes of n values in a file. */
static size_t cpu_span(tfm_type type, int64_t n) {
  const struct cpu_layout *l = &cpu_layouts[type];
  return (size_t)(n / l->cols) * l->bytes;
}

/* Bytes of 32 columns in a panel, without what a block has at its front. */
CPU_INLINE int cpu_piece_bytes(int type) {
  const struct cpu_layout *l = &cpu_layouts[type];
  return CPU_ROWS * (l->byte + 4 * (l->high + l->low));
}

CPU_INLINE int cpu_front_bytes(int type) { return CPU_ROWS * 2 * cpu_layouts[type].f16; }

/* Bytes of whole blocks of n columns in a panel. */
CPU_INLINE size_t cpu_panel_span(int type, int64_t n) {
  const struct cpu_layout *l = &cpu_layouts[type];
  if (l->cols == 1) return (size_t)n * l->bytes * CPU_ROWS;
  return (size_t)(n / l->cols) *
         (size_t)(cpu_front_bytes(type) + l->cols / 32 * cpu_piece_bytes(type));
}

/* Columns 32 b and on of a panel; *front receives where the block begins. */
CPU_INLINE const uint8_t *cpu_piece_at(const uint8_t **front, const uint8_t *panel, int type,
                                       int32_t b) {
  const int pieces = cpu_layouts[type].cols / 32;
  *front = panel + cpu_panel_span((int)type, (int64_t)b / pieces * pieces * 32);
  return *front + cpu_front_bytes(type) + b % pieces * cpu_piece_bytes(type);
}

static int32_t cpu_panels(int32_t rows) { return cpu_shares(rows, CPU_ROWS); }

static tfm_type cpu_type_of(const tfm_weight_source *s, const tfm_part *p) {
  return s->type == TFM_TYPE_DEFAULT ? p->type : s->type;
}

/* A matrix that learns stays as adamw leaves it: products pack it as they go. */
static bool cpu_learns(const tfm_weight_source *s) {
  bool learns = s->roles & TFM_ROLE_GRADIENT && s->stable && !s->transposed;
  int32_t i;
  for (i = 0; i < s->part_count; i++)
    learns = learns && s->parts[i].type == TFM_F32 && cpu_type_of(s, &s->parts[i]) == TFM_F32;
  return learns;
}

static bool cpu_in_panels(const tfm_weight_source *s) {
  return s->roles != TFM_ROLE_GATHER && !cpu_learns(s);
}

/* Bytes of our own memory that a part takes. */
static size_t cpu_part_bytes(const tfm_weight_source *s, const tfm_part *p) {
  tfm_type type = cpu_type_of(s, p);
  if (cpu_in_panels(s)) return (size_t)cpu_panels(p->rows) * cpu_panel_span((int)type, s->cols);
  if (s->stable && !s->transposed && type == p->type && !p->scales.at)
    return 0; /* as it lies in the file */
  return cpu_align((size_t)p->rows * cpu_span(type, s->cols));
}

/* Types that the reference knows and these kernels do not: F8 is converted from, only. */
static bool cpu_declines(const tfm_weight_source *s, const tfm_part *p) {
  return cpu_layouts[cpu_type_of(s, p)].bytes < 2;
}

static tfm_pack_size cpu_pack_size(tfm_dev *d, const tfm_weight_source *s) {
  tfm_pack_size size = {0, 0}, failed = {0, 0};
  int32_t i;
  tfm_backend_ref()->pack_size(d, s); /* it knows what cannot be packed, and says so */
  for (i = 0; i < s->part_count && d->status == TFM_OK; i++)
    if (cpu_declines(s, &s->parts[i]))
      tfm_dev_fail(d, TFM_E_UNSUPPORTED, "device cpu has no kernels for %s; choose device ref",
                   tfm_type_name(cpu_type_of(s, &s->parts[i])));
  if (d->status != TFM_OK) return failed;
  size.host_bytes = cpu_align(sizeof(cpu_weight) + (size_t)s->part_count * sizeof(cpu_stripe));
  for (i = 0; i < s->part_count; i++) size.device_bytes += cpu_part_bytes(s, &s->parts[i]);
  return size;
}

typedef struct cpu_piece { /* 32 columns of a row, as a panel has them */
  uint16_t f16[2];
  uint8_t byte[2];
  uint32_t high[2], low[8];
} cpu_piece;

static uint32_t cpu_dword(const uint8_t *p) {
  uint32_t u;
  memcpy(&u, p, sizeof u);
  return u;
}

/* Bits 4 u to 4 u + 3 of `high` go to bit u of bytes 0 to 3. */
static uint32_t cpu_spread(uint32_t high) {
  uint32_t spread = 0;
  int u;
  for (u = 0; u < 8; u++) spread |= ((high >> 4 * u & 15) * 0x00204081u & 0x01010101u) << u;
  return spread;
}

/* A block of 32: f16, fifth bits, the rest. */
CPU_INLINE void cpu_piece_of_32(cpu_piece *p, const uint8_t *x, tfm_type type) {
  const struct cpu_layout *l = &cpu_layouts[type];
  int u;
  memcpy(p->f16, x, 2 * (size_t)l->f16);
  x += 2 * l->f16;
  if (l->high) p->high[0] = cpu_spread(cpu_dword(x)), x += 4;
  for (u = 0; u < l->low; u++)
    p->low[u] = cpu_dword(x + 4 * u) ^ (l->low == 8 && l->shift == 7 ? 0x80808080u : 0);
}

/* Columns 32 g to 32 g + 31 of a block of 256: see the reference's decoders. */
CPU_INLINE void cpu_piece_of_256(cpu_piece *p, const uint8_t *x, tfm_type type, int g) {
  const bool six = type == TFM_Q6_K;
  const uint8_t *low = six ? x + g / 4 * 64 + g % 2 * 32
                           : x + (type == TFM_Q4_K ? 16 : 48) + g / 2 * 32;
  const uint8_t *high = six ? x + 128 + g / 4 * 32 : x + 16, *at = x + 4;
  const int shift = six ? g % 4 / 2 * 4 : g % 2 * 4;
  int u;
  memset(p->high, 0, sizeof p->high);
  for (u = 0; u < 4; u++)
    p->low[u] = (cpu_dword(low + 4 * u) >> shift & 0x0f0f0f0fu) |
                (cpu_dword(low + 4 * u + 16) >> shift & 0x0f0f0f0fu) << 4;
  for (u = 0; u < 8 && six; u++)
    p->high[u / 4] |= (cpu_dword(high + 4 * u) >> g % 4 * 2 & 0x03030303u) << u % 4 * 2;
  for (u = 0; u < 8 && type == TFM_Q5_K; u++)
    p->high[0] |= (cpu_dword(high + 4 * u) >> g & 0x01010101u) << u;
  memcpy(p->f16, six ? x + 208 : x, six ? 2 : 4);
  if (six) memcpy(p->byte, x + 192 + 2 * g, 2);
  else {
    p->f16[1] ^= 0x8000; /* what is taken off is added */
    p->byte[0] = (uint8_t)(g < 4 ? at[g] & 63 : (at[g + 4] & 15) | at[g % 4] >> 6 << 4);
    p->byte[1] = (uint8_t)(g < 4 ? at[g + 4] & 63 : at[g + 4] >> 4 | at[g] >> 6 << 4);
  }
}

/* Back from places CPU_ROWS numbers apart. */
CPU_INLINE const uint8_t *cpu_pick(const uint8_t *panel, void *row, int n, int slot,
                                   const size_t bytes) {
  uint8_t *one = (uint8_t *)row;
  int i;
  for (i = 0; i < n; i++, panel += CPU_ROWS * bytes, one += bytes)
    memcpy(one, panel + (size_t)slot * bytes, bytes);
  return panel;
}

static void cpu_pick_piece(cpu_piece *p, const uint8_t *panel, tfm_type type, int32_t b, int slot) {
  const struct cpu_layout *l = &cpu_layouts[type];
  const uint8_t *front, *at = cpu_piece_at(&front, panel, (int)type, b);
  cpu_pick(front, p->f16, cpu_min(l->f16, 2), slot, 2);
  at = cpu_pick(at, p->byte, cpu_min(l->byte, 2), slot, 1);
  at = cpu_pick(at, p->high, cpu_min(l->high, 2), slot, 4);
  cpu_pick(at, p->low, cpu_min(l->low, 8), slot, 4);
}

/* n numbers of every row's piece, from `field` of the first on, go to a panel. */
CPU_INLINE uint8_t *cpu_deal(uint8_t *to, const void *field, int n, const size_t bytes) {
  const uint8_t *from = (const uint8_t *)field;
  int i, slot;
  for (i = 0; i < n; i++, from += bytes)
    for (slot = 0; slot < CPU_ROWS; slot++, to += bytes)
      memcpy(to, from + (size_t)slot * sizeof(cpu_piece), bytes);
  return to;
}

/* Whole blocks of 32 rows go to their place in a panel. */
CPU_INLINE void cpu_deal_blocks_of(uint8_t *to, const uint8_t *const *row, int32_t cols,
                                   const tfm_type type) {
  const struct cpu_layout *l = &cpu_layouts[type];
  const int f16 = cpu_min(l->f16, 2), byte = l->byte, high = l->high, low = l->low;
  cpu_piece piece[CPU_ROWS];
  size_t at;
  int32_t b, g, slot;
  for (b = 0; b < cols / l->cols; b++)
    for (g = 0, at = (size_t)b * l->bytes; g < l->cols / 32; g++) {
      for (slot = 0; slot < CPU_ROWS; slot++)
        if (l->cols == 32) cpu_piece_of_32(&piece[slot], row[slot] + at, type);
        else cpu_piece_of_256(&piece[slot], row[slot] + at, type, g);
      if (g == 0) to = cpu_deal(to, piece->f16, f16, 2);
      to = cpu_deal(to, piece->byte, byte, 1);
      to = cpu_deal(to, piece->high, high, 4);
      to = cpu_deal(to, piece->low, low, 4);
    }
}

static void cpu_deal_blocks(uint8_t *to, const uint8_t *const *row, int32_t cols, tfm_type type) {
#define CPU_DEAL(one) case one: cpu_deal_blocks_of(to, row, cols, one); return
  switch ((int)type) { /* its layout is a constant in each */
    CPU_DEAL(TFM_Q8_0);
    CPU_DEAL(TFM_Q4_0);
    CPU_DEAL(TFM_Q4_1);
    CPU_DEAL(TFM_Q5_0);
    CPU_DEAL(TFM_Q5_1);
    CPU_DEAL(TFM_Q4_K);
    CPU_DEAL(TFM_Q5_K);
    CPU_DEAL(TFM_Q6_K);
  }
#undef CPU_DEAL
}

static uint64_t cpu_qword(const uint8_t *p) {
  uint64_t u;
  memcpy(&u, p, sizeof u);
  return u;
}

/* Four columns of four rows of 16 bits, as four rows of columns. */
CPU_INLINE void cpu_turn_halves(uint8_t *to, const uint8_t *a, const uint8_t *b, const uint8_t *c,
                                const uint8_t *d) {
  const uint64_t even = 0x0000ffff0000ffffu, half = 0xffffffffu;
  uint64_t r0 = cpu_qword(a), r1 = cpu_qword(b), r2 = cpu_qword(c), r3 = cpu_qword(d), y[4];
  const uint64_t p = (r0 & even) | (r1 & even) << 16, q = (r0 >> 16 & even) | (r1 & ~even);
  const uint64_t r = (r2 & even) | (r3 & even) << 16, s = (r2 >> 16 & even) | (r3 & ~even);
  int i;
  y[0] = (p & half) | r << 32, y[1] = (q & half) | s << 32;
  y[2] = p >> 32 | (r & ~half), y[3] = q >> 32 | (s & ~half);
  for (i = 0; i < 4; i++) memcpy(to + 2 * CPU_ROWS * i, &y[i], sizeof y[i]);
}

/* Two columns of two rows of 32 bits, as two rows of columns. */
CPU_INLINE void cpu_turn_words(uint8_t *to, const uint8_t *a, const uint8_t *b) {
  const uint64_t r0 = cpu_qword(a), r1 = cpu_qword(b), half = 0xffffffffu;
  const uint64_t y0 = (r0 & half) | r1 << 32, y1 = r0 >> 32 | (r1 & ~half);
  memcpy(to, &y0, sizeof y0);
  memcpy(to + 4 * CPU_ROWS, &y1, sizeof y1);
}

/* 32 rows of a float type go to their place in a panel. */
static void cpu_deal_floats(uint8_t *to, const uint8_t *const *row, int32_t cols, tfm_type type) {
  const size_t bytes = cpu_layouts[type].bytes;
  const int32_t each = bytes == 2 ? 4 : 2; /* columns at a time, and rows */
  const uint8_t *from[CPU_ROWS];           /* in the order of a panel's columns, */
  size_t at;                               /* at this byte */
  int32_t col;
  int i;
  for (i = 0; i < CPU_ROWS; i++) /* of bf16, a dword has rows i and i + 16 */
    from[i] = row[type == TFM_BF16 ? i / 2 + i % 2 * 16 : i];
  for (col = 0, at = 0; col + each <= cols; col += each, at += 8, to += CPU_ROWS * 8)
    for (i = 0; i < CPU_ROWS; i += each)
      if (bytes == 4) cpu_turn_words(to + 4 * i, from[i] + at, from[i + 1] + at);
      else cpu_turn_halves(to + 2 * i, from[i] + at, from[i + 1] + at, from[i + 2] + at,
                           from[i + 3] + at);
  for (; col < cols; col++, at += bytes)
    for (i = 0; i < CPU_ROWS; i++, to += bytes) memcpy(to, from[i] + at, bytes);
}

typedef struct cpu_pack_job {
  tfm_dev *d;
  const tfm_part *part;
  uint8_t *to;
  tfm_type type;
  int32_t cols;
  bool transposed, panels;
} cpu_pack_job;

static tfm_mat cpu_view(const void *data, tfm_type type, int32_t rows, int32_t cols,
                        int64_t stride) {
  tfm_mat m;
  m.data = (void *)(uintptr_t)data;
  m.type = type;
  m.rows = rows;
  m.cols = cols;
  m.stride = stride;
  return m;
}

/* y = x from any type to any type. The reference's cast does blocks too, and dispatches nothing for
   as few values as here: a job may call it. */
static void cpu_convert(tfm_dev *d, tfm_mat y, tfm_mat x) { tfm_backend_ref()->cast(d, y, x); }

/* A tile [32][32] of a transposed source, converted; rows by cols of it are there. */
static void cpu_pack_turned(const cpu_pack_job *t, uint8_t *y, int32_t row, int32_t rows,
                            int32_t col, int32_t cols) {
  tfm_type type = t->part->type;
  const uint8_t *from = (const uint8_t *)t->part->data +
                        cpu_span(type, (int64_t)col * t->part->rows + row);
  float tile[CPU_ROWS * 32], swap;
  int i, j;
  cpu_convert(t->d, cpu_view(tile, TFM_F32, cols, rows, 32),
              cpu_view(from, type, cols, rows, t->part->rows));
  for (i = 0; i < 32; i++)
    for (j = 0; j < i; j++)
      swap = tile[i * 32 + j], tile[i * 32 + j] = tile[j * 32 + i], tile[j * 32 + i] = swap;
  cpu_convert(t->d, cpu_view(y, t->type, rows, cols, 32), cpu_view(tile, TFM_F32, rows, cols, 32));
}

/* x[i] *= the scale of value (row, col + i) of a part with `all` columns. */
static void cpu_scale(float *x, const tfm_scales *s, int32_t all, int32_t row, int32_t col,
                      int32_t cols) {
  const float *at = s->at + (int64_t)(row / s->tall) * ((all + s->wide - 1) / s->wide);
  int32_t i;
  for (i = 0; i < cols; i++) x[i] *= at[(col + i) / s->wide];
}

/* Part of a row, 256 values at most, in the type wanted: as it lies in the file, or converted to
   `room`. */
static const uint8_t *cpu_pack_straight(const cpu_pack_job *t, uint8_t *room, int32_t row,
                                        int32_t col, int32_t cols) {
  tfm_type type = t->part->type;
  const uint8_t *from = (const uint8_t *)t->part->data +
                        (size_t)row * cpu_span(type, t->cols) + cpu_span(type, col);
  float value[256];
  if (type == t->type && !t->part->scales.at) { /* the next is read after 31 rows more */
    const size_t bytes = cpu_span(type, cols);
    size_t i;
    for (i = 0; i < bytes; i += 64) __builtin_prefetch(from + bytes + i);
    return from;
  }
  if (!t->part->scales.at) {
    cpu_convert(t->d, cpu_view(room, t->type, 1, cols, cols), cpu_view(from, type, 1, cols, cols));
    return room;
  }
  cpu_convert(t->d, cpu_view(value, TFM_F32, 1, cols, cols), cpu_view(from, type, 1, cols, cols));
  cpu_scale(value, &t->part->scales, t->cols, row, col, cols);
  cpu_convert(t->d, cpu_view(room, t->type, 1, cols, cols),
              cpu_view(value, TFM_F32, 1, cols, cols));
  return room;
}

/* Rows of a group, as a file has them, lie in panels or in rows of our own. */
static void cpu_pack_tile(const cpu_pack_job *t, const uint8_t *const *from, int32_t group,
                          int32_t rows, int32_t col, int32_t cols) {
  const size_t bytes = cpu_span(t->type, cols), stride = cpu_span(t->type, t->cols);
  uint8_t *to = t->to;
  int32_t i;
  if (!t->panels) {
    to += (size_t)group * CPU_ROWS * stride + cpu_span(t->type, col);
    for (i = 0; i < rows; i++, to += stride) memcpy(to, from[i], bytes);
    return;
  }
  to += (size_t)group * cpu_panel_span((int)t->type, t->cols) + cpu_panel_span((int)t->type, col);
  if (cpu_has_blocks((int)t->type)) cpu_deal_blocks(to, from, cols, t->type);
  else cpu_deal_floats(to, from, cols, t->type);
}

/* Groups of 32 rows begin .. end-1, by tiles of 32 columns or, from rows as they lie, of 256. */
static void cpu_pack_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  static const uint8_t zeros[256 * 4] = {0};
  const cpu_pack_job *t = (const cpu_pack_job *)context;
  const int32_t step = t->transposed ? 32 : 256;
  const size_t span = cpu_span(t->type, step);
  uint8_t tile[CPU_ROWS * 256 * 4];
  const uint8_t *from[CPU_ROWS];
  int32_t group, col, i;
  (void)worker;
  for (group = begin; group < end; group++)
    for (col = 0; col < t->cols; col += step) {
      int32_t row = group * CPU_ROWS, rows = cpu_min(CPU_ROWS, t->part->rows - row);
      int32_t cols = cpu_min(step, t->cols - col);
      if (t->transposed) cpu_pack_turned(t, tile, row, rows, col, cols);
      for (i = 0; i < CPU_ROWS; i++)
        from[i] = i >= rows ? zeros : t->transposed ? tile + (size_t)i * span
                  : cpu_pack_straight(t, tile + (size_t)i * span, row + i, col, cols);
      cpu_pack_tile(t, from, group, rows, col, cols);
    }
}

/* Returns where the next part begins. */
static uint8_t *cpu_pack_part(tfm_dev *d, cpu_stripe *stripe, const tfm_weight_source *s,
                              const tfm_part *p, uint8_t *own) {
  cpu_pack_job job = {d, p, own, cpu_type_of(s, p), s->cols, s->transposed, cpu_in_panels(s)};
  size_t bytes = cpu_part_bytes(s, p);
  stripe->data = bytes ? own : (const uint8_t *)p->data;
  stripe->bytes = job.panels ? cpu_panel_span((int)job.type, s->cols) : cpu_span(job.type, s->cols);
  stripe->rows = p->rows;
  stripe->type = job.type;
  stripe->panels = job.panels;
  if (bytes) tfm_parallel_for(d, cpu_panels(p->rows), 1, cpu_pack_rows, &job);
  return own + bytes;
}

static void cpu_pack(tfm_dev *d, tfm_weight *w, const tfm_weight_source *s, void *host,
                     void *device) {
  cpu_weight *packed = (cpu_weight *)host;
  uint8_t *own = (uint8_t *)device;
  int64_t first = 0;
  int32_t i;
  memset(w, 0, sizeof *w);
  w->rows = s->rows;
  w->cols = s->cols;
  w->experts = s->experts;
  w->roles = s->roles;
  w->host = host;
  w->device = device;
  packed->stripe = (cpu_stripe *)(void *)(packed + 1);
  packed->stripes = s->part_count / (s->experts ? s->experts : 1);
  for (i = 0; i < s->part_count; i++) {
    cpu_stripe *stripe = &packed->stripe[i];
    if (i % packed->stripes == 0) packed->panels = 0;
    own = cpu_pack_part(d, stripe, s, &s->parts[i], own);
    stripe->first = first;
    stripe->panel = packed->panels;
    packed->panels += cpu_panels(stripe->rows);
    first += stripe->rows;
    w->bytes += (uint64_t)stripe->rows * stripe->bytes / (stripe->panels ? CPU_ROWS : 1);
  }
}

/* y[0 .. 31] = what a piece of a row stands for. */
static void cpu_piece_values(tfm_dev *d, float *y, const cpu_piece *p, tfm_type type) {
  const struct cpu_layout *l = &cpu_layouts[type];
  float f16[2] = {0, 0}, scale[2], low = 0;
  int i;
  cpu_convert(d, cpu_view(f16, TFM_F32, 1, l->f16, 2), cpu_view(p->f16, TFM_F16, 1, l->f16, 2));
  scale[0] = scale[1] = f16[0];
  if (l->f16 == 2) low = f16[1];
  if (l->byte) {
    bool six = type == TFM_Q6_K; /* two signed scales; else a scale and an offset */
    scale[0] *= (float)(six ? (int8_t)p->byte[0] : p->byte[0]);
    scale[1] *= (float)(six ? (int8_t)p->byte[1] : p->byte[0]);
    low *= (float)p->byte[1];
  }
  for (i = 0; i < 32; i++) {
    const int u = i / 4, byte = 8 * (i % 4);
    uint32_t q = l->low == 8 ? p->low[u] >> byte & 255 : p->low[u % 4] >> (byte + u / 4 * 4) & 15;
    if (l->low == 8 && l->shift == 0) q = (uint32_t)(int8_t)q;
    if (l->high == 1) q |= (p->high[0] >> (byte + u) & 1) << 4;
    if (l->high == 2) q |= (p->high[u / 4] >> (byte + u % 4 * 2) & 3) << 4;
    y[i] = scale[i / 16] * (float)((int32_t)q - cpu_more((int)type)) + low;
  }
}

/* Columns col .. col + n - 1 of a row of the stripe, 32 of a panel at most, as floats. */
static void cpu_stripe_piece(tfm_dev *d, float *y, const cpu_stripe *s, int64_t row, int32_t col,
                             int32_t n) {
  uint8_t *from = (uint8_t *)(uintptr_t)s->data, line[32 * 4];
  int slot = (int)(row % CPU_ROWS);
  cpu_piece p;
  if (!s->panels) from += (size_t)row * s->bytes + cpu_span(s->type, col);
  else {
    from += (size_t)(row / CPU_ROWS) * s->bytes;
    if (cpu_has_blocks((int)s->type)) {
      cpu_pick_piece(&p, from, s->type, col / 32, slot);
      cpu_piece_values(d, y, &p, s->type);
      return;
    }
    if (s->type == TFM_BF16) slot = slot % 16 * 2 + slot / 16;
    cpu_pick(from + cpu_panel_span((int)s->type, col), line, n, slot, cpu_layouts[s->type].bytes);
    from = line;
  }
  cpu_convert(d, cpu_view(y, TFM_F32, 1, n, n), cpu_view(from, s->type, 1, n, n));
}

/* y = beta * y + scale * row of the weight, all experts stacked. */
static void cpu_weight_row(tfm_dev *d, float *y, const tfm_weight *w, int64_t row, float scale,
                           float beta) {
  const cpu_stripe *s = cpu_weight_of(w)->stripe;
  float piece[256];
  int32_t col, j, step;
  while (row >= s->first + s->rows) s++;
  step = s->panels ? 32 : 256;
  for (col = 0; col < w->cols; col += step) {
    int32_t n = cpu_min(step, w->cols - col);
    cpu_stripe_piece(d, piece, s, row - s->first, col, n);
    for (j = 0; j < n; j++) y[col + j] = (beta != 0 ? beta * y[col + j] : 0) + scale * piece[j];
  }
}

static void cpu_unpack(tfm_dev *d, tfm_mat y, const tfm_weight *w, int32_t first) {
  int32_t i;
  for (i = 0; i < y.rows; i++) cpu_weight_row(d, cpu_row(y, i), w, (int64_t)first + i, 1, 0);
}

/* ---- embed ---- */

typedef struct cpu_embed_job {
  tfm_dev *d;
  tfm_mat y;
  const tfm_weight *table, *positions;
  const tfm_rows *rows;
  float scale;
} cpu_embed_job;

static void cpu_embed_rows(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_embed_job *t = (const cpu_embed_job *)context;
  int32_t i;
  (void)worker;
  for (i = begin; i < end; i++) {
    if (t->rows->seq[i] < 0) continue;
    cpu_weight_row(t->d, cpu_row(t->y, i), t->table, t->rows->id[i], t->scale, 0);
    if (t->positions)
      cpu_weight_row(t->d, cpu_row(t->y, i), t->positions, t->rows->pos[i], 1, 1);
  }
}

static void cpu_embed(tfm_dev *d, tfm_mat y, const tfm_weight *table, const tfm_weight *positions,
                      const tfm_rows *rows, float scale) {
  cpu_embed_job job = {d, y, table, positions && positions->rows ? positions : NULL, rows,
                       scale != 0 ? scale : 1.0f};
  tfm_parallel_for(d, y.rows, 8, cpu_embed_rows, &job);
}

/* ---- What the reference computes: its memory is ours ---- */

static void cpu_cast(tfm_dev *d, tfm_mat y, tfm_mat x) { tfm_backend_ref()->cast(d, y, x); }

static void cpu_gather(tfm_dev *d, tfm_mat y, tfm_mat x, const int32_t *index) {
  tfm_backend_ref()->gather(d, y, x, index);
}

static void cpu_kv_put(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v, const tfm_rows *rows) {
  tfm_backend_ref()->kv_put(d, kv, k, v, rows);
}

static void cpu_route(tfm_dev *d, tfm_routing *r, tfm_mat logits, const tfm_moe *p) {
  tfm_backend_ref()->route(d, r, logits, p);
}

static void cpu_combine(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat residual, const tfm_routing *r) {
  tfm_backend_ref()->combine(d, y, x, residual, r);
}

static void cpu_sample(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits,
                       const tfm_sampler *s) {
  tfm_backend_ref()->sample(d, ids, logprobs, logits, s);
}

static void cpu_top(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits, int32_t k) {
  tfm_backend_ref()->top(d, ids, logprobs, logits, k);
}

static void cpu_embed_bwd(tfm_dev *d, tfm_mat dtable, tfm_mat dpositions, tfm_mat dy,
                          const tfm_rows *rows, float scale) {
  tfm_backend_ref()->embed_bwd(d, dtable, dpositions, dy, rows, scale);
}

static void cpu_moe_bias(tfm_dev *d, tfm_mat y, tfm_mat x, const float *bias,
                         const tfm_routing *r, tfm_act act) {
  tfm_backend_ref()->moe_bias(d, y, x, bias, r, act);
}

static void cpu_add_gated(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat gate) {
  tfm_backend_ref()->add_gated(d, y, x, gate);
}

static void cpu_moe_bias_bwd(tfm_dev *d, float *db, tfm_mat dy, const tfm_routing *r) {
  tfm_backend_ref()->moe_bias_bwd(d, db, dy, r);
}

static void cpu_add_gated_bwd(tfm_dev *d, tfm_mat dx, tfm_mat dgate, tfm_mat dy, tfm_mat x,
                              tfm_mat gate) {
  tfm_backend_ref()->add_gated_bwd(d, dx, dgate, dy, x, gate);
}

static void cpu_route_bwd(tfm_dev *d, tfm_mat dlogits, const float *dweight, const tfm_routing *r,
                          const tfm_moe *p, float balance, float *balance_loss) {
  tfm_backend_ref()->route_bwd(d, dlogits, dweight, r, p, balance, balance_loss);
}

static void cpu_combine_bwd(tfm_dev *d, tfm_mat dx, float *dweight, tfm_mat dy, tfm_mat x,
                            const tfm_routing *r) {
  tfm_backend_ref()->combine_bwd(d, dx, dweight, dy, x, r);
}

/* ---- The product: what all instruction sets share ---- */

typedef struct cpu_product { /* a matmul, or a matmul_moe, of x's rows first .. first + rows - 1 */
  tfm_mat y, x;
  const tfm_weight *w;
  const tfm_epilogue *e;      /* NULL: none */
  const tfm_routing *routing; /* NULL: a plain matrix */
  bool spread, in_order;      /* in_order: first, rows are of routing->order, by experts */
  int32_t first, rows;
  uint8_t *quantised;         /* [rows] of these rows: groups; or tiles of bf16 */
  size_t quantised_bytes;     /* of a row */
  uint8_t *work;              /* CPU_TILE_BYTES of each thread; with tiles, CPU_TILED_BYTES */
  const cpu_stripe *up;       /* y = act(x gate^T) * x up^T, of two stripes and the epilogue's act;
                                 NULL: y is the product */
  bool tiles;                 /* AMX multiplies all of the weight that is not F32, */
  bool bytes;                 /* or 16 rows at a time by what of it is Q8_0 */
} cpu_product;

typedef struct cpu_coming { /* weights of which a tile asks the second cache for `step` bytes, */
  const uint8_t *at;        /* or its whole lines, with every four of its columns */
  int32_t step;
} cpu_coming;

/* One panel or more of W. Of float types: out[i * CPU_OUT + j] = x[i] . row j of the panels. Of
   blocks, x being cpu_groups: out[i * (rows of the panels) + j] += x[i] . row j. Two rows of x and
   more take a panel, and ask for what comes after it; else a tile asks for its own next bytes. */
typedef void (*cpu_tile)(float *out, const void *const *x, const uint8_t *w, size_t panel_bytes,
                         int32_t cols, const cpu_coming *coming);

/* Asked for in bunches, lines would take up all of the room that the first cache has for those on
   their way, and products wait for theirs. */
CPU_INLINE void cpu_ask(cpu_coming *c, const int lines) {
  __builtin_prefetch(c->at, 0, 2);
  if (lines > 1) __builtin_prefetch(c->at + CPU_ALIGN, 0, 2);
  c->at += c->step;
}

typedef struct cpu_tile_row {
  int32_t rows, panels; /* of x, of W */
  cpu_tile run;
} cpu_tile_row;

typedef struct cpu_slots { /* the rows of y and x that one expert, or the only matrix, multiplies */
  const int32_t *order;    /* NULL: row i is i */
  int32_t begin, end;
  int32_t tiled;           /* where the first lies among the rows that are tiles: whole 16s */
} cpu_slots;

static int32_t cpu_experts(const cpu_product *t) { return t->routing ? t->routing->experts : 1; }

/* The row of x that a slot reads. */
static int32_t cpu_slot_from(const cpu_product *t, int32_t slot) {
  return t->routing && t->spread ? slot / t->routing->top_k : slot;
}

/* The row of x that is number i of the part. */
static const float *cpu_row_of_part(const cpu_product *t, int32_t i) {
  return cpu_row(t->x, t->in_order ? cpu_slot_from(t, t->routing->order[t->first + i])
                                   : t->first + i);
}

/* What an expert has of the part: its slots are in the order of their tokens, so they lie together.
   Each expert's tiles begin with a whole one: there is room for 16 rows more before the next. */
static cpu_slots cpu_slots_of(const cpu_product *t, int32_t expert) {
  const int32_t last = t->first + t->rows;
  cpu_slots s = {NULL, t->first, last, 0};
  if (!t->routing) return s;
  s.order = t->routing->order;
  s.begin = t->routing->begin[expert];
  s.end = t->routing->begin[expert + 1];
  if (t->in_order) {
    if (s.begin < t->first) s.begin = t->first;
    s.end = cpu_min(s.end, last);
    s.tiled = ((s.begin - t->first) / 16 + expert) * 16;
    return s;
  }
  while (s.begin < s.end && cpu_slot_from(t, s.order[s.begin]) < t->first) s.begin++;
  while (s.begin < s.end && cpu_slot_from(t, s.order[s.end - 1]) >= last) s.end--;
  return s;
}

static int32_t cpu_slot_at(const cpu_slots *s, int32_t i) { return s->order ? s->order[i] : i; }

static bool cpu_is_quantised(const tfm_weight *w) { /* at least a part of it */
  const cpu_weight *packed = cpu_weight_of(w);
  int32_t i;
  for (i = 0; i < packed->stripes; i++)
    if (cpu_has_blocks((int)packed->stripe[i].type)) return true;
  return false;
}

/* Whether AMX is to multiply a weight, at least a part of it, by so many rows. */
static bool cpu_in_tiles(const tfm_dev *d, const tfm_weight *w, int32_t rows) {
  const cpu_weight *packed = cpu_weight_of(w);
  int32_t i;
  if (!d->state || d->deterministic) return false;
  if (rows < (cpu_is_quantised(w) ? CPU_TILED_BLOCKS : CPU_TILED_FLOATS)) return false;
  for (i = 0; i < packed->stripes; i++)
    if (packed->stripe[i].type != TFM_F32) return true;
  return false;
}

/* The row of x of slot i, in the form that a stripe's tiles take. */
static const void *cpu_row_of_x(const cpu_product *t, const cpu_stripe *stripe, const cpu_slots *s,
                                int32_t i) {
  const int32_t row = cpu_slot_from(t, cpu_slot_at(s, i));
  if (!cpu_has_blocks((int)stripe->type)) return cpu_row(t->x, row);
  return t->quantised + (size_t)((t->in_order ? i : row) - t->first) * t->quantised_bytes;
}

/* Items per share that make a share worth its dispatch. */
static int32_t cpu_grain(int64_t work_per_item) {
  return (int32_t)(work_per_item < 32768 ? 32768 / (work_per_item + 1) + 1 : 1);
}

#if defined(__GNUC__)
typedef struct cpu_shared { /* items of a job, which whoever is free takes the next of */
  tfm_job job;
  void *context;
  int32_t n, least, threads;
  int32_t next; /* atomic */
} cpu_shared;

/* Less and less at a time: two thirds of an even share of what is left. */
static void cpu_take(void *context, int32_t begin, int32_t end, int32_t worker) {
  cpu_shared *s = (cpu_shared *)context;
  int32_t at = __atomic_load_n(&s->next, __ATOMIC_RELAXED), to;
  (void)begin, (void)end;
  while (at < s->n) {
    to = (s->n - at) / (3 * s->threads) * 2;
    to = cpu_min(at + cpu_max(to, s->least), s->n);
    if (!__atomic_compare_exchange_n(&s->next, &at, to, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      continue; /* at: what it is now */
    s->job(s->context, at, to, worker);
    at = __atomic_load_n(&s->next, __ATOMIC_RELAXED);
  }
}

/* As tfm_parallel_for, `least` items at a time at least, for long jobs: on a machine that has other
   work, too, one thread may be several times as fast as another. */
static void cpu_parallel_for(tfm_dev *d, int32_t n, int32_t least, tfm_job job, void *context) {
  cpu_shared s = {job, context, n, least, cpu_min(d->threads, cpu_shares(n, least)), 0};
  if (s.threads < 2) tfm_parallel_for(d, n, least, job, context);
  else tfm_parallel_for(d, s.threads, 1, cpu_take, &s);
}
#endif

/* ---- Attention: what all instruction sets share ---- */

typedef struct cpu_attn_job {
  tfm_mat y, q;
  const tfm_kv *kv;
  const tfm_rows *rows;
  const tfm_attn *p;
  int32_t group;       /* query heads per kv head */
  int32_t tile, tiles; /* rows in an item, items per kv head */
  float *work;         /* of all threads */
  float *lse;          /* [T, H], or NULL */
  float *sums;         /* of all pieces, where threads share them: [heads][tiles][pieces] */
  int32_t pieces;      /* of the longest row */
} cpu_attn_job;

typedef struct cpu_run { /* rows of one sequence, at consecutive positions */
  int32_t row, rows, pos, seq, head; /* first row and its position; kv head */
} cpu_run;

/* Rows begin .. end-1 start with a run; rows of padding are skipped. False: there is none. */
static bool cpu_run_next(cpu_run *run, const tfm_rows *rows, int32_t begin, int32_t end) {
  while (begin < end && rows->seq[begin] < 0) begin++;
  if (begin == end) return false;
  run->row = begin;
  run->pos = rows->pos[begin];
  run->seq = rows->seq[begin];
  for (run->rows = 1; begin + run->rows < end; run->rows++)
    if (rows->seq[begin + run->rows] != run->seq ||
        rows->pos[begin + run->rows] != run->pos + run->rows) break;
  return true;
}

/* The first position that a query at pos sees. */
static int32_t cpu_first_key(const tfm_attn *p, int32_t pos) {
  return p->window > 0 && pos >= p->window ? pos - p->window + 1 : 0;
}

static int32_t cpu_runs(const tfm_rows *rows) {
  int32_t row = 0, runs = 0;
  cpu_run run;
  for (; cpu_run_next(&run, rows, row, rows->n); row = run.row + run.rows) runs++;
  return runs;
}

static int32_t cpu_pieces(int32_t positions) { return cpu_shares(positions, CPU_PIECE); }

/* The key, or the value, of the run's head at a position. */
static const uint8_t *cpu_kv_at(const tfm_kv *kv, const cpu_run *run, int32_t pos, bool value) {
  int64_t page, row;
  if (!kv->table) /* rows of this very call */
    return (const uint8_t *)(cpu_row(value ? kv->value_rows : kv->key_rows,
                                     run->row + (int64_t)pos - run->pos) + run->head * kv->width);
  page = kv->table[(int64_t)run->seq * kv->max_pages + pos / kv->page_tokens];
  row = (page * kv->heads + run->head) * kv->page_tokens + pos % kv->page_tokens;
  return (const uint8_t *)(value ? kv->v : kv->k) + cpu_span(kv->type, row * kv->width);
}

static tfm_type cpu_kv_type(const tfm_kv *kv) { return kv->table ? kv->type : TFM_F32; }

/* How many of positions pos .. end-1 have their keys, or values, equally far apart in memory: the
   first is at *at, the next *apart bytes further. */
static int32_t cpu_kv_rows(const tfm_kv *kv, const cpu_run *run, int32_t pos, int32_t end,
                           bool value, const uint8_t **at, size_t *apart) {
  *at = cpu_kv_at(kv, run, pos, value);
  *apart = kv->table ? cpu_span(kv->type, kv->width)
                     : (size_t)(value ? kv->value_rows : kv->key_rows).stride * sizeof(float);
  return kv->table ? cpu_min(end - pos, kv->page_tokens - pos % kv->page_tokens) : end - pos;
}

/* Every sequence lies in one piece, from position 0 on, and nothing is padding. */
static bool cpu_rows_are_whole(const tfm_rows *rows) {
  int32_t i;
  for (i = 0; i < rows->n; i++) {
    bool next = i > 0 && rows->seq[i] == rows->seq[i - 1] && rows->pos[i] == rows->pos[i - 1] + 1;
    if (rows->seq[i] < 0 || (rows->pos[i] != 0 && !next)) return false;
  }
  return true;
}

/* ---- Element by element: what all instruction sets share ---- */

enum { CPU_STRIP = 1024, CPU_ANGLES = 64 }; /* columns of an item; pairs that are turned together */

typedef struct cpu_norm_job {
  tfm_mat y, x, residual;
  const float *w, *b;
  float *stats;
  const tfm_norm *p;
  int32_t groups;
} cpu_norm_job;

typedef struct cpu_rope_job {
  tfm_mat x;
  const int32_t *pos;
  const tfm_rope *p;
} cpu_rope_job;

typedef struct cpu_glu_job {
  tfm_mat y, gate_up;
  tfm_act act;
  int32_t strips; /* of a row */
} cpu_glu_job;

/* ---- Training: what all instruction sets share ---- */

typedef enum cpu_form { CPU_FORWARD, CPU_DX, CPU_DW } cpu_form;

/* c = finish(a b), [rows, cols], a sum over `depth` terms.
     forward  y = epilogue(x W^T)     a: rows of x      b: rows of W, transposed
     dx       dx = before(... dy W)   a: rows of dy     b: rows of W
     dw       dw = ... dy^T x         a: columns of dy  b: rows of x */
typedef struct cpu_gemm {
  cpu_form form;
  tfm_dev *d;
  tfm_mat c, a, b;       /* b: of dw */
  const tfm_weight *w;   /* of the others */
  const tfm_epilogue *e; /* NULL: none */
  float beta;            /* of dx and dw */
  int32_t rows, cols, depth;
  /* Of one expert: the slots that are rows of y and dy, and how many share a row of x, dx. */
  const int32_t *slots;  /* NULL: a plain matrix */
  int32_t sharing;
  int64_t first;         /* row of the weight that is the matrix's first */
  int32_t pairs, chunk;  /* of panels, in cols; rows of an item */
  uint8_t *work;
} cpu_gemm;

static int32_t cpu_slot(const cpu_gemm *t, int32_t i) { return t->slots ? t->slots[i] : i; }
static int32_t cpu_from(const cpu_gemm *t, int32_t i) {
  return t->slots ? t->slots[i] / t->sharing : i;
}

static const float *cpu_gemm_a(const cpu_gemm *t, int32_t i) {
  return cpu_row(t->a, t->form == CPU_FORWARD ? cpu_from(t, i) : cpu_slot(t, i));
}

static int32_t cpu_gemm_c(const cpu_gemm *t, int32_t i) { /* which row */
  return t->form == CPU_FORWARD ? cpu_slot(t, i) : t->form == CPU_DX ? cpu_from(t, i) : i;
}

/* Rows of c in an item, a multiple of those of a tile: what takes the busiest thread least, where
   16 rows' time goes into packing a panel. */
static int32_t cpu_gemm_chunk(int32_t rows, int32_t pairs, int32_t threads) {
  int64_t least = INT64_MAX;
  int32_t chunks, best = rows;
  for (chunks = 1; chunks <= 64 && chunks * CPU_TILE < rows + CPU_TILE; chunks++) {
    int32_t each = cpu_shares(cpu_shares(rows, chunks), CPU_TILE) * CPU_TILE;
    int64_t share = ((int64_t)chunks * pairs + threads - 1) / threads, time = share * (each + 16);
    if (time < least) least = time, best = each;
  }
  return best;
}

/* Row `row` of a weight from column col on, where it lies as floats in rows; else NULL. */
static const float *cpu_weight_floats(const tfm_weight *w, int64_t row, int32_t col) {
  const cpu_stripe *s = cpu_weight_of(w)->stripe;
  while (row >= s->first + s->rows) s++;
  if (s->panels || s->type != TFM_F32) return NULL;
  return (const float *)(const void *)(s->data + (size_t)(row - s->first) * s->bytes) + col;
}

/* Row k of b from column col on, where it lies as floats; else NULL. */
static const float *cpu_gemm_b(const cpu_gemm *t, int32_t k, int32_t col) {
  if (t->form == CPU_DW) return cpu_row(t->b, cpu_from(t, k)) + col;
  return cpu_weight_floats(t->w, t->first + k, col);
}

/* The same where W is not in floats: n columns, 32 at most. */
static void cpu_gemm_piece(const cpu_gemm *t, float *piece, int32_t k, int32_t col, int32_t n) {
  const cpu_stripe *s = cpu_weight_of(t->w)->stripe;
  while (t->first + k >= s->first + s->rows) s++;
  cpu_stripe_piece(t->d, piece, s, t->first + k - s->first, col, n);
}

typedef struct cpu_sums_job { /* of a matrix's columns */
  float *sums;
  tfm_mat x;
} cpu_sums_job;

typedef struct cpu_slope_job { /* of elementwise backward entries */
  tfm_mat dx, dy, gate_up;
  const tfm_epilogue *e;
  tfm_act act;
} cpu_slope_job;

typedef struct cpu_norm_bwd_job {
  tfm_mat dx, dy, x, residual;
  const float *w, *stats;
  float *dw, *db;
  const tfm_norm *p;
  int32_t groups, rows; /* of a piece, */
  float *sums;          /* [pieces][2][n] */
} cpu_norm_bwd_job;

typedef struct cpu_loss_job {
  float *losses, *hits;
  tfm_mat logits;
  const int32_t *target;
  const float *weight;
  float scale;
} cpu_loss_job;

enum { CPU_SHARE = 1 << 15 }; /* floats of an arena in an item */

typedef struct cpu_arena_job {
  float *w, *m, *v;
  const float *g;
  float factor, fix1, fix2; /* of the gradient: clipping; of m and v: bias correction */
  int64_t n;
  double *sums;             /* of the shares that are added up together */
  const tfm_adamw *p;
} cpu_arena_job;

typedef struct cpu_attn_bwd_job {
  cpu_attn_job attn;
  tfm_mat dq, dk, dv, dy; /* absent: forward's */
  int32_t items;          /* of a head of keys */
  uint8_t *work;
} cpu_attn_bwd_job;

/* ---- The instruction sets ---- */

#define CPU_PASTE2(name, level) cpu_##name##_##level
#define CPU_PASTE(name, level) CPU_PASTE2(name, level)
#define V(name) CPU_PASTE(name, CPU_LEVEL) /* V(tile): this level's cpu_tile_avx2 */

#if defined(__clang__)
#define CPU_TARGET_WITH(flags, features) \
  _Pragma(CPU_TEXT(clang attribute push(__attribute__((target(features))), apply_to = function)))
#define CPU_TARGET_END _Pragma("clang attribute pop")
#else
#define CPU_TARGET_WITH(flags, features) \
  _Pragma("GCC push_options") _Pragma(CPU_TEXT(GCC optimize(flags))) \
  _Pragma(CPU_TEXT(GCC target(features)))
#define CPU_TARGET_END _Pragma("GCC pop_options")
#endif
#define CPU_TARGET_BEGIN(features) CPU_TARGET_WITH("O3", features) /* O3: tiles are unrolled */
#define CPU_TEXT(text) #text

/* Loops over the vectors of a tile: unrolled early, so that its sums are registers. */
#if defined(CPU_ARM) && defined(__clang__)
#define CPU_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(CPU_ARM)
#define CPU_UNROLL _Pragma("GCC unroll 16")
#else
#define CPU_UNROLL
#endif

/* Tiles of AMX, which Linux saves for a process that asked for them; or a test's own, in C. */
#if defined(TFM_CPU_AMX_STANDIN)
#define CPU_AMX 1
#elif defined(CPU_X86) && defined(__linux__) && (!defined(__clang__) || __clang_major__ >= 12) && \
    (defined(__clang__) || __GNUC__ >= 11)
#define CPU_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define CPU_AMX 0
#endif

#if CPU_AMX /* see below; false: not theirs */
static bool cpu_tiles_gemm(tfm_dev *d, const cpu_gemm *t);
static bool cpu_tiles_attn(tfm_dev *d, cpu_attn_bwd_job *t);
static void cpu_tiles_panels(const cpu_product *t, const cpu_slots *rows, const cpu_stripe *stripe,
                             int32_t panel, int32_t n, int32_t col, int32_t worker);
static void cpu_tiles_of_x(void *context, int32_t begin, int32_t end, int32_t worker);
static void cpu_bytes_begin(void);
static void cpu_bytes_end(void);
static void cpu_bytes_panel(float *out, int32_t *dots, const cpu_group *x, size_t x_bytes,
                            const uint8_t *w, int32_t cols, cpu_coming *coming);
#elif defined(CPU_X86) || defined(CPU_ARM)
static bool cpu_tiles_gemm(tfm_dev *d, const cpu_gemm *t) {
  (void)d, (void)t;
  return false;
}
static bool cpu_tiles_attn(tfm_dev *d, cpu_attn_bwd_job *t) {
  (void)d, (void)t;
  return false;
}
static void cpu_tiles_panels(const cpu_product *t, const cpu_slots *rows, const cpu_stripe *stripe,
                             int32_t panel, int32_t n, int32_t col, int32_t worker) {
  (void)t, (void)rows, (void)stripe, (void)panel, (void)n, (void)col, (void)worker;
}
static void cpu_tiles_of_x(void *context, int32_t begin, int32_t end, int32_t worker) {
  (void)context, (void)begin, (void)end, (void)worker;
}
static void cpu_bytes_begin(void) {}
static void cpu_bytes_end(void) {}
static void cpu_bytes_panel(float *out, int32_t *dots, const cpu_group *x, size_t x_bytes,
                            const uint8_t *w, int32_t cols, cpu_coming *coming) {
  (void)out, (void)dots, (void)x, (void)x_bytes, (void)w, (void)cols, (void)coming;
}
#endif

#if defined(CPU_X86)
#if !defined(__clang__)
#pragma GCC diagnostic push /* of gcc 12's own, once they are inlined */
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <cpuid.h>
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#define CPU_LEVEL avx2
#define CPU_LANES 8
CPU_TARGET_BEGIN("avx2,fma,f16c")
#include "transformer_cpu.c"
CPU_TARGET_END
#undef CPU_LEVEL
#undef CPU_LANES

#define CPU_LEVEL avx512
#define CPU_LANES 16
CPU_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#include "transformer_cpu.c"
CPU_TARGET_END
#undef CPU_LEVEL
#undef CPU_LANES

typedef struct cpu_features { /* bits of cpuid and of xgetbv that a level needs */
  uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, more_eax, state; /* more: leaf 7, 1 */
} cpu_features;

/* FMA, OSXSAVE, AVX, F16C; AVX2; registers of 256 bits saved. */
static const cpu_features cpu_avx2 = {1u << 12 | 1u << 27 | 1u << 28 | 1u << 29, 1u << 5, 0, 0, 0,
                                      0x06};
/* and AVX512 F, DQ, BW, VL; VNNI; masks and registers of 512 bits saved. */
static const cpu_features cpu_avx512 = {0, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, 1u << 11, 0,
                                        0, 0xe6};
#if defined(TFM_CPU_AMX_STANDIN)
static const cpu_features cpu_amx = {0, 0, 0, 0, 1u << 5, 0xe6};
#else
/* and AVX512 BF16; AMX BF16, TILE, INT8; tiles saved. */
static const cpu_features cpu_amx = {0, 0, 0, 1u << 22 | 1u << 24 | 1u << 25, 1u << 5, 0x600e6};
#endif

static cpu_features cpu_detect(void) {
  cpu_features f = {0, 0, 0, 0, 0, 0};
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &f.leaf1_ecx, &d)) return f;
  if (f.leaf1_ecx & 1u << 27) __asm__ volatile("xgetbv" : "=a"(f.state), "=d"(d) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &f.leaf7_ebx, &f.leaf7_ecx, &f.leaf7_edx) || a < 1) return f;
  __get_cpuid_count(7, 1, &f.more_eax, &b, &c, &d);
  return f;
}

static bool cpu_has(cpu_features f, cpu_features wanted) {
  return !(wanted.leaf1_ecx & ~f.leaf1_ecx) && !(wanted.leaf7_ebx & ~f.leaf7_ebx) &&
         !(wanted.leaf7_ecx & ~f.leaf7_ecx) && !(wanted.leaf7_edx & ~f.leaf7_edx) &&
         !(wanted.more_eax & ~f.more_eax) && !(wanted.state & ~f.state);
}

/* The system saves tiles for processes that asked; its answer holds for all their threads. */
static bool cpu_tiles_permitted(void) {
#if defined(TFM_CPU_AMX_STANDIN) || !CPU_AMX
  return CPU_AMX;
#else
  enum { REQUEST = 0x1023, TILE_DATA = 18 };
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#endif
}

static bool cpu_has_amx(void) {
  cpu_features f = cpu_detect();
  return CPU_AMX && !TFM_CPU_AVX2_ONLY && cpu_has(f, cpu_avx2) && cpu_has(f, cpu_avx512) &&
         cpu_has(f, cpu_amx) && cpu_tiles_permitted();
}

/* ---- Products of bf16, in tiles ---- */

#if CPU_AMX
#define CPU_LEVEL avx512 /* V(...): what is taken from there */
CPU_TARGET_BEGIN("fma,f16c,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8")
#if defined(TFM_CPU_AMX_STANDIN)
#include TFM_CPU_AMX_STANDIN
#endif

/* A tile holds 16 rows of 64 bytes. One of a has 16 rows of 32 terms; one of b has 16 pairs of
   terms of 16 columns, so the terms of a pair lie side by side. b is packed so, each tile in one
   piece, by all threads; a too where it is used column by column (dw), else 32 rows at a time by
   the thread that multiplies them. 32 rows by 32 columns are four tiles of sums. Terms that are
   missing are zeros. An element's sum has the same order whatever the block, the item and the
   thread. */
enum {
  CPU_TILE_ROWS = 16,
  CPU_TERMS = 32,
  CPU_TILE_SIZE = 1024,
  CPU_GROUPS = 4,
  CPU_NEAR = 8 /* steps: so many of 32 rows of a stay in the first cache */
};

typedef struct cpu_tiled { /* a block of a product: these rows and columns of c, these terms */
  const cpu_gemm *t;
  int32_t row, rows, col, cols, k, depth;
  int32_t steps;     /* tiles along depth */
  int32_t wide;      /* columns of an item */
  uint8_t *a, *b;    /* [rows / 16][steps] and [cols / 16][steps] tiles; a NULL: by the items */
} cpu_tiled;

/* 16 floats, n of them there, which may be none. */
CPU_INLINE __m512 cpu_sixteen(const float *p, int32_t n) {
  if (n >= 16) return V(load)(p);
  return n > 0 ? V(load_some)(p, n) : _mm512_setzero_ps();
}

/* 32 terms of a row, n of them there: 16 pairs. */
CPU_INLINE __m512i cpu_pairs_along(const float *row, int32_t n) {
  if (!row) return _mm512_setzero_si512();
  return (__m512i)_mm512_cvtne2ps_pbh(cpu_sixteen(row + 16, n - 16), cpu_sixteen(row, n));
}

/* Each value beside its counterpart. */
CPU_INLINE __m512i cpu_pairs(__m512 low, __m512 high) {
  const __m512i deal = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
      3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(deal, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* Of 16 columns from col on, n of them there: a term of each, from one row, beside the next, from
   another. */
CPU_INLINE __m512i cpu_pairs_across(const float *first, const float *second, int32_t col,
                                    int32_t n) {
  return cpu_pairs(cpu_sixteen(first + col, first ? n : 0),
                   cpu_sixteen(second + col, second ? n : 0));
}

/* 16 vectors of 16 dwords are transposed: by pairs, by fours, then whole quarters. */
CPU_INLINE void cpu_turn_pairs(__m512i *v) {
  __m512i a[16], b[16];
  int i;
  for (i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  for (i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (i = 0; i < 4; i++) { /* column 4 q + i of all rows lies in the quarters q */
    __m512i even = _mm512_shuffle_i32x4(b[i], b[i + 4], 0x88);
    __m512i odd = _mm512_shuffle_i32x4(b[i], b[i + 4], 0xdd);
    __m512i even2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0x88);
    __m512i odd2 = _mm512_shuffle_i32x4(b[i + 8], b[i + 12], 0xdd);
    v[i] = _mm512_shuffle_i32x4(even, even2, 0x88);
    v[i + 4] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
    v[i + 8] = _mm512_shuffle_i32x4(even, even2, 0xdd);
    v[i + 12] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
  }
}

/* A row in memory of operand a, or b: of its terms, or of its rows or columns. */
CPU_INLINE const float *cpu_tiled_line(const cpu_gemm *t, bool a, int32_t i) {
  return a ? cpu_gemm_a(t, i) : cpu_gemm_b(t, i, 0);
}

/* Whether terms run along a row in memory, or from row to row. */
CPU_INLINE bool cpu_terms_run_along(const cpu_gemm *t, bool a) {
  return a ? t->form != CPU_DW : t->form == CPU_FORWARD;
}

CPU_INLINE void cpu_tile_store(uint8_t *to, const __m512i *v) {
  int i;
  for (i = 0; i < CPU_TILE_ROWS; i++) _mm512_store_si512(to + 64 * i, v[i]);
}

/* 16 lines of `depth` terms, NULL for zeros: their tiles, one after the other. */
static void cpu_lines_along(uint8_t *to, const float *const *line, int32_t depth, bool turn) {
  __m512i v[CPU_TILE_ROWS];
  int32_t k;
  int i;
  for (k = 0; k < depth; k += CPU_TERMS, to += CPU_TILE_SIZE) {
    for (i = 0; i < CPU_TILE_ROWS; i++)
      v[i] = cpu_pairs_along(line[i] ? line[i] + k : NULL, depth - k);
    if (turn) cpu_turn_pairs(v);
    cpu_tile_store(to, v);
  }
}

/* 32 lines that are terms of n columns: tiles of so many groups of 16, `group` bytes apart. */
static void cpu_lines_across(uint8_t *to, int64_t group, int32_t groups, const float *const *line,
                             int32_t n, bool turn) {
  __m512i v[CPU_TILE_ROWS];
  int32_t g;
  int i;
  for (g = 0; g < groups; g++, to += group) {
    for (i = 0; i < CPU_TILE_ROWS; i++)
      v[i] = cpu_pairs_across(line[2 * i], line[2 * i + 1], g * CPU_TILE_ROWS,
                              n - g * CPU_TILE_ROWS);
    if (turn) cpu_turn_pairs(v);
    cpu_tile_store(to, v);
  }
}

/* Rows or columns first .. first + n - 1, 16 at most, where terms run along: all their tiles. */
static void cpu_pack_along(uint8_t *to, const cpu_tiled *p, bool a, int32_t first, int32_t n) {
  const float *line[CPU_TILE_ROWS];
  int i;
  for (i = 0; i < CPU_TILE_ROWS; i++)
    line[i] = i < n ? cpu_tiled_line(p->t, a, first + i) + p->k : NULL;
  cpu_lines_along(to, line, p->depth, !a);
}

/* The same where terms run across, of four groups of 16, n rows or columns altogether. */
static void cpu_pack_across(uint8_t *to, const cpu_tiled *p, bool a, int32_t first, int32_t n) {
  const int64_t group = (int64_t)p->steps * CPU_TILE_SIZE;
  const float *line[CPU_TERMS];
  int32_t step;
  int i;
  for (step = 0; step < p->steps; step++, to += CPU_TILE_SIZE) {
    for (i = 0; i < CPU_TERMS; i++) {
      int32_t k = step * CPU_TERMS + i;
      line[i] = k < p->depth ? cpu_tiled_line(p->t, a, p->k + k) + first : NULL;
    }
    cpu_lines_across(to, group, CPU_GROUPS, line, n, a);
  }
}

/* Four groups of 16 rows or columns. */
static void cpu_pack_groups(const cpu_tiled *p, bool a, int32_t first) {
  const int32_t from = (a ? p->row : p->col) + first;
  const int32_t n = cpu_min(CPU_GROUPS * CPU_TILE_ROWS, (a ? p->rows : p->cols) - first);
  uint8_t *to = (a ? p->a : p->b) + (int64_t)(first / CPU_TILE_ROWS) * p->steps * CPU_TILE_SIZE;
  int32_t i;
  if (!cpu_terms_run_along(p->t, a)) cpu_pack_across(to, p, a, from, n);
  else
    for (i = 0; i < CPU_GROUPS; i++, to += (int64_t)p->steps * CPU_TILE_SIZE)
      cpu_pack_along(to, p, a, from + i * CPU_TILE_ROWS, n - i * CPU_TILE_ROWS);
}

static int32_t cpu_pack_items_of(int32_t n) { /* rows or columns */
  return cpu_shares(n, CPU_GROUPS * CPU_TILE_ROWS);
}

/* Items of b, then of a. */
static void cpu_pack_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_tiled *p = (const cpu_tiled *)context;
  int32_t of_b = cpu_pack_items_of(p->cols), i;
  (void)worker;
  for (i = begin; i < end; i++)
    cpu_pack_groups(p, i >= of_b, (i < of_b ? i : i - of_b) * CPU_GROUPS * CPU_TILE_ROWS);
}

/* Eight tiles: sums 0 to 3; a in 4 and 5, of so many bytes a row; b in 6 and 7. */
static void cpu_tiles_configure(int bytes) {
  uint8_t config[64] __attribute__((aligned(64))) = {1}; /* palette; [16]: bytes; [48]: rows */
  int i;
  for (i = 0; i < 8; i++) {
    config[16 + 2 * i] = (uint8_t)(i / 2 == 2 ? bytes : 64);
    config[48 + i] = (uint8_t)(i / 2 == 3 ? bytes / 4 : CPU_TILE_ROWS);
  }
  __asm__ volatile("" : : "r"(config) : "memory"); /* gcc 12 believes that 8 bytes are read */
  _tile_loadconfig(config);
}

static void cpu_tiles_begin(void) { cpu_tiles_configure(64); }

typedef struct cpu_walk { /* through tiles of an operand, in pairs, the second tile `next` away */
  const uint8_t *at;
  size_t next, step; /* bytes */
} cpu_walk;

/* Sums of 32 rows, or 16, and 32 columns: from out, of rows so many bytes apart, or from zero. */
CPU_INLINE void cpu_sums_begin(const float *out, size_t row, bool more, const bool both) {
  const uint8_t *at = (const uint8_t *)out, *below = at + CPU_TILE_ROWS * row;
  if (!more) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, at, row);
  _tile_loadd(1, at + 64, row);
  if (both) _tile_loadd(2, below, row);
  if (both) _tile_loadd(3, below + 64, row);
}

CPU_INLINE void cpu_sums_end(float *out, size_t row, const bool both) {
  uint8_t *at = (uint8_t *)out, *below = at + CPU_TILE_ROWS * row;
  _tile_stored(0, at, row);
  _tile_stored(1, at + 64, row);
  if (both) _tile_stored(2, below, row);
  if (both) _tile_stored(3, below + 64, row);
}

/* 16 rows of a; `past`: they take no room in the first cache. */
#define CPU_LOAD_ROWS(tile, at, past)                                      \
  do {                                                                     \
    if (past) _tile_stream_loadd(tile, at, 64);                            \
    else _tile_loadd(tile, at, 64);                                        \
  } while (0)

/* Sums += 32 terms: rows of a times columns of b. */
CPU_INLINE void cpu_sums_step(cpu_walk *a, cpu_walk *b, const bool both, const bool past) {
  CPU_LOAD_ROWS(4, a->at, past);
  _tile_loadd(6, b->at, 64);
  if (both) CPU_LOAD_ROWS(5, a->at + a->next, past);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b->at + b->next, 64);
  if (both) _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(1, 4, 7);
  if (both) _tile_dpbf16ps(3, 5, 7);
  a->at += a->step, b->at += b->step;
}

/* out [32][32], of rows so many bytes apart, (+)= 32 rows of a times 32 columns of b. */
CPU_INLINE void cpu_tiles_multiply(float *out, size_t row, cpu_walk a, cpu_walk b, int32_t steps,
                                   bool more) {
  cpu_sums_begin(out, row, more, true);
  for (; steps; steps--) cpu_sums_step(&a, &b, true, false);
  cpu_sums_end(out, row, true);
}

/* Where the sums of 32 rows will go to is asked for. */
static void cpu_tiles_expect(const cpu_tiled *p, int32_t row, int32_t rows, int32_t col,
                             int32_t cols) {
  int32_t i, j;
  for (i = 0; i < rows; i++) {
    float *c = cpu_row(p->t->c, cpu_gemm_c(p->t, p->row + row + i)) + p->col + col;
    for (j = 0; j < cols; j += CPU_ALIGN / 4) __builtin_prefetch(c + j, 1);
  }
}

static int32_t cpu_tiled_rows(const cpu_tiled *p) { return cpu_panels(p->rows); }

/* The tiles of 32 rows of a: packed by all threads, or now. */
static const uint8_t *cpu_tiles_of_a(const cpu_tiled *p, int32_t row, int32_t worker) {
  const int64_t group = (int64_t)p->steps * CPU_TILE_SIZE;
  uint8_t *own = cpu_quantised_at(p->t->d) + (size_t)worker * CPU_TRAIN_BYTES;
  if (p->a) return p->a + row / CPU_TILE_ROWS * group;
  cpu_pack_along(own, p, true, p->row + row, p->rows - row);
  cpu_pack_along(own + group, p, true, p->row + row + CPU_TILE_ROWS,
                 p->rows - row - CPU_TILE_ROWS);
  return own;
}

/* 32 rows of a times columns col .. col + cols - 1, as many as an item may have at a time. */
static void cpu_tiles_run(const cpu_tiled *p, const uint8_t *a, float *out, int32_t row,
                          int32_t col, int32_t cols) {
  const int64_t group = (int64_t)p->steps * CPU_TILE_SIZE;
  int32_t rows = cpu_min(CPU_ROWS, p->rows - row), i, k;
  cpu_walk x = {a, (size_t)group, CPU_TILE_SIZE}, w = x;
  cpu_tiles_expect(p, row, rows, col, cols);
  for (k = 0; k < p->steps; k += CPU_NEAR)
    for (i = 0; i < cols; i += CPU_ROWS) {
      x.at = a + k * CPU_TILE_SIZE;
      w.at = p->b + (col + i) / CPU_TILE_ROWS * group + k * CPU_TILE_SIZE;
      cpu_tiles_multiply(out + i, CPU_ABREAST * sizeof *out, x, w, cpu_min(CPU_NEAR, p->steps - k),
                         k > 0);
    }
  for (i = 0; i < rows; i++)
    V(finish)(p->t, cpu_gemm_c(p->t, p->row + row + i), p->col + col, out + i * CPU_ABREAST, cols);
}

/* Items are (some columns, 32 rows), rows running fastest, so that b's part stays near. */
static void cpu_tiles_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_tiled *p = (const cpu_tiled *)context;
  float *out = (float *)(void *)((uint8_t *)p->t->d->work + (size_t)worker * CPU_TILE_BYTES);
  int32_t item, row, col, last;
  const uint8_t *a;
  cpu_tiles_begin();
  for (item = begin; item < end; item++) {
    row = item % cpu_tiled_rows(p) * CPU_ROWS;
    col = item / cpu_tiled_rows(p) * p->wide;
    last = cpu_min(col + p->wide, p->cols);
    a = cpu_tiles_of_a(p, row, worker);
    for (; col < last; col += CPU_ABREAST)
      cpu_tiles_run(p, a, out, row, col, cpu_min(CPU_ABREAST, last - col));
  }
  _tile_release();
}

/* Columns of an item: what of b stays in the second cache, but several items for each thread. */
static int32_t cpu_tiles_wide(const cpu_tiled *p) {
  int32_t panels = cpu_min(cpu_panels(p->cols), CPU_SIDE / 4 / (2 * CPU_TILE_SIZE) / p->steps);
  while (panels > 1 && cpu_tiled_rows(p) * (cpu_panels(p->cols) / panels) < 3 * p->t->d->threads)
    panels = (panels + 1) / 2;
  return (panels > 0 ? panels : 1) * CPU_ROWS;
}

/* packed: whether what of a is packed beforehand is already. */
static void cpu_tiles_block(cpu_tiled *p, bool packed) {
  tfm_dev *d = p->t->d;
  int32_t of_a = packed || p->t->form != CPU_DW ? 0 : cpu_pack_items_of(p->rows);
  p->steps = cpu_shares(p->depth, CPU_TERMS);
  p->b = cpu_quantised_at(d) + (size_t)d->threads * CPU_TRAIN_BYTES;
  p->a = p->t->form == CPU_DW ? p->b + CPU_SIDE : NULL;
  p->wide = cpu_tiles_wide(p);
  tfm_parallel_for(d, cpu_pack_items_of(p->cols) + of_a, 1, cpu_pack_items, p);
  tfm_parallel_for(d, cpu_tiled_rows(p) * cpu_shares(p->cols, p->wide), 1, cpu_tiles_items, p);
}

/* Rows, or columns, of as many terms that fit a side: whole items of packing. */
static int32_t cpu_side_lines(int32_t depth) {
  const int32_t item = CPU_GROUPS * CPU_TILE_ROWS;
  int64_t bytes = (int64_t)(depth + CPU_TERMS - 1) / CPU_TERMS * CPU_TERMS * 2 * item;
  return (int32_t)(CPU_SIDE / bytes) * item;
}

/* False: its operands are not floats in rows, or too long. */
static bool cpu_tiles_gemm(tfm_dev *d, const cpu_gemm *g) {
  int32_t deepest = g->form == CPU_FORWARD ? g->depth : cpu_min(g->depth, CPU_DEEP);
  int32_t most = cpu_side_lines(deepest);
  cpu_gemm t = *g;
  cpu_tiled p;
  if (most == 0 || deepest > CPU_TRAIN_BYTES / (2 * CPU_ROWS) - CPU_TERMS) return false;
  if (g->w && !cpu_weight_floats(g->w, g->first, 0)) return false;
  t.d = d;
  p.t = &t;
  for (p.k = 0; p.k < g->depth; p.k += p.depth) {
    p.depth = cpu_min(deepest, g->depth - p.k);
    t.beta = p.k ? 1 : g->beta;
    t.e = p.k + p.depth == g->depth ? g->e : NULL;
    for (p.row = 0; p.row < g->rows; p.row += p.rows) {
      p.rows = cpu_min(most, g->rows - p.row);
      for (p.col = 0; p.col < g->cols; p.col += p.cols) {
        p.cols = cpu_min(most, g->cols - p.col);
        cpu_tiles_block(&p, p.col > 0);
      }
    }
  }
  return true;
}

/* ---- Attention in tiles ----
   Of prompts and of training. As vectors compute it (see there), but scores, and what becomes of
   them, are [keys, queries]: a softmax then runs down vectors of 16 queries, and what it leaves is
   an operand of the products that follow with no more than rounding to bf16. So these give y and dq
   transposed. A block is 128 queries: of some rows, all heads that share one of keys. It meets 128
   keys at a time, from multiples of 128 on, or 32 in backward. Scores, sums and the softmax are
   F32. What a query does not see adds zeros: its bits do not depend on its block. */

enum {
  CPU_LOOK = 128,                        /* queries of a block, keys of forward's */
  CPU_LOOK_STEPS = CPU_LOOK / CPU_TERMS, /* where these are terms */
  CPU_LOOK_ROWS = CPU_LOOK * CPU_WIDTH * 2, /* bytes that they take as tiles, at most */
  CPU_LOOK_FEW = 16 /* rows of a sequence in a pass; fewer are not worth it, and stay F32 */
};

typedef struct cpu_look { /* a thread's memory; heads have `wide` columns, whole tiles */
  int32_t wide, n, row, at, head, begin; /* queries of the block; the first's row and position; head
                                            of keys, first key */
  uint8_t *queries, *dys;          /* [128 / 16][wide / 32] tiles: columns of scores, and of dp */
  uint8_t *query_terms, *dy_terms; /* [wide / 16][4]: columns of dk and dv */
  uint8_t *keys, *values;          /* [keys / 16][wide / 32]: rows of scores, and of dp */
  uint8_t *turned;                 /* [wide / 16][steps of keys]: values for y, keys for dq: rows */
  uint8_t *p, *ds, *terms; /* [32 / 16][4]: rows for dv, dk; [queries / 16][steps]: columns */
  float *score, *dp;       /* [keys][32], of 32 queries at a time; in backward [32][128] */
  float *out, *dk, *dv;    /* y or dq: [128 / 32][wide][32]; [32][wide] */
  float *room;             /* [128][CPU_WIDTH]: keys or values of a cache that is not F32 */
  /* of each query: its largest score so far, or -lse; the sum so far, or -delta; keys it sees */
  float top[CPU_LOOK], sum[CPU_LOOK];
  int32_t first[CPU_LOOK], last[CPU_LOOK];
} cpu_look;

static cpu_look cpu_look_at(const cpu_attn_bwd_job *t, int32_t worker) {
  uint8_t *at = t->work + (size_t)worker * CPU_TRAIN_BYTES;
  cpu_look k;
  k.wide = cpu_panels(t->attn.kv->width) * CPU_ROWS;
  k.queries = at, k.dys = at += CPU_LOOK_ROWS;
  k.query_terms = at += CPU_LOOK_ROWS, k.dy_terms = at += CPU_LOOK_ROWS;
  k.room = (float *)(void *)k.query_terms; /* forward has none of these */
  k.keys = at += CPU_LOOK_ROWS, k.values = k.keys + CPU_LOOK_ROWS / 2;
  k.turned = at += CPU_LOOK_ROWS;
  k.terms = at += CPU_LOOK_ROWS, k.p = at += 2 * CPU_LOOK * CPU_ROWS;
  k.ds = at += 2 * CPU_ROWS * CPU_LOOK;
  k.score = (float *)(void *)(at += 2 * CPU_ROWS * CPU_LOOK);
  k.dp = k.score + CPU_ROWS * CPU_LOOK;
  k.out = k.dp + CPU_ROWS * CPU_LOOK;
  k.dk = k.out + CPU_WIDTH * CPU_LOOK, k.dv = k.dk + CPU_ROWS * CPU_WIDTH;
  return k;
}

/* Where query j of the block lies in a matrix of rows of all heads. */
static int64_t cpu_look_query(const cpu_look *k, const cpu_attn_job *t, tfm_mat m, int32_t j) {
  const int32_t head = k->head * t->group + j % t->group;
  return (k->row + j / t->group) * m.stride + head * t->kv->width;
}

typedef struct cpu_lines { /* rows of a head, NULL where there are no more */
  const float *at[CPU_LOOK];
  int32_t n, width;
} cpu_lines;

static cpu_lines cpu_lines_of(int32_t n, int32_t width) {
  cpu_lines x;
  memset(x.at, 0, sizeof x.at);
  x.n = n, x.width = width;
  return x;
}

static cpu_lines cpu_query_lines(const cpu_look *k, const cpu_attn_job *t, tfm_mat m) {
  cpu_lines x = cpu_lines_of(k->n, t->kv->width);
  int32_t j;
  for (j = 0; j < x.n; j++) x.at[j] = cpu_row(m, 0) + cpu_look_query(k, t, m, j);
  return x;
}

/* n keys, or values, of a run's head from position `base` on. */
static cpu_lines cpu_key_lines(const cpu_look *k, const cpu_attn_job *t, const cpu_run *run,
                               int32_t base, int32_t n, bool value) {
  const tfm_type type = cpu_kv_type(t->kv);
  cpu_lines x = cpu_lines_of(n, t->kv->width);
  int32_t i;
  for (i = 0; i < n; i++) {
    const uint8_t *from = cpu_kv_at(t->kv, run, base + i, value);
    x.at[i] = type == TFM_F32 ? (const float *)(const void *)from : k->room + i * CPU_WIDTH;
    if (type != TFM_F32) V(widen)(k->room + i * CPU_WIDTH, from, type, x.width);
  }
  return x;
}

/* Rows as rows, or turned as columns, of a product over a head's columns: whole pairs of tiles. */
static void cpu_look_along(uint8_t *to, const cpu_lines *x, bool turn) {
  int32_t row;
  for (row = 0; row < cpu_panels(x->n) * CPU_ROWS; row += CPU_TILE_ROWS) {
    cpu_lines_along(to, x->at + row, x->width, turn);
    to += cpu_panels(x->width) * CPU_TILE_SIZE;
  }
}

/* Rows as terms of a product whose columns, or turned rows, are the head's: `steps` from group to
   group of 16 of these. */
static void cpu_look_across(uint8_t *to, const cpu_lines *x, int32_t steps, bool turn) {
  int32_t row;
  for (row = 0; row < x->n; row += CPU_TERMS, to += CPU_TILE_SIZE)
    cpu_lines_across(to, (int64_t)steps * CPU_TILE_SIZE, 2 * cpu_panels(x->width), x->at + row,
                     x->width, turn);
}

typedef struct cpu_side { /* tiles of an operand: [groups of 16][stride], from some step on */
  const uint8_t *at;
  int32_t stride;
} cpu_side;

/* out [rows][cols], `stride` floats from row to row, (+)= a b: so many steps. */
static void cpu_look_product(float *out, int32_t stride, int32_t rows, int32_t cols, cpu_side a,
                             cpu_side b, int32_t steps, bool more) {
  cpu_walk x = {a.at, (size_t)a.stride * CPU_TILE_SIZE, CPU_TILE_SIZE}, w = x;
  int32_t i, j;
  w.next = (size_t)b.stride * CPU_TILE_SIZE;
  for (i = 0; i < rows; i += CPU_ROWS, x.at += 2 * x.next)
    for (j = 0, w.at = b.at; j < cols; j += CPU_ROWS, w.at += 2 * w.next)
      cpu_tiles_multiply(out + i * stride + j, (size_t)stride * sizeof *out, x, w, steps, more);
}

/* Which of 16 queries from number j on see a key. */
CPU_INLINE __mmask16 cpu_look_sees(const cpu_look *k, int32_t j, int32_t key) {
  const __m512i at = _mm512_set1_epi32(key);
  return _mm512_cmple_epi32_mask(at, _mm512_loadu_si512(k->last + j)) &
         _mm512_cmpge_epi32_mask(at, _mm512_loadu_si512(k->first + j));
}

/* Keys from `base` on, n at most, that all of these queries see. */
static int32_t cpu_look_all(const cpu_look *k, int32_t j, int32_t base, int32_t n) {
  return k->first[j + CPU_TILE_ROWS - 1] > base ? 0 : cpu_min(n, k->last[j] + 1 - base);
}

/* Queries with those that fill whole tiles. */
static int32_t cpu_look_cols(const cpu_look *k) { return cpu_panels(k->n) * CPU_ROWS; }

/* A block of some rows of a run, from number `first` on. It will meet keys from a multiple on. */
static void cpu_look_begin(cpu_look *k, const cpu_attn_job *t, const cpu_run *run, int32_t first,
                           int32_t rows, int32_t multiple) {
  cpu_lines queries;
  int32_t j;
  k->n = rows * t->group;
  k->row = run->row + first;
  k->at = run->pos + first;
  k->head = run->head;
  k->begin = cpu_first_key(t->p, k->at) / multiple * multiple;
  for (j = 0; j < cpu_look_cols(k); j++) {
    k->last[j] = k->at + j / t->group;
    k->first[j] = cpu_first_key(t->p, k->last[j]);
  }
  queries = cpu_query_lines(k, t, t->q);
  cpu_look_along(k->queries, &queries, true);
}

/* What lies transposed in `out`, of 32 queries from j on. */
static float *cpu_look_out(const cpu_look *k, int32_t j) {
  return k->out + j / CPU_ROWS * k->wide * CPU_ROWS;
}

/* Rows of y or dq become that, over `divisor` or as it is. */
static void cpu_look_end(const cpu_look *k, const cpu_attn_job *t, tfm_mat y,
                         const float *divisor) {
  const int32_t width = t->kv->width;
  int32_t j, d, i;
  for (j = 0; j < k->n; j += CPU_TILE_ROWS)
    for (d = 0; d < width; d += CPU_TILE_ROWS) {
      const float *out = cpu_look_out(k, j) + d * CPU_ROWS + j % CPU_ROWS;
      __m512i v[CPU_TILE_ROWS];
      for (i = 0; i < CPU_TILE_ROWS; i++) {
        __m512 x = V(load)(out + i * CPU_ROWS);
        v[i] = _mm512_castps_si512(divisor ? V(div)(x, V(load)(divisor + j)) : x);
      }
      cpu_turn_pairs(v);
      for (i = 0; i < CPU_TILE_ROWS && j + i < k->n; i++)
        V(store_some)(cpu_row(y, 0) + cpu_look_query(k, t, y, j + i) + d,
                      _mm512_castsi512_ps(v[i]), width - d);
    }
}

/* cap tanh(score scale / cap), of n keys and 32 queries. */
static void cpu_look_cap(float *score, int32_t n, float scale, float cap) {
  int32_t i;
  for (i = 0; i < n * CPU_ROWS; i += CPU_TILE_ROWS) {
    V(vec) e = V(sigmoid)(V(mul)(V(load)(score + i), V(all)(2 * scale / cap)));
    V(store)(score + i, V(fma)(e, V(all)(2 * cap), V(all)(-cap)));
  }
}

/* Score times `by` of key i from `base` on, or minus infinity where a query does not see it; all of
   the first `all` are seen. */
CPU_INLINE V(vec) cpu_look_score(const cpu_look *k, V(vec) by, int32_t j, int32_t base, int32_t i,
                                 int32_t all) {
  V(vec) s = V(mul)(V(load)(k->score + i * CPU_ROWS + j % CPU_ROWS), by);
  if (i < all) return s;
  return _mm512_mask_mov_ps(V(all)(-INFINITY), cpu_look_sees(k, j, base + i), s);
}

/* Scores of n keys from `base` on with 16 queries become exponentials, terms of y; what was summed
   up of y shrinks where a score is larger than those before. */
static void cpu_look_softmax(cpu_look *k, float scale, int32_t j, int32_t base, int32_t n) {
  const int32_t all = cpu_look_all(k, j, base, n);
  const V(vec) by = V(all)(scale), was = V(load)(k->top + j);
  V(vec) top[2] = {was, was}, sum[2], shrink, minus, e[2];
  uint8_t *to = k->terms + j % CPU_ROWS / CPU_TILE_ROWS * CPU_LOOK_STEPS * CPU_TILE_SIZE;
  float *out = cpu_look_out(k, j) + j % CPU_ROWS;
  int32_t i, d;
  for (i = 0; i < n; i++) top[i % 2] = V(max)(cpu_look_score(k, by, j, base, i, all), top[i % 2]);
  top[0] = V(max)(top[0], top[1]);
  minus = V(mul)(top[0], V(all)(-1.0f));
  shrink = V(exp)(V(add)(was, minus));
  sum[0] = V(mul)(V(load)(k->sum + j), shrink), sum[1] = V(all)(0.0f);
  for (i = 0; i < n; i += 2) {
    for (d = 0; d < 2; d++) {
      e[d] = V(exp)(V(add)(cpu_look_score(k, by, j, base, i + d, all), minus));
      sum[d] = V(add)(sum[d], e[d]);
    }
    _mm512_store_si512(to + i / CPU_TERMS * CPU_TILE_SIZE + i % CPU_TERMS / 2 * 64,
                       cpu_pairs(e[0], e[1]));
  }
  V(store)(k->top + j, top[0]);
  V(store)(k->sum + j, V(add)(sum[0], sum[1]));
  if (base == k->begin || !_mm512_cmp_ps_mask(was, top[0], _CMP_LT_OQ)) return;
  for (d = 0; d < k->wide; d++, out += CPU_ROWS) V(store)(out, V(mul)(V(load)(out), shrink));
}

/* Of `keys` keys from `base` on, those, in whole tiles, that some of 32 queries from j on see. */
static int32_t cpu_look_seen(const cpu_look *k, int32_t j, int32_t base, int32_t keys) {
  return cpu_panels(cpu_min(keys, k->last[j + CPU_ROWS - 1] + 1 - base)) * CPU_ROWS;
}

/* A block meets keys from `base` on: 32 queries after the other, whose scores stay near. */
static void cpu_look_meet(const cpu_attn_job *t, cpu_look *k, const cpu_run *run, int32_t base) {
  const int32_t keys = cpu_min(CPU_LOOK, k->last[k->n - 1] + 1 - base);
  const int32_t steps = cpu_panels(t->kv->width);
  const float cap = t->p->softcap;
  const cpu_side rows = {k->keys, steps}, values = {k->turned, CPU_LOOK_STEPS};
  const cpu_side terms = {k->terms, CPU_LOOK_STEPS};
  cpu_side queries = {k->queries, steps};
  cpu_lines lines = cpu_key_lines(k, t, run, base, keys, false);
  int32_t j, seen;
  cpu_look_along(k->keys, &lines, false);
  lines = cpu_key_lines(k, t, run, base, keys, true);
  cpu_look_across(k->turned, &lines, CPU_LOOK_STEPS, true);
  for (j = 0; j < cpu_look_cols(k); j += CPU_ROWS, queries.at += 2 * steps * CPU_TILE_SIZE) {
    seen = cpu_look_seen(k, j, base, keys);
    if (seen <= 0) continue;
    cpu_look_product(k->score, CPU_ROWS, seen, CPU_ROWS, rows, queries, steps, false);
    if (cap != 0) cpu_look_cap(k->score, seen, t->p->scale, cap);
    cpu_look_softmax(k, cap != 0 ? 1 : t->p->scale, j, base, seen);
    cpu_look_softmax(k, cap != 0 ? 1 : t->p->scale, j + CPU_TILE_ROWS, base, seen);
    cpu_look_product(cpu_look_out(k, j), CPU_ROWS, k->wide, CPU_ROWS, values, terms,
                     seen / CPU_TERMS, base > k->begin);
  }
}

/* y, and lse, of some rows of a run, from number `first` on. */
static void cpu_look_forward(const cpu_attn_job *t, cpu_look *k, const cpu_run *run, int32_t first,
                             int32_t rows) {
  int32_t base, j;
  cpu_look_begin(k, t, run, first, rows, CPU_LOOK);
  for (j = 0; j < CPU_LOOK; j++) k->top[j] = -3e38f, k->sum[j] = 0;
  for (base = k->begin; base < k->at + rows; base += CPU_LOOK) cpu_look_meet(t, k, run, base);
  cpu_look_end(k, t, t->y, k->sum);
  for (j = 0; j < k->n && t->lse; j++)
    t->lse[(int64_t)(k->row + j / t->group) * t->p->heads + k->head * t->group + j % t->group] =
        k->top[j] + logf(k->sum[j]);
}

/* Scores and dp of 32 keys from `base` on with 16 queries become p and ds. */
static void cpu_look_slopes(const cpu_look *k, float scale, int32_t j, int32_t base) {
  const V(vec) by = V(all)(scale), lse = V(load)(k->top + j), delta = V(load)(k->sum + j);
  const int32_t all = cpu_look_all(k, j, base, CPU_ROWS), col = j % CPU_TERMS * 2;
  uint8_t *terms = k->terms + j / CPU_TILE_ROWS * CPU_TILE_SIZE;
  const int64_t tile = j / CPU_TERMS * CPU_TILE_SIZE + col;
  int32_t i, r;
  for (i = 0; i < CPU_ROWS; i += 2) {
    V(vec) ds[2];
    for (r = i; r < i + 2; r++) {
      const int64_t at = tile + r / CPU_TILE_ROWS * CPU_LOOK_STEPS * CPU_TILE_SIZE +
                         r % CPU_TILE_ROWS * 64;
      V(vec) p = V(exp)(V(fma)(V(load)(k->score + r * CPU_LOOK + j), by, lse));
      V(vec) d = V(mul)(V(add)(V(load)(k->dp + r * CPU_LOOK + j), delta), by);
      if (r >= all) p = _mm512_maskz_mov_ps(cpu_look_sees(k, j, base + r), p);
      ds[r % 2] = V(mul)(p, d);
      _mm256_store_si256((__m256i *)(void *)(k->p + at), (__m256i)_mm512_cvtneps_pbh(p));
      _mm256_store_si256((__m256i *)(void *)(k->ds + at), (__m256i)_mm512_cvtneps_pbh(ds[r % 2]));
    }
    _mm512_store_si512(terms + i / 2 * 64, cpu_pairs(ds[0], ds[1]));
  }
}

/* Rows row .. row + n - 1 of a head's columns grow by x [n][wide]. */
static void cpu_look_add(tfm_mat y, int32_t row, int32_t n, int32_t col, int32_t width,
                         const float *x, int32_t wide) {
  int32_t i, j;
  for (i = 0; i < n; i++, x += wide) {
    float *to = cpu_row(y, row + i) + col;
    for (j = 0; j < width; j += CPU_TILE_ROWS)
      V(store_some)(to + j, V(add)(V(load_some)(to + j, width - j), V(load)(x + j)), width - j);
  }
}

/* A block meets 32 keys from `base` on: parts of dq, dk and dv. */
static void cpu_look_back_at(const cpu_attn_bwd_job *t, cpu_look *k, const cpu_run *run,
                             int32_t base) {
  const cpu_attn_job *a = &t->attn;
  const int32_t width = a->kv->width, keys = cpu_min(CPU_ROWS, run->rows - base), head = run->head;
  const int32_t first = base > k->at ? (base - k->at) * a->group / CPU_ROWS * CPU_ROWS : 0;
  const int32_t cols = cpu_look_cols(k), of_head = cpu_panels(width);
  const int32_t steps = (cols - first) / CPU_TERMS;
  const int64_t from = first / CPU_TERMS * CPU_TILE_SIZE;
  cpu_lines key = cpu_key_lines(k, a, run, base, keys, false);
  cpu_lines value = cpu_key_lines(k, a, run, base, keys, true);
  cpu_side q = {k->queries + from * 2 * of_head, of_head}, dy = q, rows = {k->keys, of_head};
  cpu_side p = {k->p + from, CPU_LOOK_STEPS}, ds = p, to_dv = p, to_dk = p, values = rows;
  cpu_side turned = {k->turned, 1}, to_dq = {k->terms + 2 * from, 1};
  int32_t j;
  values.at = k->values, dy.at = k->dys + from * 2 * of_head, ds.at = k->ds + from;
  to_dv.at = k->dy_terms + from, to_dk.at = k->query_terms + from;
  cpu_look_along(k->keys, &key, false);
  cpu_look_along(k->values, &value, false);
  cpu_look_across(k->turned, &key, 1, true);
  cpu_look_product(k->score + first, CPU_LOOK, CPU_ROWS, cols - first, rows, q, of_head, false);
  cpu_look_product(k->dp + first, CPU_LOOK, CPU_ROWS, cols - first, values, dy, of_head, false);
  for (j = first; j < cols; j += CPU_TILE_ROWS) cpu_look_slopes(k, a->p->scale, j, base);
  cpu_look_product(k->dv, k->wide, CPU_ROWS, k->wide, p, to_dv, steps, false);
  cpu_look_product(k->dk, k->wide, CPU_ROWS, k->wide, ds, to_dk, steps, false);
  for (j = first; j < cols; j += CPU_ROWS, to_dq.at += 2 * CPU_TILE_SIZE)
    cpu_look_product(cpu_look_out(k, j), CPU_ROWS, k->wide, CPU_ROWS, turned, to_dq, 1,
                     base > k->begin);
  cpu_look_add(t->dk, run->row + base, keys, head * width, width, k->dk, k->wide);
  cpu_look_add(t->dv, run->row + base, keys, head * width, width, k->dv, k->wide);
}

/* A block of some rows: dq, and its parts of dk and dv. */
static void cpu_look_back_block(const cpu_attn_bwd_job *t, cpu_look *k, const cpu_run *run,
                                int32_t first, int32_t rows) {
  const cpu_attn_job *a = &t->attn;
  cpu_lines q, dy;
  int32_t j, base;
  cpu_look_begin(k, a, run, first, rows, CPU_ROWS);
  q = cpu_query_lines(k, a, a->q), dy = cpu_query_lines(k, a, t->dy);
  cpu_look_along(k->dys, &dy, true);
  cpu_look_across(k->query_terms, &q, CPU_LOOK_STEPS, false);
  cpu_look_across(k->dy_terms, &dy, CPU_LOOK_STEPS, false);
  for (j = 0; j < cpu_look_cols(k); j++) {
    const int32_t row = k->row + j / a->group, head = k->head * a->group + j % a->group;
    k->top[j] = j < k->n ? -a->lse[(int64_t)row * a->p->heads + head] : 0;
    k->sum[j] = j < k->n ? -V(attn_delta)(t, row, head) : 0;
  }
  for (base = k->begin; base < k->at + rows; base += CPU_ROWS) cpu_look_back_at(t, k, run, base);
  cpu_look_end(k, a, t->dq, NULL);
}

/* Rows of a run that are worked off together. In backward they are all of one item. */
static int32_t cpu_look_rows(const cpu_attn_bwd_job *t, const cpu_run *run) {
  const bool few = t->attn.kv->table && run->rows < CPU_LOOK_FEW;
  const int32_t queries = few ? (int32_t)CPU_QUERIES : (int32_t)CPU_LOOK;
  return queries / t->attn.group;
}

static int32_t cpu_look_items_of(const cpu_attn_bwd_job *t, const cpu_run *run) {
  const int32_t rows = cpu_look_rows(t, run);
  return t->dy.data ? 1 : cpu_shares(run->rows, rows);
}

static void cpu_look_backward(const cpu_attn_bwd_job *t, cpu_look *k, const cpu_run *run) {
  const int32_t rows = cpu_look_rows(t, run);
  int32_t first;
  V(attn_bwd_clear)(t, run);
  for (first = 0; first < run->rows; first += rows)
    cpu_look_back_block(t, k, run, first, cpu_min(rows, run->rows - first));
}

/* Item `item` of a run's, by turns from the front and from the back: where they take longer. */
static void cpu_look_item(const cpu_attn_bwd_job *t, cpu_look *k, const cpu_run *run, int32_t item,
                          int32_t worker) {
  const int32_t each = cpu_look_rows(t, run), last = cpu_look_items_of(t, run) - 1;
  const int32_t first = (item % 2 ? last - item / 2 : item / 2) * each;
  const int32_t rows = cpu_min(each, run->rows - first);
  cpu_run part = *run;
  if (t->dy.data) {
    cpu_look_backward(t, k, run);
  } else if (t->attn.kv->table && run->rows < CPU_LOOK_FEW) {
    part.row += first, part.pos += first, part.rows = rows;
    V(attn_run)(&t->attn, &part, worker);
  } else cpu_look_forward(&t->attn, k, run, first, rows);
}

/* Items are (head of keys, some rows of a run), rows running fastest. */
static void cpu_look_items(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_attn_bwd_job *t = (const cpu_attn_bwd_job *)context;
  const tfm_rows *rows = t->attn.rows;
  cpu_look k = cpu_look_at(t, worker);
  int32_t item, row, i;
  cpu_run run;
  cpu_tiles_begin();
  for (run.head = begin / t->items; run.head * t->items < end; run.head++)
    for (item = run.head * t->items, row = 0; item < end && cpu_run_next(&run, rows, row, rows->n);
         row = run.row + run.rows)
      for (i = 0; i < cpu_look_items_of(t, &run); i++, item++)
        if (item >= begin && item < end) cpu_look_item(t, &k, &run, i, worker);
  _tile_release();
}

/* False: every sequence has few rows, of a cache; or they are trained with a cap on scores, whose
   backward only vectors know. */
static bool cpu_tiles_attn(tfm_dev *d, cpu_attn_bwd_job *t) {
  const tfm_rows *rows = t->attn.rows;
  int32_t row = 0, longest = 0;
  cpu_run run;
  if (!t->attn.kv->table && t->attn.p->softcap != 0) return false;
  for (t->items = 0; cpu_run_next(&run, rows, row, rows->n); row = run.row + run.rows) {
    t->items += cpu_look_items_of(t, &run);
    if (run.rows > longest) longest = run.rows;
  }
  if (t->attn.kv->table && longest < CPU_LOOK_FEW) return false;
  t->work = cpu_quantised_at(d);
  cpu_parallel_for(d, t->items * t->attn.kv->heads, 1, cpu_look_items, t);
  return true;
}

/* ---- Prompts and batches, in tiles ----
   x and W are rounded to bf16, W of whatever type but F32. A panel of W waits as tiles while all
   rows of x pass by, 32 at a time: as many as stay in the second cache, if they have no more than
   2,048 columns. Longer rows are cut into parts. A part of a panel stays in the first cache, the
   same part of x in the second, and sums of several panels wait in a thread's memory for the next.
   While tiles multiply, vectors do the rest, a little in each step: they unpack the panel or part
   that comes next, and sums of the panels before become y. An element's sum has the same order
   whatever is cut how. */

enum { CPU_UNIT = 4 }; /* columns of a panel that are unpacked together */

/* Dword u of 32 columns of blocks, of 16 rows: see V(numbers), where u is a constant. */
CPU_INLINE __m512i cpu_unit_numbers(const uint8_t *w, int u, int j, const int type) {
  const struct cpu_layout *l = &cpu_layouts[type];
  const uint8_t *high = w + CPU_ROWS * l->byte + 64 * j, *low = high + 4 * CPU_ROWS * l->high;
  const int bit = l->high == 2 ? u % 4 * 2 : u;
  __m512i q, h;
  if (l->low == 8) return _mm512_loadu_si512(low + 4 * CPU_ROWS * u);
  q = _mm512_srlv_epi32(_mm512_loadu_si512(low + 4 * CPU_ROWS * (u % 4)),
                        _mm512_set1_epi32(u / 4 * 4));
  q = _mm512_and_si512(q, _mm512_set1_epi8(15));
  if (l->high == 0) return q;
  h = _mm512_loadu_si512(high + (l->high == 2 ? u / 4 * 4 * CPU_ROWS : 0));
  h = _mm512_rolv_epi32(h, _mm512_set1_epi32((4 - bit) & 31));
  return _mm512_or_si512(q, _mm512_and_si512(h, _mm512_set1_epi8(l->high == 2 ? 0x30 : 0x10)));
}

/* scale 256 (1 + number / 256) + rest, of a number that lies in bits 15 to 22, where a float has
   the first eight of its fraction. */
CPU_INLINE __m512 cpu_unit_value(__m512i number, __m512 scale, __m512 rest) {
  const __m512i one = _mm512_set1_epi32(0x3f800000), bits = _mm512_set1_epi32(0x7f8000);
  __m512i x = _mm512_ternarylogic_epi32(number, bits, one, 0xea); /* number & bits | one */
  return _mm512_fmadd_ps(_mm512_castsi512_ps(x), scale, rest);
}

/* Columns 4 unit to 4 unit + 3 of a panel in blocks: two lines of each of two tiles. */
CPU_INLINE void cpu_unit_of_blocks(uint8_t *to, const uint8_t *w, int32_t unit, const int type) {
  const int u = unit % 8, half = V(halved)(type) ? u / 4 : 0;
  const float shift = -256.0f - (float)cpu_more(type);
  const uint8_t *front, *at = cpu_piece_at(&front, w, type, unit / 8);
  int j;
  __builtin_prefetch(at + 2 * CPU_AHEAD + 128 * u);
  __builtin_prefetch(at + 2 * CPU_AHEAD + 128 * u + 64);
  for (j = 0; j < 2; j++, to += CPU_TILE_SIZE) {
    const __m512 low = V(has_low)(type) ? V(scales)(front, at, type, 2, j) : _mm512_setzero_ps();
    __m512 scale = V(scales)(front, at, type, half, j);
    const __m512 rest = _mm512_fmadd_ps(scale, _mm512_set1_ps(shift), low);
    const __m512i q = cpu_unit_numbers(at, u, j, type);
    scale = _mm512_mul_ps(scale, _mm512_set1_ps(256));
    _mm512_store_si512(to, cpu_pairs(cpu_unit_value(_mm512_slli_epi32(q, 15), scale, rest),
                                     cpu_unit_value(_mm512_slli_epi32(q, 7), scale, rest)));
    _mm512_store_si512(to + 64, cpu_pairs(cpu_unit_value(_mm512_srli_epi32(q, 1), scale, rest),
                                          cpu_unit_value(_mm512_srli_epi32(q, 9), scale, rest)));
  }
}

/* The same of floats, n columns of them there, which may be fewer than 4, or none. */
CPU_INLINE void cpu_unit_of_floats(uint8_t *to, const uint8_t *w, int32_t n, const int type) {
  const __mmask32 odd = 0xaaaaaaaa;
  int i;
  for (i = 0; i < CPU_UNIT; i += 2, to += 64, w += 4 * CPU_ROWS) {
    const __m512i none = _mm512_setzero_si512();
    const __m512i first = i < n ? _mm512_loadu_si512(w) : none;
    const __m512i second = i + 1 < n ? _mm512_loadu_si512(w + 2 * CPU_ROWS) : none;
    __builtin_prefetch(w + 2 * CPU_AHEAD), __builtin_prefetch(w + 2 * CPU_AHEAD + 64);
    if (type == TFM_BF16) { /* a dword: rows i and i + 16 */
      _mm512_store_si512(to, _mm512_mask_blend_epi16(odd, first, _mm512_slli_epi32(second, 16)));
      _mm512_store_si512(to + CPU_TILE_SIZE,
                         _mm512_mask_blend_epi16(odd, _mm512_srli_epi32(first, 16), second));
    } else {
      _mm512_store_si512(to, cpu_pairs(_mm512_cvtph_ps(_mm512_castsi512_si256(first)),
                                       _mm512_cvtph_ps(_mm512_castsi512_si256(second))));
      _mm512_store_si512(to + CPU_TILE_SIZE,
                         cpu_pairs(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(first, 1)),
                                   _mm512_cvtph_ps(_mm512_extracti64x4_epi64(second, 1))));
    }
  }
}

typedef struct cpu_tiles { /* panels of a stripe, a thread's, times rows of x */
  const cpu_product *t;
  const cpu_slots *slots;      /* CPU_TILED_ROWS at most */
  const cpu_stripe *stripe;
  int32_t first, panels, col;  /* panel; how many; the first's first column of y */
  int32_t wide, parts, group;  /* columns of a part of a panel, of which there are so many; panels
                                  whose sums wait together */
  uint8_t *room[2];            /* a part of a panel, as tiles: this one, and the next */
  float *sums[2];              /* [rows][line]: of this group, and of the one before */
  int32_t line;                /* [group][32], and more: rows are not in step */
} cpu_tiles;

typedef struct cpu_ending { /* a group's sums on their way to y, a row at a time */
  const cpu_tiles *p;
  const float *sums;
  int32_t first, panels; /* the group's */
  int32_t row, left;     /* the next to go; how many are to go */
} cpu_ending;

/* What the epilogue adds to the next row is asked for. */
static void cpu_tiles_expect_residual(const cpu_ending *e, int32_t col, int32_t n) {
  const tfm_epilogue *epilogue = e->p->t->e;
  const float *next;
  int32_t j;
  if (e->left < 2 || !epilogue || !epilogue->residual.data) return;
  next = cpu_row(epilogue->residual, cpu_slot_at(e->p->slots, e->p->slots->begin + e->row + 1));
  for (j = 0; j < n; j += CPU_ALIGN / 4) __builtin_prefetch(next + col + j);
}

static void cpu_tiles_end(cpu_ending *e) {
  const cpu_tiles *p = e->p;
  const int32_t gated = p->t->up ? 2 : 1, wide = e->panels / gated * CPU_ROWS;
  const int32_t from = e->first / gated * CPU_ROWS, col = p->col + from;
  const int32_t n = cpu_min(wide, p->stripe->rows - p->first * CPU_ROWS - from);
  const float *sums = e->sums + e->row * p->line;
  const int32_t row = cpu_slot_at(p->slots, p->slots->begin + e->row);
  cpu_tiles_expect_residual(e, col, n);
  if (p->t->up) V(glu_values)(cpu_row(p->t->y, row) + col, sums, sums + wide, n, p->t->e->act);
  else V(write)(p->t, sums, n, row, col);
  e->row++, e->left--;
}

typedef struct cpu_ahead { /* what vectors do while tiles multiply */
  uint8_t *to;         /* tiles of columns of W that are needed next */
  const uint8_t *w;    /* a panel, from these columns on */
  int32_t cols, unit;  /* of these; what is unpacked */
  cpu_ending *ending;
  int32_t units, ends; /* to be done in a square, */
  int32_t of_units, of_ends, steps; /* evenly: both grow in a step, and what fills `steps` is due */
  const uint8_t *x;    /* tiles of the next columns of x: the second cache is asked for them, */
  int32_t lines;       /* so many lines in a step */
} cpu_ahead;

static int32_t cpu_units(const cpu_ahead *p) { return (p->cols + 31) / 32 * (32 / CPU_UNIT); }

CPU_INLINE void cpu_unpack_unit(cpu_ahead *p, const int type) {
  uint8_t *to = p->to + p->unit / 8 * (2 * CPU_TILE_SIZE) + p->unit % 8 * 128;
  if (cpu_has_blocks(type)) cpu_unit_of_blocks(to, p->w, p->unit, type);
  else cpu_unit_of_floats(to, p->w + (size_t)p->unit * (CPU_UNIT * 2 * CPU_ROWS),
                          p->cols - p->unit * CPU_UNIT, type);
  p->unit++;
}

CPU_INLINE void cpu_ahead_step(cpu_ahead *p, const int type) {
  int32_t i;
  for (p->of_units += p->units; p->of_units >= p->steps; p->of_units -= p->steps)
    cpu_unpack_unit(p, type);
  for (p->of_ends += p->ends; p->of_ends >= p->steps; p->of_ends -= p->steps)
    cpu_tiles_end(p->ending);
  for (i = 0; i < p->lines; i++, p->x += CPU_ALIGN) __builtin_prefetch(p->x, 0, 2);
}

typedef struct cpu_square { /* 32 rows of x, or 16, times 32 columns of y: steps of 32 terms */
  const uint8_t *x, *w;
  float *out;
  size_t row, group; /* bytes from row to row of out, from 16 rows of x to the others */
  int32_t steps;
  bool more, both;
} cpu_square;

CPU_INLINE void cpu_square_of(const cpu_square *s, cpu_ahead *ahead, const int type,
                              const bool both) {
  cpu_walk a = {s->x, s->group, CPU_TILE_SIZE}, b = {s->w, CPU_TILE_SIZE, 2 * CPU_TILE_SIZE};
  cpu_ahead p = *ahead;
  int32_t i;
  cpu_sums_begin(s->out, s->row, s->more, both);
  for (i = 0; i < s->steps; i++) {
    cpu_sums_step(&a, &b, both, true);
    cpu_ahead_step(&p, type);
  }
  cpu_sums_end(s->out, s->row, both);
  *ahead = p;
}

/* s NULL: a step of what is ahead, only. */
#define CPU_SQUARE_OF(type)                                                \
  static void cpu_square_##type(const cpu_square *s, cpu_ahead *ahead) {   \
    if (!s) cpu_ahead_step(ahead, type);                                   \
    else if (s->both) cpu_square_of(s, ahead, type, true);                 \
    else cpu_square_of(s, ahead, type, false);                             \
  }
CPU_SQUARE_OF(TFM_F16)
CPU_SQUARE_OF(TFM_BF16)
CPU_SQUARE_OF(TFM_Q8_0)
CPU_SQUARE_OF(TFM_Q4_0)
CPU_SQUARE_OF(TFM_Q4_1)
CPU_SQUARE_OF(TFM_Q5_0)
CPU_SQUARE_OF(TFM_Q5_1)
CPU_SQUARE_OF(TFM_Q4_K)
CPU_SQUARE_OF(TFM_Q5_K)
CPU_SQUARE_OF(TFM_Q6_K)

static void (*const cpu_squares[])(const cpu_square *, cpu_ahead *) = {
  NULL, NULL, cpu_square_TFM_F16, cpu_square_TFM_BF16, cpu_square_TFM_Q8_0, cpu_square_TFM_Q4_0,
  cpu_square_TFM_Q4_1, cpu_square_TFM_Q5_0, cpu_square_TFM_Q5_1, cpu_square_TFM_Q4_K,
  cpu_square_TFM_Q5_K, cpu_square_TFM_Q6_K};

typedef struct cpu_part { /* columns k .. k + cols - 1 of a panel, one of a group */
  int32_t first, panels, slot; /* the group's; which of them */
  int32_t k, cols, left;       /* left: of the group's parts, with this one */
} cpu_part;

/* Parts run through the panels of a group, then through their columns. Past the end: no columns. */
static cpu_part cpu_part_at(const cpu_tiles *p, int32_t i) {
  const int32_t first = i / (p->group * p->parts) * p->group, within = i - first * p->parts;
  cpu_part part = {first, cpu_min(p->group, p->panels - first), 0, 0, 0, 0};
  if (part.panels <= 0) return part;
  part.slot = within % part.panels;
  part.k = within / part.panels * p->wide;
  part.cols = cpu_min(p->wide, p->t->x.cols - part.k);
  part.left = part.panels * p->parts - within;
  return part;
}

/* The part's panel: the group's are gates, then as many of up, where there are gates. */
static const uint8_t *cpu_part_panel(const cpu_tiles *p, const cpu_part *part) {
  const int32_t gates = part->panels / 2;
  const cpu_stripe *stripe = p->stripe;
  int32_t i = part->first + part->slot;
  if (p->t->up) {
    i = part->first / 2 + part->slot % gates;
    if (part->slot >= gates) stripe = p->t->up;
  }
  return stripe->data + (size_t)(p->first + i) * stripe->bytes;
}

static cpu_ahead cpu_tiles_ahead(const cpu_tiles *p, const cpu_part *part, cpu_ending *ending) {
  cpu_ahead next = {NULL, NULL, 0, 0, ending, 0, 0, 0, 0, 1, NULL, 0};
  next.to = p->room[1];
  next.cols = part->cols;
  if (part->cols > 0)
    next.w = cpu_part_panel(p, part) + cpu_panel_span((int)p->stripe->type, part->k);
  return next;
}

/* The second cache is asked for the columns of x that the group's panels are multiplied by next:
   by each panel for a share of the lines. */
static void cpu_tiles_expect_x(const cpu_tiles *p, const cpu_part *now, const cpu_square *s,
                               cpu_ahead *next) {
  const int32_t k = now->k + p->wide < p->t->x.cols ? now->k + p->wide : 0;
  const int32_t of_16 = p->wide / 2; /* lines of 16 rows, of which a square has two */
  const int32_t lines = cpu_shares(2 * of_16, now->panels), from = now->slot * lines;
  next->lines = cpu_shares(lines, s->steps);
  next->x = s->x + (size_t)(k - now->k) * CPU_ROWS + (size_t)(from / of_16) * s->group +
            (size_t)(from % of_16) * CPU_ALIGN;
}

/* The part is multiplied by all rows, while the next is unpacked and the group before ends. */
static void cpu_tiles_part(const cpu_tiles *p, const cpu_part *now, cpu_ahead *next) {
  const cpu_product *t = p->t;
  const int32_t rows = p->slots->end - p->slots->begin, squares = cpu_shares(rows, CPU_ROWS);
  const uint8_t *x;
  cpu_square s;
  int32_t i;
  s.w = p->room[0];
  s.row = (size_t)p->line * sizeof *s.out;
  s.group = cpu_tiled_bytes(CPU_TILE_ROWS, t->x.cols);
  s.steps = cpu_shares(now->cols, CPU_TERMS);
  s.more = now->k > 0;
  next->steps = s.steps;
  x = t->quantised + (size_t)(p->slots->tiled / CPU_TILE_ROWS) * s.group;
  for (i = 0; i < squares; i++) {
    next->units = cpu_shares(cpu_units(next) - next->unit, squares - i);
    next->ends = cpu_shares(next->ending->left, now->left * squares - i);
    s.x = x + (size_t)(2 * i) * s.group + (size_t)now->k * CPU_ROWS;
    s.out = p->sums[0] + now->slot * CPU_ROWS + i * CPU_ROWS * p->line;
    s.both = rows - i * CPU_ROWS > CPU_TILE_ROWS;
    if (p->parts > 1) cpu_tiles_expect_x(p, now, &s, next);
    cpu_squares[p->stripe->type](&s, next);
  }
}

/* All parts of a group are multiplied: its sums change places with those of the one before. */
static cpu_ending cpu_tiles_ending(cpu_tiles *p, const cpu_part *last) {
  float *sums = p->sums[0];
  const cpu_ending e = {p, sums, last->first, last->panels, 0, p->slots->end - p->slots->begin};
  p->sums[0] = p->sums[1], p->sums[1] = sums;
  return e;
}

/* Of `panels`, so many in a group: even shares, gates with what they let through. */
static int32_t cpu_tiles_group(const cpu_tiles *p, int32_t most) {
  const int32_t n = cpu_even_part(p->panels, most);
  return p->t->up ? n + n % 2 : n;
}

/* The same, of as many rows as a thread has room for. */
static void cpu_tiles_rows(const cpu_product *t, const cpu_slots *slots, const cpu_stripe *stripe,
                           int32_t panel, int32_t n, int32_t col, int32_t worker) {
  cpu_tiles p = {t, slots, stripe, panel, t->up ? 2 * n : n, col, t->x.cols, 1, 0, {NULL, NULL},
                 {NULL, NULL}, 0};
  cpu_ending ending = {&p, NULL, 0, 0, 0, 0};
  cpu_part part;
  cpu_ahead next;
  int32_t i;
  if (t->x.cols > CPU_TILED_WHOLE) p.wide = CPU_TILED_COLS;
  p.parts = cpu_shares(t->x.cols, p.wide);
  p.group = cpu_tiles_group(&p, p.parts > 1 ? CPU_TILED_PANELS : CPU_TILED_FEW);
  p.line = p.group * CPU_ROWS + CPU_ALIGN / 4;
  p.room[0] = t->work + (size_t)worker * CPU_TILED_BYTES;
  p.room[1] = p.room[0] + 2 * CPU_ROWS * CPU_TILED_WHOLE;
  p.sums[0] = (float *)(void *)(p.room[1] + 2 * CPU_ROWS * CPU_TILED_WHOLE);
  p.sums[1] = p.sums[0] + CPU_TILED_SUMS;
  part = cpu_part_at(&p, 0);
  next = cpu_tiles_ahead(&p, &part, &ending);
  next.units = cpu_units(&next);
  cpu_squares[stripe->type](NULL, &next);
  for (i = 0; part.cols > 0; i++) {
    const cpu_part now = part;
    uint8_t *swap = p.room[0];
    p.room[0] = p.room[1], p.room[1] = swap;
    part = cpu_part_at(&p, i + 1);
    next = cpu_tiles_ahead(&p, &part, &ending);
    cpu_tiles_part(&p, &now, &next);
    if (now.left == 1) ending = cpu_tiles_ending(&p, &now);
  }
  while (ending.left > 0) cpu_tiles_end(&ending);
}

/* n panels of a stripe, from `panel` on, times the rows of x that its expert has. */
static void cpu_tiles_panels(const cpu_product *t, const cpu_slots *rows, const cpu_stripe *stripe,
                             int32_t panel, int32_t n, int32_t col, int32_t worker) {
  cpu_slots s = *rows;
  cpu_tiles_begin();
  for (; s.begin < rows->end; s.begin = s.end, s.tiled += CPU_TILED_ROWS) {
    s.end = cpu_min(s.begin + CPU_TILED_ROWS, rows->end);
    cpu_tiles_rows(t, &s, stripe, panel, n, col, worker);
  }
  _tile_release();
}

/* ---- A few rows, in tiles of bytes ----
   32 columns of 32 rows of Q8_0 are two tiles of unsigned bytes, as they lie; 32 columns of 16 rows
   of quantised x are one of signed bytes. Their products are the integers that vectors add up, and
   what becomes of them is the same too: no bit differs. The other types have to be unpacked, which
   takes as long as multiplying by vectors. */

enum { CPU_DOTS = 2 * CPU_TILE_SIZE / 4 }; /* of a block: [2 halves of the panel][16 rows][16] */

static void cpu_bytes_begin(void) { cpu_tiles_configure(32); }
static void cpu_bytes_end(void) { _tile_release(); }

/* 32 columns of 16 rows of x, x_bytes apart, times those of a panel. */
CPU_INLINE void cpu_bytes_dots(int32_t *dots, const int8_t *x, size_t x_bytes, const uint8_t *w) {
  _tile_loadd(4, x, x_bytes);
  _tile_loadd(6, w, 4 * CPU_ROWS);
  _tile_loadd(7, w + 64, 4 * CPU_ROWS);
  _tile_zero(0);
  _tile_zero(1);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  _tile_stored(0, dots, 64);
  _tile_stored(1, dots + CPU_DOTS / 2, 64);
}

/* Blocks `block` and on of a panel, those of one group of x: their dots, [4][CPU_DOTS]. */
CPU_INLINE void cpu_bytes_group(int32_t *dots, const cpu_group *x, size_t x_bytes,
                                const uint8_t *w, int32_t block, int32_t blocks) {
  const int32_t n = cpu_min(CPU_GROUP / 32, blocks - block);
  const uint8_t *front;
  int32_t k;
  for (k = 0; k < n; k++, dots += CPU_DOTS)
    cpu_bytes_dots(dots, x->value + 32 * k, x_bytes,
                   cpu_piece_at(&front, w, TFM_Q8_0, block + k));
}

/* Sums of half a panel += a block's: as V(block). x: the first row's group, block k of it. What is
   coming is asked for meanwhile, CPU_BYTES_ASKED times. */
CPU_INLINE void cpu_bytes_add(__m512 *sum, const int32_t *dots, const uint8_t *x, size_t x_bytes,
                              int32_t k, __m512 scale, cpu_coming *coming) {
  int i;
  for (i = 0; i < CPU_TILE_ROWS; i++, x += x_bytes, dots += CPU_TILE_ROWS) {
    const __m512i first = V(first_sum)((const cpu_group *)(const void *)x, k, TFM_Q8_0, 0);
    const __m512i dot = _mm512_add_epi32(_mm512_load_si512(dots), first);
    sum[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum[i]);
    if (i % (CPU_TILE_ROWS / CPU_BYTES_ASKED) == 0) cpu_ask(coming, 1);
  }
}

/* out [16][32] += a group's dots, scaled: as V(block_tile). */
CPU_INLINE void cpu_bytes_scale(float *out, const int32_t *dots, const uint8_t *x, size_t x_bytes,
                                const uint8_t *w, int32_t block, int32_t blocks,
                                cpu_coming *coming) {
  const int32_t n = cpu_min(CPU_GROUP / 32, blocks - block);
  const uint8_t *front;
  int32_t k;
  int i, j;
  for (j = 0; j < 2; j++) {
    __m512 sum[CPU_TILE_ROWS];
    for (i = 0; i < CPU_TILE_ROWS; i++) sum[i] = _mm512_setzero_ps();
    for (k = 0; k < n; k++) {
      cpu_piece_at(&front, w, TFM_Q8_0, block + k);
      cpu_bytes_add(sum, dots + k * CPU_DOTS + j * (CPU_DOTS / 2), x, x_bytes, k,
                    V(scales)(front, NULL, TFM_Q8_0, 0, j), coming);
    }
    for (i = 0; i < CPU_TILE_ROWS; i++) {
      const cpu_group *group = (const cpu_group *)(const void *)(x + (size_t)i * x_bytes);
      float *to = out + i * CPU_ROWS + j * CPU_TILE_ROWS;
      _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[i], _mm512_set1_ps(group->scale),
                                           _mm512_loadu_ps(to)));
    }
  }
}

/* out [16][32] += 16 rows of x, x_bytes apart, times columns of a panel of Q8_0, a group of x after
   the other. dots: [4][CPU_DOTS]. */
static void cpu_bytes_panel(float *out, int32_t *dots, const cpu_group *x, size_t x_bytes,
                            const uint8_t *w, int32_t cols, cpu_coming *coming) {
  const int32_t blocks = cols / 32;
  int32_t block;
  for (block = 0; block < blocks; block += CPU_GROUP / 32, x++) {
    cpu_bytes_group(dots, x, x_bytes, w, block, blocks);
    cpu_bytes_scale(out, dots, (const uint8_t *)x, x_bytes, w, block, blocks, coming);
  }
}

/* Rows of x as tiles of bf16: [rows / 16][cols / 32][16][32]. */
static void cpu_tiles_of_x(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_product *t = (const cpu_product *)context;
  const size_t group = cpu_tiled_bytes(CPU_TILE_ROWS, t->x.cols);
  int32_t expert, i, at, col;
  (void)worker;
  for (expert = 0; expert < cpu_experts(t); expert++) {
    const cpu_slots s = cpu_slots_of(t, expert);
    i = s.begin - t->first > begin ? s.begin - t->first : begin;
    for (; i < cpu_min(end, s.end - t->first); i++) {
      const float *x = cpu_row_of_part(t, i);
      uint8_t *to;
      at = s.tiled + t->first + i - s.begin;
      to = t->quantised + (size_t)(at / CPU_TILE_ROWS) * group + at % CPU_TILE_ROWS * 64;
      for (col = 0; col < t->x.cols; col += CPU_TERMS, to += CPU_TILE_SIZE)
        _mm512_store_si512(to, cpu_pairs_along(x + col, t->x.cols - col));
    }
  }
}
CPU_TARGET_END
#undef CPU_LEVEL
#endif
#endif

#if !defined(CPU_X86)
static bool cpu_has_amx(void) { return false; }
#endif

#if defined(CPU_ARM)

#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define CPU_LANES 4
#if defined(__clang__)
#define CPU_ARM_TARGET(gcc, clang) CPU_TARGET_BEGIN(clang)
#define CPU_ASSEMBLE
#else /* before registers are dealt out, gcc's scheduler asks for more of them than there are */
#define CPU_ARM_TARGET(gcc, clang) CPU_TARGET_WITH("O3,no-schedule-insns", gcc)
#define CPU_ASSEMBLE ".arch armv8.2-a+dotprod+i8mm\n\t" /* without -O it forgets to say so */
#endif

#define CPU_LEVEL neon
#define CPU_DOT 0 /* CPU_DOT: instructions for sums of products of bytes; 1: four, 2: matrices */
CPU_ARM_TARGET("arch=armv8-a", "neon")
#include "transformer_cpu.c"
CPU_TARGET_END
#undef CPU_LEVEL
#undef CPU_DOT

#define CPU_LEVEL dotprod
#define CPU_DOT 1
CPU_ARM_TARGET("arch=armv8.2-a+dotprod", "dotprod")
#include "transformer_cpu.c"
CPU_TARGET_END
#undef CPU_LEVEL
#undef CPU_DOT

#define CPU_LEVEL i8mm
#define CPU_DOT 2
CPU_ARM_TARGET("arch=armv8.2-a+dotprod+i8mm", "dotprod,i8mm")
#include "transformer_cpu.c"
CPU_TARGET_END
#undef CPU_LEVEL
#undef CPU_DOT
#undef CPU_LANES

typedef struct cpu_features {
  bool dotprod, i8mm;
} cpu_features;

/* The system is asked, as its registers of features are not a program's to read everywhere. */
static cpu_features cpu_detect(void) {
  cpu_features f = {false, false};
#if defined(__linux__)
  f.dotprod = (getauxval(AT_HWCAP) >> 20 & 1) != 0;
  f.i8mm = (getauxval(AT_HWCAP2) >> 13 & 1) != 0;
#elif defined(__APPLE__)
  int has;
  size_t bytes = sizeof has;
  f.dotprod = !sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &bytes, NULL, 0) && has;
  bytes = sizeof has;
  f.i8mm = !sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &bytes, NULL, 0) && has;
#endif
  return f;
}
#endif

/* ---- The tables ---- */

#define CPU_TABLE(of)                                                                             \
  {                                                                                               \
    TFM_BACKEND_ABI, "cpu", TFM_F32, TFM_F32, 1, 256, false, false,                               \
    cpu_open, cpu_close, cpu_sync, cpu_alloc, cpu_release,                                        \
    cpu_put, cpu_put, cpu_put, cpu_zero, /* put, get, copy: one address space, one function */    \
    cpu_alloc, cpu_release, cpu_work_bytes, cpu_replay, cpu_record,                               \
    cpu_pack_size, cpu_pack, cpu_unpack,                                                          \
    cpu_cast, cpu_embed, cpu_gather, of(norm), of(matmul), of(rope), cpu_kv_put,                  \
    of(attn), of(glu), cpu_route, of(matmul_moe), cpu_combine, cpu_sample, cpu_top,               \
    of(matmul_glu), NULL, NULL, /* layer decode */                                                \
    of(loss), of(matmul_dx), of(matmul_dw), of(epilogue_bwd), of(norm_bwd), of(attn_bwd),         \
    of(glu_bwd), cpu_embed_bwd, cpu_route_bwd, cpu_combine_bwd, of(moe_dx), of(moe_dw),           \
    of(sumsq), of(adamw), cpu_moe_bias, cpu_add_gated, cpu_moe_bias_bwd, cpu_add_gated_bwd,       \
    NULL, NULL /* mark usage: by the clock */                                                     \
  }
#define CPU_NONE(name) NULL
#define CPU_AVX2(name) cpu_##name##_avx2
#define CPU_AVX512(name) cpu_##name##_avx512
#define CPU_NEON(name) cpu_##name##_neon
#define CPU_DOTPROD(name) cpu_##name##_dotprod
#define CPU_I8MM(name) cpu_##name##_i8mm

#if !defined(CPU_ARM) /* incomplete: passed over */
static const tfm_backend cpu_table_none = CPU_TABLE(CPU_NONE);
#endif

#if defined(CPU_X86)
static const tfm_backend cpu_table_avx2 = CPU_TABLE(CPU_AVX2);
static const tfm_backend cpu_table_avx512 = CPU_TABLE(CPU_AVX512);

const tfm_backend *tfm_backend_cpu(void) {
  cpu_features f = cpu_detect();
  if (!cpu_has(f, cpu_avx2)) return &cpu_table_none;
  return cpu_has(f, cpu_avx512) && !TFM_CPU_AVX2_ONLY ? &cpu_table_avx512 : &cpu_table_avx2;
}
#elif defined(CPU_ARM)
static const tfm_backend cpu_table_neon = CPU_TABLE(CPU_NEON);
static const tfm_backend cpu_table_dotprod = CPU_TABLE(CPU_DOTPROD);
static const tfm_backend cpu_table_i8mm = CPU_TABLE(CPU_I8MM);

const tfm_backend *tfm_backend_cpu(void) {
  cpu_features f = cpu_detect();
  if (!f.dotprod) return &cpu_table_neon;
  return f.i8mm ? &cpu_table_i8mm : &cpu_table_dotprod;
}
#else
const tfm_backend *tfm_backend_cpu(void) { return &cpu_table_none; }
#endif

#else /* CPU_LEVEL: from here on, everything is compiled once per instruction set */

/* ---- Vectors of CPU_LANES floats, or as many 32-bit integers ---- */

#if CPU_LANES == 16
typedef __m512 V(vec);
typedef __m512i V(ints);

enum {
  V(vectors) = 2, /* of a panel */
  V(stream) = 4,  /* panels at a time for one row of x: streams from memory, and chains of sums */
  V(wide) = 2,    /* ... of a float type for more rows; 1 of a quantised type */
  V(shift) = 7,   /* dot's w is 128 more than it stands for: 1 << 7 */
  V(zipped) = 0
};

/* The largest: 24 sums and 4 vectors of W; 16 sums of integers, 16 of floats. */
#define CPU_FLOAT_TILES(tile, type)                                                              \
  tile(float_tile, type, 6, 2) tile(float_tile, type, 4, 2) tile(float_tile, type, 2, 2)         \
  tile(float_tile, type, 1, 2) tile(float_tile, type, 6, 1) tile(float_tile, type, 4, 1)         \
  tile(float_tile, type, 2, 1) tile(float_tile, type, 1, 1) tile(float_tile, type, 1, 4)
#define CPU_BLOCK_TILES(tile, type)                                                              \
  tile(block_tile, type, 8, 1) tile(block_tile, type, 4, 1) tile(block_tile, type, 2, 1)         \
  tile(block_tile, type, 1, 1) tile(block_tile, type, 1, 4)
#define CPU_LINE_TILES(tile, type)                                                               \
  tile(block_tile, type, 4, 1) tile(block_tile, type, 2, 1) tile(block_tile, type, 1, 1)         \
  tile(block_tile, type, 1, 4)

CPU_INLINE V(vec) V(load)(const float *p) { return _mm512_loadu_ps(p); }
CPU_INLINE void V(store)(float *p, V(vec) v) { _mm512_storeu_ps(p, v); }
CPU_INLINE V(vec) V(load_some)(const float *p, int32_t n) {
  return n >= 16 ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
CPU_INLINE void V(store_some)(float *p, V(vec) v, int32_t n) {
  if (n >= 16) _mm512_storeu_ps(p, v);
  else _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
}
CPU_INLINE V(vec) V(all)(float x) { return _mm512_set1_ps(x); }
CPU_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return _mm512_add_ps(a, b); }
CPU_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return _mm512_mul_ps(a, b); }
CPU_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return _mm512_div_ps(a, b); }
CPU_INLINE V(vec) V(sqrt)(V(vec) a) { return _mm512_sqrt_ps(a); }
CPU_INLINE V(vec) V(positive)(V(vec) a) { /* 1 where a is, else 0 */
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_GT_OQ),
                             _mm512_set1_ps(1.0f));
}
/* a, but 0 where x < least */
CPU_INLINE V(vec) V(unless_below)(V(vec) a, V(vec) x, V(vec) least) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), a);
}
/* 1 / a of a from 1 to 2^125, to its last bit but one: a division takes longer */
CPU_INLINE V(vec) V(inverse)(V(vec) a) {
  __m512 x = _mm512_rcp14_ps(a);
  return _mm512_mul_ps(x, _mm512_fnmadd_ps(a, x, _mm512_set1_ps(2.0f)));
}
CPU_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return _mm512_fmadd_ps(a, b, c); }
/* of a NaN and b: b */
CPU_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return _mm512_max_ps(a, b); }
CPU_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return _mm512_min_ps(a, b); }
CPU_INLINE V(vec) V(round)(V(vec) a) { return _mm512_roundscale_ps(a, 8); }
/* a * 2^n for a whole n from -126 to 127 */
CPU_INLINE V(vec) V(scale)(V(vec) a, V(vec) n) { return _mm512_scalef_ps(a, n); }
CPU_INLINE V(vec) V(halves)(const void *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
CPU_INLINE V(vec) V(brains)(const void *p) { /* bf16 */
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
CPU_INLINE __m256 V(low)(V(vec) a) { return _mm512_castps512_ps256(a); }
CPU_INLINE __m256 V(high)(V(vec) a) { return _mm512_extractf32x8_ps(a, 1); }
CPU_INLINE __m256 V(eight_max)(V(vec) a) { return _mm256_max_ps(V(low)(a), V(high)(a)); }
CPU_INLINE __m256 V(eight_sum)(V(vec) a) { return _mm256_add_ps(V(low)(a), V(high)(a)); }
CPU_INLINE V(ints) V(load_ints)(const void *p) { return _mm512_loadu_si512(p); }
CPU_INLINE void V(store_ints)(int32_t *p, V(ints) a) { _mm512_storeu_si512(p, a); }
CPU_INLINE V(ints) V(all_ints)(int32_t x) { return _mm512_set1_epi32(x); }
CPU_INLINE V(ints) V(and)(V(ints) a, V(ints) b) { return _mm512_and_si512(a, b); }
CPU_INLINE V(ints) V(or)(V(ints) a, V(ints) b) { return _mm512_or_si512(a, b); }
CPU_INLINE V(ints) V(add_bytes)(V(ints) a, V(ints) b) { return _mm512_add_epi8(a, b); }
CPU_INLINE V(ints) V(left)(V(ints) a, const int n) { return _mm512_slli_epi32(a, (unsigned)n); }
CPU_INLINE V(ints) V(right)(V(ints) a, const int n) { return _mm512_srli_epi32(a, (unsigned)n); }
CPU_INLINE V(ints) V(signed_right)(V(ints) a, const int n) {
  return _mm512_srai_epi32(a, (unsigned)n);
}
CPU_INLINE V(ints) V(widen_bytes)(const void *p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
CPU_INLINE V(ints) V(widen_signed)(const void *p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
CPU_INLINE V(ints) V(top)(V(ints) a, V(ints) b) { return _mm512_max_epi32(a, b); }
CPU_INLINE V(ints) V(plus)(V(ints) a, V(ints) b) { return _mm512_add_epi32(a, b); }
CPU_INLINE void V(store_bytes)(int8_t *p, V(ints) a) { /* the lowest of each lane */
  _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(a));
}
CPU_INLINE V(ints) V(to_ints)(V(vec) a) { return _mm512_cvtps_epi32(a); }
CPU_INLINE V(vec) V(to_floats)(V(ints) a) { return _mm512_cvtepi32_ps(a); }
CPU_INLINE V(vec) V(as_floats)(V(ints) a) { return _mm512_castsi512_ps(a); }
/* sum + four products of bytes per lane: w 0 to 255, x -127 to 127. gcc moves the sums of the
   intrinsic from register to register. */
CPU_INLINE V(ints) V(dot)(V(ints) sum, V(ints) w, V(ints) x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
  return sum;
}
/* the same for w 0 to 63 */
CPU_INLINE V(ints) V(dot6)(V(ints) sum, V(ints) w, V(ints) x) { return V(dot)(sum, w, x); }
#elif CPU_LANES == 8
typedef __m256 V(vec);
typedef __m256i V(ints);

enum { /* as above, for half the registers of half the width */
  V(vectors) = 4,
  V(stream) = 2,
  V(wide) = 1,
  V(shift) = 0, /* dot takes the offset off itself */
  V(zipped) = 0
};

#define CPU_FLOAT_TILES(tile, type)                                                              \
  tile(float_tile, type, 3, 1) tile(float_tile, type, 2, 1) tile(float_tile, type, 1, 1)         \
  tile(float_tile, type, 1, 2)
#define CPU_BLOCK_TILES(tile, type)                                                              \
  tile(block_tile, type, 2, 1) tile(block_tile, type, 1, 1) tile(block_tile, type, 1, 2)
#define CPU_LINE_TILES(tile, type) CPU_BLOCK_TILES(tile, type)

CPU_INLINE V(vec) V(load)(const float *p) { return _mm256_loadu_ps(p); }
CPU_INLINE void V(store)(float *p, V(vec) v) { _mm256_storeu_ps(p, v); }
CPU_INLINE __m256i V(first)(int32_t n) { /* a mask */
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
CPU_INLINE V(vec) V(load_some)(const float *p, int32_t n) {
  return n >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, V(first)(n));
}
CPU_INLINE void V(store_some)(float *p, V(vec) v, int32_t n) {
  if (n >= 8) _mm256_storeu_ps(p, v);
  else _mm256_maskstore_ps(p, V(first)(n), v);
}
CPU_INLINE V(vec) V(all)(float x) { return _mm256_set1_ps(x); }
CPU_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return _mm256_add_ps(a, b); }
CPU_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return _mm256_mul_ps(a, b); }
CPU_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return _mm256_div_ps(a, b); }
CPU_INLINE V(vec) V(sqrt)(V(vec) a) { return _mm256_sqrt_ps(a); }
CPU_INLINE V(vec) V(positive)(V(vec) a) {
  return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_GT_OQ), _mm256_set1_ps(1.0f));
}
CPU_INLINE V(vec) V(unless_below)(V(vec) a, V(vec) x, V(vec) least) {
  return _mm256_and_ps(_mm256_cmp_ps(x, least, _CMP_NLT_UQ), a);
}
CPU_INLINE V(vec) V(inverse)(V(vec) a) { return _mm256_div_ps(_mm256_set1_ps(1.0f), a); }
CPU_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return _mm256_fmadd_ps(a, b, c); }
CPU_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return _mm256_max_ps(a, b); }
CPU_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return _mm256_min_ps(a, b); }
CPU_INLINE V(vec) V(round)(V(vec) a) { return _mm256_round_ps(a, 8); }
CPU_INLINE V(vec) V(scale)(V(vec) a, V(vec) n) {
  __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
}
CPU_INLINE V(vec) V(halves)(const void *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
CPU_INLINE V(vec) V(brains)(const void *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
CPU_INLINE __m256 V(low)(V(vec) a) { return a; }
CPU_INLINE __m256 V(eight_max)(V(vec) a) { return a; }
CPU_INLINE __m256 V(eight_sum)(V(vec) a) { return a; }
CPU_INLINE V(ints) V(load_ints)(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
CPU_INLINE void V(store_ints)(int32_t *p, V(ints) a) { _mm256_storeu_si256((__m256i *)p, a); }
CPU_INLINE V(ints) V(all_ints)(int32_t x) { return _mm256_set1_epi32(x); }
CPU_INLINE V(ints) V(and)(V(ints) a, V(ints) b) { return _mm256_and_si256(a, b); }
CPU_INLINE V(ints) V(or)(V(ints) a, V(ints) b) { return _mm256_or_si256(a, b); }
CPU_INLINE V(ints) V(add_bytes)(V(ints) a, V(ints) b) { return _mm256_add_epi8(a, b); }
CPU_INLINE V(ints) V(left)(V(ints) a, const int n) { return _mm256_slli_epi32(a, n); }
CPU_INLINE V(ints) V(right)(V(ints) a, const int n) { return _mm256_srli_epi32(a, n); }
CPU_INLINE V(ints) V(signed_right)(V(ints) a, const int n) { return _mm256_srai_epi32(a, n); }
CPU_INLINE V(ints) V(widen_bytes)(const void *p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
CPU_INLINE V(ints) V(widen_signed)(const void *p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
CPU_INLINE V(ints) V(top)(V(ints) a, V(ints) b) { return _mm256_max_epi32(a, b); }
CPU_INLINE V(ints) V(plus)(V(ints) a, V(ints) b) { return _mm256_add_epi32(a, b); }
CPU_INLINE void V(store_bytes)(int8_t *p, V(ints) a) {
  const __m256i lowest = _mm256_set1_epi32(0x0c080400);
  __m256i four = _mm256_shuffle_epi8(a, lowest);
  _mm_storel_epi64((__m128i *)(void *)p, _mm_unpacklo_epi32(_mm256_castsi256_si128(four),
                                                            _mm256_extracti128_si256(four, 1)));
}
CPU_INLINE V(ints) V(to_ints)(V(vec) a) { return _mm256_cvtps_epi32(a); }
CPU_INLINE V(vec) V(to_floats)(V(ints) a) { return _mm256_cvtepi32_ps(a); }
CPU_INLINE V(vec) V(as_floats)(V(ints) a) { return _mm256_castsi256_ps(a); }
/* Pairs of products stay within 16 bits: 2 * 63 * 127. */
CPU_INLINE V(ints) V(dot6)(V(ints) sum, V(ints) w, V(ints) x) {
  __m256i pairs = _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* w - 128 is split into its magnitude and its sign, which goes to x: 2 * 128 * 127 fits too. */
CPU_INLINE V(ints) V(dot)(V(ints) sum, V(ints) w, V(ints) x) {
  __m256i value = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return V(dot6)(sum, _mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
}
#else
typedef float32x4_t V(vec);
typedef int32x4_t V(ints);

enum { /* as above: 32 registers of a quarter of the width */
  V(vectors) = 8,
  V(stream) = 2,
  V(wide) = 1,
  V(shift) = 0,
  V(zipped) = CPU_DOT == 2 /* what is unpacked is in the order of V(zip) */
};

/* The largest: 24 sums, 3 values of x and 2 vectors of W; of integers, what CPU_DOT leaves room
   for, see V(dots). */
#define CPU_FLOAT_TILES(tile, type)                                                              \
  tile(float_tile, type, 3, 1) tile(float_tile, type, 2, 1) tile(float_tile, type, 1, 1)         \
  tile(float_tile, type, 1, 2)
#if CPU_DOT == 2
#define CPU_BLOCK_TILES(tile, type)                                                              \
  tile(block_tile, type, 4, 1) tile(block_tile, type, 2, 1) tile(block_tile, type, 1, 1)         \
  tile(block_tile, type, 1, 2)
#else
#define CPU_BLOCK_TILES(tile, type)                                                              \
  tile(block_tile, type, 3, 1) tile(block_tile, type, 2, 1) tile(block_tile, type, 1, 1)         \
  tile(block_tile, type, 1, 2)
#endif
#define CPU_LINE_TILES(tile, type) CPU_BLOCK_TILES(tile, type)

CPU_INLINE V(vec) V(load)(const float *p) { return vld1q_f32(p); }
CPU_INLINE void V(store)(float *p, V(vec) v) { vst1q_f32(p, v); }
CPU_INLINE V(vec) V(load_some)(const float *p, int32_t n) {
  V(vec) v = vdupq_n_f32(0);
  if (n >= 4) return vld1q_f32(p);
  v = vld1q_lane_f32(p, v, 0);
  if (n > 1) v = vld1q_lane_f32(p + 1, v, 1);
  return n > 2 ? vld1q_lane_f32(p + 2, v, 2) : v;
}
CPU_INLINE void V(store_some)(float *p, V(vec) v, int32_t n) {
  if (n >= 4) {
    vst1q_f32(p, v);
    return;
  }
  vst1q_lane_f32(p, v, 0);
  if (n > 1) vst1q_lane_f32(p + 1, v, 1);
  if (n > 2) vst1q_lane_f32(p + 2, v, 2);
}
CPU_INLINE V(vec) V(all)(float x) { return vdupq_n_f32(x); }
CPU_INLINE V(vec) V(add)(V(vec) a, V(vec) b) { return vaddq_f32(a, b); }
CPU_INLINE V(vec) V(mul)(V(vec) a, V(vec) b) { return vmulq_f32(a, b); }
CPU_INLINE V(vec) V(div)(V(vec) a, V(vec) b) { return vdivq_f32(a, b); }
CPU_INLINE V(vec) V(sqrt)(V(vec) a) { return vsqrtq_f32(a); }
CPU_INLINE V(vec) V(fma)(V(vec) a, V(vec) b, V(vec) c) { return vfmaq_f32(c, a, b); }
CPU_INLINE V(vec) V(max)(V(vec) a, V(vec) b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
CPU_INLINE V(vec) V(min)(V(vec) a, V(vec) b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
CPU_INLINE V(vec) V(round)(V(vec) a) { return vrndnq_f32(a); }
CPU_INLINE V(ints) V(load_ints)(const void *p) { return vld1q_s32((const int32_t *)p); }
CPU_INLINE void V(store_ints)(int32_t *p, V(ints) a) { vst1q_s32(p, a); }
CPU_INLINE V(ints) V(all_ints)(int32_t x) { return vdupq_n_s32(x); }
CPU_INLINE V(ints) V(and)(V(ints) a, V(ints) b) { return vandq_s32(a, b); }
CPU_INLINE V(ints) V(or)(V(ints) a, V(ints) b) { return vorrq_s32(a, b); }
CPU_INLINE V(ints) V(add_bytes)(V(ints) a, V(ints) b) {
  return vreinterpretq_s32_s8(vaddq_s8(vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b)));
}
/* The compilers' own operators: the intrinsics want n in the source, not after inlining. */
CPU_INLINE V(ints) V(left)(V(ints) a, const int n) { return a << n; }
CPU_INLINE V(ints) V(signed_right)(V(ints) a, const int n) { return a >> n; }
CPU_INLINE V(ints) V(right)(V(ints) a, const int n) {
  return vreinterpretq_s32_u32(vreinterpretq_u32_s32(a) >> (uint32_t)n);
}
CPU_INLINE V(ints) V(top)(V(ints) a, V(ints) b) { return vmaxq_s32(a, b); }
CPU_INLINE V(ints) V(plus)(V(ints) a, V(ints) b) { return vaddq_s32(a, b); }
CPU_INLINE int8x8_t V(four_bytes)(const void *p) {
  uint32_t four;
  memcpy(&four, p, sizeof four);
  return vcreate_s8(four);
}
CPU_INLINE V(ints) V(widen_signed)(const void *p) {
  return vmovl_s16(vget_low_s16(vmovl_s8(V(four_bytes)(p))));
}
CPU_INLINE V(ints) V(widen_bytes)(const void *p) {
  uint16x8_t wide = vmovl_u8(vreinterpret_u8_s8(V(four_bytes)(p)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}
CPU_INLINE void V(store_bytes)(int8_t *p, V(ints) a) {
  int16x4_t half = vmovn_s32(a);
  int8x8_t four = vmovn_s16(vcombine_s16(half, half));
  uint32_t u = vget_lane_u32(vreinterpret_u32_s8(four), 0);
  memcpy(p, &u, sizeof u);
}
CPU_INLINE V(ints) V(to_ints)(V(vec) a) { return vcvtnq_s32_f32(a); }
CPU_INLINE V(vec) V(to_floats)(V(ints) a) { return vcvtq_f32_s32(a); }
CPU_INLINE V(vec) V(as_floats)(V(ints) a) { return vreinterpretq_f32_s32(a); }
CPU_INLINE V(vec) V(positive)(V(vec) a) {
  uint32x4_t one = vreinterpretq_u32_f32(vdupq_n_f32(1.0f));
  return vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(a, vdupq_n_f32(0)), one));
}
CPU_INLINE V(vec) V(unless_below)(V(vec) a, V(vec) x, V(vec) least) {
  return vbslq_f32(vcltq_f32(x, least), vdupq_n_f32(0), a);
}
CPU_INLINE V(vec) V(inverse)(V(vec) a) { return vdivq_f32(vdupq_n_f32(1.0f), a); }
CPU_INLINE V(vec) V(scale)(V(vec) a, V(vec) n) {
  V(ints) power = V(left)(vaddq_s32(V(to_ints)(n), vdupq_n_s32(127)), 23);
  return vmulq_f32(a, V(as_floats)(power));
}
CPU_INLINE V(vec) V(halves)(const void *p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
}
CPU_INLINE V(vec) V(brains)(const void *p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p), 16));
}
CPU_INLINE float V(max_of)(V(vec) v) { return vmaxvq_f32(v); }
CPU_INLINE float V(first_of)(V(vec) v) { return vgetq_lane_f32(v, 0); }
CPU_INLINE float V(sum_of)(V(vec) v) { return vaddvq_f32(v); }
CPU_INLINE int32_t V(sum16)(const int8_t *q) { return vaddlvq_s8(vld1q_s8(q)); }

/* to[stride * i + j] = row[j][i], i, j < 4 */
CPU_INLINE void V(transpose4)(float *to, int32_t stride, const float *const *row, int32_t at) {
  float32x4x2_t a = vzipq_f32(vld1q_f32(row[0] + at), vld1q_f32(row[2] + at));
  float32x4x2_t b = vzipq_f32(vld1q_f32(row[1] + at), vld1q_f32(row[3] + at));
  float32x4x2_t low = vzipq_f32(a.val[0], b.val[0]), high = vzipq_f32(a.val[1], b.val[1]);
  vst1q_f32(to, low.val[0]);
  vst1q_f32(to + stride, low.val[1]);
  vst1q_f32(to + 2 * stride, high.val[0]);
  vst1q_f32(to + 3 * stride, high.val[1]);
}
CPU_INLINE void V(transpose)(float *to, int32_t stride, const float *const *row) {
  int i, j;
  for (i = 0; i < 8; i += 4)
    for (j = 0; j < 8; j += 4) V(transpose4)(to + stride * i + j, stride, row + j, i);
}

/* sum + four products of signed bytes per lane. gcc knows the intrinsics' builtins by their target
   only, clang 14's header by the command line only: so assembly. */
CPU_INLINE V(ints) V(dot)(V(ints) sum, V(ints) w, V(ints) x) {
#if CPU_DOT
  __asm__(CPU_ASSEMBLE "sdot %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(w), "w"(x));
  return sum;
#else /* pairs of products stay within 16 bits: 2 * 128 * 127 */
  int8x16_t a = vreinterpretq_s8_s32(w), b = vreinterpretq_s8_s32(x);
  int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}

/* Rows r and r + 1 of W, then r + 2 and r + 3: 8 columns each, from two dwords of all four. */
CPU_INLINE void V(zip)(V(ints) *pair) {
#if CPU_DOT == 2
  int32x4x2_t both = vzipq_s32(pair[0], pair[1]);
  pair[0] = both.val[0];
  pair[1] = both.val[1];
#else
  (void)pair;
#endif
}

#if CPU_DOT == 2
CPU_INLINE V(ints) V(eights)(const int8_t *a, const int8_t *b) {
  return vreinterpretq_s32_s8(vcombine_s8(vld1_s8(a), vld1_s8(b)));
}
/* sum [2][2] + x [2][8] w [2][8]^T */
CPU_INLINE V(ints) V(dot_pairs)(V(ints) sum, V(ints) x, V(ints) w) {
  __asm__(CPU_ASSEMBLE "smmla %0.4s, %1.16b, %2.16b" : "+w"(sum) : "w"(x), "w"(w));
  return sum;
}
/* Row `second` of x, from its pair's sums with a zipped pair. */
CPU_INLINE V(ints) V(sums_of)(const V(ints) *sum, int second) {
  int64x2_t low = vreinterpretq_s64_s32(sum[0]), high = vreinterpretq_s64_s32(sum[1]);
  return vreinterpretq_s32_s64(second ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
}
#endif
#endif

#if defined(CPU_X86)
CPU_INLINE void V(zip)(V(ints) *pair) { (void)pair; } /* AArch64 has a use for it */
CPU_INLINE float V(max_of)(V(vec) v) {
  __m256 a = V(eight_max)(v);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
CPU_INLINE float V(first_of)(V(vec) v) {
  return _mm_cvtss_f32(_mm256_castps256_ps128(V(low)(v)));
}
CPU_INLINE float V(sum_of)(V(vec) v) {
  __m256 a = V(eight_sum)(v);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* The sum of 16 signed bytes. */
CPU_INLINE int32_t V(sum16)(const int8_t *q) {
  __m128i more = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(const void *)q),
                               _mm_set1_epi8(-128));
  __m128i sums = _mm_sad_epu8(more, _mm_setzero_si128());
  return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums))) - 16 * 128;
}

/* to[stride * i + j] = row[j][i], i, j < 8 */
CPU_INLINE void V(transpose)(float *to, int32_t stride, const float *const *row) {
  __m256 a[8], b[8];
  int i;
  for (i = 0; i < 8; i += 2) {
    __m256 x = _mm256_loadu_ps(row[i]), y = _mm256_loadu_ps(row[i + 1]);
    a[i] = _mm256_unpacklo_ps(x, y);
    a[i + 1] = _mm256_unpackhi_ps(x, y);
  }
  for (i = 0; i < 8; i += 4) { /* columns i, i + 1, ... of four rows, in each half */
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + stride * i, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    _mm256_storeu_ps(to + stride * (i + 4), _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
}

#endif

/* e^x within 3 units in the last place: x = n log 2 + r (the coefficients are Cephes'). Below
   2^-126 it is 0, as denormal results take 100 times as long; and it does not overflow. */
CPU_INLINE V(vec) V(exp)(V(vec) x) {
  const V(vec) least = V(all)(-87.33f);
  V(vec) n, r, p, wanted = x;
  x = V(min)(V(all)(88.3f), V(max)(least, x));
  n = V(round)(V(mul)(x, V(all)(1.44269504f)));
  r = V(fma)(n, V(all)(-0.693359375f), x);
  r = V(fma)(n, V(all)(2.12194440e-4f), r);
  p = V(fma)(V(all)(1.9875691500e-4f), r, V(all)(1.3981999507e-3f));
  p = V(fma)(p, r, V(all)(8.3334519073e-3f));
  p = V(fma)(p, r, V(all)(4.1665795894e-2f));
  p = V(fma)(p, r, V(all)(1.6666665459e-1f));
  p = V(fma)(p, r, V(all)(5.0000001201e-1f));
  p = V(fma)(p, V(mul)(r, r), V(add)(r, V(all)(1.0f)));
  return V(unless_below)(V(scale)(p, n), wanted, least);
}

/* ---- Epilogue ---- */

CPU_INLINE V(vec) V(sigmoid)(V(vec) x) { /* 1 / (1 + e^-x) */
  V(vec) one = V(all)(1.0f);
  return V(inverse)(V(add)(one, V(exp)(V(mul)(x, V(all)(-1.0f)))));
}

CPU_INLINE V(vec) V(gelu)(V(vec) v) {
  float x[CPU_LANES];
  int i;
  V(store)(x, v);
  for (i = 0; i < CPU_LANES; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
  return V(load)(x);
}

CPU_INLINE V(vec) V(act)(V(vec) v, tfm_act act) {
  switch (act) {
    case TFM_ACT_NONE: break;
    case TFM_ACT_GELU: return V(gelu)(v);
    case TFM_ACT_GELU_TANH: { /* x/2 (1 + tanh u) = x / (1 + e^-2u) */
      V(vec) cubic = V(fma)(V(mul)(v, v), V(all)(0.044715f), V(all)(1.0f));
      return V(mul)(v, V(sigmoid)(V(mul)(V(mul)(v, cubic), V(all)(2 * 0.79788456f))));
    }
    case TFM_ACT_SILU: return V(mul)(v, V(sigmoid)(v));
    case TFM_ACT_RELU: return V(max)(V(all)(0.0f), v); /* NaN stays */
  }
  return v;
}

/* What few networks want, lane by lane: the cap of logits, and dropout. */
static V(vec) V(rare)(V(vec) v, int32_t n, const tfm_epilogue *e, int32_t row, int32_t col) {
  float x[CPU_LANES];
  int32_t i;
  V(store)(x, v);
  for (i = 0; i < n && e->softcap != 0; i++) x[i] = e->softcap * tanhf(x[i] / e->softcap);
  for (i = 0; i < n && e->dropout.rate > 0; i++) x[i] *= cpu_dropout(&e->dropout, row, col + i);
  return V(load)(x);
}

/* See epilogue; act is a constant where this is inlined. */
CPU_INLINE void V(epilogue_as)(float *y, const float *v, int32_t n, const tfm_epilogue *e,
                               int32_t row, int32_t col, const tfm_act act) {
  const float *residual = e->residual.data ? cpu_row(e->residual, row) + col : NULL;
  float *aux = e->aux.data ? cpu_row(e->aux, row) + col : NULL;
  V(vec) x;
  int32_t j;
  for (j = 0; j < n; j += CPU_LANES) {
    x = V(load)(v + j);
    if (e->bias) x = V(add)(x, V(load_some)(e->bias + col + j, n - j));
    if (aux) V(store_some)(aux + j, x, n - j);
    x = V(act)(x, act);
    if (e->softcap != 0 || e->dropout.rate > 0) x = V(rare)(x, cpu_min(CPU_LANES, n - j), e, row,
                                                            col + j);
    if (residual) x = V(add)(x, V(load_some)(residual + j, n - j));
    V(store_some)(y + j, x, n - j);
  }
}

/* y[row, col .. col + n - 1] = epilogue(v), which is readable up to whole vectors. */
static void V(epilogue)(float *y, const float *v, int32_t n, const tfm_epilogue *e, int32_t row,
                        int32_t col) {
  switch (e->act) {
    case TFM_ACT_NONE: V(epilogue_as)(y, v, n, e, row, col, TFM_ACT_NONE); return;
    case TFM_ACT_GELU: V(epilogue_as)(y, v, n, e, row, col, TFM_ACT_GELU); return;
    case TFM_ACT_GELU_TANH: V(epilogue_as)(y, v, n, e, row, col, TFM_ACT_GELU_TANH); return;
    case TFM_ACT_SILU: V(epilogue_as)(y, v, n, e, row, col, TFM_ACT_SILU); return;
    case TFM_ACT_RELU: V(epilogue_as)(y, v, n, e, row, col, TFM_ACT_RELU); return;
  }
}

/* ---- Tiles of float weights ---- */

/* Column k of vectors `at` and `at` + half of a panel. w: the panel's units of that column. */
CPU_INLINE void V(pair)(V(vec) *low, V(vec) *high, const uint8_t *w, tfm_type type, int at) {
  const int half = V(vectors) / 2 * CPU_LANES, i = at * CPU_LANES;
  if (type == TFM_F32) {
    *low = V(load)((const float *)(const void *)w + i);
    *high = V(load)((const float *)(const void *)w + i + half);
  } else if (type == TFM_F16) {
    *low = V(halves)(w + 2 * i);
    *high = V(halves)(w + 2 * (i + half));
  } else { /* the upper 16 bits of a float; row i + 16 lies in the upper half of row i's lane */
    V(ints) both = V(load_ints)(w + 4 * i);
    *low = V(as_floats)(V(left)(both, 16));
    *high = V(as_floats)(V(and)(both, V(all_ints)((int32_t)0xffff0000)));
  }
}

/* rows, panels and type are constants where this is inlined, so that the sums stay in registers. */
CPU_INLINE void V(float_tile)(float *out, const void *const *x, const uint8_t *w,
                              size_t panel_bytes, int32_t cols, const cpu_coming *coming,
                              const tfm_type type, const int rows, const int panels) {
  const int bytes = CPU_ROWS * (type == TFM_F32 ? 4 : 2), half = V(vectors) / 2;
  V(vec) sum[CPU_TILE][4 * V(vectors)], low, high, b;
  int32_t k;
  int i, j, p, l;
  (void)coming;
  CPU_UNROLL for (i = 0; i < rows; i++)
    CPU_UNROLL for (j = 0; j < panels * V(vectors); j++) sum[i][j] = V(all)(0.0f);
  for (k = 0; k < cols; k++, w += bytes)
    CPU_UNROLL for (p = 0; p < panels; p++) {
      const uint8_t *at = w + (size_t)p * panel_bytes;
      for (l = 0; l < bytes; l += CPU_ALIGN) __builtin_prefetch(at + CPU_AHEAD + l);
      CPU_UNROLL for (j = 0; j < half; j++) {
        V(pair)(&low, &high, at, type, j);
        CPU_UNROLL for (i = 0; i < rows; i++) {
          V(vec) *s = &sum[i][p * V(vectors) + j];
          b = V(all)(((const float *)x[i])[k]);
          s[0] = V(fma)(low, b, s[0]);
          s[half] = V(fma)(high, b, s[half]);
        }
      }
    }
  CPU_UNROLL for (i = 0; i < rows; i++)
    CPU_UNROLL for (j = 0; j < panels * V(vectors); j++)
      V(store)(out + i * CPU_OUT + j * CPU_LANES, sum[i][j]);
}

/* ---- Tiles of quantised weights ----
   A block's numbers and x's are multiplied as integers, and brought to its scales. These sums are
   added up over a group of x, and with its scale to the result. */

/* Vector j of dword u of 32 columns: a panel's rows and bytes, 4 u and on. */
CPU_INLINE V(ints) V(numbers)(const uint8_t *w, const int type, const int u, const int j) {
  const struct cpu_layout *l = &cpu_layouts[type];
  const int dword = CPU_ROWS * 4, at = 4 * CPU_LANES * j, bit = u % 4 * 2;
  const uint8_t *high = w + CPU_ROWS * l->byte, *low = high + dword * l->high;
  V(ints) q, h;
  if (l->low == 8) return V(load_ints)(low + dword * u + at);
  q = V(load_ints)(low + dword * (u % 4) + at);
  q = V(and)(u < 4 ? q : V(right)(q, 4), V(all_ints)(0x0f0f0f0f));
  if (l->high == 0) return q;
  h = V(load_ints)(high + (l->high == 2 ? u / 4 * dword : 0) + at);
  if (l->high == 1) {
    h = u < 4 ? V(left)(h, 4 - u) : V(right)(h, u - 4);
    return V(or)(q, V(and)(h, V(all_ints)(0x10101010)));
  }
  h = bit < 4 ? V(left)(h, 4 - bit) : V(right)(h, bit - 4);
  return V(or)(q, V(and)(h, V(all_ints)(0x30303030)));
}

CPU_INLINE bool V(is_unpacked)(const int type) { return type >= CPU_UNPACKED; }

/* The half of 32 columns has a scale of its own. */
CPU_INLINE bool V(halved)(const int type) {
  return type == TFM_Q6_K || type == CPU_UNPACKED_HALVES;
}

CPU_INLINE bool V(has_low)(const int type) {
  return type == CPU_UNPACKED_LOW || (cpu_layouts[type].f16 == 2 && !V(is_unpacked)(type));
}

/* Number `which` of vector j of the panel's rows: scale, scale of the second half, or lowest value.
   Unpacked, they are floats; 0 and 1, or 0 and 2. */
CPU_INLINE V(vec) V(scales)(const uint8_t *front, const uint8_t *w, const int type,
                            const int which, const int j) {
  const int at = CPU_LANES * j, f16 = which == 2 ? 2 * CPU_ROWS : 0;
  const int byte = which ? CPU_ROWS : 0;
  V(vec) scale;
  if (V(is_unpacked)(type))
    return V(load)((const float *)(const void *)front + (which ? CPU_ROWS : 0) + at);
  scale = V(halves)(front + f16 + 2 * at);
  if (cpu_layouts[type].byte == 0) return scale;
  return V(mul)(scale, V(to_floats)(V(halved)(type) ? V(widen_signed)(w + byte + at)
                                                    : V(widen_bytes)(w + byte + at)));
}

/* The 4 bytes of x, in every lane. */
CPU_INLINE V(ints) V(quad)(const int8_t *x) {
  int32_t four;
  memcpy(&four, x, sizeof four);
  return V(all_ints)(four);
}

/* What the sum of dwords `begin` to 7, or to 3, starts from: minus the sum of x, times what these
   numbers are more than they stand for. AVX2's dot takes 128 off itself. */
CPU_INLINE V(ints) V(first_sum)(const cpu_group *x, int32_t k, const int type, const int begin) {
  const int shift = cpu_layouts[type].shift;
  V(ints) sum;
  if (shift == 0 || (shift == 7 && V(shift) == 0)) return V(all_ints)(0);
  sum = V(all_ints)(V(halved)(type) ? x->half[begin / 4][k] : x->whole[k]);
  return shift == 7 ? sum : V(signed_right)(sum, 7 - shift);
}

/* Lines to ask for with each dword: what is unpacked is multiplied by many rows. */
CPU_INLINE int V(lines)(const int type) { return V(is_unpacked)(type) ? 1 : 2; }

/* dots[i][j] += dwords begin .. begin + step - 1 of vector j of the panel, times x[i]'s. */
#if defined(CPU_X86)
CPU_INLINE void V(dots)(V(ints) (*dots)[V(vectors)], const cpu_group *const *x, int32_t k,
                        const uint8_t *w, cpu_coming *next, const int type, const int rows,
                        const int begin, const int step) {
  V(ints) numbers[V(vectors)], four;
  int i, j, u;
  for (u = begin; u < begin + step; u++) {
    if (rows > 1) cpu_ask(next, V(lines)(type));
    for (j = 0; j < V(vectors); j++) numbers[j] = V(numbers)(w, type, u, j);
    for (i = 0; i < rows; i++) {
      four = V(quad)(x[i]->value + 32 * k + 4 * u);
      for (j = 0; j < V(vectors); j++)
        dots[i][j] = cpu_layouts[type].shift == 7 ? V(dot)(dots[i][j], numbers[j], four)
                                                  : V(dot6)(dots[i][j], numbers[j], four);
    }
  }
}
#else /* more vectors of W than rows of x: these stay in registers */
CPU_INLINE void V(dots_of_four)(V(ints) (*dots)[V(vectors)], const cpu_group *const *x, int32_t k,
                                const uint8_t *w, const int type, const int rows,
                                const int begin, const int step) {
  V(ints) four[CPU_TILE], numbers;
  int i, j, u;
  CPU_UNROLL for (u = begin; u < begin + step; u++) {
    CPU_UNROLL for (i = 0; i < rows; i++) four[i] = V(quad)(x[i]->value + 32 * k + 4 * u);
    CPU_UNROLL for (j = 0; j < V(vectors); j++) {
      numbers = V(numbers)(w, type, u, j);
      CPU_UNROLL for (i = 0; i < rows; i++) dots[i][j] = V(dot)(dots[i][j], numbers, four[i]);
    }
  }
}

#if CPU_DOT == 2
/* Products of matrices: 8 columns of 2 rows of x with 8 of 2 rows of W, and so 2 x 2 sums. Half of
   the panel at a time leaves room for the sums of 4 rows. An odd row stands in for its partner. */
CPU_INLINE void V(dots_of_pairs)(V(ints) (*dots)[V(vectors)], const cpu_group *const *x, int32_t k,
                                 const uint8_t *w, const int type, const int rows,
                                 const int begin, const int step) {
  enum { HALF = V(vectors) / 2 };
  V(ints) sum[CPU_TILE / 2][HALF][2], eight[CPU_TILE / 2], pair[2];
  const int pairs = (rows + 1) / 2, last = rows - 1;
  int half, i, j, u;
  CPU_UNROLL for (half = 0; half < 2; half++) {
    CPU_UNROLL for (i = 0; i < pairs; i++)
      CPU_UNROLL for (j = 0; j < HALF; j++) sum[i][j][0] = sum[i][j][1] = V(all_ints)(0);
    CPU_UNROLL for (u = begin; u < begin + step; u += 2) {
      CPU_UNROLL for (i = 0; i < pairs; i++)
        eight[i] = V(eights)(x[2 * i]->value + 32 * k + 4 * u,
                             x[cpu_min(2 * i + 1, last)]->value + 32 * k + 4 * u);
      CPU_UNROLL for (j = 0; j < HALF; j++) {
        pair[0] = V(numbers)(w, type, u, half * HALF + j);
        pair[1] = V(numbers)(w, type, u + 1, half * HALF + j);
        if (!V(is_unpacked)(type)) V(zip)(pair);
        CPU_UNROLL for (i = 0; i < pairs; i++) {
          sum[i][j][0] = V(dot_pairs)(sum[i][j][0], eight[i], pair[0]);
          sum[i][j][1] = V(dot_pairs)(sum[i][j][1], eight[i], pair[1]);
        }
      }
    }
    CPU_UNROLL for (j = 0; j < HALF; j++)
      CPU_UNROLL for (i = 0; i < rows; i++)
        dots[i][half * HALF + j] = V(plus)(dots[i][half * HALF + j],
                                           V(sums_of)(sum[i / 2][j], i % 2));
  }
}
#endif

CPU_INLINE void V(dots)(V(ints) (*dots)[V(vectors)], const cpu_group *const *x, int32_t k,
                        const uint8_t *w, cpu_coming *next, const int type, const int rows,
                        const int begin, const int step) {
  int u;
  for (u = begin; u < begin + step && rows > 1; u++) cpu_ask(next, V(lines)(type));
#if CPU_DOT == 2
  if (rows > 1 || V(is_unpacked)(type)) {
    V(dots_of_pairs)(dots, x, k, w, type, rows, begin, step);
    return;
  }
#endif
  V(dots_of_four)(dots, x, k, w, type, rows, begin, step);
}
#endif

/* sum[i][j] += vector j of the panel times piece k of x[i], with the scales of W. */
CPU_INLINE void V(block)(V(vec) (*sum)[V(vectors)], const cpu_group *const *x, int32_t k,
                         const uint8_t *front, const uint8_t *w, cpu_coming *next, const int type,
                         const int rows) {
  const int step = V(halved)(type) ? 4 : 8;
  V(ints) dots[CPU_TILE][V(vectors)];
  V(vec) scale;
  int begin, i, j;
  CPU_UNROLL for (begin = 0; begin < 8; begin += step) {
    CPU_UNROLL for (i = 0; i < rows; i++)
      CPU_UNROLL for (j = 0; j < V(vectors); j++) dots[i][j] = V(first_sum)(x[i], k, type, begin);
    V(dots)(dots, x, k, w, next, type, rows, begin, step);
    CPU_UNROLL for (j = 0; j < V(vectors); j++) {
      scale = V(scales)(front, w, type, begin / 4, j);
      CPU_UNROLL for (i = 0; i < rows; i++)
        sum[i][j] = V(fma)(V(to_floats)(dots[i][j]), scale, sum[i][j]);
    }
  }
  if (!V(has_low)(type)) return;
  CPU_UNROLL for (j = 0; j < V(vectors); j++) {
    scale = V(scales)(front, w, type, 2, j);
    CPU_UNROLL for (i = 0; i < rows; i++)
      sum[i][j] = V(fma)(scale, V(all)(x[i]->sum[k]), sum[i][j]);
  }
}

/* Adds to out [rows][panels][CPU_ROWS]. */
CPU_INLINE void V(block_tile)(float *out, const void *const *x, const uint8_t *w,
                              size_t panel_bytes, int32_t cols, const cpu_coming *coming,
                              const int type, const int rows, const int panels) {
  const int bytes = cpu_piece_bytes(type) + cpu_front_bytes(type) / (cpu_layouts[type].cols / 32);
  cpu_coming next = {NULL, 0};
  const cpu_group *group[CPU_TILE];
  V(vec) sum[4][CPU_TILE][V(vectors)], scale;
  int32_t b, k, n;
  int i, j, p, l;
  if (coming) next = *coming;
  for (i = 0; i < rows; i++) group[i] = (const cpu_group *)x[i];
  for (b = 0; b < cols / 32; b += n) {
    n = cpu_min(CPU_GROUP / 32, cols / 32 - b);
    for (p = 0; p < panels; p++)
      for (i = 0; i < rows; i++)
        for (j = 0; j < V(vectors); j++) sum[p][i][j] = V(all)(0.0f);
    for (k = 0; k < n; k++)
      for (p = 0; p < panels; p++) {
        const uint8_t *front, *at = cpu_piece_at(&front, w + (size_t)p * panel_bytes, type, b + k);
        if (rows == 1 && !V(is_unpacked)(type))
          for (l = 0; l < bytes; l += CPU_ALIGN) __builtin_prefetch(at + CPU_AHEAD + l);
        V(block)(sum[p], group, k, front, at, &next, type, rows);
      }
    for (i = 0; i < rows; i++) {
      scale = V(all)(group[i]->scale);
      for (p = 0; p < panels; p++)
        for (j = 0; j < V(vectors); j++) {
          float *to = out + ((i * panels + p) * V(vectors) + j) * CPU_LANES;
          V(store)(to, V(fma)(sum[p][i][j], scale, V(load)(to)));
        }
      group[i]++;
    }
  }
}

/* What a type is unpacked to for many rows of x; 0: nothing, it is multiplied as it lies. */
CPU_INLINE int V(form)(int type) {
  if (type == TFM_Q8_0 && V(zipped)) return CPU_UNPACKED;
  return cpu_layouts[type].form;
}

/* cols columns of a panel, numbers as bytes and scales as floats. */
CPU_INLINE void V(unpack_as)(uint8_t *to, const uint8_t *w, int32_t cols, const int type) {
  const int form = V(form)(type), dword = CPU_ROWS * 4;
  const V(ints) more = V(all_ints)((int32_t)((uint32_t)(uint8_t)(cpu_more(form) - cpu_more(type)) *
                                             0x01010101u));
  V(ints) pair[2];
  int32_t b;
  int j, u;
  for (b = 0; b < cols / 32; b++) {
    const uint8_t *front, *at = cpu_piece_at(&front, w, type, b);
    float *scale = (float *)(void *)to;
    for (j = 0; j < V(vectors); j++) {
      V(store)(scale + CPU_LANES * j, V(scales)(front, at, type, 0, j));
      if (form != CPU_UNPACKED)
        V(store)(scale + CPU_ROWS + CPU_LANES * j,
                 V(scales)(front, at, type, form == CPU_UNPACKED_LOW ? 2 : 1, j));
    }
    to += cpu_front_bytes(form);
    for (u = 0; u < 8; u += 2, to += 2 * dword)
      for (j = 0; j < V(vectors); j++) {
        pair[0] = V(add_bytes)(V(numbers)(at, type, u, j), more);
        pair[1] = V(add_bytes)(V(numbers)(at, type, u + 1, j), more);
        V(zip)(pair);
        V(store_ints)((int32_t *)(void *)to + CPU_LANES * j, pair[0]);
        V(store_ints)((int32_t *)(void *)(to + dword) + CPU_LANES * j, pair[1]);
      }
  }
}

/* ---- Tiles by type and size ---- */

#define CPU_TILE_OF(kind, type, rows, panels)                                                      \
  static void V(kind##_##type##_##rows##_##panels)(float *out, const void *const *x,               \
                                                   const uint8_t *w, size_t panel_bytes,           \
                                                   int32_t cols, const cpu_coming *coming) {       \
    V(kind)(out, x, w, panel_bytes, cols, coming, type, rows, panels);                             \
  }
#define CPU_TILE_ROW(kind, type, rows, panels) {rows, panels, V(kind##_##type##_##rows##_##panels)},

CPU_FLOAT_TILES(CPU_TILE_OF, TFM_F32)
CPU_FLOAT_TILES(CPU_TILE_OF, TFM_F16)
CPU_FLOAT_TILES(CPU_TILE_OF, TFM_BF16)
CPU_BLOCK_TILES(CPU_TILE_OF, TFM_Q8_0)
CPU_BLOCK_TILES(CPU_TILE_OF, CPU_UNPACKED)
CPU_BLOCK_TILES(CPU_TILE_OF, CPU_UNPACKED_LOW)
CPU_BLOCK_TILES(CPU_TILE_OF, CPU_UNPACKED_HALVES)
CPU_BLOCK_TILES(CPU_TILE_OF, TFM_Q4_0)
CPU_LINE_TILES(CPU_TILE_OF, TFM_Q4_1)
CPU_LINE_TILES(CPU_TILE_OF, TFM_Q5_0)
CPU_LINE_TILES(CPU_TILE_OF, TFM_Q5_1)
CPU_LINE_TILES(CPU_TILE_OF, TFM_Q4_K)
CPU_LINE_TILES(CPU_TILE_OF, TFM_Q5_K)
CPU_LINE_TILES(CPU_TILE_OF, TFM_Q6_K)

/* The first tile that takes as many panels, and no more rows. */
static const cpu_tile_row *V(tile_for)(int type, int32_t rows, int32_t panels) {
  static const cpu_tile_row tiles[CPU_FORMS][9] = {
    {{0, 0, NULL}},
    {CPU_FLOAT_TILES(CPU_TILE_ROW, TFM_F32)}, {CPU_FLOAT_TILES(CPU_TILE_ROW, TFM_F16)},
    {CPU_FLOAT_TILES(CPU_TILE_ROW, TFM_BF16)}, {CPU_BLOCK_TILES(CPU_TILE_ROW, TFM_Q8_0)},
    {CPU_BLOCK_TILES(CPU_TILE_ROW, TFM_Q4_0)}, {CPU_LINE_TILES(CPU_TILE_ROW, TFM_Q4_1)},
    {CPU_LINE_TILES(CPU_TILE_ROW, TFM_Q5_0)}, {CPU_LINE_TILES(CPU_TILE_ROW, TFM_Q5_1)},
    {CPU_LINE_TILES(CPU_TILE_ROW, TFM_Q4_K)}, {CPU_LINE_TILES(CPU_TILE_ROW, TFM_Q5_K)},
    {CPU_LINE_TILES(CPU_TILE_ROW, TFM_Q6_K)}, {{0, 0, NULL}}, {{0, 0, NULL}},
    {CPU_BLOCK_TILES(CPU_TILE_ROW, CPU_UNPACKED)},
    {CPU_BLOCK_TILES(CPU_TILE_ROW, CPU_UNPACKED_LOW)},
    {CPU_BLOCK_TILES(CPU_TILE_ROW, CPU_UNPACKED_HALVES)}};
  const cpu_tile_row *t = tiles[type];
  while (t->panels != panels || t->rows > rows) t++;
  return t;
}

static void V(unpack)(uint8_t *to, const uint8_t *w, int32_t cols, tfm_type type) {
  switch (type) {
    case TFM_Q8_0: V(unpack_as)(to, w, cols, TFM_Q8_0); break;
    case TFM_Q4_0: V(unpack_as)(to, w, cols, TFM_Q4_0); break;
    case TFM_Q4_1: V(unpack_as)(to, w, cols, TFM_Q4_1); break;
    case TFM_Q5_0: V(unpack_as)(to, w, cols, TFM_Q5_0); break;
    case TFM_Q5_1: V(unpack_as)(to, w, cols, TFM_Q5_1); break;
    case TFM_Q4_K: V(unpack_as)(to, w, cols, TFM_Q4_K); break;
    case TFM_Q5_K: V(unpack_as)(to, w, cols, TFM_Q5_K); break;
    case TFM_Q6_K: V(unpack_as)(to, w, cols, TFM_Q6_K); break;
    default: break;
  }
}

/* ---- matmul ---- */

/* n values, whole 32s. NaN and infinity end up in the scale, as the bits of absolute values are in
   order. */
static void V(quantise_group)(cpu_group *y, const float *x, int32_t n) {
  const V(ints) positive = V(all_ints)(0x7fffffff);
  V(ints) top = V(all_ints)(0);
  V(vec) inverse;
  int32_t lane[CPU_LANES], best = 0, i;
  float largest;
  for (i = 0; i < n; i += CPU_LANES) top = V(top)(top, V(and)(V(load_ints)(x + i), positive));
  V(store_ints)(lane, top);
  for (i = 0; i < CPU_LANES; i++) best = lane[i] > best ? lane[i] : best;
  memcpy(&largest, &best, sizeof largest);
  inverse = V(all)(largest > 1e-30f && largest < 1e30f ? 127.0f / largest : 0.0f);
  for (i = 0; i < n; i += CPU_LANES)
    V(store_bytes)(y->value + i, V(to_ints)(V(mul)(V(load)(x + i), inverse)));
  for (i = 0; i < n / 32; i++) {
    int32_t a = V(sum16)(y->value + 32 * i), b = V(sum16)(y->value + 32 * i + 16);
    y->whole[i] = -128 * (a + b);
    y->half[0][i] = -128 * a;
    y->half[1][i] = -128 * b;
    y->sum[i] = (float)(a + b);
  }
  y->scale = largest / 127.0f;
}

static void V(quantise)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_product *t = (const cpu_product *)context;
  int32_t i, col;
  (void)worker;
  for (i = begin; i < end; i++) {
    cpu_group *y = (cpu_group *)(void *)(t->quantised + (size_t)i * t->quantised_bytes);
    const float *x = cpu_row_of_part(t, i);
    for (col = 0; col < t->x.cols; col += CPU_GROUP)
      V(quantise_group)(y++, x + col, cpu_min(CPU_GROUP, t->x.cols - col));
  }
}

static void V(write)(const cpu_product *t, const float *v, int32_t cols, int32_t row, int32_t col) {
  float *y = cpu_row(t->y, row) + col;
  if (t->e) V(epilogue)(y, v, cols, t->e, row, col);
  else memcpy(y, v, (size_t)cols * sizeof *y);
}

/* n panels of a stripe, times all rows of x that its expert has. col: the first column of y. */
static void V(panels)(const cpu_product *t, const cpu_slots *s, const cpu_stripe *stripe,
                      int32_t panel, int32_t n, int32_t col) {
  const uint8_t *w = stripe->data + (size_t)panel * stripe->bytes;
  int32_t cols = cpu_min(n * CPU_ROWS, stripe->rows - panel * CPU_ROWS), slot, i;
  float out[CPU_TILE * CPU_OUT];
  const void *x[CPU_TILE];
  const cpu_tile_row *tile;
  for (slot = s->begin; slot < s->end; slot += tile->rows) {
    tile = V(tile_for)((int)stripe->type, s->end - slot, n);
    for (i = 0; i < tile->rows; i++) x[i] = cpu_row_of_x(t, stripe, s, slot + i);
    if (cpu_has_blocks((int)stripe->type)) memset(out, 0, CPU_OUT * sizeof *out); /* 1 row */
    tile->run(out, x, w, stripe->bytes, t->x.cols, NULL);
    for (i = 0; i < tile->rows; i++)
      V(write)(t, out + i * CPU_OUT, cols, cpu_slot_at(s, slot + i), col);
  }
}

/* Up to so many rows of x multiply a type as it is packed: to unpack it for them does not pay. */
CPU_INLINE int32_t V(packed)(int type) { return type == TFM_Q4_0 && CPU_LANES == 16 ? 16 : 4; }

/* The tiles that a chunk's next one is asked for by: those of the first rows of x. */
static int32_t V(asking)(int type, int32_t n) {
  int32_t tiles = 0, i, rows;
  for (i = 0; i < cpu_min(n, CPU_ASKING); i += rows) {
    rows = V(tile_for)(type, n - i, 1)->rows;
    tiles += rows > 1;
  }
  return tiles > 0 ? tiles : 1;
}

/* A panel of blocks times n rows of x, CPU_MANY at most: out [n][CPU_ROWS]. room: for a chunk,
   or for integers of tiles. */
static void V(block_panel)(float *out, uint8_t *room, const cpu_product *t, const cpu_slots *s,
                           int32_t slot, int32_t n, const cpu_stripe *stripe, int32_t panel) {
  const uint8_t *from = stripe->data + (size_t)panel * stripe->bytes, *w;
  const int form = n > V(packed)((int)stripe->type) ? V(form)((int)stripe->type) : 0;
  const int type = form ? form : (int)stripe->type;
  const int32_t asking = V(asking)(type, n);
  const bool bytes = t->bytes && stripe->type == TFM_Q8_0 && n >= 16;
  const void *x[CPU_TILE];
  const cpu_tile_row *tile;
  int32_t k, i, j, cols, span;
  cpu_coming next;
  memset(out, 0, (size_t)n * CPU_ROWS * sizeof *out);
  for (k = 0; k < t->x.cols; k += cols, from += span) {
    cols = cpu_min(CPU_CHUNK, t->x.cols - k);
    span = (int32_t)cpu_panel_span((int)stripe->type, cols);
    w = form ? room : from;
    if (form) V(unpack)(room, from, cols, stripe->type);
    next.at = from + span;
    next.step = span / (bytes ? cols / 16 * CPU_BYTES_ASKED : asking * (cols / 4));
    for (i = 0; bytes && i + 16 <= n; i += 16) {
      cpu_bytes_panel(out + i * CPU_ROWS, (int32_t *)(void *)room,
                      (const cpu_group *)cpu_row_of_x(t, stripe, s, slot + i) + k / CPU_GROUP,
                      t->quantised_bytes, from, cols, &next);
      next.at = from, next.step = 0;
    }
    for (; i < n; i += tile->rows) {
      tile = V(tile_for)(type, n - i, 1);
      if (i >= CPU_ASKING) next.at = w, next.step = 0;
      for (j = 0; j < tile->rows; j++)
        x[j] = (const cpu_group *)cpu_row_of_x(t, stripe, s, slot + i + j) + k / CPU_GROUP;
      tile->run(out + i * CPU_ROWS, x, w, 0, cols, &next);
      next.at += next.step * (cols / 4);
    }
  }
}

static void V(block_panels)(const cpu_product *t, const cpu_slots *s, const cpu_stripe *stripe,
                            int32_t panel, int32_t col, int32_t worker) {
  float *out = (float *)(void *)(t->work + (size_t)worker * CPU_TILE_BYTES);
  int32_t cols = cpu_min(CPU_ROWS, stripe->rows - panel * CPU_ROWS), slot, n, i;
  for (slot = s->begin; slot < s->end; slot += n) {
    n = cpu_min(CPU_MANY, s->end - slot);
    for (i = 0; i < n; i++) { /* 128 bytes of y, far apart: asked for ahead */
      const float *y = cpu_row(t->y, cpu_slot_at(s, slot + i)) + col;
      __builtin_prefetch(y, 1), __builtin_prefetch(y + CPU_ROWS / 2, 1);
    }
    V(block_panel)(out, (uint8_t *)(out + CPU_MANY * CPU_ROWS), t, s, slot, n, stripe, panel);
    for (i = 0; i < n; i++)
      V(write)(t, out + i * CPU_ROWS, cols, cpu_slot_at(s, slot + i), col);
  }
}

/* Panels begin .. end-1 of each expert. */
static void V(columns)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_product *t = (const cpu_product *)context;
  const cpu_weight *w = cpu_weight_of(t->w);
  int32_t expert, i, at, n;
  if (t->bytes) cpu_bytes_begin();
  for (expert = 0; expert < cpu_experts(t); expert++) {
    cpu_slots slots = cpu_slots_of(t, expert);
    bool many = slots.end - slots.begin > 1;
    for (i = 0; i < w->stripes && slots.begin < slots.end; i++) {
      const cpu_stripe *s = &w->stripe[expert * w->stripes + i];
      int32_t first = (int32_t)(s->first - (int64_t)expert * t->w->rows);
      int32_t last = cpu_min(end, s->panel + cpu_panels(s->rows));
      bool blocks = many && cpu_has_blocks((int)s->type);
      bool tiled = t->tiles && s->type != TFM_F32;
      int32_t wide = tiled ? last : blocks ? 1 : many ? V(wide) : V(stream);
      for (at = begin > s->panel ? begin : s->panel; at < last; at += n) {
        int32_t panel = at - s->panel, col = first + panel * CPU_ROWS;
        n = tiled ? last - at : last - at >= wide ? wide : 1;
        if (tiled) cpu_tiles_panels(t, &slots, s, panel, n, col, worker);
        else if (blocks) V(block_panels)(t, &slots, s, panel, col, worker);
        else V(panels)(t, &slots, s, panel, n, col);
      }
    }
  }
  if (t->bytes) cpu_bytes_end();
}

static void V(product)(tfm_dev *d, cpu_product *t) {
  const int32_t panels = t->up ? cpu_panels(t->y.cols) : cpu_weight_of(t->w)->panels;
  int32_t all = t->x.rows, most, taken;
  t->work = (uint8_t *)d->work;
  t->tiles = cpu_in_tiles(d, t->w, t->y.rows / cpu_experts(t));
  t->in_order = t->routing && (t->tiles || !t->spread);
  if (t->in_order) all = t->y.rows;
  most = all;
  if (t->tiles) {
    t->work = cpu_quantised_at(d);
    t->quantised = t->work + (size_t)d->threads * CPU_TILED_BYTES;
    most = cpu_even_part(all, t->routing ? CPU_TILED_SLOTS : CPU_TILED_ROWS);
  } else if (cpu_is_quantised(t->w)) {
    t->quantised = cpu_quantised_at(d);
    t->quantised_bytes = cpu_quantised_bytes(t->x.cols);
    most = cpu_even_part(all, cpu_quantised_most(t->x.cols));
    t->bytes = d->state && (!t->routing || t->in_order); /* rows lie one after the other */
  }
  taken = cpu_min(t->tiles ? CPU_TILED_TAKEN : CPU_TAKEN, cpu_shares(panels, d->threads));
  for (t->first = 0; t->first < all; t->first += t->rows) {
    t->rows = cpu_min(most, all - t->first);
    if (t->quantised)
      tfm_parallel_for(d, t->rows, cpu_grain(t->x.cols), t->tiles ? cpu_tiles_of_x : V(quantise),
                       t);
    cpu_parallel_for(d, panels, cpu_max(taken, cpu_grain((int64_t)t->x.cols * CPU_ROWS * t->rows)),
                     V(columns), t);
  }
}

static void V(matmul_rows)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                           const tfm_epilogue *e);
static void V(matmul_moe_rows)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                               const tfm_routing *r, bool spread);

static void V(matmul)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                      const tfm_epilogue *e) {
  cpu_product t = {y, x, w, e, NULL, false, false, 0, 0, NULL, 0, NULL, NULL, false, false};
  if (cpu_weight_of(w)->stripe->panels) V(product)(d, &t);
  else V(matmul_rows)(d, y, x, w, e);
}

/* Where tiles multiply, a row's gate and up are at hand together. They may be two stripes, or whole
   panels of one. */
static bool V(matmul_glu)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w, tfm_act act) {
  const cpu_weight *packed = cpu_weight_of(w);
  const int32_t panels = cpu_panels(y.cols);
  tfm_epilogue e;
  cpu_product t = {y, x, w, &e, NULL, false, false, 0, 0, NULL, 0, NULL, NULL, false, false};
  cpu_stripe up = packed->stripe[packed->stripes - 1];
  if (packed->stripes == 1 && y.cols % CPU_ROWS == 0) up.data += (size_t)panels * up.bytes;
  else if (packed->stripes != 2 || packed->stripe->rows != up.rows) return false;
  if (!packed->stripe->panels || packed->stripe->type != up.type || !cpu_in_tiles(d, w, x.rows))
    return false;
  memset(&e, 0, sizeof e);
  e.act = act;
  t.up = &up;
  V(product)(d, &t);
  return true;
}

static void V(matmul_moe)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                          const tfm_routing *r, bool spread) {
  cpu_product t = {y, x, w, NULL, r, spread, false, 0, 0, NULL, 0, NULL, NULL, false, false};
  if (cpu_weight_of(w)->stripe->panels) V(product)(d, &t);
  else V(matmul_moe_rows)(d, y, x, w, r, spread);
}

/* ---- norm, rope, glu ---- */

/* y = residual + (x - mean) * deviation^-1 * (w + offset) + b, of n values. */
static void V(norm_vector)(const cpu_norm_job *t, float *y, const float *x, const float *residual,
                           int32_t n, float *stats) {
  const V(vec) offset = V(all)(t->p->offset);
  V(vec) sum = V(all)(0.0f), minus = sum, inverse, v;
  float mean = 0, means[CPU_LANES];
  int32_t i;
  for (i = 0; i < n && t->p->kind == TFM_NORM_LAYER; i += CPU_LANES)
    sum = V(add)(sum, V(load_some)(x + i, n - i));
  if (t->p->kind == TFM_NORM_LAYER) mean = V(sum_of)(sum) / (float)n;
  V(store)(means, minus = V(all)(-mean));
  for (i = 0, sum = V(all)(0.0f); i < n; i += CPU_LANES) { /* beyond n, nothing is subtracted */
    v = V(add)(V(load_some)(x + i, n - i), V(load_some)(means, n - i));
    sum = V(fma)(v, v, sum);
  }
  stats[0] = mean;
  stats[1] = 1.0f / sqrtf(V(sum_of)(sum) / (float)n + t->p->eps);
  inverse = V(all)(stats[1]);
  for (i = 0; i < n; i += CPU_LANES) {
    v = V(mul)(V(add)(V(load_some)(x + i, n - i), minus), inverse);
    v = V(mul)(v, V(add)(V(load_some)(t->w + i, n - i), offset));
    if (t->b) v = V(add)(v, V(load_some)(t->b + i, n - i));
    if (residual) v = V(add)(v, V(load_some)(residual + i, n - i));
    V(store_some)(y + i, v, n - i);
  }
}

static void V(norm_rows)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_norm_job *t = (const cpu_norm_job *)context;
  int32_t n = t->x.cols / t->groups, i, g;
  float own[2];
  (void)worker;
  for (i = begin; i < end; i++)
    for (g = 0; g < t->groups; g++)
      V(norm_vector)(t, cpu_row(t->y, i) + g * n, cpu_row(t->x, i) + g * n,
                     t->residual.data ? cpu_row(t->residual, i) + g * n : NULL, n,
                     t->stats ? t->stats + 2 * ((int64_t)i * t->groups + g) : own);
}

static void V(norm)(tfm_dev *d, tfm_mat y, tfm_mat x, const float *w, const float *b,
                    tfm_mat residual, float *stats, const tfm_norm *p) {
  cpu_norm_job t = {y, x, residual, w, b, stats, p, p->groups > 0 ? p->groups : 1};
  tfm_parallel_for(d, x.rows, cpu_grain(4 * (int64_t)x.cols), V(norm_rows), &t);
}

/* Pairs first .. first + n - 1 of a head, by the angles' cosines and sines. */
static void V(rope_head)(float *x, const tfm_rope *p, int32_t first, int32_t n, const float *c,
                         const float *s) {
  float *a = x + first, *b = a + p->rot / 2;
  int32_t i;
  for (i = 0; i < n && p->interleaved; i++) {
    float *pair = x + 2 * (first + i), u = pair[0], v = pair[1];
    pair[0] = u * c[i] - v * s[i];
    pair[1] = v * c[i] + u * s[i];
  }
  for (i = 0; i < n && !p->interleaved; i += CPU_LANES) {
    V(vec) u = V(load_some)(a + i, n - i), v = V(load_some)(b + i, n - i);
    V(vec) cosine = V(load)(c + i), sine = V(load)(s + i);
    V(store_some)(a + i, V(fma)(V(mul)(v, sine), V(all)(-1.0f), V(mul)(u, cosine)), n - i);
    V(store_some)(b + i, V(fma)(u, sine, V(mul)(v, cosine)), n - i);
  }
}

/* Sines and cosines of angles below 2^24. n quarter turns are taken off, exactly at first, as what
   is left has no finer bits than pi / 2 as a float. The coefficients are Cephes'. */
CPU_INLINE void V(sine_cosine)(V(vec) x, V(vec) *sine, V(vec) *cosine) {
  const V(vec) one = V(all)(1.0f);
  V(vec) n = V(round)(V(mul)(x, V(all)(0.63661977f))), minus = V(mul)(n, V(all)(-1.0f));
  V(ints) turn = V(to_ints)(n), next = V(plus)(turn, V(all_ints)(1));
  V(vec) odd = V(to_floats)(V(and)(turn, V(all_ints)(1)));
  V(vec) even = V(to_floats)(V(and)(next, V(all_ints)(1))), r, square, s, c;
  r = V(fma)(minus, V(all)(1.57079637f), x);
  r = V(fma)(minus, V(all)(-4.37113883e-8f), r);
  r = V(fma)(minus, V(all)(-1.71512451e-15f), r);
  square = V(mul)(r, r);
  s = V(fma)(V(all)(-1.9515295891e-4f), square, V(all)(8.3321608736e-3f));
  s = V(fma)(s, square, V(all)(-1.6666654611e-1f));
  s = V(fma)(V(mul)(s, square), r, r);
  c = V(fma)(V(all)(2.4433157118e-5f), square, V(all)(-1.3887316255e-3f));
  c = V(fma)(c, square, V(all)(4.1666645683e-2f));
  c = V(fma)(V(mul)(c, square), square, V(fma)(square, V(all)(-0.5f), one));
  n = V(to_floats)(V(and)(turn, V(all_ints)(2))); /* a sign: 1 - 0 or 1 - 2 */
  *sine = V(mul)(V(fma)(n, V(all)(-1.0f), one), V(fma)(odd, c, V(mul)(even, s)));
  n = V(to_floats)(V(and)(next, V(all_ints)(2)));
  *cosine = V(mul)(V(fma)(n, V(all)(-1.0f), one), V(fma)(odd, s, V(mul)(even, c)));
}

static void V(rope_rows)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_rope_job *t = (const cpu_rope_job *)context;
  const tfm_rope *p = t->p;
  const V(vec) scale = V(all)(p->scale), turn = V(all)(p->inverse ? -p->scale : p->scale);
  float c[CPU_ANGLES], s[CPU_ANGLES];
  int32_t row, first, head, i, n;
  (void)worker;
  for (row = begin; row < end; row++)
    for (first = 0; first < p->rot / 2; first += n) {
      n = cpu_min(CPU_ANGLES, p->rot / 2 - first);
      for (i = 0; i < n; i += CPU_LANES) {
        V(vec) angle = V(load_some)(p->inv_freq + first + i, n - i), sine, cosine;
        V(sine_cosine)(V(mul)(angle, V(all)((float)t->pos[row])), &sine, &cosine);
        V(store)(c + i, V(mul)(cosine, scale));
        V(store)(s + i, V(mul)(sine, turn));
      }
      for (head = 0; head < t->x.cols; head += p->head_width)
        V(rope_head)(cpu_row(t->x, row) + head, p, first, n, c, s);
    }
}

static void V(rope)(tfm_dev *d, tfm_mat x, const int32_t *pos, const tfm_rope *p) {
  cpu_rope_job t = {x, pos, p};
  tfm_parallel_for(d, x.rows, cpu_grain(8 * (int64_t)x.cols), V(rope_rows), &t);
}

/* y = act(gate) * up, of n values. */
static void V(glu_values)(float *y, const float *gate, const float *up, int32_t n, tfm_act act) {
  int32_t i;
  for (i = 0; i < n; i += CPU_LANES)
    V(store_some)(y + i, V(mul)(V(act)(V(load_some)(gate + i, n - i), act),
                                V(load_some)(up + i, n - i)), n - i);
}

static void V(glu_strips)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_glu_job *t = (const cpu_glu_job *)context;
  int32_t item;
  (void)worker;
  for (item = begin; item < end; item++) {
    int32_t row = item / t->strips, col = item % t->strips * CPU_STRIP;
    const float *gate = cpu_row(t->gate_up, row) + col;
    V(glu_values)(cpu_row(t->y, row) + col, gate, gate + t->y.cols,
                  cpu_min(CPU_STRIP, t->y.cols - col), t->act);
  }
}

static void V(glu)(tfm_dev *d, tfm_mat y, tfm_mat gate_up, tfm_act act) {
  cpu_glu_job t = {y, gate_up, act, cpu_shares(y.cols, CPU_STRIP)};
  tfm_parallel_for(d, y.rows * t.strips, 4, V(glu_strips), &t);
}

/* ---- attn ----
   Keys are taken in tiles of 64 positions, from multiples of 64 on, whoever looks at them. A tile
   of keys is made two panels of F32 weights, and so are its values, 32 columns at a time: the tiles
   of matmul then multiply queries by keys, and probabilities by values. All query heads and rows
   that see the tile share it. The softmax is computed as it comes (Milakov and Gimelshein 2018),
   for each piece of 512 positions by itself; pieces are then added up in their order. So where
   there are fewer items than threads, these share the pieces of long rows, and no bit changes. */

/* 32 floats from a block of Q8_0. */
static void V(widen_block)(float *to, const uint8_t *from) {
  uint8_t half[2 * CPU_LANES] = {0};
  V(vec) scale;
  int32_t i;
  memcpy(half, from, 2);
  scale = V(all)(V(first_of)(V(halves)(half)));
  for (i = 0; i < 32; i += CPU_LANES)
    V(store)(to + i, V(mul)(scale, V(to_floats)(V(widen_signed)(from + 2 + i))));
}

/* n floats from a float type, or from Q8_0. */
static void V(widen)(float *to, const uint8_t *from, tfm_type type, int32_t n) {
  float rest[CPU_LANES];
  uint8_t last[2 * CPU_LANES] = {0};
  int32_t i;
  for (i = 0; i < n && type == TFM_Q8_0; i += 32) V(widen_block)(to + i, from + i / 32 * 34);
  if (type == TFM_Q8_0) return;
  if (type == TFM_F32) {
    for (i = 0; i + CPU_LANES <= n; i += CPU_LANES)
      V(store)(to + i, V(load)((const float *)(const void *)from + i));
    memcpy(to + i, from + 4 * i, (size_t)(n - i) * sizeof *to);
    return;
  }
  for (i = 0; i + CPU_LANES <= n; i += CPU_LANES)
    V(store)(to + i, type == TFM_F16 ? V(halves)(from + 2 * i) : V(brains)(from + 2 * i));
  if (i == n) return;
  memcpy(last, from + 2 * i, 2 * (size_t)(n - i));
  V(store)(rest, type == TFM_F16 ? V(halves)(last) : V(brains)(last));
  memcpy(to + i, rest, (size_t)(n - i) * sizeof *to);
}

/* A panel of keys, or values, [width][32], whose places outside first .. end-1 are 0. rows: as much
   memory. */
static void V(pack_keys)(float *panel, float *rows, const cpu_attn_job *t, const cpu_run *run,
                         int32_t base, int32_t first, int32_t end, bool value) {
  const int32_t width = t->kv->width, stride = (width + 7) / 8 * 8;
  const tfm_type type = cpu_kv_type(t->kv);
  const bool there = type == TFM_F32 && stride == width; /* as floats: `rows` is one, of zeros */
  const float *row[CPU_ROWS], *eight[8];
  const uint8_t *at;
  size_t apart;
  int32_t i, j, k, n;
  for (i = 0; i < CPU_ROWS; i++) row[i] = rows + (there ? 0 : i * stride);
  if (first > 0 || end < CPU_ROWS || stride > width)
    memset(rows, 0, (size_t)(there ? stride : CPU_ROWS * stride) * sizeof *rows);
  for (i = first; i < end; i += n) {
    n = cpu_kv_rows(t->kv, run, base + i, base + end, value, &at, &apart);
    for (j = i; j < i + n; j++, at += apart)
      if (there) row[j] = (const float *)(const void *)at;
      else V(widen)(rows + j * stride, at, type, width);
  }
  for (i = 0; i < CPU_ROWS; i += 8)
    for (k = 0; k < stride; k += 8) {
      for (j = 0; j < 8; j++) eight[j] = row[i + j] + k;
      V(transpose)(panel + CPU_ROWS * k + i, CPU_ROWS, eight);
    }
}

/* Panels of values, or keys, of n positions, 32 columns each: [n][32]. */
static void V(pack_values)(float *panel, const cpu_attn_job *t, const cpu_run *run, int32_t base,
                           int32_t first, int32_t end, int32_t n, bool value) {
  const tfm_type type = cpu_kv_type(t->kv);
  const int32_t width = t->kv->width;
  const uint8_t *from;
  size_t apart;
  int32_t i, j, col, next;
  if (first > 0 || end < n || width % CPU_ROWS)
    memset(panel, 0, (size_t)(cpu_panels(width) * n * CPU_ROWS) * sizeof *panel);
  for (i = first; i < end; i = next) {
    next = i + cpu_kv_rows(t->kv, run, base + i, base + end, value, &from, &apart);
    for (j = i; j < next; j++, from += apart)
      for (col = 0; col < width; col += CPU_ROWS)
        V(widen)(panel + (col / CPU_ROWS * n + j) * CPU_ROWS, from + cpu_span(type, col), type,
                 cpu_min(CPU_ROWS, width - col));
  }
}

/* out = values of positions first .. end-1 times weight: where they lie, which for one query is
   less than to pack them, and with the bits of tiles. Only for floats of one vector at least; the
   last vectors of four may overlap. */
static void V(sum_values)(float *out, const cpu_attn_job *t, const cpu_run *run,
                          const float *weight, int32_t base, int32_t first, int32_t end) {
  const int32_t width = t->kv->width;
  const uint8_t *from;
  V(vec) sum[4], w;
  size_t apart;
  int32_t at[4], i, j, k, col, next;
  for (col = 0; col < width; col += 4 * CPU_LANES) {
    for (k = 0; k < 4; k++) {
      at[k] = cpu_min(col + k * CPU_LANES, width - CPU_LANES);
      sum[k] = V(all)(0.0f);
    }
    for (i = first; i < end; i = next) {
      next = i + cpu_kv_rows(t->kv, run, base + i, base + end, true, &from, &apart);
      for (j = i; j < next; j++, from += apart) {
        w = V(all)(weight[j]);
        CPU_UNROLL for (k = 0; k < 4; k++)
          sum[k] = V(fma)(V(load)((const float *)(const void *)from + at[k]), w, sum[k]);
      }
    }
    for (k = 0; k < 4; k++) V(store)(out + at[k], sum[k]);
  }
}

typedef struct V(query) { /* one head of one row */
  const float *q;
  float *y, *sums; /* of the pieces so far; of a piece: [CPU_SUMS + width] */
  float max, sum;
  int32_t first, last; /* positions that it sees */
} V(query);

/* n scores become exponentials below the new maximum; returns what earlier sums have to be scaled
   by. Places outside first .. end-1 are masked. */
static float V(softmax)(float *sums, float *score, int32_t n, int32_t first, int32_t end,
                        const tfm_attn *p) {
  V(vec) top = V(all)(-3e38f), sum = V(all)(0.0f), x;
  float best, correction;
  int32_t i;
  for (i = 0; i < n; i += CPU_LANES)
    V(store)(score + i, V(mul)(V(load)(score + i), V(all)(p->scale)));
  for (i = 0; i < n && p->softcap != 0; i++)
    score[i] = p->softcap * tanhf(score[i] / p->softcap);
  for (i = 0; i < first; i++) score[i] = -INFINITY;
  for (i = end; i < n; i++) score[i] = -INFINITY;
  for (i = 0; i < n; i += CPU_LANES) top = V(max)(top, V(load)(score + i));
  best = V(max_of)(top);
  best = best > sums[0] ? best : sums[0];
  correction = V(first_of)(V(exp)(V(all)(sums[0] - best)));
  for (i = 0; i < n; i += CPU_LANES) {
    x = V(exp)(V(add)(V(load)(score + i), V(all)(-best)));
    V(store)(score + i, x);
    sum = V(add)(sum, x);
  }
  sums[1] = sums[1] * correction + V(sum_of)(sum);
  sums[0] = best;
  return correction;
}

/* y = y * correction + v */
static void V(carry)(float *y, const float *v, int32_t n, float correction) {
  int32_t i;
  for (i = 0; i < n; i += CPU_LANES)
    V(store_some)(y + i, V(fma)(V(load_some)(y + i, n - i), V(all)(correction), V(load)(v + i)),
                  n - i);
}

/* As many queries as a tile of matmul has rows see the keys from `base` on, in so many panels;
   returns how many. values NULL: a query alone, which takes them as they lie. */
static int32_t V(attn_tile)(const cpu_attn_job *t, const cpu_run *run, V(query) *q, int32_t queries,
                            int32_t base, int32_t panels, const float *keys, const float *values) {
  const int32_t width = t->kv->width, of_keys = (width + 7) / 8 * 8 * CPU_ROWS;
  const size_t panel = CPU_KEYS * CPU_ROWS * sizeof *values;
  float score[CPU_TILE * CPU_OUT], out[CPU_TILE * CPU_OUT], correction[CPU_TILE];
  const void *x[CPU_TILE];
  int32_t i, col, n, rows = V(tile_for)(TFM_F32, queries, 1)->rows;
  for (i = 0; i < rows; i++) x[i] = q[i].q;
  panels = cpu_min(panels, cpu_panels(q[rows - 1].last + 1 - base)); /* nobody sees more */
  for (i = 0; i < panels; i += n) {
    n = panels - i >= V(wide) ? V(wide) : 1;
    V(tile_for)(TFM_F32, rows, n)
        ->run(score + i * CPU_ROWS, x, (const uint8_t *)(keys + i * of_keys),
              (size_t)of_keys * sizeof *keys, width, NULL);
  }
  for (i = 0; i < rows; i++) {
    int32_t first = cpu_min(panels * CPU_ROWS, q[i].first - base);
    int32_t end = cpu_min(panels * CPU_ROWS, q[i].last + 1 - base);
    x[i] = score + i * CPU_OUT;
    correction[i] =
        V(softmax)(q[i].sums, score + i * CPU_OUT, panels * CPU_ROWS, first, end, t->p);
  }
  if (!values) {
    const int32_t first = q->first > base ? q->first - base : 0;
    V(sum_values)(out, t, run, score, base, first, cpu_min(CPU_KEYS, q->last + 1 - base));
    V(carry)(q->sums + CPU_SUMS, out, width, *correction);
  }
  for (col = 0; values && col < width; col += n * CPU_ROWS) {
    n = width - col >= V(wide) * CPU_ROWS ? V(wide) : 1;
    V(tile_for)(TFM_F32, rows, n)
        ->run(out, x, (const uint8_t *)(values + col * CPU_KEYS), panel, panels * CPU_ROWS,
              NULL);
    for (i = 0; i < rows; i++)
      V(carry)(q[i].sums + CPU_SUMS + col, out + i * CPU_OUT, cpu_min(n * CPU_ROWS, width - col),
               correction[i]);
  }
  return rows;
}

/* The queries of a run; their sums, of a piece, one after the other. Returns how many. */
static int32_t V(attn_queries)(const cpu_attn_job *t, const cpu_run *run, V(query) *query,
                               float *sums) {
  const int32_t queries = run->rows * t->group, width = t->kv->width;
  int32_t i;
  for (i = 0; i < queries; i++, query++, sums += CPU_SUMS + width) {
    int32_t row = run->row + i / t->group, at = (run->head * t->group + i % t->group) * width;
    query->q = cpu_row(t->q, row) + at;
    query->y = cpu_row(t->y, row) + at;
    query->sums = sums;
    query->last = t->rows->pos[row];
    query->first = cpu_first_key(t->p, query->last);
    query->max = -3e38f;
    query->sum = 0;
  }
  return queries;
}

/* A run's sums of a piece. work: of the thread. */
static void V(attn_piece)(const cpu_attn_job *t, const cpu_run *run, V(query) *query, int32_t piece,
                          float *work) {
  float *keys = work, *values = work + CPU_WIDTH * CPU_KEYS;
  const int32_t queries = run->rows * t->group, width = t->kv->width;
  const int32_t last = cpu_min(run->pos + run->rows, (piece + 1) * CPU_PIECE) - 1;
  const bool alone = queries == 1 && cpu_kv_type(t->kv) == TFM_F32 && width >= CPU_LANES;
  int32_t first = cpu_first_key(t->p, run->pos), base, i;
  if (first < piece * CPU_PIECE) first = piece * CPU_PIECE;
  for (i = 0; i < queries; i++) {
    memset(query[i].sums, 0, (size_t)(CPU_SUMS + width) * sizeof *query->sums);
    query[i].sums[0] = -3e38f;
  }
  for (base = first / CPU_KEYS * CPU_KEYS; base <= last; base += CPU_KEYS) {
    int32_t begin = first > base ? first - base : 0, end = cpu_min(CPU_KEYS, last + 1 - base);
    for (i = 0; i < end; i += CPU_ROWS)
      V(pack_keys)(keys + i * ((width + 7) / 8 * 8), values, t, run, base + i,
                   begin > i ? cpu_min(CPU_ROWS, begin - i) : 0, cpu_min(CPU_ROWS, end - i), false);
    if (!alone) V(pack_values)(values, t, run, base, begin, end, CPU_KEYS, true);
    for (i = 0; i < queries && query[i].last < base;) i++;
    while (i < queries)
      i += V(attn_tile)(t, run, query + i, queries - i, base, cpu_panels(end), keys,
                        alone ? NULL : values);
  }
}

/* Another piece is added to those before it, unless it is empty, or the first. */
static void V(attn_add)(V(query) *q, const float *sums, int32_t width) {
  float best = q->max > sums[0] ? q->max : sums[0];
  float of_old = V(first_of)(V(exp)(V(all)(q->max - best)));
  float of_new = V(first_of)(V(exp)(V(all)(sums[0] - best)));
  int32_t i;
  if (sums[1] == 0) return;
  if (q->sum == 0) {
    memcpy(q->y, sums + CPU_SUMS, (size_t)width * sizeof *q->y);
    q->max = sums[0];
    q->sum = sums[1];
    return;
  }
  for (i = 0; i < width; i += CPU_LANES) {
    V(vec) more = V(mul)(V(load_some)(sums + CPU_SUMS + i, width - i), V(all)(of_new));
    V(store_some)(q->y + i, V(fma)(V(load_some)(q->y + i, width - i), V(all)(of_old), more),
                  width - i);
  }
  q->sum = q->sum * of_old + sums[1] * of_new;
  q->max = best;
}

static void V(attn_finish)(const cpu_attn_job *t, const cpu_run *run, const V(query) *query) {
  const int32_t queries = run->rows * t->group;
  int32_t i, j;
  for (i = 0; i < queries; i++, query++) {
    int32_t head = run->head * t->group + i % t->group;
    for (j = 0; j < t->kv->width; j++) query->y[j] /= query->sum;
    if (t->lse)
      t->lse[(int64_t)(run->row + i / t->group) * t->p->heads + head] =
          query->max + logf(query->sum);
  }
}

/* Pieces that a run's rows see: the first, and the one after the last. */
static int32_t V(attn_pieces)(const cpu_attn_job *t, const cpu_run *run, int32_t *end) {
  *end = cpu_pieces(run->pos + run->rows);
  return cpu_first_key(t->p, run->pos) / CPU_PIECE;
}

/* Item i of (kv head, some rows), rows running fastest: the first run, and the row after the last
   one. False: none. */
static bool V(attn_item)(const cpu_attn_job *t, int32_t item, cpu_run *run, int32_t *last) {
  int32_t row = item % t->tiles * t->tile;
  run->head = item / t->tiles;
  *last = cpu_min(row + t->tile, t->rows->n);
  return cpu_run_next(run, t->rows, row, *last);
}

/* A run whose queries fit a tile of keys: all of it. */
static void V(attn_run)(const cpu_attn_job *t, const cpu_run *run, int32_t worker) {
  float *work = t->work + (size_t)worker * (CPU_TILE_BYTES / sizeof *t->work);
  V(query) query[CPU_QUERIES];
  const int32_t queries = V(attn_queries)(t, run, query, work + 2 * CPU_WIDTH * CPU_KEYS);
  int32_t piece, pieces, i;
  for (piece = V(attn_pieces)(t, run, &pieces); piece < pieces; piece++) {
    V(attn_piece)(t, run, query, piece, work);
    for (i = 0; i < queries; i++) V(attn_add)(&query[i], query[i].sums, t->kv->width);
  }
  V(attn_finish)(t, run, query);
}

static void V(attn_items)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_attn_job *t = (const cpu_attn_job *)context;
  int32_t item, last;
  cpu_run run;
  bool more;
  for (item = begin; item < end; item++)
    for (more = V(attn_item)(t, item, &run, &last); more;
         more = cpu_run_next(&run, t->rows, run.row + run.rows, last))
      V(attn_run)(t, &run, worker);
}

/* Where the sums of a piece of a run lie, when threads share the pieces of an item. */
static float *V(attn_sums)(const cpu_attn_job *t, int32_t item, int32_t piece, const cpu_run *run) {
  const int64_t of_row = (int64_t)t->group * (CPU_SUMS + t->kv->width);
  return t->sums + (((int64_t)item * t->pieces + piece) * t->tile + run->row % t->tile) * of_row;
}

/* Items have pieces, running fastest. */
static void V(attn_share)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_attn_job *t = (const cpu_attn_job *)context;
  float *work = t->work + (size_t)worker * (CPU_TILE_BYTES / sizeof *t->work);
  int32_t item, last, piece, pieces, first;
  V(query) query[CPU_QUERIES];
  cpu_run run;
  bool more;
  for (item = begin; item < end; item++)
    for (more = V(attn_item)(t, item / t->pieces, &run, &last); more;
         more = cpu_run_next(&run, t->rows, run.row + run.rows, last)) {
      piece = item % t->pieces;
      first = V(attn_pieces)(t, &run, &pieces);
      if (piece < first || piece >= pieces) continue;
      V(attn_queries)(t, &run, query, V(attn_sums)(t, item / t->pieces, piece, &run));
      V(attn_piece)(t, &run, query, piece, work);
    }
}

static void V(attn_collect)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_attn_job *t = (const cpu_attn_job *)context;
  int32_t item, last, piece, pieces, i, queries;
  V(query) query[CPU_QUERIES];
  cpu_run run;
  bool more;
  (void)worker;
  for (item = begin; item < end; item++)
    for (more = V(attn_item)(t, item, &run, &last); more;
         more = cpu_run_next(&run, t->rows, run.row + run.rows, last)) {
      queries = V(attn_queries)(t, &run, query, NULL);
      for (piece = V(attn_pieces)(t, &run, &pieces); piece < pieces; piece++) {
        const float *sums = V(attn_sums)(t, item, piece, &run);
        for (i = 0; i < queries; i++, sums += CPU_SUMS + t->kv->width)
          V(attn_add)(&query[i], sums, t->kv->width);
      }
      V(attn_finish)(t, &run, query);
    }
}

/* What debugging asks for, dropout, and odd shapes are left to the reference. */
static bool V(attn_declines)(const cpu_attn_job *t) {
  return t->p->probs || t->p->dropout.rate > 0 || t->kv->width > CPU_WIDTH ||
         t->group > CPU_QUERIES ||
         (!t->kv->table && !cpu_rows_are_whole(t->rows));
}

/* Whether threads share pieces: there are few items, of long rows, and room for their sums, which
   is one whole context's (cpu_work_bytes). */
static bool V(attn_shares)(const tfm_dev *d, cpu_attn_job *t) {
  const int64_t of_piece = (int64_t)t->p->heads * (CPU_SUMS + t->kv->width) * 4;
  const int64_t room = ((int64_t)t->kv->max_pages - 1) * t->kv->page_tokens / CPU_PIECE + 1;
  int64_t sums;
  int32_t i, longest = 0;
  for (i = 0; i < t->rows->n; i++)
    if (t->rows->seq[i] >= 0 && t->rows->pos[i] >= longest) longest = t->rows->pos[i] + 1;
  t->pieces = cpu_pieces(longest);
  sums = (int64_t)t->tile * t->tiles * t->pieces;
  return t->kv->table && t->pieces > 1 && t->kv->heads * t->tiles < 2 * d->threads &&
         d->threads > 1 && sums <= room && sums * of_piece <= CPU_PARTS;
}

static void V(attn)(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv, const tfm_rows *rows,
                    float *lse, const tfm_attn *p) {
  cpu_attn_job t = {y, q, kv, rows, p, p->heads / kv->heads, 1, 0, (float *)d->work, lse, NULL, 0};
  int32_t runs = cpu_runs(rows);
  if (V(attn_declines)(&t)) {
    tfm_backend_ref()->attn(d, y, q, kv, rows, lse, p);
    return;
  }
  if (d->products == TFM_BF16) {
    const tfm_mat none = {NULL, TFM_F32, 0, 0, 0};
    cpu_attn_bwd_job tiled = {t, none, none, none, none, 0, NULL};
    if (cpu_tiles_attn(d, &tiled)) return;
  }
  /* rows of one sequence share its keys; others might as well be apart */
  t.tile = cpu_min(CPU_QUERIES / t.group, runs ? cpu_shares(rows->n, runs) : 1);
  t.tiles = cpu_shares(rows->n, t.tile);
  if (V(attn_shares)(d, &t)) {
    t.sums = (float *)(void *)cpu_quantised_at(d);
    tfm_parallel_for(d, kv->heads * t.tiles * t.pieces, 1, V(attn_share), &t);
    tfm_parallel_for(d, kv->heads * t.tiles, 1, V(attn_collect), &t);
  } else tfm_parallel_for(d, kv->heads * t.tiles, 1, V(attn_items), &t);
}

/* ---- Training: products ----
   All three are one: panels of b are packed, 256 columns and 512 terms at a time, and multiplied by
   rows of a with the tiles of matmul. Sums of a block of rows wait beside them for the next terms.
   So an element's sum has the same order whatever the tile, the chunk or the thread. */

/* 8 rows at a time become columns 8 wide: to[k * stride + i] = row[i][k], i < 8, k < n. */
static void V(turn)(float *to, int32_t stride, const float *const *row, int32_t n) {
  const float *at[8];
  int32_t k, i;
  for (k = 0; k + 8 <= n; k += 8) {
    for (i = 0; i < 8; i++) at[i] = row[i] + k;
    V(transpose)(to + (int64_t)k * stride, stride, at);
  }
  for (; k < n; k++)
    for (i = 0; i < 8; i++) to[(int64_t)k * stride + i] = row[i][k];
}

/* A panel of W's rows n .. n + 31, terms k .. k + depth - 1; rows that W lacks repeat its last. */
static void V(pack_across)(const cpu_gemm *t, float *panel, int32_t n, int32_t k, int32_t depth) {
  const float *row[8];
  int32_t i, j;
  for (i = 0; i < CPU_ROWS; i += 8) {
    for (j = 0; j < 8; j++)
      row[j] = cpu_weight_floats(t->w, t->first + cpu_min(n + i + j, t->cols - 1), k);
    V(turn)(panel + i, CPU_ROWS, row, depth);
  }
}

/* to[i * stride + j] = a[k + j, row + i]: columns row .. row + n - 1 of dy become rows. */
static void V(turn_a)(const cpu_gemm *t, float *to, int32_t stride, int32_t row, int32_t n,
                      int32_t k, int32_t depth) {
  const float *from[8];
  int32_t i, j;
  for (j = 0; j + 8 <= depth; j += 8) {
    for (i = 0; i < 8; i++) from[i] = cpu_gemm_a(t, k + j + i) + row;
    V(turn)(to + j, stride, from, n);
  }
  for (; j < depth; j++)
    for (i = 0; i < n; i++) to[(int64_t)i * stride + j] = cpu_gemm_a(t, k + j)[row + i];
}

/* d[i] = act'(v[i]) */
CPU_INLINE V(vec) V(slope)(V(vec) v, tfm_act act) {
  V(vec) one = V(all)(1.0f), s, rest;
  switch (act) {
    case TFM_ACT_NONE: break;
    case TFM_ACT_GELU: { /* the normal distribution's integral, and x times its density */
      float x[CPU_LANES], e[CPU_LANES];
      int i;
      V(store)(x, v);
      V(store)(e, V(exp)(V(mul)(V(mul)(v, v), V(all)(-0.5f))));
      for (i = 0; i < CPU_LANES; i++)
        x[i] = 0.5f * (1.0f + erff(x[i] * 0.70710678f)) + x[i] * 0.39894228f * e[i];
      return V(load)(x);
    }
    case TFM_ACT_GELU_TANH: { /* x s(2u), s the logistic function: s + x s (1 - s) 2u' */
      V(vec) square = V(mul)(v, v);
      V(vec) cubic = V(fma)(square, V(all)(0.044715f), one);
      s = V(sigmoid)(V(mul)(V(mul)(v, cubic), V(all)(2 * 0.79788456f)));
      rest = V(mul)(V(mul)(v, s), V(fma)(s, V(all)(-1.0f), one));
      cubic = V(fma)(square, V(all)(0.134145f * 1.59576912f), V(all)(1.59576912f));
      return V(fma)(rest, cubic, s);
    }
    case TFM_ACT_SILU:
      s = V(sigmoid)(v);
      return V(fma)(V(mul)(v, s), V(fma)(s, V(all)(-1.0f), one), s);
    case TFM_ACT_RELU: return V(positive)(v);
  }
  return one;
}

/* The cap of logits and dropout, lane by lane: slope times their derivative. */
static V(vec) V(rare_slope)(V(vec) slope, V(vec) aux, int32_t n, const tfm_epilogue *e, int32_t row,
                            int32_t col) {
  float x[CPU_LANES], value[CPU_LANES];
  int32_t i;
  V(store)(x, slope);
  V(store)(value, V(act)(aux, e->act));
  for (i = 0; i < n && e->softcap != 0 && e->aux.data; i++) {
    float cap = tanhf(value[i] / e->softcap);
    x[i] *= 1.0f - cap * cap;
  }
  for (i = 0; i < n && e->dropout.rate > 0; i++) x[i] *= cpu_dropout(&e->dropout, row, col + i);
  return V(load)(x);
}

/* dx = dy through the epilogue, n columns; may be in place. */
static void V(epilogue_slope)(float *dx, const float *dy, int32_t n, const tfm_epilogue *e,
                              int32_t row, int32_t col) {
  const float *aux = e->aux.data ? cpu_row(e->aux, row) + col : NULL;
  V(vec) slope, v = V(all)(0.0f);
  int32_t j;
  for (j = 0; j < n; j += CPU_LANES) {
    if (aux) v = V(load_some)(aux + j, n - j);
    slope = aux ? V(slope)(v, e->act) : V(all)(1.0f);
    if (e->softcap != 0 || e->dropout.rate > 0)
      slope = V(rare_slope)(slope, v, cpu_min(CPU_LANES, n - j), e, row, col + j);
    V(store_some)(dx + j, V(mul)(slope, V(load_some)(dy + j, n - j)), n - j);
  }
}

/* n whole sums of a row of c, from column col on. */
static void V(finish)(const cpu_gemm *t, int32_t row, int32_t col, const float *v, int32_t n) {
  float *c = cpu_row(t->c, row) + col;
  int32_t j;
  if (t->form == CPU_FORWARD) {
    if (t->e) V(epilogue)(c, v, n, t->e, row, col);
    else memcpy(c, v, (size_t)n * sizeof *c);
    return;
  }
  for (j = 0; j < n && t->beta != 0; j += CPU_LANES)
    V(store_some)(c + j, V(add)(V(load_some)(c + j, n - j), V(load)(v + j)), n - j);
  if (t->e) V(epilogue_slope)(c, t->beta == 0 ? v : c, n, t->e, row, col);
  for (j = 0; j < n && t->beta == 0 && !t->e; j += CPU_LANES) /* faster than memcpy: asked for */
    V(store_some)(c + j, V(load)(v + j), n - j);
}

typedef struct V(gemm_part) { /* of an item: rows and columns whose sums wait together */
  int32_t row, rows, col, panels;
  int32_t waiting;          /* rows of sums: all, or a tile's where there are no more terms */
  int32_t k, depth;         /* the terms at hand */
  float *b, *sums; /* [panels][depth][32], [panels / 4][waiting][128] */
  float *turned;   /* [some][depth + 16] */
} V(gemm_part);

/* The sums of the row that waits as number `row`, in panels from `panel` on. */
CPU_INLINE float *V(sums_at)(const V(gemm_part) *p, int32_t row, int32_t panel) {
  const int32_t abreast = CPU_OUT / CPU_ROWS;
  return p->sums + ((int64_t)(panel / abreast) * p->waiting + row) * CPU_OUT +
         panel % abreast * CPU_ROWS;
}

/* Row i of the packed panels: n columns of b's row, of which 32 belong to each. */
static void V(pack_row)(const V(gemm_part) *p, const float *from, int32_t i, int32_t n) {
  const int64_t bytes = (int64_t)p->depth * CPU_ROWS;
  int32_t j;
  for (j = 0; j < p->panels * CPU_ROWS; j += CPU_LANES) {
    float *to = p->b + j / CPU_ROWS * bytes + i * CPU_ROWS + j % CPU_ROWS;
    V(store)(to, j + CPU_LANES <= n ? V(load)(from + j)
                                    : j < n ? V(load_some)(from + j, n - j) : V(all)(0.0f));
  }
}

/* Panels of b as its rows come. */
static void V(pack_down)(const cpu_gemm *t, const V(gemm_part) *p) {
  enum { AHEAD = 8 }; /* rows: too short for the processor to see streams in them */
  int32_t n = cpu_min(p->panels * CPU_ROWS, t->cols - p->col), i, j;
  float copy[CPU_PANELS * CPU_ROWS];
  for (i = 0; i < p->depth; i++) {
    const float *from = cpu_gemm_b(t, p->k + i, p->col), *next;
    next = i + AHEAD < p->depth ? cpu_gemm_b(t, p->k + i + AHEAD, p->col) : NULL;
    for (j = 0; next && j < n; j += CPU_ALIGN / 4) __builtin_prefetch(next + j);
    for (j = 0; !from && j < n; j += CPU_ROWS)
      cpu_gemm_piece(t, copy + j, p->k + i, p->col + j, cpu_min(CPU_ROWS, n - j));
    V(pack_row)(p, from ? from : copy, i, n);
  }
}

/* Sums number row .. row + rows - 1 (+)= rows of a times the packed panels. */
static void V(gemm_tile)(const V(gemm_part) *p, int32_t row, int32_t rows, const void *const *x) {
  float out[CPU_TILE * CPU_OUT];
  size_t bytes = (size_t)p->depth * CPU_ROWS * sizeof *p->b;
  int32_t panel, n, i, j;
  for (panel = 0; panel < p->panels; panel += n) {
    float *sums = V(sums_at)(p, row, panel);
    n = p->panels - panel < V(wide) ? 1 : V(wide);
    V(tile_for)(TFM_F32, rows, n)
        ->run(p->k ? out : sums, x, (const uint8_t *)p->b + (size_t)panel * bytes, bytes, p->depth,
              NULL);
    for (i = 0; i < rows && p->k; i++)
      for (j = i * CPU_OUT; j < i * CPU_OUT + n * CPU_ROWS; j += CPU_LANES)
        V(store)(sums + j, V(add)(V(load)(sums + j), V(load)(out + j)));
  }
}

/* Where sums will go to is asked for while they are computed. */
static void V(gemm_expect)(const cpu_gemm *t, const V(gemm_part) *p, int32_t row, int32_t rows,
                           int32_t cols) {
  int32_t i, j;
  for (i = 0; i < rows; i++) {
    float *c = cpu_row(t->c, cpu_gemm_c(t, p->row + row + i)) + p->col;
    for (j = 0; j < cols; j += CPU_ALIGN / 4) __builtin_prefetch(c + j, 1);
  }
}

/* All rows of the part, for the terms at hand. */
static void V(gemm_rows)(const cpu_gemm *t, const V(gemm_part) *p) {
  const int32_t stride = p->depth + 16; /* no multiple of a page: lines of the cache differ */
  int32_t tile = V(tile_for)(TFM_F32, CPU_TILE, 1)->rows;
  int32_t at = CPU_TURNED / stride / tile * tile; /* rows of a that are turned at a time */
  int32_t cols = cpu_min(p->panels * CPU_ROWS, t->cols - p->col), row, rows, i, j;
  bool last = p->k + p->depth == t->depth;
  const void *x[CPU_TILE];
  for (row = 0; row < p->rows; row += rows) {
    int32_t slot = p->waiting < p->rows ? 0 : row; /* number of the first of these rows' sums */
    if (t->form == CPU_DW && row % at == 0)
      V(turn_a)(t, p->turned, stride, p->row + row, cpu_min(at, p->rows - row), p->k, p->depth);
    rows = V(tile_for)(TFM_F32, p->rows - row, 1)->rows;
    for (i = 0; i < rows; i++)
      x[i] = t->form == CPU_DW ? p->turned + (int64_t)((row + i) % at) * stride
                               : cpu_gemm_a(t, p->row + row + i) + p->k;
    if (last) V(gemm_expect)(t, p, row, rows, cols);
    V(gemm_tile)(p, slot, rows, x);
    for (i = 0; i < rows && last; i++)
      for (j = 0; j < cols; j += CPU_OUT)
        V(finish)(t, cpu_gemm_c(t, p->row + row + i), p->col + j,
                  V(sums_at)(p, slot + i, j / CPU_ROWS), cpu_min(CPU_OUT, cols - j));
  }
}

/* packed: the rows before had the same columns, whose terms, if few, are still there. */
static void V(gemm_part_run)(const cpu_gemm *t, V(gemm_part) *p, bool packed) {
  int32_t blocks = cpu_shares(t->depth, CPU_DEPTH), i;
  int32_t most = cpu_shares(cpu_shares(t->depth, blocks), 8) * 8;
  bool pack = blocks > 1 || !packed;
  p->waiting = blocks > 1 ? p->rows : CPU_TILE; /* so few stay in the first cache */
  for (p->k = 0; p->k < t->depth; p->k += p->depth) {
    p->depth = cpu_min(most, t->depth - p->k);
    if (pack && t->form != CPU_FORWARD) V(pack_down)(t, p);
    for (i = 0; i < p->panels && pack && t->form == CPU_FORWARD; i++)
      V(pack_across)(t, p->b + (int64_t)i * p->depth * CPU_ROWS, p->col + i * CPU_ROWS, p->k,
                     p->depth);
    V(gemm_rows)(t, p);
  }
}

/* Items are (chunk of rows, pair of panels), pairs running fastest. */
static void V(gemm_items)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_gemm *t = (const cpu_gemm *)context;
  int32_t item, n, row, last, panels = cpu_panels(t->cols);
  V(gemm_part) p;
  p.b = (float *)(void *)(t->work + (size_t)worker * CPU_TRAIN_BYTES);
  p.sums = p.b + CPU_PANELS * CPU_ROWS * CPU_DEPTH;
  p.turned = p.sums + CPU_PANELS * CPU_ROWS * CPU_BLOCK;
  for (item = begin; item < end; item += n) {
    int32_t pair = item % t->pairs;
    n = cpu_min(cpu_min(end - item, t->pairs - pair), CPU_PANELS / 2);
    p.col = pair * 2 * CPU_ROWS;
    p.panels = cpu_min(n * 2, panels - pair * 2);
    row = item / t->pairs * t->chunk;
    last = cpu_min(row + t->chunk, t->rows);
    for (; row < last; row += p.rows) {
      bool packed = row > item / t->pairs * t->chunk;
      p.row = row;
      p.rows = cpu_min(CPU_BLOCK, last - row);
      V(gemm_part_run)(t, &p, packed);
    }
  }
}

static void V(gemm)(tfm_dev *d, cpu_gemm *t) {
  int32_t chunks;
  if (d->products == TFM_BF16 && cpu_tiles_gemm(d, t)) return;
  t->d = d;
  t->work = cpu_quantised_at(d);
  t->pairs = (cpu_panels(t->cols) + 1) / 2;
  t->chunk = cpu_gemm_chunk(t->rows, t->pairs, d->threads);
  chunks = cpu_shares(t->rows, t->chunk);
  tfm_parallel_for(d, chunks * t->pairs, cpu_grain((int64_t)t->depth * t->chunk * 2 * CPU_ROWS),
                   V(gemm_items), t);
}

static void V(matmul_rows)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                           const tfm_epilogue *e) {
  cpu_gemm t = {CPU_FORWARD, d, y, x, x, w, e, 0, y.rows, y.cols, x.cols, NULL, 1, 0, 0, 0, NULL};
  V(gemm)(d, &t);
}

static void V(matmul_dx)(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_weight *w, float beta,
                         const tfm_epilogue *before) {
  cpu_gemm t = {CPU_DX, d, dx, dy, dy, w, before, beta, dx.rows, dx.cols, w->rows, NULL, 1, 0, 0, 0,
                NULL};
  V(gemm)(d, &t);
}

/* Column sums, in the order of the rows, of 64 columns at a time. */
static void V(column_sums)(void *context, int32_t begin, int32_t end, int32_t worker) {
  enum { ABREAST = 64 / CPU_LANES };
  const cpu_sums_job *t = (const cpu_sums_job *)context;
  V(vec) sum[ABREAST];
  int32_t col, row, i;
  (void)worker;
  for (col = begin; col < end; col += 64) {
    int32_t some = cpu_min(ABREAST, cpu_shares(end - col, CPU_LANES)), n = end - col;
    for (i = 0; i < some; i++)
      sum[i] = V(load_some)(t->sums + col + i * CPU_LANES, n - i * CPU_LANES);
    for (row = 0; row < t->x.rows; row++) {
      const float *x = cpu_row(t->x, row) + col;
      for (i = 0; i < ABREAST && n >= 64; i++) sum[i] = V(add)(sum[i], V(load)(x + i * CPU_LANES));
      for (i = 0; i < some && n < 64; i++)
        sum[i] = V(add)(sum[i], V(load_some)(x + i * CPU_LANES, n - i * CPU_LANES));
    }
    for (i = 0; i < some; i++)
      V(store_some)(t->sums + col + i * CPU_LANES, sum[i], n - i * CPU_LANES);
  }
}

static void V(matmul_dw)(tfm_dev *d, tfm_mat dw, float *db, tfm_mat dy, tfm_mat x, float beta) {
  cpu_gemm t = {CPU_DW, d, dw, dy, x, NULL, NULL, beta, dw.rows, dw.cols, dy.rows, NULL, 1, 0, 0, 0,
                NULL};
  cpu_sums_job sums = {db, dy};
  if (dw.type != TFM_F32) {
    tfm_backend_ref()->matmul_dw(d, dw, db, dy, x, beta); /* it says what is wrong */
    return;
  }
  V(gemm)(d, &t);
  if (db) tfm_parallel_for(d, dy.cols, 64, V(column_sums), &sums);
}

/* The products of all experts, one after the other: their rows are `slots`, their terms are too. */
static void V(gemm_experts)(tfm_dev *d, cpu_gemm *t, const tfm_routing *r, bool spread) {
  int32_t e, n, rows = t->form == CPU_DW ? t->rows : t->w->rows;
  tfm_mat c = t->c;
  t->sharing = spread ? r->top_k : 1;
  for (e = 0; e < r->experts; e++) {
    n = r->begin[e + 1] - r->begin[e];
    t->slots = r->order + r->begin[e];
    t->first = (int64_t)e * rows;
    if (t->form == CPU_DW) {
      t->depth = n;
      t->c.data = cpu_row(c, t->first);
    } else t->rows = n;
    if (n > 0) V(gemm)(d, t);
  }
}

static void V(matmul_moe_rows)(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                               const tfm_routing *r, bool spread) {
  cpu_gemm t = {CPU_FORWARD, d, y, x, x, w, NULL, 0, 0, y.cols, x.cols, NULL, 1, 0, 0, 0, NULL};
  V(gemm_experts)(d, &t, r, spread);
}

/* A token's experts add up in ascending order. */
static void V(moe_dx)(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_weight *w, const tfm_routing *r,
                      bool spread) {
  cpu_gemm t = {CPU_DX, d, dx, dy, dy, w, NULL, 1, 0, dx.cols, w->rows, NULL, 1, 0, 0, 0, NULL};
  int32_t i;
  for (i = 0; i < dx.rows; i++) memset(cpu_row(dx, i), 0, (size_t)dx.cols * sizeof(float));
  V(gemm_experts)(d, &t, r, spread);
}

static void V(moe_dw)(tfm_dev *d, tfm_mat dw, tfm_mat dy, tfm_mat x, const tfm_routing *r,
                      bool spread) {
  cpu_gemm t = {CPU_DW, d, dw, dy, x, NULL, NULL, 1, dy.cols, dw.cols, 0, NULL, 1, 0, 0, 0, NULL};
  if (dw.type == TFM_F32) V(gemm_experts)(d, &t, r, spread);
  else tfm_backend_ref()->moe_dw(d, dw, dy, x, r, spread); /* it says what is wrong */
}

/* ---- Training: element by element ---- */

static void V(epilogue_bwd_rows)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_slope_job *t = (const cpu_slope_job *)context;
  int32_t i;
  (void)worker;
  for (i = begin; i < end; i++)
    V(epilogue_slope)(cpu_row(t->dx, i), cpu_row(t->dy, i), t->dx.cols, t->e, i, 0);
}

static void V(epilogue_bwd)(tfm_dev *d, tfm_mat dx, tfm_mat dy, const tfm_epilogue *e) {
  cpu_slope_job t = {dx, dy, dy, e, TFM_ACT_NONE};
  tfm_parallel_for(d, dx.rows, cpu_grain(32 * (int64_t)dx.cols), V(epilogue_bwd_rows), &t);
}

static void V(glu_bwd_rows)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_slope_job *t = (const cpu_slope_job *)context;
  int32_t n = t->dy.cols, i, j;
  (void)worker;
  for (i = begin; i < end; i++) {
    const float *dy = cpu_row(t->dy, i), *gate = cpu_row(t->gate_up, i), *up = gate + n;
    float *dgate = cpu_row(t->dx, i), *dup = dgate + n;
    for (j = 0; j < n; j += CPU_LANES) {
      V(vec) g = V(load_some)(gate + j, n - j), y = V(load_some)(dy + j, n - j);
      V(vec) u = V(mul)(y, V(load_some)(up + j, n - j));
      V(store_some)(dgate + j, V(mul)(u, V(slope)(g, t->act)), n - j);
      V(store_some)(dup + j, V(mul)(y, V(act)(g, t->act)), n - j);
    }
  }
}

static void V(glu_bwd)(tfm_dev *d, tfm_mat dgate_up, tfm_mat dy, tfm_mat gate_up, tfm_act act) {
  cpu_slope_job t = {dgate_up, dy, gate_up, NULL, act};
  tfm_parallel_for(d, dy.rows, cpu_grain(32 * (int64_t)dy.cols), V(glu_bwd_rows), &t);
}

/* ---- Training: norms ---- */

/* dx of one vector of n values, with g = dy (w + offset):
   deviation^-1 (g - mean of g - xhat * mean of g xhat), the first mean for layer norms only.
   sums [2][n], of dw and db, grow. */
static void V(norm_bwd_vector)(const cpu_norm_bwd_job *t, float *dx, const float *dy,
                               const float *x, const float *residual, int32_t n,
                               const float *stats, float *sums) {
  const V(vec) offset = V(all)(t->p->offset), minus = V(all)(-stats[0]), inverse = V(all)(stats[1]);
  V(vec) sum = V(all)(0.0f), product = sum, g, xhat, mean, slope;
  int32_t i;
  for (i = 0; i < n; i += CPU_LANES) { /* beyond n, dy is 0 */
    g = V(mul)(V(load_some)(dy + i, n - i), V(add)(V(load_some)(t->w + i, n - i), offset));
    xhat = V(mul)(V(add)(V(load_some)(x + i, n - i), minus), inverse);
    sum = V(add)(sum, g);
    product = V(fma)(g, xhat, product);
  }
  mean = V(all)(t->p->kind == TFM_NORM_LAYER ? -V(sum_of)(sum) / (float)n : 0.0f);
  slope = V(all)(-V(sum_of)(product) / (float)n);
  for (i = 0; i < n; i += CPU_LANES) {
    V(vec) y = V(load_some)(dy + i, n - i), dw = V(load_some)(sums + i, n - i);
    g = V(mul)(y, V(add)(V(load_some)(t->w + i, n - i), offset));
    xhat = V(mul)(V(add)(V(load_some)(x + i, n - i), minus), inverse);
    V(store_some)(sums + i, V(fma)(y, xhat, dw), n - i);
    V(store_some)(sums + n + i, V(add)(y, V(load_some)(sums + n + i, n - i)), n - i);
    g = V(mul)(inverse, V(fma)(xhat, slope, V(add)(g, mean)));
    if (residual) g = V(add)(g, V(load_some)(residual + i, n - i));
    V(store_some)(dx + i, g, n - i);
  }
}

/* Rows of a piece: their dx, and its sums of dw and db. */
static void V(norm_bwd_pieces)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_norm_bwd_job *t = (const cpu_norm_bwd_job *)context;
  int32_t n = t->x.cols / t->groups, piece, i, g;
  (void)worker;
  for (piece = begin; piece < end; piece++) {
    float *sums = t->sums + (int64_t)piece * 2 * n;
    memset(sums, 0, 2 * (size_t)n * sizeof *sums);
    for (i = piece * t->rows; i < cpu_min((piece + 1) * t->rows, t->x.rows); i++)
      for (g = 0; g < t->groups; g++)
        V(norm_bwd_vector)(t, cpu_row(t->dx, i) + g * n, cpu_row(t->dy, i) + g * n,
                           cpu_row(t->x, i) + g * n,
                           t->residual.data ? cpu_row(t->residual, i) + g * n : NULL, n,
                           t->stats + 2 * ((int64_t)i * t->groups + g), sums);
  }
}

/* Columns [begin, end) of dw and db grow by the pieces' sums. */
static void V(norm_bwd_columns)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_norm_bwd_job *t = (const cpu_norm_bwd_job *)context;
  int32_t n = t->x.cols / t->groups, piece, i;
  (void)worker;
  for (piece = 0; piece < cpu_shares(t->x.rows, t->rows); piece++) {
    const float *dw = t->sums + (int64_t)piece * 2 * n, *db = dw + n;
    for (i = begin; i < end; i++) t->dw[i] += dw[i];
    for (i = begin; i < end && t->db; i++) t->db[i] += db[i];
  }
}

/* Pieces are as many whatever the threads. */
static void V(norm_bwd)(tfm_dev *d, tfm_mat dx, float *dw, float *db, tfm_mat dy, tfm_mat x,
                        const float *w, tfm_mat residual, const float *stats, const tfm_norm *p) {
  cpu_norm_bwd_job t = {dx, dy, x, residual, w, stats, dw, db, p, p->groups > 0 ? p->groups : 1,
                        0, (float *)(void *)cpu_quantised_at(d)};
  const int32_t n = x.cols / t.groups;
  int32_t pieces = cpu_min(CPU_PIECES, CPU_TRAIN_BYTES / (2 * (int32_t)sizeof(float)) / n);
  if (pieces == 0) {
    tfm_backend_ref()->norm_bwd(d, dx, dw, db, dy, x, w, residual, stats, p);
    return;
  }
  t.rows = cpu_shares(x.rows, pieces);
  pieces = cpu_shares(x.rows, t.rows);
  tfm_parallel_for(d, pieces, cpu_grain(8 * (int64_t)x.cols * t.rows), V(norm_bwd_pieces), &t);
  tfm_parallel_for(d, n, cpu_grain(2 * pieces), V(norm_bwd_columns), &t);
}

/* ---- Training: attention ----
   With p the probability of a key, from its score s and the row's lse, and dp = dy . v:
   dv = sum of p dy, ds = p (dp - dy . y), dq = sum of ds k, dk = sum of ds q. An item is what of a
   sequence shares keys. 96 rows of queries meet 32 keys at a time: scores and dp are
   products with panels of keys and of values, dq is one with rows of keys; dk and dv are products
   of q and dy, transposed, with ds and p, whose rows already lie as a panel's do. */

enum { V(queries) = 96 };

typedef struct V(attn_bwd_work) {
  float *q, *dy;               /* [width][96], transposed */
  float *p, *ds;               /* [96][32] */
  float *keys, *values, *rows; /* [width][32], [width][32], panels of 32 columns [32][32] */
  float *dk, *dv;              /* [width][32], transposed */
  float delta[V(queries)], lse[V(queries)];
  const float *q_row[V(queries)], *dy_row[V(queries)];
  float *dq_row[V(queries)];
} V(attn_bwd_work);

/* Scores become p, and dp becomes ds; keys first .. end-1 of the tile are seen. */
static void V(attn_slopes)(const tfm_attn *a, float *p, float *ds, const float *score,
                           const float *dp, float lse, float delta, int32_t first, int32_t end) {
  float s[CPU_ROWS], cap[CPU_ROWS];
  int32_t i;
  for (i = 0; i < CPU_ROWS; i += CPU_LANES)
    V(store)(s + i, V(mul)(V(load)(score + i), V(all)(a->scale)));
  for (i = 0; i < CPU_ROWS; i++) cap[i] = 1.0f;
  for (i = 0; i < CPU_ROWS && a->softcap != 0; i++) {
    float t = tanhf(s[i] / a->softcap);
    s[i] = a->softcap * t;
    cap[i] = 1.0f - t * t;
  }
  for (i = 0; i < first; i++) s[i] = -INFINITY;
  for (i = end; i < CPU_ROWS; i++) s[i] = -INFINITY;
  for (i = 0; i < CPU_ROWS; i += CPU_LANES) {
    V(vec) e = V(exp)(V(add)(V(load)(s + i), V(all)(-lse)));
    V(vec) d = V(mul)(V(add)(V(load)(dp + i), V(all)(-delta)), V(mul)(V(load)(cap + i), e));
    V(store)(p + i, e);
    V(store)(ds + i, V(mul)(d, V(all)(a->scale)));
  }
}

/* dq of rows row .. row + 5 or fewer of the block, and their p and ds; returns how many. */
static int32_t V(attn_bwd_tile)(const cpu_attn_bwd_job *t, const V(attn_bwd_work) *k, int32_t row,
                                int32_t rows, int32_t pos, int32_t base) {
  const int32_t width = t->attn.kv->width;
  const size_t panel = CPU_ROWS * CPU_ROWS * sizeof *k->rows;
  float score[CPU_TILE * CPU_OUT], dp[CPU_TILE * CPU_OUT];
  const cpu_tile_row *tile = V(tile_for)(TFM_F32, rows, 1);
  const void *x[CPU_TILE];
  int32_t i, j, col, n;
  tile->run(score, (const void *const *)(k->q_row + row), (const uint8_t *)k->keys, 0, width, NULL);
  tile->run(dp, (const void *const *)(k->dy_row + row), (const uint8_t *)k->values, 0, width, NULL);
  for (i = 0; i < tile->rows; i++) {
    int32_t at = pos + row + i, first = cpu_first_key(t->attn.p, at) - base;
    x[i] = k->ds + (row + i) * CPU_ROWS;
    V(attn_slopes)(t->attn.p, k->p + (row + i) * CPU_ROWS, k->ds + (row + i) * CPU_ROWS,
                   score + i * CPU_OUT, dp + i * CPU_OUT, k->lse[row + i], k->delta[row + i],
                   cpu_min(CPU_ROWS, first), cpu_min(CPU_ROWS, at + 1 - base));
  }
  for (col = 0; col < width; col += n * CPU_ROWS) {
    n = width - col >= V(wide) * CPU_ROWS ? V(wide) : 1;
    V(tile_for)(TFM_F32, tile->rows, n)
        ->run(score, x, (const uint8_t *)(k->rows + col * CPU_ROWS), panel, CPU_ROWS, NULL);
    for (i = 0; i < tile->rows; i++) {
      float *dq = k->dq_row[row + i] + col;
      int32_t some = cpu_min(n * CPU_ROWS, width - col);
      for (j = 0; j < some; j += CPU_LANES)
        V(store_some)(dq + j, V(add)(V(load_some)(dq + j, some - j),
                                     V(load)(score + i * CPU_OUT + j)), some - j);
    }
  }
  return tile->rows;
}

/* to [width][32] = x [width][96] times panel [rows][32], of rows row .. row + rows - 1. */
static void V(attn_bwd_sums)(float *to, const float *x, const float *panel, int32_t width,
                             int32_t row, int32_t rows) {
  float out[CPU_TILE * CPU_OUT];
  const cpu_tile_row *tile;
  const void *at[CPU_TILE];
  int32_t i, j;
  for (i = 0; i < width; i += tile->rows) {
    tile = V(tile_for)(TFM_F32, width - i, 1);
    for (j = 0; j < tile->rows; j++) at[j] = x + (i + j) * V(queries) + row;
    tile->run(out, at, (const uint8_t *)(panel + row * CPU_ROWS), 0, rows, NULL);
    for (j = 0; j < tile->rows; j++)
      memcpy(to + (i + j) * CPU_ROWS, out + j * CPU_OUT, CPU_ROWS * sizeof *to);
  }
}

/* Row `at` + key of y, some columns, grows by column key of x [width][32], for n keys. */
static void V(attn_bwd_add)(tfm_mat y, int32_t at, int32_t col, const float *x, int32_t width,
                            int32_t n) {
  int32_t i, j;
  for (i = 0; i < n; i++) {
    float *to = cpu_row(y, at + i) + col;
    for (j = 0; j < width; j++) to[j] += x[j * CPU_ROWS + i];
  }
}

/* Of one head of a row: dy . y. */
static float V(attn_delta)(const cpu_attn_bwd_job *t, int32_t row, int32_t head) {
  const int32_t width = t->attn.kv->width;
  const float *dy = cpu_row(t->dy, row) + head * width, *y = cpu_row(t->attn.y, row) + head * width;
  V(vec) sum = V(all)(0.0f);
  int32_t j;
  for (j = 0; j < width; j += CPU_LANES)
    sum = V(fma)(V(load_some)(dy + j, width - j), V(load_some)(y + j, width - j), sum);
  return V(sum_of)(sum);
}

/* Rows row .. row + n - 1 of a sequence, one query head: pointers, lse, delta; q and dy turned. */
static void V(attn_bwd_block)(const cpu_attn_bwd_job *t, V(attn_bwd_work) *k, int32_t row,
                              int32_t n, int32_t head) {
  const cpu_attn_job *a = &t->attn;
  const int32_t width = a->kv->width, at = head * width;
  int32_t i, j;
  for (i = 0; i < n; i++) {
    k->q_row[i] = cpu_row(a->q, row + i) + at;
    k->dy_row[i] = cpu_row(t->dy, row + i) + at;
    k->dq_row[i] = cpu_row(t->dq, row + i) + at;
    memset(k->dq_row[i], 0, (size_t)width * sizeof(float));
    k->delta[i] = V(attn_delta)(t, row + i, head);
    k->lse[i] = a->lse[(int64_t)(row + i) * a->p->heads + head];
  }
  for (i = 0; i < n; i += 8) {
    const float *q[8], *dy[8];
    for (j = 0; j < 8; j++) {
      q[j] = k->q_row[cpu_min(i + j, n - 1)];
      dy[j] = k->dy_row[cpu_min(i + j, n - 1)];
    }
    V(turn)(k->q + i, V(queries), q, width);
    V(turn)(k->dy + i, V(queries), dy, width);
  }
}

/* 32 keys from `base` on, before the n rows from position pos on, see and are seen. */
static void V(attn_bwd_keys)(const cpu_attn_bwd_job *t, V(attn_bwd_work) *k, const cpu_run *run,
                             int32_t pos, int32_t n, int32_t base) {
  const cpu_attn_job *a = &t->attn;
  const int32_t width = a->kv->width, end = cpu_min(CPU_ROWS, run->rows - base);
  int32_t first = base > pos ? base - pos : 0, row, keys = run->row + base;
  V(pack_keys)(k->keys, k->dk, a, run, base, 0, end, false);
  V(pack_keys)(k->values, k->dk, a, run, base, 0, end, true);
  V(pack_values)(k->rows, a, run, base, 0, end, CPU_ROWS, false);
  for (row = first; row < n;) row += V(attn_bwd_tile)(t, k, row, n - row, pos, base);
  V(attn_bwd_sums)(k->dk, k->q, k->ds, width, first, n - first);
  V(attn_bwd_sums)(k->dv, k->dy, k->p, width, first, n - first);
  V(attn_bwd_add)(t->dk, keys, run->head * width, k->dk, width, end);
  V(attn_bwd_add)(t->dv, keys, run->head * width, k->dv, width, end);
}

/* dk and dv of a run, 0 to begin with. */
static void V(attn_bwd_clear)(const cpu_attn_bwd_job *t, const cpu_run *run) {
  const int32_t width = t->attn.kv->width, col = run->head * width;
  int32_t i;
  for (i = 0; i < run->rows; i++) {
    memset(cpu_row(t->dk, run->row + i) + col, 0, (size_t)width * sizeof(float));
    memset(cpu_row(t->dv, run->row + i) + col, 0, (size_t)width * sizeof(float));
  }
}

/* One sequence, one head of keys. */
static void V(attn_bwd_run)(const cpu_attn_bwd_job *t, V(attn_bwd_work) *k, const cpu_run *run) {
  const cpu_attn_job *a = &t->attn;
  int32_t g, pos, n, base;
  V(attn_bwd_clear)(t, run);
  for (g = 0; g < a->group; g++)
    for (pos = 0; pos < run->rows; pos += n) {
      n = cpu_min(V(queries), run->rows - pos);
      V(attn_bwd_block)(t, k, run->row + pos, n, run->head * a->group + g);
      base = cpu_first_key(a->p, pos) / CPU_ROWS * CPU_ROWS;
      for (; base < pos + n; base += CPU_ROWS) V(attn_bwd_keys)(t, k, run, pos, n, base);
    }
}

/* Items are (sequence, head of keys), heads running fastest. */
static void V(attn_bwd_items)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_attn_bwd_job *t = (const cpu_attn_bwd_job *)context;
  int32_t heads = t->attn.kv->heads, item = 0, row = 0;
  float *at = (float *)(void *)(t->work + (size_t)worker * CPU_TRAIN_BYTES);
  V(attn_bwd_work) k;
  cpu_run run;
  k.q = at, k.dy = at += CPU_WIDTH * V(queries);
  k.p = at += CPU_WIDTH * V(queries), k.ds = at += CPU_ROWS * V(queries);
  k.keys = at += CPU_ROWS * V(queries), k.values = at += CPU_WIDTH * CPU_ROWS;
  k.rows = at += CPU_WIDTH * CPU_ROWS;
  k.dk = at += CPU_WIDTH * CPU_ROWS, k.dv = at += CPU_WIDTH * CPU_ROWS;
  for (; item < end && cpu_run_next(&run, t->attn.rows, row, t->attn.rows->n); row += run.rows)
    for (run.head = 0; run.head < heads; run.head++, item++)
      if (item >= begin && item < end) V(attn_bwd_run)(t, &k, &run);
}

static void V(attn_bwd)(tfm_dev *d, tfm_mat dq, tfm_mat dk, tfm_mat dv, tfm_mat dy, tfm_mat y,
                        tfm_mat q, const tfm_kv *kv, const tfm_rows *rows, const float *lse,
                        const tfm_attn *p) {
  cpu_attn_bwd_job t = {{y, q, kv, rows, p, p->heads / kv->heads, 0, 0, NULL,
                         (float *)(uintptr_t)lse, NULL, 0}, /* only read here */
                        dq, dk, dv, dy, cpu_runs(rows), cpu_quantised_at(d)};
  if (V(attn_declines)(&t.attn)) {
    tfm_backend_ref()->attn_bwd(d, dq, dk, dv, dy, y, q, kv, rows, lse, p);
    return;
  }
  if (d->products == TFM_BF16 && cpu_tiles_attn(d, &t)) return;
  tfm_parallel_for(d, t.items * kv->heads, 1, V(attn_bwd_items), &t);
}

/* ---- Training: loss ---- */

/* Where x has its largest value, the first of equals; its value in top. */
static int32_t V(largest)(float *top, const float *x, int32_t n) {
  V(vec) best = V(all)(-INFINITY);
  int32_t i;
  for (i = 0; i + CPU_LANES <= n; i += CPU_LANES) best = V(max)(best, V(load)(x + i));
  *top = V(max_of)(best);
  for (; i < n; i++) *top = x[i] > *top ? x[i] : *top;
  for (i = 0; i < n && x[i] != *top;) i++;
  return i;
}

/* x = e^(x - top), whose sum it returns. */
static float V(exp_row)(float *x, int32_t n, float top) {
  V(vec) sum = V(all)(0.0f), v;
  const V(vec) minus = V(all)(-top);
  float rest[CPU_LANES];
  int32_t i;
  for (i = 0; i + CPU_LANES <= n; i += CPU_LANES) {
    v = V(exp)(V(add)(V(load)(x + i), minus));
    V(store)(x + i, v);
    sum = V(add)(sum, v);
  }
  if (i == n) return V(sum_of)(sum);
  V(store)(rest, V(all)(-INFINITY));
  memcpy(rest, x + i, (size_t)(n - i) * sizeof *x);
  v = V(exp)(V(add)(V(load)(rest), minus));
  V(store_some)(x + i, v, n - i);
  V(store)(rest, v);
  memset(rest + (n - i), 0, (size_t)(CPU_LANES - (n - i)) * sizeof *rest);
  return V(sum_of)(V(add)(sum, V(load)(rest)));
}

static void V(loss_rows)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_loss_job *t = (const cpu_loss_job *)context;
  int32_t row, i, n = t->logits.cols;
  (void)worker;
  for (row = begin; row < end; row++) {
    float *x = cpu_row(t->logits, row), weight = t->weight ? t->weight[row] : 1.0f;
    float top, sum, factor, logit;
    int32_t target = t->target[row];
    t->losses[row] = t->hits[row] = 0;
    if (target < 0) {
      memset(x, 0, (size_t)n * sizeof *x);
      continue;
    }
    t->hits[row] = V(largest)(&top, x, n) == target ? weight : 0.0f;
    logit = x[target];
    sum = V(exp_row)(x, n, top);
    t->losses[row] = weight * (logf(sum) + top - logit);
    factor = weight * t->scale / sum;
    for (i = 0; i < n; i += CPU_LANES)
      V(store_some)(x + i, V(mul)(V(load_some)(x + i, n - i), V(all)(factor)), n - i);
    x[target] -= weight * t->scale;
  }
}

static void V(loss)(tfm_dev *d, float *losses, float *hits, tfm_mat logits, const int32_t *target,
                    const float *weight, float scale) {
  cpu_loss_job t = {losses, hits, logits, target, weight, scale};
  tfm_parallel_for(d, logits.rows, cpu_grain(16 * (int64_t)logits.cols), V(loss_rows), &t);
}

/* ---- Training: the optimiser ---- */

/* The sum of squares of a share. A whole one is read in four places at once, as a core waits for
   memory in each. */
static double V(sumsq_share)(const float *g, int64_t n) {
  enum { PLACES = 4, STRETCH = 256 };
  const int64_t each = n == CPU_SHARE ? n / PLACES : n, places = n / (each ? each : 1);
  double sum = 0;
  int64_t at, i, j;
  for (at = 0; at < each; at += STRETCH) {
    V(vec) part[PLACES] = {V(all)(0.0f), V(all)(0.0f), V(all)(0.0f), V(all)(0.0f)}, x;
    for (i = at; i < each && i < at + STRETCH; i += CPU_LANES)
      for (j = 0; j < places; j++) {
        x = V(load_some)(g + j * each + i,
                         each - i < CPU_LANES ? (int32_t)(each - i) : CPU_LANES);
        part[j] = V(fma)(x, x, part[j]);
      }
    sum += (double)V(sum_of)(V(add)(V(add)(part[0], part[1]), V(add)(part[2], part[3])));
  }
  return sum;
}

/* The sum of squares of each share, whose ends do not depend on the threads. */
static void V(sumsq_shares)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_arena_job *t = (const cpu_arena_job *)context;
  int32_t item;
  (void)worker;
  for (item = begin; item < end; item++) {
    int64_t at = (int64_t)item * CPU_SHARE;
    int64_t last = at + CPU_SHARE < t->n ? at + CPU_SHARE : t->n;
    t->sums[item] = V(sumsq_share)(t->g + at, last - at);
  }
}

static void V(sumsq)(tfm_dev *d, float *out, const void *x, tfm_type type, int64_t n) {
  enum { MOST = 256 };
  double sums[MOST], sum = 0;
  cpu_arena_job t;
  int64_t at;
  int32_t shares, i;
  if (type != TFM_F32) {
    tfm_backend_ref()->sumsq(d, out, x, type, n);
    return;
  }
  memset(&t, 0, sizeof t);
  t.sums = sums;
  for (at = 0; at < n; at += t.n) {
    t.g = (const float *)x + at;
    t.n = n - at < (int64_t)MOST * CPU_SHARE ? n - at : (int64_t)MOST * CPU_SHARE;
    shares = (int32_t)((t.n + CPU_SHARE - 1) / CPU_SHARE);
    tfm_parallel_for(d, shares, 1, V(sumsq_shares), &t);
    for (i = 0; i < shares; i++) sum += sums[i];
  }
  out[0] = (float)((double)out[0] + sum);
}

static void V(adamw_shares)(void *context, int32_t begin, int32_t end, int32_t worker) {
  const cpu_arena_job *t = (const cpu_arena_job *)context;
  const tfm_adamw *p = t->p;
  const V(vec) beta1 = V(all)(p->beta1), beta2 = V(all)(p->beta2), fix1 = V(all)(t->fix1);
  const V(vec) rest1 = V(all)((1 - p->beta1) * t->factor), fix2 = V(all)(t->fix2);
  const V(vec) rest2 = V(all)((1 - p->beta2) * t->factor * t->factor), eps = V(all)(p->eps);
  const V(vec) rate = V(all)(-p->lr), kept = V(all)(1 - p->lr * p->decay);
  int64_t i = (int64_t)begin * CPU_SHARE, last = (int64_t)end * CPU_SHARE;
  (void)worker;
  if (last > t->n) last = t->n;
  for (; i < last; i += CPU_LANES) {
    int32_t n = last - i < CPU_LANES ? (int32_t)(last - i) : CPU_LANES;
    V(vec) g = V(load_some)(t->g + i, n), w = V(load_some)(t->w + i, n), step;
    V(vec) m = V(fma)(beta1, V(load_some)(t->m + i, n), V(mul)(rest1, g));
    V(vec) v = V(fma)(beta2, V(load_some)(t->v + i, n), V(mul)(rest2, V(mul)(g, g)));
    step = V(div)(V(mul)(m, fix1), V(add)(V(sqrt)(V(mul)(v, fix2)), eps));
    V(store_some)(t->m + i, m, n);
    V(store_some)(t->v + i, v, n);
    V(store_some)(t->w + i, V(fma)(rate, step, V(mul)(w, kept)), n);
  }
}

static void V(adamw)(tfm_dev *d, void *w, tfm_type type, float *master, float *m, float *v,
                     const void *g, tfm_type gtype, int64_t n, const float *sumsq,
                     const tfm_adamw *p) {
  cpu_arena_job t = {master, m, v, (const float *)g, 1, 1, 1, n, NULL, p};
  float norm = sqrtf(sumsq[0]);
  if (type != TFM_F32 || gtype != TFM_F32 || w != (void *)master) {
    tfm_backend_ref()->adamw(d, w, type, master, m, v, g, gtype, n, sumsq, p);
    return;
  }
  if (!isfinite(norm)) return;
  if (p->clip > 0 && norm > p->clip) t.factor = p->clip / norm;
  t.fix1 = (float)(1 / (1 - pow((double)p->beta1, p->step)));
  t.fix2 = (float)(1 / (1 - pow((double)p->beta2, p->step)));
  tfm_parallel_for(d, (int32_t)((n + CPU_SHARE - 1) / CPU_SHARE), 1, V(adamw_shares), &t);
}

#undef CPU_FLOAT_TILES
#undef CPU_BLOCK_TILES
#undef CPU_LINE_TILES
#undef CPU_TILE_OF
#undef CPU_TILE_ROW
#endif
