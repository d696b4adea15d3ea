/* transformer_cuda.cu - CUDA kernels for transformer.h                       MIT licence: LICENSE

   Optional: nvcc -arch=sm_90a -O3 -DTFM_USE_CUDA app.c transformer_cuda.cu -lcublasLt

   How it works. transformer.h computes through a table of kernels (see >>backend there). This file
   hands out such a table, tfm_backend_cuda. Each open makes a stream of its own; work is enqueued
   on it in order, and a failed CUDA call becomes the device's sticky failure (tfm_dev_fail), which
   sync reports. When kernels of the reference are to run between (host_visible), memory is managed.

   Activations and the residual stream are F32, and so is every sum: where one row is multiplied
   nothing but the weights is worth saving. cuda_dots does that: a warp holds two rows of W, reads
   them 16 bytes a lane, eight loads ahead of their use, and multiplies them by up to four rows of x
   that lie in shared memory. A sum runs over the lanes in one order, which depends on nothing but
   the length of a row; the norm and the softmax are written once for all callers, too. So the bits
   of a row do not depend on the batch (rule 7), and one token by `decode` has the bits of `matmul`.

   Two faster ways lie beside that. `decode` is one cooperative kernel for as many tokens as it is
   asked for: five phases a layer, between them a barrier of all blocks, before which each block
   asks for the next phase's weights. `layer` takes passes of more than CUDA_COLUMNS rows, whose
   weights have 16 bits or fewer, through cuBLASLt and a flash attention on the tensor cores, with
   activations of 16 bits: faster, and not bit by bit what a row alone has. F32 weights are never
   taken there. An engine that is to be deterministic is not given `layer`: see rule 7 of >>backend.

   Q8_0 and Q4_0 lie with their scales apart. Q4_0 is multiplied in halves: x is brought below 128
   by a power of two first, sums of eight products run in F16, all others in F32.

   What is declined: the backward entries, and weights for them. Nothing mutable is static; what
   must last lives in tfm_dev.state. */

#include "transformer.h"
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
  CUDA_THREADS = 512,     /* of every block that multiplies or normalises: sums depend on it */
  CUDA_WARPS = CUDA_THREADS / 32,
  CUDA_COLUMNS = 4,       /* rows of x that share one reading of W */
  CUDA_SHARED = 220 << 10, /* bytes of shared memory that a block may ask for */
  CUDA_KEYS = 64,         /* keys in a tile of attention */
  CUDA_STAGE = 32 << 20,  /* bytes of a pinned buffer for uploads */
  CUDA_RING = 1 << 20,    /* bytes of pinned memory for what passes need */
  CUDA_GRAPHS = 64,       /* recorded passes, by their number of rows */
  CUDA_MARKS = 128        /* changes of the kind of work that may be on their way */
};

/* ---- Device ---- */

typedef struct cuda_graph {
  uint64_t key;
  uint32_t asked; /* how often; the second time it is worth recording */
  cudaGraphExec_t exec;
} cuda_graph;

typedef struct cuda_clock { /* a ring of events, made as they are needed */
  cudaEvent_t event[CUDA_MARKS];
  tfm_work kind[CUDA_MARKS]; /* of what comes after it */
  int first, count;
} cuda_clock;

typedef struct cuda_state {
  cudaStream_t stream;
  cuda_clock clock;
  int processors;
  char *ring;       /* pinned; used from the front, until a wait frees it */
  size_t ring_used;
  char *stage[2];   /* pinned and device buffers of uploads, from the first pack to the next sync */
  char *device_stage[2];
  cudaEvent_t staged[2];
  int turn;
  cuda_graph graph[CUDA_GRAPHS];
  int graphs;
  bool recording;
  struct cuda_lt *lt;
  struct cuda_decoder *decoder;
  size_t pass_at; /* where the buffers of `layer` begin in tfm_dev.work; 0: there are none */
  uint64_t bytes, peak_bytes; /* of device memory */
} cuda_state;

static cuda_state *cuda_of(const tfm_dev *d) { return (cuda_state *)d->state; }
static cudaStream_t cuda_stream(const tfm_dev *d) { return cuda_of(d)->stream; }

/* True when all is well; else the failure sticks to the device. */
static bool cuda_check(tfm_dev *d, cudaError_t error, const char *call) {
  if (error == cudaSuccess) return true;
  (void)cudaGetLastError(); /* not to be met again by a later launch */
  tfm_dev_fail(d, error == cudaErrorMemoryAllocation ? TFM_E_MEMORY : TFM_E_DEVICE,
               "CUDA device %d: %s: %s", (int)d->index, call, cudaGetErrorString(error));
  return false;
}

/* Every entry starts here: engines may be driven from any thread, and each thread of a process has
   a current device of its own. False: the device has failed, skip the work. */
static bool cuda_enter(tfm_dev *d) {
  return d->status == TFM_OK && cuda_check(d, cudaSetDevice(d->index), "cudaSetDevice");
}

static void *cuda_host_memory(const tfm_dev *d, void *old, size_t old_bytes, size_t bytes) {
  if (d->host && d->host->alloc) return d->host->alloc(d->host->user, old, old_bytes, bytes);
  if (bytes) return malloc(bytes);
  free(old);
  return NULL;
}

static bool cuda_parts_make(tfm_dev *d);

static bool cuda_usable(tfm_dev *d) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0)
    tfm_dev_fail(d, TFM_E_DEVICE, "no CUDA device can be used: %s",
                 error != cudaSuccess ? cudaGetErrorString(error) : "the driver lists none");
  else if (d->index < 0 || d->index >= count)
    tfm_dev_fail(d, TFM_E_DEVICE, "device_index is %d; expected 0 to %d", (int)d->index, count - 1);
  return d->status == TFM_OK;
}

static void cuda_close(tfm_dev *d);

static tfm_status cuda_open(tfm_dev *d) {
  cuda_state *s;
  tfm_status status;
  d->state = NULL;
  if (!cuda_usable(d) || !cuda_enter(d)) return d->status;
  s = (cuda_state *)cuda_host_memory(d, NULL, 0, sizeof *s);
  if (!s) {
    tfm_dev_fail(d, TFM_E_MEMORY, "out of memory for the state of a CUDA device");
    return d->status;
  }
  memset(s, 0, sizeof *s);
  d->state = s;
  if (cuda_parts_make(d) &&
      cuda_check(d, cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking),
                 "cudaStreamCreateWithFlags") &&
      cuda_check(d, cudaDeviceGetAttribute(&s->processors, cudaDevAttrMultiProcessorCount,
                                           d->index), "cudaDeviceGetAttribute") &&
      cuda_check(d, cudaHostAlloc((void **)&s->ring, CUDA_RING, cudaHostAllocDefault),
                 "cudaHostAlloc"))
    return TFM_OK;
  status = d->status;
  cuda_close(d);
  d->status = status;
  return status;
}

static void cuda_release_stage(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  int i;
  for (i = 0; i < 2; i++) {
    if (s->stage[i]) cuda_check(d, cudaFreeHost(s->stage[i]), "cudaFreeHost");
    if (s->device_stage[i]) cuda_check(d, cudaFree(s->device_stage[i]), "cudaFree");
    if (s->staged[i]) cuda_check(d, cudaEventDestroy(s->staged[i]), "cudaEventDestroy");
    s->stage[i] = s->device_stage[i] = NULL;
    s->staged[i] = NULL;
  }
}

static void cuda_parts_free(tfm_dev *d);

static void cuda_close(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  int i;
  if (!s) return;
  d->status = TFM_OK; /* whatever failed: all is to be given back on its own device */
  cuda_check(d, cudaSetDevice(d->index), "cudaSetDevice");
  for (i = 0; i < s->graphs; i++)
    if (s->graph[i].exec) cuda_check(d, cudaGraphExecDestroy(s->graph[i].exec), "graph");
  cuda_parts_free(d);
  cuda_release_stage(d);
  for (i = 0; i < CUDA_MARKS; i++)
    if (s->clock.event[i]) cuda_check(d, cudaEventDestroy(s->clock.event[i]), "cudaEventDestroy");
  if (s->ring) cuda_check(d, cudaFreeHost(s->ring), "cudaFreeHost");
  if (s->stream) cuda_check(d, cudaStreamDestroy(s->stream), "cudaStreamDestroy");
  cuda_host_memory(d, s, sizeof *s, 0);
  d->state = NULL;
}

static void cuda_wait(tfm_dev *d) {
  if (cuda_check(d, cudaStreamSynchronize(cuda_stream(d)), "cudaStreamSynchronize"))
    cuda_of(d)->ring_used = 0;
}

static tfm_status cuda_sync(tfm_dev *d) {
  tfm_status status;
  if (cuda_enter(d)) cuda_wait(d);
  if (cuda_of(d)->stage[0] || cuda_of(d)->stage[1]) cuda_release_stage(d);
  status = d->status;
  if (status != TFM_OK) cuda_of(d)->clock.count = 0; /* nobody knows what has run */
  d->status = TFM_OK;
  return status;
}

/* Running out of memory is an answer here, not a failure of the device. */
static void *cuda_alloc(tfm_dev *d, size_t bytes) {
  cuda_state *s = cuda_of(d);
  void *p = NULL;
  cudaError_t error;
  if (!cuda_enter(d)) return NULL;
  if (d->host_visible) error = cudaMallocManaged(&p, bytes, cudaMemAttachGlobal);
  else error = cudaMalloc(&p, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return NULL;
  }
  if (!cuda_check(d, error, d->host_visible ? "cudaMallocManaged" : "cudaMalloc")) return NULL;
  s->bytes += bytes;
  if (s->bytes > s->peak_bytes) s->peak_bytes = s->bytes;
  return p;
}

/* Also after a failure. */
static void cuda_release(tfm_dev *d, void *p, size_t bytes) {
  if (!p) return;
  cuda_check(d, cudaSetDevice(d->index), "cudaSetDevice"); /* memory knows its device without */
  cuda_check(d, cudaFree(p), "cudaFree");
  cuda_of(d)->bytes -= bytes;
}

static void cuda_move(tfm_dev *d, void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
  cuda_check(d, cudaMemcpyAsync(dst, src, bytes, kind, cuda_stream(d)), "cudaMemcpyAsync");
}

/* Room in the ring, whose bytes stay until the next wait; NULL when they never fit. */
static char *cuda_ring(tfm_dev *d, size_t bytes) {
  cuda_state *s = cuda_of(d);
  size_t rounded = (bytes + 63) / 64 * 64;
  if (rounded > CUDA_RING) return NULL;
  if (rounded > CUDA_RING - s->ring_used) cuda_wait(d);
  if (d->status != TFM_OK) return NULL;
  s->ring_used += rounded;
  return s->ring + s->ring_used - rounded;
}

/* What fits into the ring is not waited for. */
static void cuda_put(tfm_dev *d, void *dst, const void *host, size_t bytes) {
  char *ring;
  if (bytes == 0 || !cuda_enter(d)) return;
  ring = cuda_ring(d, bytes);
  if (ring) cuda_move(d, dst, memcpy(ring, host, bytes), bytes, cudaMemcpyHostToDevice);
  if (ring || d->status != TFM_OK) return;
  cuda_move(d, dst, host, bytes, cudaMemcpyHostToDevice);
  cuda_wait(d);
}

static void cuda_get(tfm_dev *d, void *host, const void *src, size_t bytes) {
  char *ring;
  if (bytes == 0 || !cuda_enter(d)) return;
  ring = cuda_ring(d, bytes);
  if (d->status == TFM_OK)
    cuda_move(d, ring ? ring : (char *)host, src, bytes, cudaMemcpyDeviceToHost);
  cuda_wait(d);
  if (ring && d->status == TFM_OK) memcpy(host, ring, bytes);
}

static void cuda_copy(tfm_dev *d, void *dst, const void *src, size_t bytes) {
  if (bytes && cuda_enter(d)) cuda_move(d, dst, src, bytes, cudaMemcpyDeviceToDevice);
}

static void cuda_zero(tfm_dev *d, void *dst, size_t bytes) {
  if (bytes && cuda_enter(d))
    cuda_check(d, cudaMemsetAsync(dst, 0, bytes, cuda_stream(d)), "cudaMemsetAsync");
}

/* Pinned, and at the same address on both sides. */
static void *cuda_alloc_shared(tfm_dev *d, size_t bytes) {
  void *p = NULL;
  if (!cuda_enter(d)) return NULL;
  if (cudaHostAlloc(&p, bytes, cudaHostAllocMapped) == cudaSuccess) return p;
  (void)cudaGetLastError();
  return NULL;
}

static void cuda_release_shared(tfm_dev *d, void *p, size_t) {
  if (p) cuda_check(d, cudaFreeHost(p), "cudaFreeHost");
}

/* ---- Graphs ---- */

static cuda_graph *cuda_graph_of(cuda_state *s, uint64_t key) {
  int i;
  for (i = 0; i < s->graphs; i++)
    if (s->graph[i].key == key) return &s->graph[i];
  return NULL;
}

static bool cuda_replay(tfm_dev *d, uint64_t key) {
  cuda_graph *g = cuda_graph_of(cuda_of(d), key);
  if (!g || !g->exec || !cuda_enter(d)) return false;
  cuda_check(d, cudaGraphLaunch(g->exec, cuda_stream(d)), "cudaGraphLaunch");
  return true;
}

/* Prompts come in any number of rows and are not worth it, nor is what is run but once. */
static bool cuda_record_begin(tfm_dev *d, uint64_t key) {
  cuda_state *s = cuda_of(d);
  cuda_graph *g = cuda_graph_of(s, key);
  if (key > 256 || !cuda_enter(d)) return false;
  if (!g) {
    if (s->graphs == CUDA_GRAPHS) return false;
    g = &s->graph[s->graphs++];
    g->key = key;
  }
  if (++g->asked < 2) return false;
  s->recording = cuda_check(d, cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal),
                            "cudaStreamBeginCapture");
  return s->recording;
}

static bool cuda_record(tfm_dev *d, uint64_t key, bool begin) {
  cuda_state *s = cuda_of(d);
  cuda_graph *g = cuda_graph_of(s, key);
  cudaGraph_t graph = NULL;
  if (begin) return cuda_record_begin(d, key);
  if (!s->recording) return false;
  s->recording = false;
  cuda_check(d, cudaStreamEndCapture(s->stream, &graph), "cudaStreamEndCapture");
  if (graph && d->status == TFM_OK)
    cuda_check(d, cudaGraphInstantiate(&g->exec, graph, 0), "cudaGraphInstantiate");
  if (graph) cudaGraphDestroy(graph);
  return d->status == TFM_OK && cuda_replay(d, key);
}

/* ---- What the device is busy with ----
   Where the kind of work changes, an event is recorded. Of two in a row that have both happened the
   time between them is known: it is looked for when there is no room, or when somebody asks. */

/* Counts the oldest stretch; false: the device has not come to its end. */
static bool cuda_clock_count(tfm_dev *d, bool wait) {
  cuda_clock *c = &cuda_of(d)->clock;
  int a = c->first, b = (a + 1) % CUDA_MARKS;
  float ms = 0;
  cudaError_t error;
  if (c->count < 2) return false;
  error = wait ? cudaEventSynchronize(c->event[b]) : cudaEventQuery(c->event[b]);
  if (error == cudaErrorNotReady) return false;
  if (!cuda_check(d, error, "cudaEventQuery")) return false;
  if (c->kind[a] != TFM_WORK_NONE &&
      cuda_check(d, cudaEventElapsedTime(&ms, c->event[a], c->event[b]), "cudaEventElapsedTime"))
    d->usage.seconds[c->kind[a]] += (double)ms * 1e-3;
  c->first = b;
  c->count--;
  return true;
}

static void cuda_mark(tfm_dev *d, tfm_work kind) {
  cuda_clock *c = &cuda_of(d)->clock;
  int i;
  if (!cuda_enter(d)) return;
  if (c->count == CUDA_MARKS && !cuda_clock_count(d, true)) return;
  i = (c->first + c->count) % CUDA_MARKS;
  if (!c->event[i] && !cuda_check(d, cudaEventCreate(&c->event[i]), "cudaEventCreate")) return;
  if (!cuda_check(d, cudaEventRecord(c->event[i], cuda_stream(d)), "cudaEventRecord")) return;
  c->kind[i] = kind;
  c->count++;
}

/* A failure here is met again by whoever needs the device next. */
static void cuda_usage(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  size_t free_bytes = 0, total_bytes = 0;
  if (!cuda_enter(d)) return;
  while (cuda_clock_count(d, false)) continue;
  cuda_check(d, cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
  d->usage.bytes = s->bytes;
  d->usage.peak_bytes = s->peak_bytes;
  d->usage.free_bytes = free_bytes;
  d->usage.total_bytes = total_bytes;
}

/* ---- Launching ---- */

/* One launch; shared memory beyond 48 KB is asked for. */
template <typename... P, typename... A>
static void cuda_run(tfm_dev *d, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                     A... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = shared;
  config.stream = cuda_stream(d);
  if (grid.x == 0 || grid.y == 0 || d->status != TFM_OK) return;
  if (shared > (48 << 10) &&
      !cuda_check(d, cudaFuncSetAttribute((const void *)kernel,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)shared), "cudaFuncSetAttribute")) return;
  cuda_check(d, cudaLaunchKernelEx(&config, kernel, P(arguments)...), "cudaLaunchKernelEx");
}

static unsigned cuda_blocks(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

/* ---- Number formats ---- */

__host__ __device__ static int cuda_bits(tfm_type type) { /* a value's, without scales */
  return type == TFM_F32 ? 32 : type == TFM_Q8_0 ? 8 : type == TFM_Q4_0 ? 4 : 16;
}

static bool cuda_known(tfm_type type) { return type >= TFM_F32 && type <= TFM_Q4_0; }
static bool cuda_blocked(tfm_type type) { return type == TFM_Q8_0 || type == TFM_Q4_0; }

__device__ static float cuda_load(const void *p, tfm_type type, int64_t i) {
  if (type == TFM_F32) return __ldcg((const float *)p + i);
  if (type == TFM_F16) return __half2float(__ldcg((const __half *)p + i));
  return __bfloat162float(__ldcg((const __nv_bfloat16 *)p + i));
}

__device__ static void cuda_store(void *p, tfm_type type, int64_t i, float v) {
  if (type == TFM_F32) ((float *)p)[i] = v;
  else if (type == TFM_F16) ((__half *)p)[i] = __float2half_rn(v);
  else ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v);
}

/* ---- Weights: rows of one type, each filled up with zeros to whole 16 bytes ---- */

typedef struct cuda_weight {
  uint8_t *data;       /* [rows, vectors] of 16 bytes */
  __half *scale;       /* [rows, cols / 32], of block formats */
  tfm_type type;
  int32_t rows, cols;  /* of one expert */
  int32_t vectors;     /* in a row */
} cuda_weight;

static const cuda_weight *cuda_packed(const tfm_weight *w) { return (cuda_weight *)w->host; }

/* The types of files: how many values a block has, in how many bytes, and what it becomes here.
   Q5_0 loses nothing as Q8_0, nor F8 as BF16. What has two scales becomes F16, within half a unit
   of its last place: 2^-12 of a value, or 2^-25 where that is below 2^-14. */
typedef struct cuda_format { int values, bytes; tfm_type here; } cuda_format;

__host__ __device__ static cuda_format cuda_format_of(tfm_type type) {
  switch (type) {
    case TFM_F32: return cuda_format{1, 4, TFM_F32};
    case TFM_F16: return cuda_format{1, 2, TFM_F16};
    case TFM_BF16: return cuda_format{1, 2, TFM_BF16};
    case TFM_F8_E4M3:
    case TFM_F8_E5M2: return cuda_format{1, 1, TFM_BF16};
    case TFM_Q8_0: return cuda_format{32, 34, TFM_Q8_0};
    case TFM_Q4_0: return cuda_format{32, 18, TFM_Q4_0};
    case TFM_Q4_1: return cuda_format{32, 20, TFM_F16};
    case TFM_Q5_0: return cuda_format{32, 22, TFM_Q8_0};
    case TFM_Q5_1: return cuda_format{32, 24, TFM_F16};
    case TFM_Q4_K: return cuda_format{256, 144, TFM_F16};
    case TFM_Q5_K: return cuda_format{256, 176, TFM_F16};
    case TFM_Q6_K: return cuda_format{256, 210, TFM_F16};
    default: return cuda_format{1, 0, TFM_TYPE_DEFAULT};
  }
}

/* Parts that do not become the same are all brought to F32. */
static tfm_type cuda_target(const tfm_weight_source *s) {
  tfm_type type = cuda_format_of(s->parts[0].type).here;
  int32_t i;
  if (s->type) return s->type;
  for (i = 1; i < s->part_count; i++)
    if (cuda_format_of(s->parts[i].type).here != type) type = TFM_F32;
  return type;
}

static bool cuda_part_check(tfm_dev *d, const tfm_weight_source *s, const tfm_part *p) {
  tfm_type type = cuda_target(s);
  cuda_format from = cuda_format_of(p->type), to = cuda_format_of(type);
  if (!from.here)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "weights of type %s: this table does not know it",
                 tfm_type_name(p->type));
  else if (!cuda_known(type))
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "weights of type %s: expected F32, F16, BF16, Q8_0 or Q4_0",
                 tfm_type_name(type));
  else if (s->transposed && from.values > 1)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "a transposed matrix of type %s: expected a float type",
                 tfm_type_name(p->type));
  else if (s->cols % to.values || s->cols % from.values)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED,
                 "a matrix with %d columns cannot be %s, whose blocks have %d; choose a float type",
                 (int)s->cols, tfm_type_name(s->cols % to.values ? type : p->type),
                 s->cols % to.values ? to.values : from.values);
  else if (s->on_device || s->roles & TFM_ROLE_GRADIENT)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "weights that are trained: this table has no backward");
  return d->status == TFM_OK;
}

static cuda_weight cuda_weight_of(const tfm_weight_source *s) {
  cuda_weight w;
  memset(&w, 0, sizeof w);
  w.type = cuda_target(s);
  w.rows = s->rows;
  w.cols = s->cols;
  w.vectors = (int32_t)(((int64_t)s->cols * cuda_bits(w.type) + 127) / 128);
  return w;
}

static int64_t cuda_all_rows(const tfm_weight_source *s) {
  return (int64_t)s->rows * (s->experts ? s->experts : 1);
}

static size_t cuda_align(size_t bytes) { return (bytes + 63) / 64 * 64; }
static size_t cuda_align256(size_t bytes) { return (bytes + 255) / 256 * 256; }

static tfm_pack_size cuda_pack_size(tfm_dev *d, const tfm_weight_source *s) {
  tfm_pack_size size = {0, 0};
  cuda_weight w;
  int32_t i;
  for (i = 0; i < s->part_count; i++)
    if (!cuda_part_check(d, s, &s->parts[i])) return size;
  w = cuda_weight_of(s);
  size.host_bytes = cuda_align(sizeof w);
  size.device_bytes = cuda_align((size_t)cuda_all_rows(s) * (size_t)w.vectors * 16);
  if (cuda_blocked(w.type))
    size.device_bytes += cuda_align((size_t)cuda_all_rows(s) * (size_t)(w.cols / 32) * 2);
  return size;
}

/* A piece of a part on the device, as it is in the file: `lines` lines from line `first` on. */
typedef struct cuda_piece {
  const uint8_t *data;
  tfm_type type;
  bool transposed; /* a line is a column of the matrix, else a row */
  bool keep;       /* its blocks become the weight's without a loss */
  int32_t first, lines, rows; /* rows: of the part */
  int64_t row;                /* the part's first, in the weight */
} cuda_piece;

static size_t cuda_line_bytes(const cuda_piece *p, int32_t cols) {
  int64_t n = p->transposed ? p->rows : cols;
  cuda_format f = cuda_format_of(p->type);
  return (size_t)(n / f.values * f.bytes);
}

__device__ static uint32_t cuda_u16(const uint8_t *p) { return p[0] | (uint32_t)p[1] << 8; }

__device__ static float cuda_half_at(const uint8_t *p) {
  return __half2float(__ushort_as_half((unsigned short)cuda_u16(p)));
}

/* Number j of 32, of 4 bits; or of 5, their highest in the 4 bytes before the others. */
__device__ static int cuda_q4(const uint8_t *nibbles, int j) {
  return j < 16 ? nibbles[j] & 15 : nibbles[j - 16] >> 4;
}
__device__ static int cuda_q5(const uint8_t *high, int j) {
  return cuda_q4(high + 4, j) | (high[j / 8] >> j % 8 & 1) << 4;
}

/* Value j of a block of 32. */
__device__ static float cuda_value_of_32(const uint8_t *block, tfm_type type, int j) {
  float scale = cuda_half_at(block);
  switch (type) {
    case TFM_Q8_0: return scale * (float)(int8_t)block[2 + j];
    case TFM_Q4_0: return scale * (float)(cuda_q4(block + 2, j) - 8);
    case TFM_Q5_0: return scale * (float)(cuda_q5(block + 2, j) - 16);
    case TFM_Q4_1:
      return __fadd_rn(__fmul_rn(scale, (float)cuda_q4(block + 4, j)), cuda_half_at(block + 2));
    default: /* Q5_1 */
      return __fadd_rn(__fmul_rn(scale, (float)cuda_q5(block + 4, j)), cuda_half_at(block + 2));
  }
}

/* Value j of a block of 256: of eight groups, or, in Q6_K, of sixteen. */
__device__ static float cuda_value_of_256(const uint8_t *block, tfm_type type, int j) {
  const uint8_t *six = block + 4, *high = block + 16;
  const uint8_t *nibbles = high + (type == TFM_Q5_K ? 32 : 0);
  int g = j / 32, k = j % 32, q, scale, least;
  if (type == TFM_Q6_K) {
    int n = j / 128, part = j / 32 % 4;
    q = block[64 * n + part % 2 * 32 + k] >> part / 2 * 4 & 15;
    q |= (block[128 + 32 * n + k] >> 2 * part & 3) << 4;
    return __fmul_rn(__fmul_rn(cuda_half_at(block + 208), (float)(int8_t)block[192 + j / 16]),
                     (float)(q - 32));
  }
  scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
  least = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
  q = nibbles[g / 2 * 32 + k] >> g % 2 * 4 & 15;
  if (type == TFM_Q5_K) q |= (high[k] >> g & 1) << 4;
  return __fsub_rn(__fmul_rn(__fmul_rn(cuda_half_at(block), (float)scale), (float)q),
                   __fmul_rn(cuda_half_at(block + 2), (float)least));
}

/* Value i of a line in a file's format, at any alignment. */
__device__ static float cuda_file_value(const uint8_t *line, tfm_type type, int64_t i) {
  cuda_format f = cuda_format_of(type);
  const uint8_t *block = line + i / f.values * f.bytes;
  switch (type) {
    case TFM_F32: return __uint_as_float(cuda_u16(block) | cuda_u16(block + 2) << 16);
    case TFM_BF16: return __uint_as_float(cuda_u16(block) << 16);
    case TFM_F16: return cuda_half_at(block);
    case TFM_F8_E5M2: return __half2float(__ushort_as_half((unsigned short)(block[0] << 8)));
    case TFM_F8_E4M3: /* its exponent is 8 less than a half's; 0x7f is no number */
      if ((block[0] & 0x7f) == 0x7f) return NAN;
      return 256.0f * __half2float(__ushort_as_half(
                          (unsigned short)((block[0] & 0x80) << 8 | (block[0] & 0x7f) << 7)));
    default: break;
  }
  return f.values == 256 ? cuda_value_of_256(block, type, (int)(i % 256))
                         : cuda_value_of_32(block, type, (int)(i % 32));
}

/* Bit position of value j of a block in its row's 16 bytes: in each word of eight, pairs lie 16
   bits apart, so that one mask yields two neighbours. */
__device__ static int cuda_nibble(int j) { return j / 8 * 32 + j % 8 / 2 * 4 + j % 2 * 16; }

/* 32 values become a block, with ggml's arithmetic. */
__device__ static void cuda_quantise(const float *x, tfm_type type, uint8_t *to, __half *scale) {
  float extreme = 0, d, inverse;
  uint32_t word[4] = {0, 0, 0, 0};
  int j;
  for (j = 0; j < 32; j++)
    if (fabsf(x[j]) > fabsf(extreme)) extreme = x[j];
  d = type == TFM_Q8_0 ? fabsf(extreme) / 127.0f : extreme / -8.0f;
  inverse = d != 0 ? 1.0f / d : 0.0f;
  *scale = __float2half_rn(d);
  for (j = 0; j < 32; j++) {
    float q = __fmul_rn(x[j], inverse);
    if (type == TFM_Q8_0) {
      q = roundf(q);
      ((int8_t *)to)[j] = (int8_t)(q >= -127.0f && q <= 127.0f ? q : 0.0f);
    } else {
      q = __fadd_rn(q, 8.5f);
      word[cuda_nibble(j) / 32] |= (q >= 15.0f ? 15u : q >= 0.0f ? (uint32_t)q : q < 0.0f ? 0u : 8u)
                                   << cuda_nibble(j) % 32;
    }
  }
  if (type == TFM_Q4_0) *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
}

/* A block as it is, but in its place; Q5_0 as Q8_0. */
__device__ static void cuda_keep(const uint8_t *from, tfm_type type, uint8_t *to, __half *scale) {
  uint32_t word[4] = {0, 0, 0, 0};
  int j;
  *scale = __ushort_as_half((unsigned short)cuda_u16(from));
  for (j = 0; j < 32 && type == TFM_Q8_0; j++) to[j] = from[2 + j];
  for (j = 0; j < 32 && type == TFM_Q5_0; j++) to[j] = (uint8_t)(cuda_q5(from + 2, j) - 16);
  if (type != TFM_Q4_0) return;
  for (j = 0; j < 32; j++)
    word[cuda_nibble(j) / 32] |= (uint32_t)cuda_q4(from + 2, j) << cuda_nibble(j) % 32;
  *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
}

/* Where value (row, col) of the piece's part is found. */
__device__ static float cuda_piece_value(const cuda_piece &p, int64_t bytes, int row, int col) {
  return p.transposed ? cuda_file_value(p.data + (col - p.first) * bytes, p.type, row)
                      : cuda_file_value(p.data + (row - p.first) * bytes, p.type, col);
}

/* A thread for every 32 values of a row (transposed: rows run fastest, as they do in the file). */
__global__ void cuda_pack_kernel(cuda_weight w, cuda_piece p, int64_t bytes) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, at;
  int row, block, blocks = (w.cols + 31) / 32, j, n;
  float x[32];
  if (p.transposed) row = (int)(i % p.rows), block = (int)(i / p.rows) + p.first / 32;
  else row = (int)(i / blocks) + p.first, block = (int)(i % blocks);
  if (p.transposed ? block * 32 >= p.first + p.lines : row >= p.first + p.lines) return;
  n = min(32, w.cols - block * 32);
  for (j = 0; j < 32; j++) x[j] = j < n ? cuda_piece_value(p, bytes, row, block * 32 + j) : 0.0f;
  at = p.row + row;
  if (p.keep) {
    cuda_keep(p.data + (row - p.first) * bytes + block * cuda_format_of(p.type).bytes, p.type,
              w.data + at * w.vectors * 16 + (int64_t)block * cuda_bits(w.type) * 4,
              w.scale + at * (w.cols / 32) + block);
  } else if (w.scale) {
    cuda_quantise(x, w.type, w.data + at * w.vectors * 16 + (int64_t)block * cuda_bits(w.type) * 4,
                  w.scale + at * (w.cols / 32) + block);
  } else {
    int64_t row_values = (int64_t)w.vectors * 128 / cuda_bits(w.type);
    for (j = 0; j < 32 && block * 32 + j < row_values; j++)
      cuda_store(w.data, w.type, at * row_values + block * 32 + j, x[j]);
  }
}

typedef struct cuda_memcpy_job { char *to; const char *from; size_t bytes; } cuda_memcpy_job;

static void cuda_memcpy_part(void *context, int32_t begin, int32_t end, int32_t) {
  const cuda_memcpy_job *job = (const cuda_memcpy_job *)context;
  size_t first = (size_t)begin << 20, last = (size_t)end << 20;
  if (last > job->bytes) last = job->bytes;
  memcpy(job->to + first, job->from + first, last - first);
}

/* The next of the two buffers, free to be written; -1 on failure. */
static int cuda_stage_next(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  int i = s->turn ^= 1;
  if (s->stage[i])
    return cuda_check(d, cudaEventSynchronize(s->staged[i]), "cudaEventSynchronize") ? i : -1;
  if (cuda_check(d, cudaHostAlloc((void **)&s->stage[i], CUDA_STAGE, cudaHostAllocDefault),
                 "cudaHostAlloc") &&
      cuda_check(d, cudaMalloc((void **)&s->device_stage[i], CUDA_STAGE), "cudaMalloc") &&
      cuda_check(d, cudaEventCreateWithFlags(&s->staged[i], cudaEventDisableTiming),
                 "cudaEventCreateWithFlags"))
    return i;
  return -1;
}

/* Sends a piece up and packs it; the next one's copy overlaps with this. */
static bool cuda_pack_piece(tfm_dev *d, const cuda_weight *w, cuda_piece p, const char *from) {
  cuda_state *s = cuda_of(d);
  size_t bytes = cuda_line_bytes(&p, w->cols);
  int i = cuda_stage_next(d);
  int64_t blocks = (w->cols + 31) / 32;
  cuda_memcpy_job job;
  if (i < 0) return false;
  job.to = s->stage[i];
  job.from = from;
  job.bytes = bytes * (size_t)p.lines;
  tfm_parallel_for(d, (int32_t)((job.bytes + (1 << 20) - 1) >> 20), 1, cuda_memcpy_part, &job);
  cuda_move(d, s->device_stage[i], s->stage[i], job.bytes, cudaMemcpyHostToDevice);
  p.data = (const uint8_t *)s->device_stage[i];
  blocks = p.transposed ? (int64_t)((p.lines + 31) / 32) * p.rows : blocks * p.lines;
  cuda_run(d, cuda_pack_kernel, dim3(cuda_blocks(blocks, 128)), 128, 0, *w, p, (int64_t)bytes);
  return cuda_check(d, cudaEventRecord(s->staged[i], s->stream), "cudaEventRecord");
}

static void cuda_pack_part(tfm_dev *d, const cuda_weight *w, const tfm_weight_source *s,
                           const tfm_part *part, int64_t row) {
  bool keep = w->scale && (!s->type || s->type == part->type);
  cuda_piece p = {NULL, part->type, s->transposed, keep, 0, 0, part->rows, row};
  int32_t all = s->transposed ? s->cols : part->rows;
  size_t bytes = cuda_line_bytes(&p, s->cols);
  int64_t most = (int64_t)(CUDA_STAGE / (bytes ? bytes : 1)) / 32 * 32;
  if (most == 0)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "a matrix whose rows have %llu bytes is too wide",
                 (unsigned long long)bytes);
  for (; d->status == TFM_OK && p.first < all; p.first += p.lines) {
    p.lines = all - p.first < most ? all - p.first : (int32_t)most;
    if (!cuda_pack_piece(d, w, p, (const char *)part->data + (size_t)p.first * bytes)) return;
  }
}

static void cuda_pack(tfm_dev *d, tfm_weight *w, const tfm_weight_source *s, void *host,
                      void *device) {
  cuda_weight packed = cuda_weight_of(s);
  int64_t row = 0;
  int32_t i;
  memset(w, 0, sizeof *w);
  for (i = 0; i < s->part_count; i++)
    if (!cuda_part_check(d, s, &s->parts[i])) return;
  w->rows = s->rows;
  w->cols = s->cols;
  w->experts = s->experts;
  w->roles = s->roles;
  w->host = host;
  w->device = device;
  w->bytes = (uint64_t)cuda_all_rows(s) * (uint64_t)packed.vectors * 16;
  packed.data = (uint8_t *)device;
  if (cuda_blocked(packed.type)) packed.scale = (__half *)(packed.data + cuda_align(w->bytes));
  if (packed.scale) w->bytes += (uint64_t)cuda_all_rows(s) * (uint64_t)(s->cols / 32) * 2;
  memcpy(host, &packed, sizeof packed);
  if (!cuda_enter(d)) return;
  for (i = 0; i < s->part_count; i++) {
    cuda_pack_part(d, &packed, s, &s->parts[i], row);
    row += s->parts[i].rows;
  }
}

/* Value (row, col) of a packed weight. */
__device__ static float cuda_value(const cuda_weight &w, int64_t row, int col) {
  const uint8_t *data = w.data + row * w.vectors * 16;
  float scale;
  int bit;
  if (!w.scale) return cuda_load(data, w.type, col);
  scale = __half2float(w.scale[row * (w.cols / 32) + col / 32]);
  if (w.type == TFM_Q8_0) return scale * (float)((const int8_t *)data)[col];
  bit = cuda_nibble(col % 32);
  return scale * (float)((int)(((const uint32_t *)data)[col / 32 * 4 + bit / 32] >> bit % 32 & 15) -
                         8);
}

__global__ void cuda_unpack_kernel(tfm_mat y, cuda_weight w, int32_t first) {
  int col = (int)(blockIdx.x * blockDim.x + threadIdx.x), row = (int)blockIdx.y;
  if (col < y.cols)
    ((float *)y.data)[row * y.stride + col] = cuda_value(w, (int64_t)first + row, col);
}

static void cuda_unpack(tfm_dev *d, tfm_mat y, const tfm_weight *w, int32_t first) {
  int32_t row;
  if (!cuda_enter(d)) return;
  for (row = 0; row < y.rows; row += 32768) { /* a grid is at most 65535 high */
    tfm_mat part = y;
    part.data = (float *)y.data + row * y.stride;
    part.rows = y.rows - row < 32768 ? y.rows - row : 32768;
    cuda_run(d, cuda_unpack_kernel, dim3(cuda_blocks(y.cols, 256), (unsigned)part.rows), 256, 0,
             part, *cuda_packed(w), first + row);
  }
}

/* ---- Elementary functions ---- */

__device__ static float cuda_act(float v, tfm_act act) {
  float u;
  switch (act) {
    case TFM_ACT_NONE: break;
    case TFM_ACT_GELU: return 0.5f * v * (1.0f + erff(v * 0.70710678f));
    case TFM_ACT_GELU_TANH:
      u = 0.79788456f * (v + 0.044715f * v * v * v);
      return v / (1.0f + expf(-2.0f * u));
    case TFM_ACT_SILU: return v / (1.0f + expf(-v));
    case TFM_ACT_RELU: return v > 0 || v != v ? v : 0.0f;
  }
  return v;
}

__device__ static float cuda_cap(float v, float cap) { return cap != 0 ? cap * tanhf(v / cap) : v; }

__device__ static void cuda_philox(uint32_t word[4], uint64_t key, uint64_t low, uint64_t high) {
  uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high,
           c3 = (uint32_t)(high >> 32), k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  int round;
  for (round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
    c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
    c3 = (uint32_t)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

__device__ static float cuda_dropout(const tfm_dropout &p, int row, int col) {
  uint64_t low = (uint64_t)(uint32_t)p.pos[row] << 32 | (uint32_t)col / 4;
  uint32_t word[4];
  cuda_philox(word, p.seed, low, (uint64_t)p.site << 32 | (uint32_t)p.seq[row]);
  return (float)(word[col % 4] >> 8) * (1.0f / 16777216.0f) < p.rate ? 0.0f
                                                                      : 1.0f / (1.0f - p.rate);
}

__device__ static float2 cuda_turn(const tfm_rope &p, int pos, int pair) { /* cosine and sine */
  float angle = (float)pos * p.inv_freq[pair], s = sinf(angle);
  return make_float2(__fmul_rn(cosf(angle), p.scale), __fmul_rn(p.inverse ? -s : s, p.scale));
}

__device__ static float2 cuda_rotate(float u, float v, float2 turn) {
  return make_float2(__fmaf_rn(u, turn.x, -__fmul_rn(v, turn.y)),
                     __fmaf_rn(v, turn.x, __fmul_rn(u, turn.y)));
}

/* ---- Sums over a block, in one order ---- */

__device__ static float cuda_warp_sum(float v) {
  int i;
  for (i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

__device__ static float cuda_warp_max(float v) {
  int i;
  for (i = 16; i; i /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, i));
  return v;
}

/* room: CUDA_WARPS floats of shared memory. */
__device__ static float cuda_block_sum(float v, float *room) {
  int i;
  v = cuda_warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  for (v = 0, i = 0; i < CUDA_WARPS; i++) v += room[i];
  return v;
}

__device__ static float cuda_block_max(float v, float *room) {
  int i;
  v = cuda_warp_max(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  for (i = 0; i < CUDA_WARPS; i++) v = fmaxf(v, room[i]);
  return v;
}

/* ---- norm ---- */

typedef struct cuda_norm {
  const float *w, *b;
  tfm_norm p;
} cuda_norm;

enum { CUDA_EARLY = 8 }; /* weights of a norm that a thread reads before it knows the sums */

/* Normalises n values in shared memory; all CUDA_THREADS threads. Returns mean and 1/deviation. */
__device__ static float2 cuda_normalise(float *x, int n, const cuda_norm &t, float *room) {
  float sum = 0, mean = 0, inverse, w[CUDA_EARLY], b[CUDA_EARLY];
  int i, k;
#pragma unroll
  for (k = 0; k < CUDA_EARLY; k++) {
    i = (int)threadIdx.x + k * CUDA_THREADS;
    w[k] = i < n ? __ldg(t.w + i) : 0.0f;
    b[k] = i < n && t.b ? __ldg(t.b + i) : 0.0f;
  }
  for (i = threadIdx.x; i < n && t.p.kind == TFM_NORM_LAYER; i += CUDA_THREADS) sum += x[i];
  if (t.p.kind == TFM_NORM_LAYER) mean = cuda_block_sum(sum, room) / (float)n;
  for (sum = 0, i = threadIdx.x; i < n; i += CUDA_THREADS) {
    float c = x[i] - mean;
    sum = __fmaf_rn(c, c, sum);
  }
  inverse = 1.0f / sqrtf(cuda_block_sum(sum, room) / (float)n + t.p.eps);
#pragma unroll
  for (k = 0; k < CUDA_EARLY; k++) {
    i = (int)threadIdx.x + k * CUDA_THREADS;
    if (i < n) x[i] = __fmaf_rn(__fmul_rn(x[i] - mean, inverse), w[k] + t.p.offset, b[k]);
  }
  for (i = (int)threadIdx.x + CUDA_EARLY * CUDA_THREADS; i < n; i += CUDA_THREADS)
    x[i] = __fmaf_rn(__fmul_rn(x[i] - mean, inverse), __ldg(t.w + i) + t.p.offset,
                     t.b ? __ldg(t.b + i) : 0.0f);
  return make_float2(mean, inverse);
}

/* A block for a vector. The output may be 16 bits wide: for `layer`. */
__global__ void __launch_bounds__(CUDA_THREADS) cuda_norm_kernel(tfm_mat y, tfm_mat x,
                                                                 tfm_mat residual, float *stats,
                                                                 cuda_norm t) {
  extern __shared__ float shared[];
  int groups = (int)gridDim.y, n = x.cols / groups, row = (int)blockIdx.x, g = (int)blockIdx.y, i;
  float *v = shared + CUDA_WARPS;
  float2 s;
  for (i = threadIdx.x; i < n; i += CUDA_THREADS)
    v[i] = ((const float *)x.data)[row * x.stride + g * n + i];
  __syncthreads();
  s = cuda_normalise(v, n, t, shared);
  for (i = threadIdx.x; i < n; i += CUDA_THREADS) {
    const float *beside = (const float *)residual.data;
    float old = beside ? beside[row * residual.stride + g * n + i] : 0.0f;
    cuda_store(y.data, y.type, row * y.stride + g * n + i, residual.data ? old + v[i] : v[i]);
  }
  if (!stats || threadIdx.x) return;
  stats[2 * ((int64_t)row * groups + g)] = s.x;
  stats[2 * ((int64_t)row * groups + g) + 1] = s.y;
}

static void cuda_norm_entry(tfm_dev *d, tfm_mat y, tfm_mat x, const float *w, const float *b,
                            tfm_mat residual, float *stats, const tfm_norm *p) {
  cuda_norm t = {w, b, *p};
  int32_t groups = p->groups > 0 ? p->groups : 1;
  size_t shared = sizeof(float) * (size_t)(CUDA_WARPS + x.cols / groups);
  if (cuda_enter(d))
    cuda_run(d, cuda_norm_kernel, dim3((unsigned)x.rows, (unsigned)groups), CUDA_THREADS, shared, y,
             x, residual, stats, t);
}

/* ---- cast, gather, embed, rope, glu ---- */

__global__ void cuda_copy_kernel(tfm_mat y, tfm_mat x, const int32_t *index) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  int from = index ? index[row] : row;
  if (col < y.cols)
    cuda_store(y.data, y.type, row * y.stride + col,
               cuda_load(x.data, x.type, from * x.stride + col));
}

static void cuda_gather(tfm_dev *d, tfm_mat y, tfm_mat x, const int32_t *index) {
  if (cuda_enter(d))
    cuda_run(d, cuda_copy_kernel, dim3((unsigned)y.rows, cuda_blocks(y.cols, 256)), 256, 0, y, x,
             index);
}

static void cuda_cast(tfm_dev *d, tfm_mat y, tfm_mat x) { cuda_gather(d, y, x, NULL); }

/* What a token begins with. */
__device__ static float cuda_embedding(const cuda_weight &table, const cuda_weight &positions,
                                       float scale, int id, int pos, int col) {
  float v = __fmul_rn(cuda_value(table, id, col), scale);
  return positions.data ? v + cuda_value(positions, pos, col) : v;
}

__global__ void cuda_embed_kernel(tfm_mat y, cuda_weight table, cuda_weight positions,
                                  tfm_rows rows, float scale) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  if (col < y.cols && rows.seq[row] >= 0)
    ((float *)y.data)[row * y.stride + col] =
        cuda_embedding(table, positions, scale, rows.id[row], rows.pos[row], col);
}

static void cuda_embed(tfm_dev *d, tfm_mat y, const tfm_weight *table, const tfm_weight *positions,
                       const tfm_rows *rows, float scale) {
  cuda_weight learned;
  memset(&learned, 0, sizeof learned);
  if (positions && positions->rows) learned = *cuda_packed(positions);
  if (cuda_enter(d))
    cuda_run(d, cuda_embed_kernel, dim3((unsigned)y.rows, cuda_blocks(y.cols, 256)), 256, 0, y,
             *cuda_packed(table), learned, *rows, scale != 0 ? scale : 1.0f);
}

/* Columns of pair i of a head. */
__device__ static int2 cuda_pair(const tfm_rope &p, int i) {
  if (i >= p.rot / 2) return make_int2(2 * i, 2 * i + 1); /* what is not rotated */
  return p.interleaved ? make_int2(2 * i, 2 * i + 1) : make_int2(i, i + p.rot / 2);
}

__global__ void cuda_rope_kernel(tfm_mat x, const int32_t *pos, tfm_rope p) {
  int i = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x, half = p.rot / 2;
  float *head = (float *)x.data + row * x.stride + i / half * p.head_width;
  int2 pair = cuda_pair(p, i % half);
  float2 v;
  if (i >= x.cols / p.head_width * half) return;
  v = cuda_rotate(head[pair.x], head[pair.y], cuda_turn(p, pos[row], i % half));
  head[pair.x] = v.x;
  head[pair.y] = v.y;
}

static void cuda_rope(tfm_dev *d, tfm_mat x, const int32_t *pos, const tfm_rope *p) {
  int32_t pairs = x.cols / p->head_width * (p->rot / 2);
  if (cuda_enter(d))
    cuda_run(d, cuda_rope_kernel, dim3((unsigned)x.rows, cuda_blocks(pairs, 128)), 128, 0, x, pos,
             *p);
}

/* Also of one row without a gate (up == 0), for `layer`; x and y of any type. */
__global__ void cuda_glu_kernel(tfm_mat y, tfm_mat x, const float *bias, tfm_act act, bool gated) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  int64_t at = row * x.stride + col;
  float v, up;
  if (col >= y.cols) return;
  v = cuda_load(x.data, x.type, at) + (bias ? bias[col] : 0.0f);
  v = cuda_act(v, act);
  up = gated ? cuda_load(x.data, x.type, at + y.cols) + (bias ? bias[col + y.cols] : 0.0f) : 1.0f;
  cuda_store(y.data, y.type, row * y.stride + col, gated ? __fmul_rn(v, up) : v);
}

static void cuda_glu(tfm_dev *d, tfm_mat y, tfm_mat gate_up, tfm_act act) {
  if (cuda_enter(d))
    cuda_run(d, cuda_glu_kernel, dim3((unsigned)y.rows, cuda_blocks(y.cols, 256)), 256, 0, y,
             gate_up, (const float *)NULL, act, true);
}

/* ---- The product of rows ----
   x lies in shared memory in planes: plane p has values 4p to 4p + 3 of every vector of W (Q4_0: in
   halves, 8p to 8p + 7), so that neighbouring lanes read neighbouring 16 bytes. */

/* Read once: past the first cache. Zeros where it is not wanted, without a branch. */
__device__ __forceinline__ uint4 cuda_stream_load(const uint4 *p, bool wanted) {
  uint4 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((unsigned)wanted));
  return v;
}

/* Bytes of the planes of one row of x. */
__host__ __device__ static size_t cuda_plane_bytes(const cuda_weight &w) {
  return (size_t)w.vectors * (w.type == TFM_Q4_0 ? 64 : 2048 / (size_t)cuda_bits(w.type) / 4);
}

/* Values of a row, filled up. */
__host__ __device__ static int cuda_values(const cuda_weight &w) {
  return w.vectors * (128 / cuda_bits(w.type));
}

/* Shared memory of a block that multiplies m rows. */
static size_t cuda_dots_bytes(const cuda_weight *w, int m) {
  return sizeof(float) * (size_t)(CUDA_WARPS + cuda_values(*w)) + cuda_plane_bytes(*w) * (size_t)m;
}

/* raw [cols] becomes planes; returns what sums are to be multiplied by. All threads. raw has room
   for whole vectors; what lies beyond cols becomes zero. */
__device__ static float cuda_planes(char *planes, float *raw, const cuda_weight &w, float *room) {
  int shift = w.type == TFM_F32 ? 0 : w.type == TFM_Q8_0 ? 2 : w.type == TFM_Q4_0 ? 3 : 1;
  int quads = w.vectors << shift, mask = (1 << shift) - 1, k, e = 0;
  float top = 0;
  for (k = w.cols + (int)threadIdx.x; k < quads * 4; k += CUDA_THREADS) raw[k] = 0;
  if (w.type == TFM_Q4_0) {
    for (k = threadIdx.x; k < w.cols; k += CUDA_THREADS) top = fmaxf(top, fabsf(raw[k]));
    top = cuda_block_max(top, room);
    if (top > 0 && top < INFINITY) frexpf(top, &e), e -= 7;
  }
  __syncthreads();
#pragma unroll 2
  for (k = threadIdx.x; k < quads; k += CUDA_THREADS) {
    float4 v = ((const float4 *)raw)[k];
    int plane = k & mask, vector = k >> shift;
    if (w.type != TFM_Q4_0) {
      ((float4 *)planes)[plane * w.vectors + vector] = v;
    } else {
      float by = exp2f((float)-e);
      __half2 *to = (__half2 *)planes + (plane / 2 * w.vectors + vector) * 4 + plane % 2 * 2;
      to[0] = __floats2half2_rn(v.x * by, v.y * by);
      to[1] = __floats2half2_rn(v.z * by, v.w * by);
    }
  }
  return exp2f((float)e);
}

/* 16 bytes of a row of W as floats. */
template <int TYPE> __device__ __forceinline__ void cuda_widen(float *f, uint4 q) {
  const uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (TYPE == TFM_F32) f[i] = __uint_as_float(word[i]);
    if (TYPE == TFM_F16) {
      float2 pair = __half22float2(*(const __half2 *)&word[i]);
      f[2 * i] = pair.x, f[2 * i + 1] = pair.y;
    }
    if (TYPE == TFM_BF16) {
      f[2 * i] = __uint_as_float(word[i] << 16);
      f[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
    if (TYPE == TFM_Q8_0) {
      uint32_t biased = word[i] ^ 0x80808080u; /* v + 128, in the low bits of 2^23 */
#pragma unroll
      for (int j = 0; j < 4; j++)
        f[4 * i + j] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440u + (uint32_t)j)) -
                       8388736.0f;
    }
  }
}

/* 32 values of Q4_0 as 16 pairs of halves, in order. */
__device__ __forceinline__ void cuda_widen_q4(__half2 *h, uint4 q) {
  const uint32_t word[4] = {q.x, q.y, q.z, q.w}, base = 0x64006400u; /* 1024, twice */
  const __half2 low = __half2half2(__ushort_as_half(0x6408)), /* 1032 */
                sixteenth = __half2half2(__ushort_as_half(0x2c00)),
                high = __half2half2(__ushort_as_half(0xd480)); /* -72 */
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t w = word[i / 2] >> (i % 2 * 8), a = (w & 0x000f000fu) | base,
             b = (w & 0x00f000f0u) | base;
    h[2 * i] = __hsub2(*(__half2 *)&a, low);
    h[2 * i + 1] = __hfma2(*(__half2 *)&b, sixteenth, high);
  }
}

/* sum[m] += 16 bytes of W by row m of x. */
template <int TYPE, int M>
__device__ __forceinline__ void cuda_multiply(float (&sum)[M], uint4 q, float scale,
                                              const char *planes, size_t plane_bytes, int vectors,
                                              int v) {
  constexpr int N = TYPE == TFM_F32 ? 4 : TYPE == TFM_Q8_0 ? 16 : 8;
  float w[N];
  cuda_widen<TYPE>(w, q);
#pragma unroll
  for (int m = 0; m < M; m++) {
    const float4 *x = (const float4 *)(planes + m * plane_bytes) + v;
    float t = TYPE == TFM_Q8_0 ? 0.0f : sum[m];
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      float4 a = x[i * vectors];
      t = __fmaf_rn(w[4 * i], a.x, t);
      t = __fmaf_rn(w[4 * i + 1], a.y, t);
      t = __fmaf_rn(w[4 * i + 2], a.z, t);
      t = __fmaf_rn(w[4 * i + 3], a.w, t);
    }
    sum[m] = TYPE == TFM_Q8_0 ? __fmaf_rn(scale, t, sum[m]) : t;
  }
}

template <int M>
__device__ __forceinline__ void cuda_multiply_q4(float (&sum)[M], uint4 q, float scale,
                                                 const char *planes, size_t plane_bytes,
                                                 int vectors, int v) {
  __half2 w[16];
  cuda_widen_q4(w, q);
#pragma unroll
  for (int m = 0; m < M; m++) {
    const uint4 *x = (const uint4 *)(planes + m * plane_bytes) + v;
    float t = 0;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint4 a = x[i * vectors], b = x[(i + 1) * vectors];
      __half2 s = __hmul2(w[4 * i], *(__half2 *)&a.x);
      float2 pair;
      s = __hfma2(w[4 * i + 1], *(__half2 *)&a.y, s);
      s = __hfma2(w[4 * i + 2], *(__half2 *)&a.z, s);
      s = __hfma2(w[4 * i + 3], *(__half2 *)&a.w, s);
      s = __hfma2(w[4 * i + 4], *(__half2 *)&b.x, s);
      s = __hfma2(w[4 * i + 5], *(__half2 *)&b.y, s);
      s = __hfma2(w[4 * i + 6], *(__half2 *)&b.z, s);
      s = __hfma2(w[4 * i + 7], *(__half2 *)&b.w, s);
      pair = __half22float2(s);
      t += pair.x + pair.y;
    }
    sum[m] = __fmaf_rn(scale, t, sum[m]);
  }
}

enum { CUDA_AHEAD = 4 }; /* pieces of 512 bytes of each of two rows that a warp has asked for */

typedef struct cuda_cursor { /* where a warp is: a unit of two rows, and a vector of both */
  int unit, vector;
  int64_t row[2];
} cuda_cursor;

/* Piece number `ahead` of those at the cursor. */
template <int TYPE>
__device__ __forceinline__ void cuda_ask(uint4 (&q)[2], float (&scale)[2], const cuda_weight &w,
                                         const cuda_cursor &at, int units, int ahead) {
  int v = at.vector + 32 * ahead, block = min(v, w.vectors - 1) / (TYPE == TFM_Q8_0 ? 2 : 1);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    q[r] = cuda_stream_load((const uint4 *)w.data + at.row[r] * w.vectors + v,
                            at.unit < units && v < w.vectors);
    scale[r] = 1;
    if (TYPE == TFM_Q8_0 || TYPE == TFM_Q4_0)
      scale[r] = v < w.vectors ? __half2float(__ldg(w.scale + at.row[r] * (w.cols / 32) + block))
                               : 0.0f;
  }
}

template <int TYPE, int M>
__device__ __forceinline__ void cuda_use(float (&sum)[2][M], const uint4 (&q)[2],
                                         const float (&scale)[2], const cuda_weight &w,
                                         const char *planes, int v) {
  const size_t plane_bytes = cuda_plane_bytes(w);
#pragma unroll
  for (int r = 0; r < 2; r++)
    if constexpr (TYPE == TFM_Q4_0)
      cuda_multiply_q4<M>(sum[r], q[r], scale[r], planes, plane_bytes, w.vectors, v);
    else cuda_multiply<TYPE, M>(sum[r], q[r], scale[r], planes, plane_bytes, w.vectors, v);
}

/* All units of this warp, dealt out to blocks in turn. rows(unit) tells a unit's two rows; ready()
   runs when the first pieces have been asked for, and leaves x in the planes; done(unit, sum) gets
   the products, in every lane. A piece that has been used makes room for one further on at once, so
   that memory is never waited for from a standstill. */
template <int TYPE, int M, typename ROWS, typename READY, typename DONE>
__device__ __forceinline__ void cuda_dots(const cuda_weight &w, const char *planes, int units,
                                          ROWS rows, READY ready, DONE done) {
  const int lane = threadIdx.x % 32, step = (int)gridDim.x * CUDA_WARPS;
  cuda_cursor at = {(int)(threadIdx.x / 32 * gridDim.x + blockIdx.x), lane, {0, 0}}, next;
  uint4 q[CUDA_AHEAD][2];
  float scale[CUDA_AHEAD][2], sum[2][M];
  rows(min(at.unit, units - 1), at.row);
#pragma unroll
  for (int i = 0; i < CUDA_AHEAD; i++) cuda_ask<TYPE>(q[i], scale[i], w, at, units, i);
#pragma unroll
  for (int m = 0; m < M; m++) sum[0][m] = sum[1][m] = 0;
  ready();
  while (at.unit < units) {
    next = at;
    next.vector += 32 * CUDA_AHEAD;
    if (next.vector - lane >= w.vectors) {
      next.vector = lane;
      next.unit += step;
      rows(min(next.unit, units - 1), next.row);
    }
#pragma unroll
    for (int i = 0; i < CUDA_AHEAD; i++) {
      const uint4 now[2] = {q[i][0], q[i][1]};
      const float by[2] = {scale[i][0], scale[i][1]};
      cuda_ask<TYPE>(q[i], scale[i], w, next, units, i);
      cuda_use<TYPE, M>(sum, now, by, w, planes, min(at.vector + 32 * i, w.vectors - 1));
    }
    if (next.unit != at.unit) {
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r][m] = cuda_warp_sum(sum[r][m]);
      done(at.unit, sum);
#pragma unroll
      for (int m = 0; m < M; m++) sum[0][m] = sum[1][m] = 0;
    }
    at = next;
  }
}

/* ---- matmul ---- */

__device__ static float *cuda_at(const tfm_mat &m, int64_t row, int col) {
  return (float *)m.data + row * m.stride + col;
}

/* Everything that follows a product. */
__device__ static void cuda_epilogue(const tfm_mat &y, const tfm_epilogue &e, int row, int col,
                                     float v) {
  if (e.bias) v += e.bias[col];
  if (e.aux.data) *cuda_at(e.aux, row, col) = v;
  v = cuda_cap(cuda_act(v, e.act), e.softcap);
  if (e.dropout.rate > 0) v *= cuda_dropout(e.dropout, row, col);
  if (e.residual.data) v += *cuda_at(e.residual, row, col);
  *cuda_at(y, row, col) = v;
}

typedef struct cuda_experts { /* of matmul_moe: slot s multiplies by the matrix of expert[s] */
  const int32_t *expert;
  int32_t share; /* slots that share a row of x */
} cuda_experts;

/* Rows of x from `first` on, up to M; blockIdx.y counts slots of experts. */
template <int TYPE, int M>
__global__ void __launch_bounds__(CUDA_THREADS, 1)
cuda_matmul_kernel(tfm_mat y, tfm_mat x, cuda_weight w, tfm_epilogue e, int first,
                   cuda_experts experts) {
  extern __shared__ float shared[];
  float *raw = shared + CUDA_WARPS, factor[M];
  char *planes = (char *)(raw + cuda_values(w));
  int lane = threadIdx.x % 32, count = min(M, x.rows - first);
  int64_t base = 0;
  if (experts.expert) {
    base = (int64_t)experts.expert[blockIdx.y] * w.rows;
    first = (int)blockIdx.y;
    count = 1;
  }
  auto rows = [&](int u, int64_t (&row)[2]) {
    row[0] = base + 2 * u;
    row[1] = base + min(2 * u + 1, w.rows - 1);
  };
  auto ready = [&]() {
#pragma unroll
    for (int m = 0; m < M; m++) {
      const float *from = cuda_at(x, (first + m) / experts.share, 0);
      if (m >= count) continue;
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; i < w.cols; i += CUDA_THREADS) raw[i] = from[i];
      __syncthreads();
      factor[m] = cuda_planes(planes + m * cuda_plane_bytes(w), raw, w, shared);
    }
    __syncthreads();
  };
  auto done = [&](int u, const float (&sum)[2][M]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (lane == 2 * m + r && m < count && 2 * u + r < w.rows)
          cuda_epilogue(y, e, first + m, 2 * u + r, __fmul_rn(sum[r][m], factor[m]));
  };
  cuda_dots<TYPE, M>(w, planes, (w.rows + 1) / 2, rows, ready, done);
}

typedef void (*cuda_matmul_function)(tfm_mat, tfm_mat, cuda_weight, tfm_epilogue, int,
                                     cuda_experts);

template <int TYPE> static cuda_matmul_function cuda_matmul_for(int m) {
  return m == 1 ? cuda_matmul_kernel<TYPE, 1> : cuda_matmul_kernel<TYPE, CUDA_COLUMNS>;
}

static cuda_matmul_function cuda_matmul_choose(tfm_type type, int m) {
  switch (type) {
    case TFM_F32: return cuda_matmul_for<TFM_F32>(m);
    case TFM_F16: return cuda_matmul_for<TFM_F16>(m);
    case TFM_BF16: return cuda_matmul_for<TFM_BF16>(m);
    case TFM_Q8_0: return cuda_matmul_for<TFM_Q8_0>(m);
    default: return cuda_matmul_for<TFM_Q4_0>(m);
  }
}

/* As many rows at a time as shared memory holds. */
static void cuda_matmul_small(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w,
                              const tfm_epilogue *e) {
  unsigned blocks = cuda_blocks(w->rows, 2 * CUDA_WARPS), most = (unsigned)cuda_of(d)->processors;
  cuda_experts none = {NULL, 1};
  bool fits = cuda_dots_bytes(w, CUDA_COLUMNS) <= CUDA_SHARED;
  int32_t first, m = x.rows > 1 && fits ? CUDA_COLUMNS : 1;
  if (cuda_dots_bytes(w, m) > CUDA_SHARED)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "a matrix with %d columns is too wide", (int)w->cols);
  if (blocks > most) blocks = most;
  for (first = 0; first < x.rows && d->status == TFM_OK; first += m)
    cuda_run(d, cuda_matmul_choose(w->type, m), dim3(blocks), CUDA_THREADS, cuda_dots_bytes(w, m),
             y, x, *w, *e, (int)first, none);
}

static void cuda_matmul(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                        const tfm_epilogue *e) {
  if (cuda_enter(d)) cuda_matmul_small(d, y, x, cuda_packed(w), e);
}

/* ---- Mixture of experts ---- */

/* The first expert after `after` in order of preference: larger, then lower; NaN is smallest. */
__device__ static int cuda_next_best(const float *value, int n, int after) {
  float limit = after < 0 ? 0 : value[after] == value[after] ? value[after] : -INFINITY, top = 0;
  int best = -1, i;
  for (i = 0; i < n; i++) {
    float v = value[i] == value[i] ? value[i] : -INFINITY;
    bool left = after < 0 || v < limit || (v == limit && i > after);
    if (left && (best < 0 || v > top)) best = i, top = v;
  }
  return best;
}

__global__ void cuda_route_kernel(tfm_routing r, tfm_mat logits, tfm_moe p) {
  int t = (int)(blockIdx.x * blockDim.x + threadIdx.x), i, j, best = -1;
  const float *l = cuda_at(logits, t, 0);
  float top = -INFINITY, sum = 0, chosen = 0, factor = p.scale != 0 ? p.scale : 1.0f, *probs;
  int32_t *expert = r.expert + (int64_t)t * p.top_k;
  float *weight = r.weight + (int64_t)t * p.top_k;
  if (t >= logits.rows) return;
  probs = r.probs + (int64_t)t * p.experts;
  for (i = 0; i < p.experts; i++) top = fmaxf(top, l[i]);
  for (i = 0; i < p.experts; i++) sum += probs[i] = expf(l[i] - top);
  for (i = 0; i < p.experts; i++) probs[i] /= sum;
  for (j = 0; j < p.top_k; j++) {
    best = expert[j] = cuda_next_best(l, p.experts, best);
    weight[j] = p.softmax_after ? expf(l[best] - l[expert[0]]) : probs[best];
    chosen += weight[j];
  }
  for (j = 0; j < p.top_k; j++)
    weight[j] = (p.normalise || p.softmax_after ? weight[j] / chosen : weight[j]) * factor;
}

/* One block: each thread owns experts, counts their slots, and after a sum lists them in order. */
__global__ void cuda_route_sort_kernel(tfm_routing r) {
  int slots = r.tokens * r.top_k, e, s;
  for (e = threadIdx.x; e < r.experts; e += blockDim.x) {
    int n = 0;
    for (s = 0; s < slots; s++) n += r.expert[s] == e;
    r.begin[e + 1] = n;
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (r.begin[0] = 0, e = 0; e < r.experts; e++) r.begin[e + 1] += r.begin[e];
  __syncthreads();
  for (e = threadIdx.x; e < r.experts; e += blockDim.x) {
    int at = r.begin[e];
    for (s = 0; s < slots; s++)
      if (r.expert[s] == e) r.order[at++] = s;
  }
}

static void cuda_route(tfm_dev *d, tfm_routing *r, tfm_mat logits, const tfm_moe *p) {
  r->tokens = logits.rows;
  r->top_k = p->top_k;
  r->experts = p->experts;
  if (!cuda_enter(d)) return;
  cuda_run(d, cuda_route_kernel, dim3(cuda_blocks(logits.rows, 64)), 64, 0, *r, logits, *p);
  cuda_run(d, cuda_route_sort_kernel, dim3(1), 256, 0, *r);
}

static void cuda_matmul_moe(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                            const tfm_routing *r, bool spread) {
  const cuda_weight *packed = cuda_packed(w);
  cuda_experts experts = {r->expert, spread ? r->top_k : 1};
  tfm_epilogue plain;
  memset(&plain, 0, sizeof plain);
  if (cuda_enter(d))
    cuda_run(d, cuda_matmul_choose(packed->type, 1),
             dim3(cuda_blocks(packed->rows, 2 * CUDA_WARPS), (unsigned)(r->tokens * r->top_k)),
             CUDA_THREADS, cuda_dots_bytes(packed, 1), y, x, *packed, plain, 0, experts);
}

__global__ void cuda_combine_kernel(tfm_mat y, tfm_mat x, tfm_mat residual, tfm_routing r) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x, j;
  float v;
  if (col >= y.cols) return;
  v = residual.data ? *cuda_at(residual, row, col) : 0.0f;
  for (j = 0; j < r.top_k; j++)
    v += r.weight[(int64_t)row * r.top_k + j] * *cuda_at(x, (int64_t)row * r.top_k + j, col);
  *cuda_at(y, row, col) = v;
}

__global__ void cuda_moe_bias_kernel(tfm_mat y, tfm_mat x, const float *bias, tfm_routing r,
                                     tfm_act act) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  float v;
  if (col >= y.cols) return;
  v = *cuda_at(x, row, col);
  if (bias) v += bias[(int64_t)r.expert[row] * y.cols + col];
  *cuda_at(y, row, col) = cuda_act(v, act);
}

static void cuda_moe_bias(tfm_dev *d, tfm_mat y, tfm_mat x, const float *bias, const tfm_routing *r,
                          tfm_act act) {
  if (cuda_enter(d))
    cuda_run(d, cuda_moe_bias_kernel, dim3((unsigned)y.rows, cuda_blocks(y.cols, 256)), 256, 0, y,
             x, bias, *r, act);
}

__global__ void cuda_add_gated_kernel(tfm_mat y, tfm_mat x, tfm_mat gate) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  if (col < y.cols)
    *cuda_at(y, row, col) += *cuda_at(x, row, col) / (1.0f + expf(-*cuda_at(gate, row, 0)));
}

static void cuda_add_gated(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat gate) {
  if (cuda_enter(d))
    cuda_run(d, cuda_add_gated_kernel, dim3((unsigned)y.rows, cuda_blocks(y.cols, 256)), 256, 0, y,
             x, gate);
}

static void cuda_combine(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat residual,
                         const tfm_routing *r) {
  if (cuda_enter(d))
    cuda_run(d, cuda_combine_kernel, dim3((unsigned)y.rows, cuda_blocks(y.cols, 256)), 256, 0, y, x,
             residual, *r);
}

/* ---- The cache ---- */

/* Element at which the vector of (seq, pos, head) begins. */
__device__ static int64_t cuda_kv_at(const tfm_kv &kv, int seq, int pos, int head) {
  int64_t page = kv.table[(int64_t)seq * kv.max_pages + pos / kv.page_tokens];
  return ((page * kv.heads + head) * kv.page_tokens + pos % kv.page_tokens) * kv.width;
}

__global__ void cuda_kv_put_kernel(tfm_kv kv, tfm_mat k, tfm_mat v, tfm_rows rows) {
  int col = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  int64_t at;
  if (col >= k.cols || rows.seq[row] < 0) return;
  at = cuda_kv_at(kv, rows.seq[row], rows.pos[row], col / kv.width) + col % kv.width;
  cuda_store(kv.k, kv.type, at, *cuda_at(k, row, col));
  cuda_store(kv.v, kv.type, at, *cuda_at(v, row, col));
}

static void cuda_kv_put(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v, const tfm_rows *rows) {
  if (cuda_enter(d))
    cuda_run(d, cuda_kv_put_kernel, dim3((unsigned)rows->n, cuda_blocks(k.cols, 256)), 256, 0, *kv,
             k, v, *rows);
}

/* ---- attn ----
   Keys go by in tiles of CUDA_KEYS, counted from the first that is visible. A tile's scores are
   computed by eight lanes a key; its values are summed by eight groups of eight keys, which are
   added in order, and tiles are merged in order (Milakov and Gimelshein 2018): whether one block
   takes all tiles or each block one, the bits are the same. B query heads share the keys. */

typedef struct cuda_attn {
  tfm_mat y, q;
  tfm_kv kv;
  tfm_rows rows;
  float *lse;
  tfm_attn p;
  int32_t group; /* query heads of a kv head */
  bool tiled;    /* tiles of rows of one sequence are cuda_flash_kernel's */
} cuda_attn;

typedef struct cuda_tile_room { /* shared memory of a block, for B heads of `width` */
  float *q;      /* [B, width8], filled up with zeros */
  float *part;   /* [8, B, width8] */
  float *score;  /* [B, CUDA_KEYS] */
  float *max, *sum, *all_max, *all_sum; /* [B]: of the tile; of all so far */
  float *out;    /* [B, width8] of all so far */
  int heads;     /* of these B, that are there */
} cuda_tile_room;

__host__ __device__ static int cuda_width8(int width) { return (width + 7) / 8 * 8; }

__host__ __device__ static size_t cuda_tile_floats(int heads, int width) {
  return (size_t)heads * (size_t)(10 * cuda_width8(width) + CUDA_KEYS + 4);
}

__device__ static cuda_tile_room cuda_tile_lay_out(float *at, int heads, int width) {
  int n = heads * cuda_width8(width);
  cuda_tile_room t;
  t.q = at;
  t.part = t.q + n;
  t.out = t.part + 8 * n;
  t.score = t.out + n;
  t.max = t.score + heads * CUDA_KEYS;
  t.sum = t.max + heads;
  t.all_max = t.sum + heads;
  t.all_sum = t.all_max + heads;
  t.heads = heads;
  return t;
}

/* Eight values from element `at` on, zeros after the n-th; past the first cache, where a line may
   be older than what another block has just stored. */
__device__ __forceinline__ void cuda_load8(float (&out)[8], const void *p, tfm_type type,
                                           int64_t at, int n) {
  const char *from = (const char *)p + at * (type == TFM_F32 ? 4 : 2);
  bool aligned = n >= 8 && (uintptr_t)from % 16 == 0;
  if (aligned && type != TFM_F32) {
    uint4 q = __ldcg((const uint4 *)from);
    if (type == TFM_F16) cuda_widen<TFM_F16>(out, q);
    else cuda_widen<TFM_BF16>(out, q);
  } else if (aligned) {
    float4 a = __ldcg((const float4 *)from), b = __ldcg((const float4 *)from + 1);
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = i < n ? cuda_load(p, type, at + i) : 0.0f;
  }
}

/* Candidate i of a row's keys: a position of the cache, or a row of the call. */
__device__ static bool cuda_visible(const cuda_attn &a, int row, int i) {
  int last = a.rows.pos[row];
  if (a.kv.table) return i <= last;
  return i <= row && a.rows.seq[i] == a.rows.seq[row] && a.rows.pos[i] <= last &&
         (a.p.window <= 0 || a.rows.pos[i] > last - a.p.window);
}

/* Where the tile of keys from `first` on lies, when it lies in one page; else -1. */
__device__ static int64_t cuda_tile_at(const cuda_attn &a, int row, int head, int first) {
  int last = a.kv.table ? min(first + CUDA_KEYS - 1, a.rows.pos[row]) : 0;
  if (!a.kv.table || first / a.kv.page_tokens != last / a.kv.page_tokens) return -1;
  return cuda_kv_at(a.kv, a.rows.seq[row], first, head);
}

/* Where key j of the tile lies. */
__device__ static int64_t cuda_key_at(const cuda_attn &a, const tfm_mat &rows, int64_t tile,
                                      int row, int head, int first, int j) {
  if (tile >= 0) return tile + (int64_t)j * a.kv.width;
  if (a.kv.table) return cuda_kv_at(a.kv, a.rows.seq[row], first + j, head);
  return (first + j) * rows.stride + head * a.kv.width;
}

__device__ static int cuda_first_key(const cuda_attn &a, int row) {
  int pos = a.rows.pos[row];
  return a.kv.table && a.p.window > 0 && pos >= a.p.window ? pos - a.p.window + 1 : 0;
}

__device__ static int cuda_last_key(const cuda_attn &a, int row) {
  return a.kv.table ? a.rows.pos[row] : row;
}

template <int B>
__device__ __forceinline__ void cuda_tile_scores(const cuda_attn &a, const cuda_tile_room &t,
                                                 int row, int head, int first) {
  int width = a.kv.width, width8 = cuda_width8(width), sub = threadIdx.x % 8, j;
  const void *keys = a.kv.table ? a.kv.k : a.kv.key_rows.data;
  tfm_type type = a.kv.table ? a.kv.type : a.kv.key_rows.type;
  int64_t tile = cuda_tile_at(a, row, head, first);
  for (j = threadIdx.x / 8; j < CUDA_KEYS; j += blockDim.x / 8) {
    bool visible = cuda_visible(a, row, first + j);
    float sum[B], k[8];
    int64_t at = visible ? cuda_key_at(a, a.kv.key_rows, tile, row, head, first, j) : 0;
#pragma unroll
    for (int h = 0; h < B; h++) sum[h] = 0;
    for (int c = sub * 8; c < width && visible; c += 64) {
      cuda_load8(k, keys, type, at + c, width - c);
#pragma unroll
      for (int h = 0; h < B; h++)
#pragma unroll
        for (int i = 0; i < 8; i++) sum[h] = __fmaf_rn(t.q[h * width8 + c + i], k[i], sum[h]);
    }
#pragma unroll
    for (int h = 0; h < B; h++) {
      for (int i = 1; i < 8; i *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], i);
      if (sub == 0)
        t.score[h * CUDA_KEYS + j] = visible ? cuda_cap(__fmul_rn(sum[h], a.p.scale), a.p.softcap)
                                             : -INFINITY;
    }
  }
}

__device__ static float *cuda_probs(const cuda_attn &a, int row, int query_head) {
  return a.p.probs + ((int64_t)row * a.p.heads + query_head) * a.p.probs_stride;
}

/* Scores of B heads become exponentials; a warp for a head. */
template <int B>
__device__ __forceinline__ void cuda_tile_exp(const cuda_attn &a, const cuda_tile_room &t, int row,
                                              int query_head, int first) {
  int h = threadIdx.x / 32, lane = threadIdx.x % 32, j;
  float *s = t.score + h * CUDA_KEYS, top, sum;
  if (h >= B) return;
  for (j = lane; j < CUDA_KEYS && a.p.probs && h < t.heads; j += 32) {
    int pos = a.kv.table ? first + j : s[j] > -INFINITY ? a.rows.pos[first + j] : -1;
    if (s[j] > -INFINITY && pos < a.p.probs_stride) cuda_probs(a, row, query_head + h)[pos] = s[j];
  }
  top = cuda_warp_max(fmaxf(s[lane], s[lane + 32]));
  for (j = lane; j < CUDA_KEYS; j += 32) s[j] = s[j] > -INFINITY ? expf(s[j] - top) : 0.0f;
  sum = cuda_warp_sum(s[lane] + s[lane + 32]);
  for (j = lane; j < CUDA_KEYS && a.p.dropout.rate > 0; j += 32)
    if (s[j] > 0)
      s[j] *= cuda_dropout(a.p.dropout, row, (query_head + h) * (1 << 20) +
                                                 (a.kv.table ? first + j : a.rows.pos[first + j]));
  if (lane) return;
  t.max[h] = top;
  t.sum[h] = sum;
}

template <int B>
__device__ __forceinline__ void cuda_tile_values(const cuda_attn &a, const cuda_tile_room &t,
                                                 int row, int head, int first) {
  int width = a.kv.width, width8 = cuda_width8(width), eights = width8 / 8, u;
  const void *values = a.kv.table ? a.kv.v : a.kv.value_rows.data;
  tfm_type type = a.kv.table ? a.kv.type : a.kv.value_rows.type;
  int64_t tile = cuda_tile_at(a, row, head, first);
  int own = cuda_last_key(a, row) - first; /* the row's own key, or one after this tile: visible */
  for (u = threadIdx.x; u < 8 * eights; u += blockDim.x) {
    int group = u / eights, c = u % eights * 8;
    float sum[B][8];
#pragma unroll
    for (int h = 0; h < B; h++)
#pragma unroll
      for (int i = 0; i < 8; i++) sum[h][i] = 0;
#pragma unroll
    for (int half = 0; half < 8; half += 4) { /* four rows are asked for before the first is used */
      float v[4][8];
#pragma unroll
      for (int k = 0; k < 4; k++) { /* what is not visible counts zero times a row that is */
        int j = group * 8 + half + k, there = cuda_visible(a, row, first + j) ? j : own;
        cuda_load8(v[k], values, type,
                   cuda_key_at(a, a.kv.value_rows, tile, row, head, first, there) + c, width - c);
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int h = 0; h < B; h++) {
          float p = t.score[h * CUDA_KEYS + group * 8 + half + k];
#pragma unroll
          for (int i = 0; i < 8; i++) sum[h][i] = __fmaf_rn(p, v[k][i], sum[h][i]);
        }
    }
#pragma unroll
    for (int h = 0; h < B; h++)
#pragma unroll
      for (int i = 0; i < 8; i++) t.part[(group * B + h) * width8 + c + i] = sum[h][i];
  }
}

/* Column c of head h of the tile's sum. */
__device__ static float cuda_tile_out(const cuda_tile_room &t, int heads, int width8, int h,
                                      int c) {
  float v = 0;
  for (int group = 0; group < 8; group++) v += t.part[(group * heads + h) * width8 + c];
  return v;
}

/* One tile: part, max and sum of B heads; synchronised at both ends. */
template <int B>
__device__ __forceinline__ void cuda_tile(const cuda_attn &a, const cuda_tile_room &t, int row,
                                          int head, int query_head, int first) {
  cuda_tile_scores<B>(a, t, row, head, first);
  __syncthreads();
  cuda_tile_exp<B>(a, t, row, query_head, first);
  __syncthreads();
  cuda_tile_values<B>(a, t, row, head, first);
  __syncthreads();
}

/* What the sums so far and a tile's are multiplied by when they meet. */
__device__ static float2 cuda_merge(float all_max, float tile_max) {
  float top = fmaxf(all_max, tile_max);
  return make_float2(all_max > -INFINITY ? expf(all_max - top) : 0.0f,
                     tile_max > -INFINITY ? expf(tile_max - top) : 0.0f);
}

__device__ static float cuda_blend(float all, float tile, float2 by) {
  return __fmaf_rn(all, by.x, __fmul_rn(tile, by.y));
}

template <int B>
__device__ __forceinline__ void cuda_tile_begin(const cuda_attn &a, const cuda_tile_room &t,
                                                int row, int query_head, int heads) {
  int width = a.kv.width, width8 = cuda_width8(width), i;
  for (i = threadIdx.x; i < B * width8; i += blockDim.x) {
    int h = i / width8, c = i % width8;
    int64_t at = row * a.q.stride + (query_head + h) * width + c;
    t.q[i] = h < heads && c < width ? cuda_load(a.q.data, a.q.type, at) : 0.0f;
    t.out[i] = 0;
    if (i < B) t.all_max[i] = -INFINITY, t.all_sum[i] = 0;
  }
  __syncthreads();
}

/* Adds the tile to what is there; synchronised at the end. */
template <int B>
__device__ __forceinline__ void cuda_tile_merge(const cuda_tile_room &t, int width8) {
  int i;
  for (i = threadIdx.x; i < B * width8; i += blockDim.x) {
    int h = i / width8;
    t.out[i] = cuda_blend(t.out[i], cuda_tile_out(t, B, width8, h, i % width8),
                          cuda_merge(t.all_max[h], t.max[h]));
  }
  __syncthreads();
  if (threadIdx.x < B) {
    int h = threadIdx.x;
    t.all_sum[h] = cuda_blend(t.all_sum[h], t.sum[h], cuda_merge(t.all_max[h], t.max[h]));
    t.all_max[h] = fmaxf(t.all_max[h], t.max[h]);
  }
  __syncthreads();
}

__device__ static void cuda_probs_finish(const cuda_attn &a, const cuda_tile_room &t, int row,
                                         int query_head, int heads) {
  for (int i = threadIdx.x; i < heads * a.p.probs_stride; i += blockDim.x) {
    int h = i / a.p.probs_stride;
    float *p = cuda_probs(a, row, query_head + h) + i % a.p.probs_stride;
    *p = *p > -INFINITY ? expf(*p - t.all_max[h]) / t.all_sum[h] : 0.0f;
  }
}

enum { CUDA_TILE = 128 }; /* rows of a block of cuda_flash_kernel */

/* Whether a tile of rows belongs to one sequence; all threads of a block of 128 or 256. */
__device__ static bool cuda_uniform(const tfm_rows &rows, int tile) {
  int first = tile * CUDA_TILE, n = min(CUDA_TILE, rows.n - first), seq = rows.seq[first];
  int mine = (int)threadIdx.x < n ? rows.seq[first + threadIdx.x] : seq;
  return __syncthreads_and(mine == seq) && seq >= 0 && n >= 16;
}

/* A block for up to B heads of a row: all tiles one after the other. */
template <int B> __global__ void __launch_bounds__(128) cuda_attn_kernel(cuda_attn a) {
  extern __shared__ float shared[];
  cuda_tile_room t = cuda_tile_lay_out(shared, B, a.kv.width);
  int row = (int)blockIdx.x, head = (int)blockIdx.y, in_group = (int)blockIdx.z * B;
  int heads = min(B, a.group - in_group), query_head = head * a.group + in_group, first, i;
  int width = a.kv.width, width8 = cuda_width8(width);
  if (a.rows.seq[row] < 0 || (a.tiled && cuda_uniform(a.rows, row / CUDA_TILE))) return;
  t.heads = heads;
  for (i = threadIdx.x; a.p.probs && i < heads * a.p.probs_stride; i += blockDim.x)
    cuda_probs(a, row, query_head)[i] = -INFINITY;
  cuda_tile_begin<B>(a, t, row, query_head, heads);
  for (first = cuda_first_key(a, row); first <= cuda_last_key(a, row); first += CUDA_KEYS) {
    cuda_tile<B>(a, t, row, head, query_head, first);
    cuda_tile_merge<B>(t, width8);
  }
  for (i = threadIdx.x; i < heads * width; i += blockDim.x)
    cuda_store(a.y.data, a.y.type, row * a.y.stride + query_head * width + i,
               t.out[i / width * width8 + i % width] / t.all_sum[i / width]);
  if (a.lse && threadIdx.x < heads)
    a.lse[(int64_t)row * a.p.heads + query_head + threadIdx.x] =
        t.all_max[threadIdx.x] + logf(t.all_sum[threadIdx.x]);
  if (a.p.probs) cuda_probs_finish(a, t, row, query_head, heads);
}

static int cuda_heads_at_once(int group) { return group >= 3 ? 4 : group; }

static void cuda_attn_run(tfm_dev *d, const cuda_attn *a) {
  int b = cuda_heads_at_once(a->group);
  dim3 grid((unsigned)a->rows.n, (unsigned)a->kv.heads, cuda_blocks(a->group, b));
  cuda_run(d, b == 4 ? cuda_attn_kernel<4> : b == 2 ? cuda_attn_kernel<2> : cuda_attn_kernel<1>,
           grid, 128, sizeof(float) * cuda_tile_floats(b, a->kv.width), *a);
}

static void cuda_attn_entry(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv,
                            const tfm_rows *rows, float *lse, const tfm_attn *p) {
  cuda_attn a = {y, q, *kv, *rows, lse, *p, p->heads / kv->heads, false};
  if (cuda_enter(d)) cuda_attn_run(d, &a);
}

/* ---- sample ----
   As the reference, on probabilities relative to the largest, in [0, 1]; but masses are sums of
   integers, p * 2^40 rounded, so that they do not depend on the order. A threshold is found digit
   by digit of its bits, from histograms of 1024 bins. One block for a row. */

enum { CUDA_BINS = 1024 };

typedef struct cuda_choice { /* shared memory */
  unsigned long long bin[CUDA_BINS];
  unsigned long long warp[CUDA_WARPS];
  float room[CUDA_WARPS];
  unsigned long long found;
  int digit;
} cuda_choice;

/* Larger values first, then lower ids; NaN is below all. */
__device__ static unsigned long long cuda_rank(float v, int id) {
  uint32_t bits = __float_as_uint(v);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (v == 0) bits = 0x80000000u;
  if (v != v) bits = 0;
  return (unsigned long long)bits << 32 | (uint32_t)~id;
}

__device__ static unsigned long long cuda_block_best(unsigned long long v, cuda_choice *c) {
  int i;
  for (i = 16; i; i /= 2) v = max(v, __shfl_xor_sync(~0u, v, i));
  __syncthreads();
  if (threadIdx.x % 32 == 0) c->warp[threadIdx.x / 32] = v;
  __syncthreads();
  for (i = 0; i < CUDA_WARPS; i++) v = max(v, c->warp[i]);
  return v;
}

__device__ static unsigned long long cuda_block_total(unsigned long long v, cuda_choice *c) {
  int i;
  for (i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  __syncthreads();
  if (threadIdx.x % 32 == 0) c->warp[threadIdx.x / 32] = v;
  __syncthreads();
  for (v = 0, i = 0; i < CUDA_WARPS; i++) v += c->warp[i];
  return v;
}

__device__ static unsigned long long cuda_best_of(const float *x, int n, cuda_choice *c) {
  unsigned long long best = 0;
  for (int i = threadIdx.x; i < n; i += CUDA_THREADS) best = max(best, cuda_rank(__ldcg(x + i), i));
  return cuda_block_best(best, c);
}

__device__ static int cuda_rank_id(unsigned long long rank) { return (int)~(uint32_t)rank; }

__device__ static unsigned long long cuda_mass(float p) {
  return (unsigned long long)__float2ull_rn(p * 1099511627776.0f);
}

__device__ static unsigned long long cuda_mass_of(const float *p, int n, float least,
                                                  cuda_choice *c) {
  unsigned long long sum = 0;
  for (int i = threadIdx.x; i < n; i += CUDA_THREADS) sum += p[i] >= least ? cuda_mass(p[i]) : 0;
  return cuda_block_total(sum, c);
}

/* The highest bin from which on, upwards, there is at least `goal`; found: what lies above it. */
__device__ static int cuda_bin_of(unsigned long long goal, cuda_choice *c) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = CUDA_BINS - 1 - 2 * (int)threadIdx.x;
  unsigned long long a = c->bin[top], b = c->bin[top - 1], sum = a + b, before = 0;
  int i;
  for (i = 1; i < 32; i *= 2) {
    unsigned long long other = __shfl_up_sync(~0u, sum, i);
    if (lane >= i) sum += other;
  }
  if (lane == 31) c->warp[warp] = sum;
  if (threadIdx.x == 0) c->digit = 0, c->found = 0;
  __syncthreads();
  for (i = 0; i < warp; i++) before += c->warp[i];
  before += sum - a - b;
  if (before < goal && before + a >= goal) c->digit = top, c->found = before;
  else if (before + a < goal && before + a + b >= goal) c->digit = top - 1, c->found = before + a;
  __syncthreads();
  return c->digit;
}

/* The largest t such that the elements >= t, of those >= least, have at least `goal`. */
__device__ static float cuda_threshold(const float *p, int n, float least, unsigned long long goal,
                                       bool count, cuda_choice *c) {
  uint32_t prefix = 0;
  int shift, i;
  for (shift = 20; shift >= 0; shift -= 10) {
    __syncthreads();
    for (i = threadIdx.x; i < CUDA_BINS; i += CUDA_THREADS) c->bin[i] = 0;
    __syncthreads();
    for (i = threadIdx.x; i < n; i += CUDA_THREADS) {
      uint32_t bits = __float_as_uint(p[i]);
      if (!(p[i] >= least) || (shift < 20 && bits >> (shift + 10) != prefix)) continue;
      atomicAdd(&c->bin[bits >> shift & (CUDA_BINS - 1)], count ? 1ull : cuda_mass(p[i]));
    }
    __syncthreads();
    prefix = prefix << 10 | (uint32_t)cuda_bin_of(goal, c);
    goal -= c->found;
    if (goal == 0) goal = 1;
  }
  return __uint_as_float(prefix);
}

__device__ static float cuda_least(const float *p, int n, const tfm_sampling &s, cuda_choice *c) {
  float least = 0, t;
  if (s.top_k > 0 && s.top_k < n)
    least = cuda_threshold(p, n, 0, (unsigned long long)s.top_k, true, c);
  if (s.top_p > 0 && s.top_p < 1) {
    double goal = (double)cuda_mass_of(p, n, least, c) * (double)s.top_p;
    t = cuda_threshold(p, n, least, (unsigned long long)ceil(goal), false, c);
    if (t > least) least = t;
  }
  if (s.min_p > least) least = s.min_p < 1 ? s.min_p : 1.0f;
  return least;
}

/* The first id where the running sum of what is left exceeds u of the whole. Each warp owns a
   stretch; the one in which it happens goes through its own again. */
__device__ static int cuda_draw(const float *p, int n, float least, float u, cuda_choice *c) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = (n + CUDA_WARPS - 1) / CUDA_WARPS;
  int begin = min(warp * each, n), end = min(begin + each, n), i, k;
  double goal = (double)cuda_mass_of(p, n, least, c) * (double)u;
  unsigned long long mine = 0, before = 0;
  for (i = begin + lane; i < end; i += 32) mine += p[i] >= least ? cuda_mass(p[i]) : 0;
  for (i = 16; i; i /= 2) mine += __shfl_xor_sync(~0u, mine, i);
  __syncthreads();
  if (lane == 0) c->warp[warp] = mine;
  if (threadIdx.x == 0) c->found = 0;
  __syncthreads();
  for (i = 0; i < warp; i++) before += c->warp[i];
  if ((double)before <= goal && (double)(before + mine) > goal)
    for (i = begin; i < end; i += 32) {
      float v = i + lane < end ? p[i + lane] : 0.0f;
      unsigned long long run = i + lane < end && v >= least ? cuda_mass(v) : 0, one = run;
      uint32_t over;
      for (k = 1; k < 32; k *= 2) {
        unsigned long long other = __shfl_up_sync(~0u, run, k);
        if (lane >= k) run += other;
      }
      over = __ballot_sync(~0u, one > 0 && (double)(before + run) > goal);
      if (over && lane == 0) c->found = (unsigned long long)(i + __ffs((int)over) - 1);
      if (over) break;
      before += __shfl_sync(~0u, run, 31);
    }
  __syncthreads();
  return (int)c->found;
}

/* work: n floats. All CUDA_THREADS threads; every one returns the choice. */
__device__ static int cuda_choose(const float *logits, float *work, int n, const tfm_sampling &s,
                                  int pos, const int32_t *history, cuda_choice *c) {
  bool penalised = s.repetition_penalty != 0 && s.repetition_penalty != 1;
  unsigned long long best = cuda_best_of(logits, n, c);
  float top = __ldcg(logits + cuda_rank_id(best)), least;
  uint32_t word[4];
  int i;
  if (!(s.temperature > 0) && !penalised) return cuda_rank_id(best);
  for (i = threadIdx.x; i < n; i += CUDA_THREADS) {
    float l = __ldcg(logits + i);
    work[i] = l == l ? l : -INFINITY;
  }
  __syncthreads();
  for (i = threadIdx.x; i < pos && penalised; i += CUDA_THREADS) {
    float l = __ldcg(logits + history[i]);
    if (l == l) work[history[i]] = l < 0 ? l * s.repetition_penalty : l / s.repetition_penalty;
  }
  __syncthreads();
  if (penalised && top > -INFINITY) {
    best = cuda_best_of(work, n, c);
    top = work[cuda_rank_id(best)];
    __syncthreads(); /* all have read it */
  }
  if (!(top > -INFINITY) || !(s.temperature > 0) || top == INFINITY) return cuda_rank_id(best);
  for (i = threadIdx.x; i < n; i += CUDA_THREADS) work[i] = expf((work[i] - top) / s.temperature);
  __syncthreads();
  least = cuda_least(work, n, s, c);
  cuda_philox(word, s.seed, (uint64_t)pos, s.sequence);
  return cuda_draw(work, n, least, (float)(word[0] >> 8) * (1.0f / 16777216.0f), c);
}

__device__ static float cuda_log_sum_exp(const float *x, int n, cuda_choice *c) {
  float top = x[cuda_rank_id(cuda_best_of(x, n, c))], sum = 0;
  int i;
  if (!(fabsf(top) < INFINITY)) return top;
  for (i = threadIdx.x; i < n; i += CUDA_THREADS) sum += x[i] == x[i] ? expf(x[i] - top) : 0.0f;
  return top + logf(cuda_block_sum(sum, c->room));
}

__global__ void __launch_bounds__(CUDA_THREADS) cuda_sample_kernel(int32_t *ids, float *logprobs,
                                                                   tfm_mat logits, tfm_sampler s) {
  __shared__ cuda_choice c;
  int row = (int)blockIdx.x, n = logits.cols, id;
  const float *l = cuda_at(logits, row, 0);
  float all = 0;
  if (s.seq[row] < 0) return;
  id = cuda_choose(l, s.work + (int64_t)row * 2 * n, n, s.params[row], s.pos[row],
                   s.history + (int64_t)s.seq[row] * s.history_stride, &c);
  if (logprobs) all = cuda_log_sum_exp(l, n, &c);
  if (threadIdx.x) return;
  ids[row] = id;
  if (logprobs) logprobs[row] = l[id] - all;
}

static void cuda_sample(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits,
                        const tfm_sampler *s) {
  if (cuda_enter(d))
    cuda_run(d, cuda_sample_kernel, dim3((unsigned)logits.rows), CUDA_THREADS, 0, ids, logprobs,
             logits, *s);
}

/* Every element counts those before it. */
__global__ void cuda_top_kernel(int32_t *ids, float *logprobs, tfm_mat logits, int k) {
  __shared__ float tile[256];
  int i = (int)(blockIdx.y * 256 + threadIdx.x), row = (int)blockIdx.x, n = logits.cols, first, j;
  const float *l = cuda_at(logits, row, 0);
  float own = i < n ? l[i] : 0.0f;
  unsigned long long mine = cuda_rank(own == own ? own : -INFINITY, i);
  int rank = 0;
  for (first = 0; first < n; first += 256) {
    __syncthreads();
    if (first + (int)threadIdx.x < n) {
      own = l[first + threadIdx.x];
      tile[threadIdx.x] = own == own ? own : -INFINITY; /* NaN stands among the impossible */
    }
    __syncthreads();
    for (j = 0; j < min(256, n - first); j++) rank += cuda_rank(tile[j], first + j) > mine;
  }
  if (i >= n || rank >= k) return;
  ids[(int64_t)row * k + rank] = i;
  if (logprobs) logprobs[(int64_t)row * k + rank] = l[i];
}

__global__ void __launch_bounds__(CUDA_THREADS) cuda_top_finish_kernel(float *logprobs,
                                                                       tfm_mat logits, int k) {
  __shared__ cuda_choice c;
  float all = cuda_log_sum_exp(cuda_at(logits, blockIdx.x, 0), logits.cols, &c);
  for (int i = threadIdx.x; i < k; i += CUDA_THREADS) logprobs[(int64_t)blockIdx.x * k + i] -= all;
}

static void cuda_top(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits, int32_t k) {
  if (!cuda_enter(d)) return;
  cuda_run(d, cuda_top_kernel, dim3((unsigned)logits.rows, cuda_blocks(logits.cols, 256)), 256, 0,
           ids, logprobs, logits, (int)k);
  if (logprobs)
    cuda_run(d, cuda_top_finish_kernel, dim3((unsigned)logits.rows), CUDA_THREADS, 0, logprobs,
             logits, (int)k);
}

/* ---- decode ----
   One kernel, a block on every multiprocessor, for as many tokens as are asked for. A token passes
   through five phases a layer. Phases that multiply give a warp two rows of W that belong together:
   a pair that is rotated, a gate and what it opens, or just neighbours. What blocks hand on to each
   other lies in global memory and is read past the first cache; a barrier of all blocks ends each
   phase. Every block normalises the whole residual row for itself, which is cheaper than a barrier.
   Before a barrier, each warp asks for the first rows of W that it will need after it. */

typedef struct cuda_layer {
  cuda_weight qkv, out, up, down;
  cuda_norm norm1, norm2;
  const float *qkv_bias, *out_bias, *up_bias, *down_bias;
  tfm_rope rope;
  tfm_attn attn;
  tfm_kv kv;
} cuda_layer;

typedef struct cuda_step { /* the kernel's arguments */
  const cuda_layer *layer;
  int layers, width, heads, ffn, vocabulary, steps, chunks;
  bool gated;
  tfm_act act;
  float embed_scale, softcap;
  cuda_weight embed, positions, head;
  cuda_norm norm;
  const float *head_bias;
  float *x, *q, *attn, *h, *logits; /* of one row */
  float *part; /* [kv heads, blocks of heads, chunks, B, width8 + 2] of attention */
  unsigned *arrived;                /* [kv heads, blocks of heads] */
  unsigned *barrier;
  unsigned long long *best;         /* [blocks] */
  int32_t *chosen;
  int32_t *id, *pos, *sample_pos, *history;
  const int32_t *seq;
  const tfm_sampling *params;
  float *work;
  int32_t *ids;
} cuda_step;

typedef struct cuda_token { int id, pos, seq; } cuda_token;

enum cuda_kind { CUDA_QKV, CUDA_ADD, CUDA_UP, CUDA_GATED, CUDA_LOGITS };

/* Waits until all blocks are here, and sees what they have written. */
__device__ static void cuda_barrier(unsigned *counter, unsigned *target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned now;
    *target += gridDim.x;
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(counter) : "memory");
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    while ((int)(now - *target) < 0);
  }
  __syncthreads();
}

__device__ static int cuda_units(const cuda_weight &w, int kind) {
  return kind == CUDA_GATED ? w.rows / 2 : (w.rows + 1) / 2;
}

/* The two rows of unit u. */
__device__ static int2 cuda_unit(const cuda_step &s, const cuda_layer &l, const cuda_weight &w,
                                 int kind, int u) {
  int half = l.kv.width / 2, head = u / half;
  int2 pair;
  if (kind == CUDA_GATED) return make_int2(u, u + w.rows / 2);
  if (kind != CUDA_QKV) return make_int2(2 * u, min(2 * u + 1, w.rows - 1));
  pair = make_int2(2 * (u % half), 2 * (u % half) + 1);
  if (head < s.heads + l.kv.heads) pair = cuda_pair(l.rope, u % half);
  return make_int2(head * l.kv.width + pair.x, head * l.kv.width + pair.y);
}

/* Asks for the first rows of W that this warp is going to multiply. */
__device__ static void cuda_prefetch(const cuda_step &s, const cuda_layer &l, const cuda_weight &w,
                                     int kind, const cuda_norm *norm) {
  int u = (int)(threadIdx.x / 32 * gridDim.x + blockIdx.x), i;
  int2 rows;
  if (norm && blockIdx.x == gridDim.x - 1)
    for (i = (int)threadIdx.x * 32; i < w.cols; i += CUDA_THREADS * 32) {
      asm volatile("prefetch.global.L2 [%0];" : : "l"(norm->w + i));
      if (norm->b) asm volatile("prefetch.global.L2 [%0];" : : "l"(norm->b + i));
    }
  if (u >= cuda_units(w, kind)) return;
  rows = cuda_unit(s, l, w, kind, u);
  for (i = (int)(threadIdx.x % 32) * 8; i < w.vectors; i += 256) { /* 128 bytes each */
    const uint4 *data = (const uint4 *)w.data;
    asm volatile("prefetch.global.L2 [%0];" : : "l"(data + (int64_t)rows.x * w.vectors + i));
    asm volatile("prefetch.global.L2 [%0];" : : "l"(data + (int64_t)rows.y * w.vectors + i));
  }
}

/* Two columns of q, k or v, rotated, to where attention reads them. */
__device__ static void cuda_finish_qkv(const cuda_step &s, const cuda_layer &l, cuda_token t,
                                       int2 rows, float2 v, float2 turn) {
  int width = l.kv.width, head = rows.x / width, kv_head = head - s.heads;
  bool is_k = kv_head < l.kv.heads;
  int64_t at;
  if (is_k && rows.x % width < l.rope.rot) v = cuda_rotate(v.x, v.y, turn);
  if (kv_head < 0) {
    __stcg(s.q + rows.x, v.x);
    __stcg(s.q + rows.y, v.y);
    return;
  }
  if (!is_k) kv_head -= l.kv.heads;
  at = cuda_kv_at(l.kv, t.seq, t.pos, kv_head);
  cuda_store(is_k ? l.kv.k : l.kv.v, l.kv.type, at + rows.x % width, v.x);
  cuda_store(is_k ? l.kv.k : l.kv.v, l.kv.type, at + rows.y % width, v.y);
}

/* What the phases do with a sum of one row of W. */
__device__ static void cuda_finish_row(const cuda_step &s, int kind, float *x, int row, float v,
                                       unsigned long long *best) {
  if (kind == CUDA_ADD) v += __ldcg(x + row);
  else if (kind == CUDA_UP) v = cuda_act(v, s.act);
  else *best = max(*best, cuda_rank(v = cuda_cap(v, s.softcap), row));
  __stcg(x + row, v);
}

/* raw = x, of which four values at a time are read. */
__device__ static void cuda_fetch(float *raw, const float *x, int n) {
  int quads = n / 4, i;
#pragma unroll 4
  for (i = threadIdx.x; i < quads; i += CUDA_THREADS)
    ((float4 *)raw)[i] = __ldcg((const float4 *)x + i);
  for (i = quads * 4 + (int)threadIdx.x; i < n; i += CUDA_THREADS) raw[i] = __ldcg(x + i);
}

typedef struct cuda_phase { /* x (NULL: what the token begins with), normalised, by W */
  const cuda_weight *w;
  int kind;
  const float *x;
  const cuda_norm *norm; /* NULL: none */
  const float *bias;
  float *to;
} cuda_phase;

/* Puts x into the planes; returns what sums are to be multiplied by. */
__device__ __noinline__ float cuda_phase_ready(const cuda_step &s, const cuda_phase &p,
                                               cuda_token t, float *shared) {
  float *raw = shared + CUDA_WARPS, factor;
  char *planes = (char *)(raw + cuda_values(*p.w));
  int i;
  if (p.x) cuda_fetch(raw, p.x, p.w->cols);
  for (i = threadIdx.x; i < p.w->cols && !p.x; i += CUDA_THREADS) {
    raw[i] = cuda_embedding(s.embed, s.positions, s.embed_scale, t.id, t.pos, i);
    if (blockIdx.x == 0) __stcg(s.x + i, raw[i]);
  }
  __syncthreads();
  if (p.norm) cuda_normalise(raw, p.w->cols, *p.norm, shared);
  __syncthreads();
  factor = cuda_planes(planes, raw, *p.w, shared);
  __syncthreads();
  return factor;
}

/* Returns the best logit of the warp. */
template <int TYPE>
__device__ __noinline__ unsigned long long cuda_phase_run(const cuda_step &s, const cuda_layer &l,
                                                          const cuda_phase &p, cuda_token t,
                                                          float *shared) {
  const cuda_weight w = *p.w;
  const int half = l.kv.width / 2, kind = p.kind;
  unsigned long long best = 0;
  float factor = 1;
  auto rows = [&](int u, int64_t (&row)[2]) {
    int2 pair = cuda_unit(s, l, w, kind, u);
    row[0] = pair.x;
    row[1] = pair.y;
  };
  auto ready = [&]() { factor = cuda_phase_ready(s, p, t, shared); };
  auto done = [&](int u, const float (&sum)[2][1]) {
    int2 pair = cuda_unit(s, l, w, kind, u);
    float2 turn = make_float2(1, 0), v;
    if (threadIdx.x % 32) return;
    if (kind == CUDA_QKV && u % half < l.rope.rot / 2) turn = cuda_turn(l.rope, t.pos, u % half);
    v = make_float2(__fmul_rn(sum[0][0], factor), __fmul_rn(sum[1][0], factor));
    if (p.bias) v.x += __ldg(p.bias + pair.x), v.y += __ldg(p.bias + pair.y);
    if (kind == CUDA_QKV) {
      cuda_finish_qkv(s, l, t, pair, v, turn);
    } else if (kind == CUDA_GATED) {
      __stcg(p.to + u, __fmul_rn(cuda_act(v.x, s.act), v.y));
    } else {
      cuda_finish_row(s, kind, p.to, pair.x, v.x, &best);
      if (pair.y != pair.x) cuda_finish_row(s, kind, p.to, pair.y, v.y, &best);
    }
  };
  cuda_dots<TYPE, 1>(w, (const char *)(shared + CUDA_WARPS + cuda_values(w)), cuda_units(w, kind),
                     rows, ready, done);
  return best;
}

__device__ __noinline__ unsigned long long cuda_product(const cuda_step &s, const cuda_layer &l,
                                                        const cuda_phase &p, cuda_token t,
                                                        float *shared) {
  switch (p.w->type) {
    case TFM_F32: return cuda_phase_run<TFM_F32>(s, l, p, t, shared);
    case TFM_F16: return cuda_phase_run<TFM_F16>(s, l, p, t, shared);
    case TFM_BF16: return cuda_phase_run<TFM_BF16>(s, l, p, t, shared);
    case TFM_Q8_0: return cuda_phase_run<TFM_Q8_0>(s, l, p, t, shared);
    default: return cuda_phase_run<TFM_Q4_0>(s, l, p, t, shared);
  }
}

/* Merges the tiles of B heads, in order. */
template <int B>
__device__ static void cuda_gather_tiles(const cuda_step &s, const float *part, int tiles,
                                         int query_head, int heads, int width) {
  int width8 = cuda_width8(width), stride = B * (width8 + 2), i, k;
  for (i = threadIdx.x; i < heads * width; i += CUDA_THREADS) {
    int h = i / width, c = i % width;
    float top = -INFINITY, sum = 0, out = 0;
#pragma unroll 4
    for (k = 0; k < tiles; k++) {
      const float *tile = part + (int64_t)k * stride + h * (width8 + 2);
      float tile_max = __ldcg(tile + width8);
      float2 by = cuda_merge(top, tile_max);
      out = cuda_blend(out, __ldcg(tile + c), by);
      sum = cuda_blend(sum, __ldcg(tile + width8 + 1), by);
      top = fmaxf(top, tile_max);
    }
    __stcg(s.attn + query_head * width + i, out / sum);
  }
}

/* One tile of B heads; the block that finishes the last one of these heads merges them. */
template <int B>
__device__ static void cuda_attend_tile(const cuda_step &s, const cuda_attn &a, int item,
                                        int tiles, float *shared) {
  __shared__ bool last;
  int blocks = (a.group + B - 1) / B, tile = item % tiles, of = item / tiles;
  int head = of / blocks, in_group = of % blocks * B, heads = min(B, a.group - in_group), i;
  int width = a.kv.width, width8 = cuda_width8(width), query_head = head * a.group + in_group;
  float *part = s.part + (int64_t)of * s.chunks * B * (width8 + 2);
  float *mine = part + (int64_t)tile * B * (width8 + 2);
  cuda_tile_room t = cuda_tile_lay_out(shared, B, width);
  __syncthreads();
  cuda_tile_begin<B>(a, t, 0, query_head, heads);
  cuda_tile<B>(a, t, 0, head, query_head, cuda_first_key(a, 0) + tile * CUDA_KEYS);
  for (i = threadIdx.x; i < B * width8; i += CUDA_THREADS)
    __stcg(mine + i / width8 * (width8 + 2) + i % width8,
           cuda_tile_out(t, B, width8, i / width8, i % width8));
  if (threadIdx.x < B) {
    __stcg(mine + threadIdx.x * (width8 + 2) + width8, t.max[threadIdx.x]);
    __stcg(mine + threadIdx.x * (width8 + 2) + width8 + 1, t.sum[threadIdx.x]);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(s.arrived + of, 1u) == (unsigned)tiles - 1;
    if (last) s.arrived[of] = 0;
    __threadfence();
  }
  __syncthreads();
  if (last) cuda_gather_tiles<B>(s, part, tiles, query_head, heads, width);
}

template <int B>
__device__ __noinline__ void cuda_attend(const cuda_step &s, const cuda_layer &l, cuda_token t,
                                         float *shared) {
  __shared__ int32_t pos, seq;
  cuda_attn a;
  int tiles, items, i;
  if (threadIdx.x == 0) pos = t.pos, seq = t.seq;
  __syncthreads();
  memset(&a, 0, sizeof a);
  a.q.data = s.q;
  a.q.type = TFM_F32;
  a.kv = l.kv;
  a.rows.n = 1;
  a.rows.pos = &pos;
  a.rows.seq = &seq;
  a.p = l.attn;
  a.group = l.attn.heads / l.kv.heads;
  tiles = (t.pos - cuda_first_key(a, 0)) / CUDA_KEYS + 1;
  items = l.kv.heads * ((a.group + B - 1) / B) * tiles;
  for (i = (int)blockIdx.x; i < items; i += (int)gridDim.x)
    cuda_attend_tile<B>(s, a, i, tiles, shared);
}

__device__ static void cuda_attend_of(const cuda_step &s, const cuda_layer &l, cuda_token t,
                                      float *shared) {
  int group = l.attn.heads / l.kv.heads;
  if (group >= 3) cuda_attend<4>(s, l, t, shared);
  else if (group == 2) cuda_attend<2>(s, l, t, shared);
  else cuda_attend<1>(s, l, t, shared);
}

/* One layer; `next` is where the one after it is read to. */
__device__ static void cuda_step_layer(const cuda_step &s, const cuda_layer &l, int index,
                                       cuda_layer *next, cuda_token t, unsigned *target,
                                       float *shared) {
  int up = s.gated ? CUDA_GATED : CUDA_UP, i;
  const cuda_phase qkv = {&l.qkv, CUDA_QKV, index ? s.x : NULL, &l.norm1, l.qkv_bias, NULL};
  const cuda_phase out = {&l.out, CUDA_ADD, s.attn, NULL, l.out_bias, s.x};
  const cuda_phase open = {&l.up, up, s.x, &l.norm2, l.up_bias, s.h};
  const cuda_phase down = {&l.down, CUDA_ADD, s.h, NULL, l.down_bias, s.x};
  cuda_product(s, l, qkv, t, shared);
  cuda_prefetch(s, l, l.out, CUDA_ADD, NULL);
  cuda_barrier(s.barrier, target);
  cuda_attend_of(s, l, t, shared);
  cuda_prefetch(s, l, l.up, up, &l.norm2);
  cuda_barrier(s.barrier, target);
  cuda_product(s, l, out, t, shared);
  if ((int64_t)l.down.rows * l.down.vectors < 1 << 19) cuda_prefetch(s, l, l.down, CUDA_ADD, NULL);
  cuda_barrier(s.barrier, target);
  cuda_product(s, l, open, t, shared);
  cuda_prefetch(s, l, l.down, CUDA_ADD, NULL);
  for (i = threadIdx.x; i < (int)(sizeof l / 4) && index + 1 < s.layers; i += CUDA_THREADS)
    ((uint32_t *)next)[i] = ((const uint32_t *)(s.layer + index + 1))[i];
  cuda_barrier(s.barrier, target);
  cuda_product(s, l, down, t, shared);
  if (index + 1 < s.layers) cuda_prefetch(s, *next, next->qkv, CUDA_QKV, &next->norm1);
  else cuda_prefetch(s, l, s.head, CUDA_LOGITS, &s.norm);
  cuda_barrier(s.barrier, target);
}

/* The token that follows; every block finds it for itself where it is the largest logit. */
__device__ static int cuda_step_choose(const cuda_step &s, cuda_token t, unsigned long long best,
                                       unsigned *target, float *shared) {
  cuda_choice *c = (cuda_choice *)(void *)shared;
  tfm_sampling how = *s.params;
  bool penalised = how.repetition_penalty != 0 && how.repetition_penalty != 1;
  int id;
  best = cuda_block_best(best, c);
  if (threadIdx.x == 0) __stcg(s.best + blockIdx.x, best);
  cuda_barrier(s.barrier, target);
  if (!(how.temperature > 0) && !penalised) {
    best = threadIdx.x < gridDim.x ? __ldcg(s.best + threadIdx.x) : 0;
    return cuda_rank_id(cuda_block_best(best, c));
  }
  if (blockIdx.x == 0) {
    id = cuda_choose(s.logits, s.work, s.vocabulary, how, t.pos + 1, s.history, c);
    if (threadIdx.x == 0) __stcg(s.chosen, id);
  }
  cuda_barrier(s.barrier, target);
  return __ldcg(s.chosen);
}

__global__ void __launch_bounds__(CUDA_THREADS, 1)
cuda_decode_kernel(const __grid_constant__ cuda_step s) {
  extern __shared__ float shared[];
  __shared__ cuda_layer layer[2];
  const cuda_phase head = {&s.head, CUDA_LOGITS, s.x, &s.norm, s.head_bias, s.logits};
  cuda_token t = {*s.id, *s.pos, *s.seq};
  unsigned target = 0;
  int step, index, i;
  for (step = 0; step < s.steps; step++) {
    unsigned long long best;
    for (i = threadIdx.x; i < (int)(sizeof *layer / 4); i += CUDA_THREADS)
      ((uint32_t *)layer)[i] = ((const uint32_t *)s.layer)[i];
    __syncthreads();
    for (index = 0; index < s.layers; index++)
      cuda_step_layer(s, layer[index % 2], index, &layer[(index + 1) % 2], t, &target, shared);
    best = cuda_product(s, layer[0], head, t, shared);
    __syncthreads();
    t.id = cuda_step_choose(s, t, best, &target, shared);
    t.pos++;
    if (blockIdx.x || threadIdx.x) continue;
    s.history[t.pos] = t.id;
    *(volatile int32_t *)&s.ids[step] = t.id;
    __threadfence_system();
  }
  if (blockIdx.x || threadIdx.x) return;
  *s.id = t.id;
  *s.pos = t.pos;
  *s.sample_pos = t.pos + 1;
}

/* ---- What decode keeps between calls ---- */

typedef struct cuda_decoder {
  bool refused; /* it was tried, and is not possible */
  const tfm_net *net; /* NULL: nothing is made yet */
  const tfm_kv *kv;
  const void *work;
  cuda_step step;
  size_t shared;
} cuda_decoder;

typedef struct cuda_room { char *base; size_t used; } cuda_room; /* base NULL: only measures */

static void *cuda_take(cuda_room *r, size_t count, size_t size) {
  char *at = r->base ? r->base + r->used : NULL;
  r->used += cuda_align256(count * size);
  return at;
}

/* Lays the buffers of decode out in the engine's workspace. */
static void cuda_step_lay_out(cuda_step *s, cuda_room *r, const tfm_net *net, int32_t context,
                              int processors) {
  size_t inner = (size_t)(net->heads * net->head_width);
  int group = net->kv_heads ? net->heads / net->kv_heads : 1, b = cuda_heads_at_once(group);
  size_t of = b ? (size_t)net->kv_heads * cuda_blocks(group, b) : 0;
  s->chunks = context / CUDA_KEYS + 2;
  s->layer = (const cuda_layer *)cuda_take(r, (size_t)net->layers, sizeof(cuda_layer));
  s->x = (float *)cuda_take(r, (size_t)net->width, sizeof(float));
  s->q = (float *)cuda_take(r, inner, sizeof(float));
  s->attn = (float *)cuda_take(r, inner, sizeof(float));
  s->h = (float *)cuda_take(r, (size_t)net->ffn_width, sizeof(float));
  s->logits = (float *)cuda_take(r, (size_t)net->vocabulary, sizeof(float));
  s->part = (float *)cuda_take(r, of * (size_t)s->chunks * (size_t)b,
                               (size_t)(cuda_width8(net->head_width) + 2) * sizeof(float));
  s->barrier = (unsigned *)cuda_take(r, 1 + of, sizeof(unsigned));
  s->arrived = s->barrier + 1;
  s->best = (unsigned long long *)cuda_take(r, (size_t)processors, sizeof *s->best);
  s->chosen = (int32_t *)cuda_take(r, 1, sizeof(int32_t));
}

/* What the kernel does not know how to compute. */
static bool cuda_layer_plain(const tfm_layer *l) {
  return l->norm1 && l->norm2 && !l->post1 && !l->post2 && !l->q_norm && !l->k_norm &&
         !l->router.rows && !l->shared_gate.rows && l->up.rows && l->attn.dropout.rate == 0;
}

static bool cuda_decode_knows(const tfm_dev *d, const tfm_run_ahead *r) {
  const tfm_net *net = r->net;
  int32_t i;
  if (!d->work || d->host_visible || r->rows.n != 1 || net->head_width % 2 || net->experts)
    return false;
  for (i = 0; i < net->layers; i++)
    if (!cuda_layer_plain(&net->layer[i]) ) return false;
  return true;
}

static void cuda_layer_fill(cuda_layer *to, const tfm_net *net, const tfm_layer *l,
                            const tfm_kv *kv) {
  memset(to, 0, sizeof *to);
  to->qkv = *cuda_packed(&l->qkv);
  to->out = *cuda_packed(&l->out);
  to->up = *cuda_packed(&l->up);
  to->down = *cuda_packed(&l->down);
  to->norm1.w = l->norm1, to->norm1.b = l->norm1_bias, to->norm1.p = net->norm;
  to->norm2.w = l->norm2, to->norm2.b = l->norm2_bias, to->norm2.p = net->norm;
  to->qkv_bias = l->qkv_bias, to->out_bias = l->out_bias;
  to->up_bias = l->up_bias, to->down_bias = l->down_bias;
  to->rope = l->rope;
  to->attn = l->attn;
  to->kv = *kv;
}

static size_t cuda_larger(size_t a, size_t b) { return a > b ? a : b; }

static size_t cuda_layer_shared(const cuda_layer *l) {
  int b = cuda_heads_at_once(l->attn.heads / l->kv.heads);
  size_t most = sizeof(float) * cuda_tile_floats(b, l->kv.width);
  most = cuda_larger(most, cuda_dots_bytes(&l->qkv, 1));
  most = cuda_larger(most, cuda_dots_bytes(&l->out, 1));
  most = cuda_larger(most, cuda_dots_bytes(&l->up, 1));
  return cuda_larger(most, cuda_dots_bytes(&l->down, 1));
}

static void cuda_step_fill(cuda_step *s, const tfm_run_ahead *r) {
  const tfm_net *net = r->net;
  s->layers = net->layers, s->width = net->width, s->heads = net->heads;
  s->ffn = net->ffn_width, s->vocabulary = net->vocabulary;
  s->gated = net->gated;
  s->act = net->act;
  s->embed_scale = net->embed_scale != 0 ? net->embed_scale : 1.0f;
  s->softcap = net->logit_softcap;
  s->embed = *cuda_packed(&net->embed);
  if (net->positions.rows) s->positions = *cuda_packed(&net->positions);
  s->head = *cuda_packed(&net->head);
  s->head_bias = net->head_bias;
  s->norm.w = net->final_norm, s->norm.b = net->final_norm_bias, s->norm.p = net->norm;
  s->id = (int32_t *)r->rows.id, s->pos = (int32_t *)r->rows.pos, s->seq = r->rows.seq;
  s->sample_pos = (int32_t *)r->sampler.pos;
  s->params = r->sampler.params;
  s->work = r->sampler.work;
}

/* Once for an engine: the layers go to the device. */
static bool cuda_decoder_make(tfm_dev *d, const tfm_run_ahead *r) {
  cuda_state *s = cuda_of(d);
  cuda_decoder *c = s->decoder;
  cuda_room room = {(char *)d->work, 0};
  int32_t i, blocks = 0;
  memset(c, 0, sizeof *c);
  c->net = r->net, c->kv = r->kv, c->work = d->work;
  cuda_step_lay_out(&c->step, &room, r->net, r->sampler.history_stride, s->processors);
  c->shared = cuda_larger(sizeof(cuda_choice), cuda_dots_bytes(cuda_packed(&r->net->head), 1));
  cuda_zero(d, c->step.barrier, (char *)c->step.best - (char *)c->step.barrier);
  for (i = 0; i < r->net->layers; i++) {
    cuda_layer l;
    cuda_layer_fill(&l, r->net, &r->net->layer[i], &r->kv[i]);
    c->shared = cuda_larger(c->shared, cuda_layer_shared(&l));
    cuda_put(d, (void *)(c->step.layer + i), &l, sizeof l);
  }
  cuda_step_fill(&c->step, r);
  c->refused = c->shared > CUDA_SHARED;
  if (c->refused) return false;
  cuda_check(d, cudaFuncSetAttribute((const void *)cuda_decode_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)c->shared),
             "cudaFuncSetAttribute");
  cuda_check(d, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, cuda_decode_kernel,
                                                              CUDA_THREADS, c->shared),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  c->refused = blocks < 1;
  return !c->refused;
}

static bool cuda_decode(tfm_dev *d, const tfm_run_ahead *r, int32_t steps) {
  cuda_state *s = cuda_of(d);
  cudaLaunchAttribute together = {};
  cudaLaunchConfig_t config = {};
  cuda_step step;
  if (!cuda_decode_knows(d, r) || !cuda_enter(d)) return false;
  if (s->decoder->net != r->net && !cuda_decoder_make(d, r)) return false;
  if (s->decoder->refused) return false;
  step = s->decoder->step;
  step.steps = steps;
  step.ids = r->ids;
  step.history = (int32_t *)r->sampler.history;
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  config.gridDim = dim3((unsigned)s->processors);
  config.blockDim = dim3(CUDA_THREADS);
  config.dynamicSmemBytes = s->decoder->shared;
  config.stream = s->stream;
  config.attrs = &together;
  config.numAttrs = 1;
  cuda_zero(d, step.barrier, sizeof *step.barrier);
  cuda_check(d, cudaLaunchKernelEx(&config, cuda_decode_kernel, step), "cudaLaunchKernelEx");
  return true;
}

/* ---- layer: passes of many rows, on the tensor cores ----
   Activations have 16 bits: BF16 where the weights do, else F16; the residual stream stays F32, as
   cuBLASLt adds to it. Quantised weights are widened a stretch at a time. A block of attention
   takes 128 rows of one sequence and one head; each of its 8 warps keeps 16 rows of q, of scores
   and of the output in registers, while tiles of 64 keys and values pass through shared memory, two
   deep. Tiles that hold several sequences, and heads of other widths, go to cuda_attn_kernel. */

__device__ __forceinline__ void cuda_copy16(uint32_t to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(from));
}

__device__ __forceinline__ void cuda_matrices(uint32_t (&r)[4], uint32_t at, bool turned) {
  if (turned)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

/* c [16, 8] += a [16, 16] b [16, 8] */
template <bool BF>
__device__ __forceinline__ void cuda_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if (BF)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <bool BF> __device__ __forceinline__ uint32_t cuda_pack2(float a, float b) {
  if (BF) {
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(uint32_t *)&v;
  } else {
    __half2 v = __floats2half2_rn(a, b);
    return *(uint32_t *)&v;
  }
}

/* Where 16 bytes, number `eighth`, of a row of D values lie: turned, against bank conflicts. */
template <int D> __device__ __forceinline__ uint32_t cuda_swizzle(int row, int eighth) {
  return (uint32_t)(row * D * 2 + ((eighth ^ (row & 7)) * 16));
}

/* Keys and values `first` to first + 63 of a head, to shared memory; beyond `last`, the last's. */
template <int D>
__device__ __forceinline__ void cuda_flash_load(const cuda_attn &a, uint32_t keys, uint32_t values,
                                                int seq, int head, int first, int last) {
  for (int i = threadIdx.x; i < CUDA_KEYS * D / 8; i += 256) {
    int row = i / (D / 8), eighth = i % (D / 8);
    int64_t at = cuda_kv_at(a.kv, seq, min(first + row, last), head) + eighth * 8;
    cuda_copy16(keys + cuda_swizzle<D>(row, eighth), (const uint16_t *)a.kv.k + at);
    cuda_copy16(values + cuda_swizzle<D>(row, eighth), (const uint16_t *)a.kv.v + at);
  }
  asm volatile("cp.async.commit_group;");
}

/* s [16, 64] = q k^T of a warp. */
template <int D, bool BF>
__device__ __forceinline__ void cuda_flash_scores(float (&s)[8][4], const uint32_t (&q)[D / 16][4],
                                                  uint32_t keys) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int n = 0; n < 4; n++) {
      uint32_t b[4];
      cuda_matrices(b, keys + cuda_swizzle<D>(n * 16 + lane / 16 * 8 + lane % 8,
                                              k * 2 + lane / 8 % 2), false);
      cuda_mma<BF>(s[2 * n], q[k], b[0], b[1]);
      cuda_mma<BF>(s[2 * n + 1], q[k], b[2], b[3]);
    }
}

/* o [16, D] += p v of a warp. */
template <int D, bool BF>
__device__ __forceinline__ void cuda_flash_values(float (&o)[D / 8][4], const float (&p)[8][4],
                                                  uint32_t values) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    uint32_t a[4] = {cuda_pack2<BF>(p[2 * k][0], p[2 * k][1]),
                     cuda_pack2<BF>(p[2 * k][2], p[2 * k][3]),
                     cuda_pack2<BF>(p[2 * k + 1][0], p[2 * k + 1][1]),
                     cuda_pack2<BF>(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
      uint32_t b[4];
      cuda_matrices(b, values + cuda_swizzle<D>(k * 16 + lane / 8 % 2 * 8 + lane % 8,
                                                n * 2 + lane / 16), true);
      cuda_mma<BF>(o[2 * n], a, b[0], b[1]);
      cuda_mma<BF>(o[2 * n + 1], a, b[2], b[3]);
    }
  }
}

/* Scores become powers of two below the rows' maxima; o and the sums are brought down to them.
   Elements 0, 1 of four belong to the warp's row lane / 4, elements 2, 3 to the row eight below. */
template <int D>
__device__ __forceinline__ void cuda_flash_exp(const cuda_attn &a, float (&s)[8][4],
                                               float (&o)[D / 8][4], float (&top)[2],
                                               float (&sum)[2], const int (&pos)[2], int first,
                                               bool whole) {
  const float log2e = 1.44269504f;
  int lane = threadIdx.x % 32, window = a.p.window > 0 ? a.p.window : INT32_MAX;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float best = top[r], by;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        int key = first + n * 8 + lane % 4 * 2 + i % 2;
        s[n][i] = cuda_cap(s[n][i] * a.p.scale, a.p.softcap) * log2e;
        if (!whole && (key > pos[r] || pos[r] - key >= window)) s[n][i] = -INFINITY;
        best = fmaxf(best, s[n][i]);
      }
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
    by = best > -INFINITY ? exp2f(top[r] - best) : 1.0f;
    top[r] = best;
    sum[r] *= by;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; i++) {
        s[n][i] = best > -INFINITY ? exp2f(s[n][i] - best) : 0.0f;
        sum[r] += s[n][i];
      }
#pragma unroll
    for (int n = 0; n < D / 8; n++) o[n][2 * r] *= by, o[n][2 * r + 1] *= by;
  }
}

template <int D, bool BF>
__global__ void __launch_bounds__(256, 1) cuda_flash_kernel(cuda_attn a) {
  extern __shared__ __align__(128) uint8_t tiles[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = (int)blockIdx.y;
  const int tile = (int)(gridDim.x - 1 - blockIdx.x); /* long ones first */
  const int begin = tile * CUDA_TILE;
  const int n = min(CUDA_TILE, a.rows.n - begin), row = begin + warp * 16 + lane / 4;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(tiles), stage = CUDA_KEYS * D * 2;
  const int low = a.rows.pos[begin], last = a.rows.pos[begin + n - 1], seq = a.rows.seq[begin];
  int pos[2], first, turn = 0;
  uint32_t q[D / 16][4];
  float o[D / 8][4], s[8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  if (!cuda_uniform(a.rows, tile)) return;
  first = a.p.window > 0 && low >= a.p.window ? (low - a.p.window + 1) / CUDA_KEYS * CUDA_KEYS : 0;
  for (int i = threadIdx.x; i < CUDA_TILE * D / 8; i += 256) /* q, where keys will be */
    cuda_copy16(base + cuda_swizzle<D>(i / (D / 8), i % (D / 8)),
                (const uint16_t *)a.q.data + (begin + min(i / (D / 8), n - 1)) * a.q.stride +
                    head * D + i % (D / 8) * 8);
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;");
  __syncthreads();
#pragma unroll
  for (int k = 0; k < D / 16; k++)
    cuda_matrices(q[k], base + cuda_swizzle<D>(warp * 16 + lane % 16, k * 2 + lane / 16), false);
#pragma unroll
  for (int i = 0; i < D / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  for (int r = 0; r < 2; r++) pos[r] = row + 8 * r < begin + n ? a.rows.pos[row + 8 * r] : -1;
  __syncthreads();
  cuda_flash_load<D>(a, base, base + stage, seq, head / a.group, first, last);
  for (; first <= last; first += CUDA_KEYS, turn ^= 1) {
    uint32_t keys = base + (uint32_t)turn * 2 * stage;
    uint32_t next = base + (uint32_t)(turn ^ 1) * 2 * stage;
    bool whole = first + CUDA_KEYS - 1 <= low && a.p.window <= 0;
    if (first + CUDA_KEYS <= last)
      cuda_flash_load<D>(a, next, next + stage, seq, head / a.group, first + CUDA_KEYS, last);
    else asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 1;");
    __syncthreads();
    cuda_flash_scores<D, BF>(s, q, keys);
    cuda_flash_exp<D>(a, s, o, top, sum, pos, first, whole);
    cuda_flash_values<D, BF>(o, s, keys + stage);
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    if (row + 8 * r >= begin + n) continue;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
      *(uint32_t *)((uint16_t *)a.y.data + (row + 8 * r) * a.y.stride + head * D + i * 8 +
                    lane % 4 * 2) =
          cuda_pack2<BF>(o[i][2 * r] / sum[r], o[i][2 * r + 1] / sum[r]);
  }
}

/* q is rotated in place, k and v go to the cache: pair i of a row's heads, q then k then v. */
__global__ void cuda_append_kernel(tfm_mat qkv, const float *bias, tfm_rope p, tfm_kv kv,
                                   tfm_rows rows, int heads) {
  int i = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x, half = kv.width / 2;
  int head = i / half, kv_head = head - heads, seq = rows.seq[row];
  bool is_k = kv_head < kv.heads;
  int2 pair = make_int2(2 * (i % half), 2 * (i % half) + 1);
  int64_t from = row * qkv.stride + head * kv.width, at;
  float2 v;
  if (i >= qkv.cols / 2 || seq < 0) return;
  if (is_k) pair = cuda_pair(p, i % half);
  v = make_float2(cuda_load(qkv.data, qkv.type, from + pair.x),
                  cuda_load(qkv.data, qkv.type, from + pair.y));
  if (bias) v.x += bias[head * kv.width + pair.x], v.y += bias[head * kv.width + pair.y];
  if (is_k && i % half < p.rot / 2)
    v = cuda_rotate(v.x, v.y, cuda_turn(p, rows.pos[row], i % half));
  if (kv_head < 0) {
    cuda_store(qkv.data, qkv.type, from + pair.x, v.x);
    cuda_store(qkv.data, qkv.type, from + pair.y, v.y);
    return;
  }
  at = cuda_kv_at(kv, seq, rows.pos[row], is_k ? kv_head : kv_head - kv.heads);
  cuda_store(is_k ? kv.k : kv.v, kv.type, at + pair.x, v.x);
  cuda_store(is_k ? kv.k : kv.v, kv.type, at + pair.y, v.y);
}

/* Rows of a quantised weight, 16 bytes a thread, as halves. */
__global__ void cuda_widen_kernel(__half *to, cuda_weight w, int first, int rows) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / w.vectors;
  int v = (int)(i % w.vectors), k;
  uint4 q;
  if (row >= rows) return;
  q = ((const uint4 *)w.data)[(first + row) * w.vectors + v];
  if (w.type == TFM_Q8_0) {
    float f[16], scale = __half2float(w.scale[(first + row) * (w.cols / 32) + v / 2]);
    cuda_widen<TFM_Q8_0>(f, q);
#pragma unroll
    for (k = 0; k < 8; k++)
      ((__half2 *)(to + row * w.cols + v * 16))[k] =
          __floats2half2_rn(f[2 * k] * scale, f[2 * k + 1] * scale);
  } else {
    __half2 h[16], scale = __half2half2(w.scale[(first + row) * (w.cols / 32) + v]);
    cuda_widen_q4(h, q);
#pragma unroll
    for (k = 0; k < 16; k++)
      ((__half2 *)(to + row * w.cols + v * 32))[k] = __hmul2(h[k], scale);
  }
}

typedef struct cuda_product_shape { int32_t m, n, k, ldx, ldy; tfm_type in, out; bool add, bias; }
  cuda_product_shape;

typedef struct cuda_choice_of { /* cuBLASLt's kernel for a shape */
  cuda_product_shape shape;
  cublasLtMatmulAlgo_t algorithm;
} cuda_choice_of;

enum { CUDA_SHAPES = 128 };

typedef struct cuda_lt { /* for tfm_dev.state */
  cublasLtHandle_t handle;
  cuda_choice_of choice[CUDA_SHAPES];
  int choices;
} cuda_lt;

typedef struct cuda_lt_job { /* the descriptions of one product */
  cublasLtMatmulDesc_t what;
  cublasLtMatrixLayout_t w, x, y;
} cuda_lt_job;

static bool cuda_lt_check(tfm_dev *d, cublasStatus_t status, const char *call) {
  if (status == CUBLAS_STATUS_SUCCESS) return true;
  tfm_dev_fail(d, status == CUBLAS_STATUS_ALLOC_FAILED ? TFM_E_MEMORY : TFM_E_DEVICE,
               "CUDA device %d: %s: cuBLAS status %d", (int)d->index, call, (int)status);
  return false;
}

static cudaDataType_t cuda_data_type(tfm_type type) {
  return type == TFM_F32 ? CUDA_R_32F : type == TFM_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* y [m, n] = x w^T, by columns as cuBLAS has it: y^T = w x^T. */
static bool cuda_lt_describe(tfm_dev *d, cuda_lt_job *j, const cuda_product_shape *p, int32_t ldw,
                             const float *bias) {
  cublasOperation_t turned = CUBLAS_OP_T;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  cudaDataType_t in = cuda_data_type(p->in), out = cuda_data_type(p->out);
  memset(j, 0, sizeof *j);
  return cuda_lt_check(d, cublasLtMatmulDescCreate(&j->what, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                       "cublasLtMatmulDescCreate") &&
         cuda_lt_check(d, cublasLtMatmulDescSetAttribute(j->what, CUBLASLT_MATMUL_DESC_TRANSA,
                                                         &turned, sizeof turned), "TRANSA") &&
         (!bias ||
          (cuda_lt_check(d, cublasLtMatmulDescSetAttribute(j->what, CUBLASLT_MATMUL_DESC_EPILOGUE,
                                                           &epilogue, sizeof epilogue),
                         "EPILOGUE") &&
           cuda_lt_check(d, cublasLtMatmulDescSetAttribute(
                                j->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias),
                         "BIAS_POINTER"))) &&
         cuda_lt_check(d, cublasLtMatrixLayoutCreate(&j->w, in, (uint64_t)p->k, (uint64_t)p->n,
                                                     ldw), "cublasLtMatrixLayoutCreate") &&
         cuda_lt_check(d, cublasLtMatrixLayoutCreate(&j->x, in, (uint64_t)p->k, (uint64_t)p->m,
                                                     p->ldx), "cublasLtMatrixLayoutCreate") &&
         cuda_lt_check(d, cublasLtMatrixLayoutCreate(&j->y, out, (uint64_t)p->n, (uint64_t)p->m,
                                                     p->ldy), "cublasLtMatrixLayoutCreate");
}

static void cuda_lt_forget(cuda_lt_job *j) {
  if (j->y) cublasLtMatrixLayoutDestroy(j->y);
  if (j->x) cublasLtMatrixLayoutDestroy(j->x);
  if (j->w) cublasLtMatrixLayoutDestroy(j->w);
  if (j->what) cublasLtMatmulDescDestroy(j->what);
}

/* Every operand lies on 16 bytes at least; unless told, cuBLASLt counts on 256. */
static bool cuda_lt_aligned(tfm_dev *d, cublasLtMatmulPreference_t preference) {
  static const cublasLtMatmulPreferenceAttributes_t which[4] = {
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
  uint32_t bytes = 16;
  int i;
  for (i = 0; i < 4; i++)
    if (!cuda_lt_check(d, cublasLtMatmulPreferenceSetAttribute(preference, which[i], &bytes,
                                                               sizeof bytes), "MIN_ALIGNMENT"))
      return false;
  return true;
}

/* The first that cuBLASLt proposes, remembered. */
static bool cuda_lt_choose(tfm_dev *d, const cuda_lt_job *j, const cuda_product_shape *p,
                           size_t space, cublasLtMatmulAlgo_t *out) {
  cuda_lt *lt = cuda_of(d)->lt;
  cublasLtMatmulPreference_t preference = NULL;
  cublasLtMatmulHeuristicResult_t found;
  int i, n = 0;
  for (i = 0; i < lt->choices; i++)
    if (memcmp(&lt->choice[i].shape, p, sizeof *p) == 0)
      return *out = lt->choice[i].algorithm, true;
  if (cuda_lt_check(d, cublasLtMatmulPreferenceCreate(&preference), "preference") &&
      cuda_lt_check(d, cublasLtMatmulPreferenceSetAttribute(
                           preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space,
                           sizeof space), "MAX_WORKSPACE_BYTES") &&
      cuda_lt_aligned(d, preference))
    cuda_lt_check(d, cublasLtMatmulAlgoGetHeuristic(lt->handle, j->what, j->w, j->x, j->y, j->y,
                                                    preference, 1, &found, &n),
                  "cublasLtMatmulAlgoGetHeuristic");
  if (preference) cublasLtMatmulPreferenceDestroy(preference);
  if (d->status == TFM_OK && n == 0)
    tfm_dev_fail(d, TFM_E_DEVICE, "cuBLASLt has no kernel for a product of %d x %d x %d", p->m,
                 p->n, p->k);
  if (d->status != TFM_OK) return false;
  *out = found.algo;
  if (lt->choices < CUDA_SHAPES) {
    lt->choice[lt->choices].shape = *p;
    lt->choice[lt->choices++].algorithm = found.algo;
  }
  return true;
}

typedef struct cuda_pass { /* what a layer computes with, in tfm_dev.work */
  tfm_mat h, qkv, up, act; /* of 16 bits */
  tfm_type type;
  __half *wide;            /* widened weights */
  size_t wide_bytes;
  void *space;             /* cuBLAS's own */
  size_t space_bytes;
} cuda_pass;

/* y = x w^T, or y += x w^T + bias; w as it lies, of 16 bits. */
static void cuda_lt_product(tfm_dev *d, const cuda_pass *pass, tfm_mat y, tfm_mat x, const void *w,
                            int32_t ldw, const float *bias, bool add) {
  cuda_product_shape p;
  cublasLtMatmulAlgo_t algorithm;
  cuda_lt_job job;
  float one = 1, beta = add ? 1.0f : 0.0f;
  memset(&p, 0, sizeof p);
  p.m = y.rows, p.n = y.cols, p.k = x.cols, p.ldx = (int32_t)x.stride, p.ldy = (int32_t)y.stride;
  p.in = x.type, p.out = y.type, p.add = add, p.bias = bias != NULL;
  if (d->status != TFM_OK) return;
  if (cuda_lt_describe(d, &job, &p, ldw, bias) &&
      cuda_lt_choose(d, &job, &p, pass->space_bytes, &algorithm))
    cuda_lt_check(d, cublasLtMatmul(cuda_of(d)->lt->handle, job.what, &one, w, job.w, x.data, job.x,
                                    &beta, y.data, job.y, y.data, job.y, &algorithm, pass->space,
                                    pass->space_bytes, cuda_stream(d)), "cublasLtMatmul");
  cuda_lt_forget(&job);
}

static size_t cuda_size(tfm_type type) { return type == TFM_F32 ? 4 : 2; }

static tfm_mat cuda_columns(tfm_mat m, int32_t first, int32_t cols) {
  m.data = (char *)m.data + (size_t)first * cuda_size(m.type);
  m.cols = cols;
  return m;
}

/* The same for packed weights: quantised ones in stretches of rows. */
static void cuda_gemm(tfm_dev *d, const cuda_pass *pass, tfm_mat y, tfm_mat x, const cuda_weight *w,
                      const float *bias, bool add) {
  int32_t first, n, most = (int32_t)(pass->wide_bytes / 2 / (size_t)w->cols) / 8 * 8;
  if (!w->scale) {
    cuda_lt_product(d, pass, y, x, w->data, cuda_values(*w), bias, add);
    return;
  }
  for (first = 0; first < w->rows && d->status == TFM_OK; first += n) {
    n = w->rows - first < most ? w->rows - first : most;
    cuda_run(d, cuda_widen_kernel, dim3(cuda_blocks((int64_t)n * w->vectors, 256)), 256, 0,
             pass->wide, *w, (int)first, (int)n);
    cuda_lt_product(d, pass, cuda_columns(y, first, n), x, pass->wide, w->cols,
                    bias ? bias + first : NULL, add);
  }
}

static tfm_mat cuda_take_mat(cuda_room *r, tfm_type type, int32_t rows, int32_t cols) {
  tfm_mat m;
  m.type = type;
  m.rows = rows;
  m.cols = cols;
  m.stride = (cols + 7) / 8 * 8;
  m.data = cuda_take(r, (size_t)rows * (size_t)m.stride, cuda_size(type));
  return m;
}

static size_t cuda_least_of(size_t a, size_t b) { return a < b ? a : b; }

static cuda_pass cuda_pass_lay_out(cuda_room *r, const tfm_net *net, tfm_type type, int32_t rows) {
  size_t inner = (size_t)(net->heads * net->head_width), c = (size_t)net->width;
  size_t widest = (size_t)net->ffn_width * (net->gated ? 2 : 1), wide = inner > c ? inner : c;
  cuda_pass p;
  if (widest < inner * 3) widest = inner * 3;
  p.type = type;
  p.h = cuda_take_mat(r, type, rows, (int32_t)wide);
  p.qkv = cuda_take_mat(r, type, rows, (net->heads + 2 * net->kv_heads) * net->head_width);
  p.up = cuda_take_mat(r, type, rows, net->ffn_width * (net->gated ? 2 : 1));
  p.act = cuda_take_mat(r, type, rows, net->ffn_width);
  p.wide_bytes = cuda_least_of(widest * cuda_larger(wide, (size_t)net->ffn_width) * 2,
                               (size_t)64 << 20);
  p.wide = (__half *)cuda_take(r, p.wide_bytes, 1);
  p.space_bytes = c < 512 ? (size_t)1 << 20 : (size_t)32 << 20;
  p.space = cuda_take(r, p.space_bytes, 1);
  return p;
}

/* The activations' type that all four matrices agree with; F32: this is no layer for 16 bits. */
static tfm_type cuda_layer_type(const tfm_layer *l) {
  const tfm_weight *w[4] = {&l->qkv, &l->out, &l->up, &l->down};
  tfm_type type = TFM_F32;
  int i;
  for (i = 0; i < 4; i++) {
    tfm_type mine = cuda_packed(w[i])->scale ? TFM_F16 : cuda_packed(w[i])->type;
    if (i && mine != type) return TFM_F32;
    type = mine;
  }
  return type;
}

static bool cuda_layer_knows(tfm_dev *d, tfm_mat x, const tfm_net *net, const tfm_layer *l,
                             const tfm_kv *kv) {
  const tfm_weight *w[4] = {&l->qkv, &l->out, &l->up, &l->down};
  int i;
  for (i = 0; i < 4; i++)
    if (w[i]->cols % 8 || w[i]->rows % 8) return false;
  return d->work && cuda_of(d)->pass_at && x.rows > CUDA_COLUMNS && kv->table && !net->experts &&
         kv->width % 2 == 0 && cuda_layer_plain(l);
}

static bool cuda_lt_open(tfm_dev *d) {
  cuda_lt *lt = cuda_of(d)->lt;
  return lt->handle || cuda_lt_check(d, cublasLtCreate(&lt->handle), "cublasLtCreate");
}

template <bool BF>
static void cuda_flash_run(tfm_dev *d, const cuda_attn *a) {
  int width = a->kv.width;
  dim3 grid(cuda_blocks(a->rows.n, CUDA_TILE), (unsigned)a->p.heads);
  size_t shared = (size_t)4 * CUDA_KEYS * 2 * (size_t)width;
  cuda_run(d, width == 64 ? cuda_flash_kernel<64, BF> : cuda_flash_kernel<128, BF>, grid, 256,
           shared, *a);
}

static void cuda_layer_attend(tfm_dev *d, cuda_attn *a) {
  int width = a->kv.width;
  a->tiled = (width == 64 || width == 128) && a->kv.type == a->q.type && a->rows.n >= 16;
  if (a->tiled && a->kv.type == TFM_F16) cuda_flash_run<false>(d, a);
  else if (a->tiled) cuda_flash_run<true>(d, a);
  cuda_attn_run(d, a);
}

static void cuda_layer_run(tfm_dev *d, cuda_pass *p, tfm_mat x, const tfm_net *net,
                           const tfm_layer *l, const tfm_kv *kv, const tfm_rows *rows) {
  int32_t inner = net->heads * net->head_width;
  tfm_mat none = {};
  cuda_attn a = {cuda_columns(p->h, 0, inner), cuda_columns(p->qkv, 0, inner), *kv, *rows, NULL,
                 l->attn, net->heads / net->kv_heads, false};
  cuda_norm norm1 = {l->norm1, l->norm1_bias, net->norm}, norm2 = {l->norm2, l->norm2_bias,
                                                                  net->norm};
  size_t shared = sizeof(float) * (size_t)(CUDA_WARPS + net->width);
  dim3 each((unsigned)x.rows);
  tfm_mat h = cuda_columns(p->h, 0, net->width);
  tfm_mat up = cuda_columns(p->up, 0, l->up.rows), act = cuda_columns(p->act, 0, l->down.cols);
  norm1.p.groups = norm2.p.groups = 0;
  cuda_run(d, cuda_norm_kernel, each, CUDA_THREADS, shared, h, x, none, (float *)NULL, norm1);
  cuda_gemm(d, p, p->qkv, h, cuda_packed(&l->qkv), NULL, false);
  cuda_run(d, cuda_append_kernel, dim3((unsigned)x.rows, cuda_blocks(p->qkv.cols / 2, 256)), 256, 0,
           p->qkv, l->qkv_bias, l->rope, *kv, *rows, (int)net->heads);
  cuda_layer_attend(d, &a);
  cuda_gemm(d, p, x, a.y, cuda_packed(&l->out), l->out_bias, true);
  cuda_run(d, cuda_norm_kernel, each, CUDA_THREADS, shared, h, x, none, (float *)NULL, norm2);
  cuda_gemm(d, p, up, h, cuda_packed(&l->up), NULL, false);
  cuda_run(d, cuda_glu_kernel, dim3((unsigned)x.rows, cuda_blocks(act.cols, 256)), 256, 0,
           act, up, l->up_bias, net->act, net->gated);
  cuda_gemm(d, p, x, act, cuda_packed(&l->down), l->down_bias, true);
}

static bool cuda_layer_entry(tfm_dev *d, tfm_mat x, const tfm_net *net, int32_t index,
                             const tfm_kv *kv, const tfm_rows *rows) {
  const tfm_layer *l = &net->layer[index];
  cuda_room room;
  cuda_pass pass;
  tfm_type type;
  if (d->status != TFM_OK) return true; /* nothing is to be done any more */
  if (!cuda_layer_knows(d, x, net, l, kv)) return false;
  type = cuda_layer_type(l);
  if (type == TFM_F32 || !cuda_enter(d) || !cuda_lt_open(d)) return false;
  room.base = (char *)cuda_align256((size_t)d->work + cuda_of(d)->pass_at); /* cuBLAS wants that */
  room.used = 0;
  pass = cuda_pass_lay_out(&room, net, type, x.rows);
  cuda_layer_run(d, &pass, x, net, l, kv, rows);
  return true;
}

/* attn where q has 16 bits: as `layer` has it computed, unless the bits must not depend on the rows
   beside, or more than y is wanted. */
static void cuda_attn_halves(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv,
                             const tfm_rows *rows, float *lse, const tfm_attn *p) {
  cuda_attn a = {y, q, *kv, *rows, lse, *p, p->heads / kv->heads, false};
  bool aligned = (uintptr_t)q.data % 16 == 0 && q.stride % 8 == 0 && y.stride % 2 == 0;
  bool plain = q.type != TFM_F32 && kv->table && !lse && !p->probs && p->dropout.rate == 0;
  if (d->deterministic || !plain || !aligned) cuda_attn_entry(d, y, q, kv, rows, lse, p);
  else if (cuda_enter(d)) cuda_layer_attend(d, &a);
}

/* ---- What tfm_dev.state holds for the parts above ---- */

static void cuda_parts_free(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  if (s->lt && s->lt->handle) cublasLtDestroy(s->lt->handle);
  if (s->lt) cuda_host_memory(d, s->lt, sizeof *s->lt, 0);
  if (s->decoder) cuda_host_memory(d, s->decoder, sizeof *s->decoder, 0);
  s->lt = NULL;
  s->decoder = NULL;
}

static bool cuda_parts_make(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  s->lt = (cuda_lt *)cuda_host_memory(d, NULL, 0, sizeof *s->lt);
  s->decoder = (cuda_decoder *)cuda_host_memory(d, NULL, 0, sizeof *s->decoder);
  if (s->lt) memset(s->lt, 0, sizeof *s->lt);
  if (s->decoder) memset(s->decoder, 0, sizeof *s->decoder);
  if (!s->lt || !s->decoder)
    tfm_dev_fail(d, TFM_E_MEMORY, "out of memory for the state of a CUDA device");
  return d->status == TFM_OK;
}

/* ---- The table ---- */

static size_t cuda_work_bytes(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                              int32_t context) {
  cuda_room room = {NULL, 0};
  cuda_step step;
  (void)sequences;
  cuda_step_lay_out(&step, &room, net, context, cuda_of(d)->processors);
  cuda_of(d)->pass_at = room.used;
  cuda_pass_lay_out(&room, net, TFM_F16, rows);
  return room.used + 256;
}

static const tfm_backend cuda_table = {
  TFM_BACKEND_ABI, "cuda", TFM_F32, TFM_F32, 1, true,
  cuda_open, cuda_close, cuda_sync, cuda_alloc, cuda_release,
  cuda_put, cuda_get, cuda_copy, cuda_zero,
  cuda_alloc_shared, cuda_release_shared, cuda_work_bytes, cuda_replay, cuda_record,
  cuda_pack_size, cuda_pack, cuda_unpack,
  cuda_cast, cuda_embed, cuda_gather, cuda_norm_entry, cuda_matmul, cuda_rope,
  cuda_kv_put, cuda_attn_halves,
  cuda_glu, cuda_route, cuda_matmul_moe, cuda_combine, cuda_sample, cuda_top,
  cuda_layer_entry, cuda_decode,
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,       /* loss matmul_dx matmul_dw epilogue_bwd
                                                           norm_bwd attn_bwd glu_bwd embed_bwd */
  NULL, NULL, NULL, NULL, NULL, NULL,                   /* route_bwd combine_bwd moe_dx moe_dw sumsq
                                                           adamw */
  cuda_moe_bias, cuda_add_gated, NULL, NULL,            /* moe_bias_bwd add_gated_bwd */
  cuda_mark, cuda_usage
};

extern "C" const tfm_backend *tfm_backend_cuda(void) { return &cuda_table; }
