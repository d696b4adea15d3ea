/* transformer_cpu.c - tuned CPU kernels for transformer.h                    MIT licence: LICENSE

   Optional: cc -O3 -DTFM_USE_CPU app.c transformer_cpu.c -lm -lpthread

   How it works. transformer.h computes through a table of kernels (see >>backend there). This file
   hands out such a table, tfm_backend_cpu. Its memory is the application's own, as the reference's
   is, so every entry may run on the threads of tfm_parallel_for.

   What is declined. All computing entries are NULL for now: TFM_AUTO passes over this table, with a
   line in the log, and the reference computes; asking for TFM_CPU with no_fallback is answered by
   TFM_E_UNSUPPORTED. Nothing here pretends to be faster than it is.

   Where its owner starts. The device entries below are complete. Next come pack_size, pack and
   unpack (a layout that the matmul reads in order), then matmul for one row, which is all of
   decode, then attn, norm and the small entries, each checked by tests against tfm_backend_ref().
   Include this file's kernels once per instruction set (target pragmas, cpuid at run time): users
   pass no compiler flags. Nothing mutable may be static; what must last lives in tfm_dev.state. */

#include "transformer.h"
#include <stdlib.h>
#include <string.h>

#define CPU_ALIGN 64 /* a cache line, and what tfm_backend.alloc promises */

static tfm_status cpu_open(tfm_dev *d) {
  d->state = NULL;
  return TFM_OK;
}

static void cpu_close(tfm_dev *d) { (void)d; }

/* Everything is done when its entry returns; only the sticky failure is left to hand over. */
static tfm_status cpu_sync(tfm_dev *d) {
  tfm_status status = d->status;
  d->status = TFM_OK;
  return status;
}

static void *cpu_realloc(const tfm_host *host, void *old, size_t old_bytes, size_t bytes) {
  if (host->alloc) return host->alloc(host->user, old, old_bytes, bytes);
  if (bytes) return malloc(bytes);
  free(old);
  return NULL;
}

/* One alignment's worth more than asked for; the block's start is kept just before the result. */
static void *cpu_alloc(tfm_dev *d, size_t bytes) {
  char *raw, *p;
  if (bytes > SIZE_MAX / 2) return NULL;
  raw = (char *)cpu_realloc(d->host, NULL, 0, bytes + 2 * CPU_ALIGN);
  if (!raw) return NULL;
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

static void cpu_put(tfm_dev *d, void *dst, const void *host, size_t bytes) {
  (void)d;
  if (bytes) memcpy(dst, host, bytes);
}

static void cpu_zero(tfm_dev *d, void *dst, size_t bytes) {
  (void)d;
  if (bytes) memset(dst, 0, bytes);
}

static size_t cpu_work_bytes(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                             int32_t context) {
  (void)d, (void)net, (void)rows, (void)sequences, (void)context;
  return 0;
}

static bool cpu_replay(tfm_dev *d, uint64_t key) {
  (void)d, (void)key;
  return false;
}

static bool cpu_record(tfm_dev *d, uint64_t key, bool begin) {
  (void)d, (void)key, (void)begin;
  return false;
}

static const tfm_backend cpu_table = {
  TFM_BACKEND_ABI, "cpu", TFM_F32, TFM_F32, 1,
  cpu_open, cpu_close, cpu_sync, cpu_alloc, cpu_release,
  cpu_put, cpu_put, cpu_put, cpu_zero, /* put, get, copy: one address space, one function */
  cpu_alloc, cpu_release, cpu_work_bytes, cpu_replay, cpu_record,
  NULL, NULL, NULL,                                     /* pack_size, pack, unpack */
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,       /* cast embed gather norm matmul rope
                                                           kv_put attn */
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,       /* glu route matmul_moe combine sample top
                                                           layer decode */
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,       /* loss matmul_dx matmul_dw epilogue_bwd
                                                           norm_bwd attn_bwd glu_bwd embed_bwd */
  NULL, NULL, NULL, NULL, NULL, NULL                    /* route_bwd combine_bwd moe_dx moe_dw sumsq
                                                           adamw */
};

const tfm_backend *tfm_backend_cpu(void) { return &cpu_table; }
