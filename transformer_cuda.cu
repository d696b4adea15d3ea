/* transformer_cuda.cu - CUDA kernels for transformer.h                       MIT licence: LICENSE

   Optional: nvcc -arch=sm_90a -O3 -DTFM_USE_CUDA app.c transformer_cuda.cu -lcublasLt

   How it works. transformer.h computes through a table of kernels (see >>backend there). This file
   hands out such a table, tfm_backend_cuda. Each open makes a stream of its own; work is enqueued
   on it in order, and a failed CUDA call becomes the device's sticky failure (tfm_dev_fail), which
   sync reports. When kernels of the reference are to run between (host_visible), memory is managed.

   Activations and the residual stream are F32. Where a few rows are multiplied nothing but the
   weights is worth saving: cuda_dots streams W through the tensor cores and multiplies it by x in
   parts of 16 bits, whose sum x is, so that nothing is rounded but the F32 sums. These run in one
   order, which depends on nothing but the shape of W; the norm and the softmax are written once for
   all callers, too. So the bits of a row do not depend on the batch (rule 7), and one token by
   `decode` has the bits of `matmul`.

   `decode` is a chain of small kernels for a token, a graph for four; each asks for its weights
   before the kernel that it follows is complete.

   Faster ways lie beside that. `layer` takes passes of more than one row whose weights have 16 bits
   or fewer, with activations of 16 bits: on Hopper up to CUDA_FEW rows by kernels of its own
   (cuda_few_kernel), again a chain of early starts; more rows, and elsewhere more than
   CUDA_COLUMNS, through cuBLASLt, and a flash attention on the tensor cores. cuda_matmul_many takes
   what else is large and of 16 bits, with x in two parts. F32 weights are never taken there. Which
   of cuBLASLt's kernels a shape gets is found by timing them.

   Of cuBLASLt and of tiles of attention the bits depend on the number of rows. An engine that is to
   be deterministic goes without them (rule 7 of >>backend): there cuda_few_kernel, and attention
   row by row, serve any number of rows, one too, and `decode` is declined; where they do not know
   the weights, it is cuda_dots as above.

   Blocks of every type lie as numbers of 4 bits or 8 with their scales and offsets apart, and are
   multiplied as whole numbers, by x as whole numbers of 16 bits with a scale for each 128.

   What is declined: the backward entries, and weights for them. Nothing mutable is static; what
   must last lives in tfm_dev.state. */

#include "transformer.h"
#include <cublasLt.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
  CUDA_CREW = 256,        /* threads of a block that multiplies, normalises or attends */
  CUDA_CREW_WARPS = CUDA_CREW / 32,
  CUDA_THREADS = 512,     /* of one that ends a token */
  CUDA_SAMPLERS = 1024,   /* of one that samples, which has a multiprocessor for itself */
  CUDA_WARPS = CUDA_SAMPLERS / 32, /* at most */
  CUDA_CLUSTER = 8,       /* of which up to so many take a row, where clusters are possible */
  CUDA_COLUMNS = 4,       /* rows of x that share one reading of W */
  CUDA_SHARED = 220 << 10, /* bytes of shared memory that a block may ask for */
  CUDA_KEYS = 64,         /* keys in a tile of attention */
  CUDA_STAGE = 32 << 20,  /* bytes of a pinned buffer for uploads */
  CUDA_RING = 1 << 20,    /* bytes of pinned memory for what passes need */
  CUDA_GRAPHS = 64,       /* recorded passes, by their number of rows */
  CUDA_RECORDED = 256,    /* rows of the largest */
  CUDA_MARKS = 128        /* changes of the kind of work that may be on their way */
};

/* ---- Device ---- */

typedef struct cuda_graph {
  uint64_t key;
  uint32_t asked; /* how often; the second time it is worth recording */
  uint64_t used;  /* when it was last asked for, in requests */
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
  uint64_t requests; /* for one of them */
  bool recording;
  bool chained; /* launches may begin before what they follow is complete: cuda_follow */
  bool chains;  /* the device can do that */
  int cluster;  /* blocks that choose a token together */
  struct cuda_lt *lt;
  struct cuda_decoder *decoder;
  size_t parts_at, parts_bytes; /* the same of cuda_matmul_many */
  size_t pass_at; /* where the buffers of `layer` begin in tfm_dev.work; 0: there are none */
  size_t tiles_at;    /* ... and cuda_tiles, for so many rows */
  int32_t tiles_rows;
  size_t wide_at;     /* a layer's cache of Q8_0 in 16 bits, for so many sequences; 0: none */
  int32_t wide_sequences, wide_context;
  int32_t tiles_layer; /* whose attention last used them: they are a pass's, whose layers ascend */
  PFN_cuTensorMapEncodeTiled_v12000 encode; /* NULL: nothing is compiled for Hopper */
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
static bool cuda_hopper_open(tfm_dev *d);

#ifndef __CUDA_ARCH_LIST__
#define __CUDA_ARCH_LIST__ 0
#endif
static const int cuda_archs[] = {__CUDA_ARCH_LIST__}; /* compiled for, the least first */

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
  int major = 0;
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
      cuda_check(d, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d->index),
                 "cudaDeviceGetAttribute") &&
      cuda_check(d, cudaHostAlloc((void **)&s->ring, CUDA_RING, cudaHostAllocDefault),
                 "cudaHostAlloc") &&
      (major != 9 || cuda_hopper_open(d))) {
    s->chains = major >= 9;
    s->cluster = major >= 9 && cuda_archs[0] >= 900 ? CUDA_CLUSTER : 1;
    return TFM_OK;
  }
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
  s->requests++;
  for (i = 0; i < s->graphs; i++)
    if (s->graph[i].key == key) return s->graph[i].used = s->requests, &s->graph[i];
  return NULL;
}

/* A place for one more: where all are taken, that of the one not asked for the longest. */
static cuda_graph *cuda_graph_add(tfm_dev *d, uint64_t key) {
  cuda_state *s = cuda_of(d);
  cuda_graph *g = s->graph;
  int i;
  if (s->graphs < CUDA_GRAPHS) g = &s->graph[s->graphs++];
  else
    for (i = 1; i < CUDA_GRAPHS; i++)
      if (s->graph[i].used < g->used) g = &s->graph[i];
  if (g->exec) {
    cuda_wait(d); /* it may be running */
    cuda_check(d, cudaGraphExecDestroy(g->exec), "cudaGraphExecDestroy");
  }
  *g = {key, 0, s->requests, NULL};
  return g;
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
  if ((uint32_t)key > CUDA_RECORDED || !cuda_enter(d)) return false;
  if (!g) g = cuda_graph_add(d, key);
  if (++g->asked < 2 || d->status != TFM_OK) return false;
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
  if (cuda_of(d)->recording || !cuda_enter(d)) return;
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

/* One launch, of clusters of that many blocks; shared memory beyond 48 KB is asked for. */
template <typename... P, typename... A>
static void cuda_run_clusters(tfm_dev *d, void (*kernel)(P...), int cluster, dim3 grid, int threads,
                              size_t shared, A... arguments) {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute[2] = {};
  if (cuda_of(d)->chained && cuda_of(d)->chains) {
    attribute[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attribute[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attribute[config.numAttrs].val.clusterDim.x = (unsigned)cluster;
    attribute[config.numAttrs].val.clusterDim.y = attribute[config.numAttrs].val.clusterDim.z = 1;
    config.numAttrs++;
  }
  config.attrs = attribute;
  config.gridDim = grid;
  config.blockDim = dim3((unsigned)threads);
  config.dynamicSmemBytes = shared;
  config.stream = cuda_stream(d);
  if (grid.x == 0 || grid.y == 0 || d->status != TFM_OK) return;
  if (shared > (24 << 10) && /* with what a kernel has of its own, 48 KB at most */
      !cuda_check(d, cudaFuncSetAttribute((const void *)kernel,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          (int)shared), "cudaFuncSetAttribute")) return;
  cuda_check(d, cudaLaunchKernelEx(&config, kernel, P(arguments)...), "cudaLaunchKernelEx");
}

template <typename... P, typename... A>
static void cuda_run(tfm_dev *d, void (*kernel)(P...), dim3 grid, int threads, size_t shared,
                     A... arguments) {
  cuda_run_clusters(d, kernel, 1, grid, threads, shared, arguments...);
}

/* In every kernel of a chain: the next one may start; what went before is complete. */
__device__ __forceinline__ void cuda_launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void cuda_follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" : : : "memory");
#endif
}

/* For those that have nothing to do before. */
__device__ __forceinline__ void cuda_take_turn() {
  cuda_launch_next();
  cuda_follow();
}

static size_t cuda_size(tfm_type type) { return type == TFM_F32 ? 4 : 2; }

static unsigned cuda_blocks(int64_t n, int64_t each) { return (unsigned)((n + each - 1) / each); }

/* ---- Number formats ---- */

/* How values of a type lie here: bits of one; how many share a scale, which are those of 2^shared
   times 16 bytes (0: there are no scales). An offset is beside the scale where numbers times scales
   are not yet the values. */
typedef struct cuda_shape { int bits, group, shared; bool offset; } cuda_shape;

__host__ __device__ static constexpr cuda_shape cuda_shape_of(tfm_type type) {
  switch (type) {
    case TFM_F32: return {32, 0, 0, false};
    case TFM_F16: case TFM_BF16: return {16, 0, 0, false};
    case TFM_F8_E4M3: return {8, 64, 2, false};
    case TFM_Q8_0: return {8, 32, 1, false};
    case TFM_Q4_0: return {4, 32, 0, false};
    case TFM_Q4_1: return {4, 32, 0, true};
    case TFM_Q6_K: return {8, 16, 0, true};
    default: return {0, 0, 0, false}; /* does not lie here */
  }
}

/* Whether values are whole numbers beside scales. */
__host__ __device__ static constexpr bool cuda_numbered(tfm_type type) {
  return cuda_shape_of(type).group > 0 && type != TFM_F8_E4M3;
}

__host__ __device__ static constexpr int cuda_vector_values(tfm_type type) { /* in 16 bytes */
  return 128 / cuda_shape_of(type).bits;
}

/* Two values of E4M3 as halves, which have them all; of one, the upper half is nothing. */
__device__ __forceinline__ uint32_t cuda_e4m3(uint32_t pair) {
  const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)pair, __NV_E4M3);
  return h.x | (uint32_t)h.y << 16;
}

__device__ static float cuda_e4m3_value(uint8_t v) {
  return __half2float(__ushort_as_half((unsigned short)cuda_e4m3(v)));
}

/* What pick(t) says of a type that is known here; in it, t.value is a constant. */
template <int TYPE> struct cuda_type { static constexpr int value = TYPE; };

template <typename PICK> static auto cuda_pick(tfm_type type, PICK pick) {
  switch (type) {
    case TFM_F32: return pick(cuda_type<TFM_F32>());
    case TFM_F16: return pick(cuda_type<TFM_F16>());
    case TFM_BF16: return pick(cuda_type<TFM_BF16>());
    case TFM_Q8_0: return pick(cuda_type<TFM_Q8_0>());
    case TFM_Q4_1: return pick(cuda_type<TFM_Q4_1>());
    case TFM_Q6_K: return pick(cuda_type<TFM_Q6_K>());
    case TFM_F8_E4M3: return pick(cuda_type<TFM_F8_E4M3>());
    default: return pick(cuda_type<TFM_Q4_0>());
  }
}

__device__ static float cuda_load(const void *p, tfm_type type, int64_t i) {
  if (type == TFM_F32) return __ldcg((const float *)p + i);
  if (type == TFM_F16) return __half2float(__ldcg((const __half *)p + i));
  return __bfloat162float(__ldcg((const __nv_bfloat16 *)p + i));
}

/* Number `i` of two halves in a word. */
__device__ __forceinline__ float cuda_scale_of(uint32_t pair, int i) {
  return __half2float(__ushort_as_half((unsigned short)(i ? pair >> 16 : pair)));
}

/* Several, none of which is waited for before all are asked for. */
template <int N>
__device__ __forceinline__ void cuda_load_some(float (&f)[N], const void *p, tfm_type type,
                                               int64_t i) {
  uint16_t half[N] = {};
#pragma unroll
  for (int k = 0; k < N; k++)
    if (type == TFM_F32) f[k] = __ldcg((const float *)p + i + k);
    else half[k] = __ldcg((const uint16_t *)p + i + k);
#pragma unroll
  for (int k = 0; k < N && type != TFM_F32; k++)
    f[k] = type == TFM_F16 ? __half2float(__ushort_as_half(half[k]))
                           : __uint_as_float((uint32_t)half[k] << 16);
}

__device__ static void cuda_store(void *p, tfm_type type, int64_t i, float v) {
  if (type == TFM_F32) ((float *)p)[i] = v;
  else if (type == TFM_F16) ((__half *)p)[i] = __float2half_rn(v);
  else ((__nv_bfloat16 *)p)[i] = __float2bfloat16_rn(v);
}

/* Four, on as many bytes as they take. */
__device__ __forceinline__ void cuda_store4(void *p, tfm_type type, int64_t i, float4 v) {
  const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
  const __nv_bfloat162 c = __floats2bfloat162_rn(v.x, v.y), e = __floats2bfloat162_rn(v.z, v.w);
  if (type == TFM_F32)
    *(float4 *)((float *)p + i) = v;
  else
    *(uint2 *)((uint16_t *)p + i) = type == TFM_F16
                                      ? make_uint2(*(const uint32_t *)&a, *(const uint32_t *)&b)
                                      : make_uint2(*(const uint32_t *)&c, *(const uint32_t *)&e);
}

/* ---- Weights: rows of one type, each filled up with zeros to whole 16 bytes ----
   Formats in blocks lie as they are read: eight rows' first 64 bytes, their next 64 bytes, ..., and
   so do the scales. Numbers of Q4_0 and Q4_1 are kept as four bits with a sign, others as a byte,
   scales and offsets as halves. Q6_K has both for each 16 bytes here, and so holds every format of
   blocks. F8 is a format in blocks of 64, whose scales are 256 times what they stand for, as those
   of weights are small; a half of them is off by 2^-12 at most. */

typedef struct cuda_weight {
  uint8_t *data;       /* [rows, vectors] of 16 bytes; of block formats cuda_vector_at */
  __half *scale;       /* of block formats; an offset follows each where there are offsets */
  tfm_type type;
  int32_t rows, cols;  /* of one expert */
  int32_t vectors;     /* in a row */
} cuda_weight;

static const cuda_weight *cuda_packed(const tfm_weight *w) { return (cuda_weight *)w->host; }

__host__ __device__ static bool cuda_blocked(tfm_type type) {
  return cuda_shape_of(type).group > 0;
}

__host__ __device__ static int cuda_pieces(const cuda_weight &w) { return (w.vectors + 3) / 4; }

/* Rows that a matrix, or an expert's, takes up. */
__host__ __device__ static int cuda_lines(const cuda_weight &w) {
  return cuda_blocked(w.type) ? (w.rows + 7) / 8 * 8 : w.rows;
}

/* Which vector of the weight is number v of a line. */
__host__ __device__ static int64_t cuda_vector_at(const cuda_weight &w, int64_t line, int v) {
  if (!cuda_blocked(w.type)) return line * w.vectors + v;
  return ((line / 8 * cuda_pieces(w) + v / 4) * 8 + line % 8) * 4 + v % 4;
}

/* Where the scale of a vector, by cuda_vector_at, is. */
__host__ __device__ static int64_t cuda_scale_at(const cuda_weight &w, int64_t vector) {
  const cuda_shape shape = cuda_shape_of(w.type);
  return (vector >> shape.shared) * (shape.offset ? 2 : 1);
}

#define CUDA_F8_SCALE 256.0f /* what scales of F8 are multiplied by */

/* Scale and offset of a vector's numbers. */
__device__ static float2 cuda_scale_value(const cuda_weight &w, int64_t vector) {
  const __half *at = w.scale + cuda_scale_at(w, vector);
  const float scale = __half2float(at[0]);
  return make_float2(w.type == TFM_F8_E4M3 ? scale / CUDA_F8_SCALE : scale,
                     cuda_shape_of(w.type).offset ? __half2float(at[1]) : 0.0f);
}

/* The line of a row, counted through all experts. */
__device__ static int64_t cuda_line_of(const cuda_weight &w, int64_t row) {
  return row + row / w.rows * (cuda_lines(w) - w.rows);
}

/* The types of files: how many values a block has, in how many bytes, and what it becomes here.
   Q5_0 loses nothing as Q8_0, nor E5M2 as BF16. What has two scales, or a product of two, keeps its
   numbers, less `middle`: scale and offset, then that of the middle, are within half a unit of a
   half's last place, 2^-12 of either. */
typedef struct cuda_format { int values, bytes; tfm_type here; int middle; } cuda_format;

__host__ __device__ static cuda_format cuda_format_of(tfm_type type) {
  switch (type) {
    case TFM_F32: return cuda_format{1, 4, TFM_F32, 0};
    case TFM_F16: return cuda_format{1, 2, TFM_F16, 0};
    case TFM_BF16: return cuda_format{1, 2, TFM_BF16, 0};
    case TFM_F8_E4M3: return cuda_format{1, 1, TFM_F8_E4M3, 0};
    case TFM_F8_E5M2: return cuda_format{1, 1, TFM_BF16, 0};
    case TFM_Q8_0: return cuda_format{32, 34, TFM_Q8_0, 0};
    case TFM_Q4_0: return cuda_format{32, 18, TFM_Q4_0, 0};
    case TFM_Q4_1: return cuda_format{32, 20, TFM_Q4_1, 8};
    case TFM_Q5_0: return cuda_format{32, 22, TFM_Q8_0, 0};
    case TFM_Q5_1: return cuda_format{32, 24, TFM_Q6_K, 0};
    case TFM_Q4_K: return cuda_format{256, 144, TFM_Q4_1, 8};
    case TFM_Q5_K: return cuda_format{256, 176, TFM_Q6_K, 16};
    case TFM_Q6_K: return cuda_format{256, 210, TFM_Q6_K, 0};
    default: return cuda_format{1, 0, TFM_TYPE_DEFAULT, 0};
  }
}

/* Whether 64 columns of a row share a scale, and halves hold 256 times all of them. */
static bool cuda_scales_fit(const tfm_scales *s, int32_t rows, int32_t cols) {
  int64_t i, n;
  if (cols % 64 || !s->at) return cols % 64 == 0;
  if (s->wide % 64 && s->wide < cols) return false;
  n = (int64_t)((rows + s->tall - 1) / s->tall) * ((cols + s->wide - 1) / s->wide);
  for (i = 0; i < n; i++) {
    float scale = fabsf(s->at[i]) * CUDA_F8_SCALE;
    if (scale != 0 && !(scale >= 6.2e-5f && scale <= 65504.0f)) return false;
  }
  return true;
}

/* What a part becomes by itself. */
static tfm_type cuda_here(const tfm_weight_source *s, const tfm_part *p) {
  tfm_type type = cuda_format_of(p->type).here;
  if (type != TFM_F8_E4M3) return type;
  return !s->transposed && cuda_scales_fit(&p->scales, p->rows, s->cols) ? type : TFM_BF16;
}

/* Blocks that do not become the same are all brought to Q6_K, other parts to F32. */
static tfm_type cuda_target(const tfm_weight_source *s) {
  tfm_type type = cuda_here(s, &s->parts[0]);
  int32_t i;
  if (s->type) return s->type;
  for (i = 1; i < s->part_count; i++) {
    tfm_type other = cuda_here(s, &s->parts[i]);
    if (other != type)
      type = cuda_numbered(type) && cuda_numbered(other) ? TFM_Q6_K : TFM_F32;
  }
  return type;
}

static bool cuda_part_check(tfm_dev *d, const tfm_weight_source *s, const tfm_part *p) {
  tfm_type type = cuda_target(s);
  cuda_format from = cuda_format_of(p->type);
  int group = cuda_blocked(type) ? cuda_shape_of(type).group : 1;
  if (!from.here)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "weights of type %s: this table does not know it",
                 tfm_type_name(p->type));
  else if (!cuda_shape_of(type).bits || (s->type == TFM_Q6_K && p->type != TFM_Q6_K))
    tfm_dev_fail(d, TFM_E_UNSUPPORTED,
                 "weights of type %s: expected F32, F16, BF16, Q8_0, Q4_0, Q4_1 or F8_E4M3",
                 tfm_type_name(type));
  else if (s->transposed && from.values > 1)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "a transposed matrix of type %s: expected a float type",
                 tfm_type_name(p->type));
  else if (s->cols % group || s->cols % from.values)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED,
                 "a matrix with %d columns cannot be %s, whose blocks have %d; choose a float type",
                 (int)s->cols, tfm_type_name(s->cols % group ? type : p->type),
                 s->cols % group ? group : from.values);
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
  w.vectors = (int32_t)(((int64_t)s->cols + cuda_vector_values(w.type) - 1) /
                        cuda_vector_values(w.type));
  return w;
}

/* Vectors of all experts. */
static int64_t cuda_all_vectors(const cuda_weight *w, int32_t experts) {
  return cuda_vector_at(*w, (int64_t)cuda_lines(*w) * (experts ? experts : 1), 0);
}

static size_t cuda_scale_bytes(const cuda_weight *w, int32_t experts) {
  if (!cuda_blocked(w->type)) return 0;
  return (size_t)cuda_scale_at(*w, cuda_all_vectors(w, experts)) * 2;
}

static size_t cuda_larger(size_t a, size_t b) { return a > b ? a : b; }
static size_t cuda_least_of(size_t a, size_t b) { return a < b ? a : b; }
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
  size.device_bytes = cuda_align((size_t)cuda_all_vectors(&w, s->experts) * 16) +
                      cuda_align(cuda_scale_bytes(&w, s->experts));
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
  tfm_scales scales;          /* of the part; on the device those of these lines, */
  int32_t scale_line;         /* the first of which is this */
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

/* A value of a block: scale * q + offset. */
typedef struct cuda_number { float scale, offset; int q; } cuda_number;

__device__ static float cuda_value_of(const cuda_number &n) {
  return __fadd_rn(__fmul_rn(n.scale, (float)n.q), n.offset);
}

/* Value j of a block of 32. */
__device__ static cuda_number cuda_number_of_32(const uint8_t *block, tfm_type type, int j) {
  const float scale = cuda_half_at(block);
  switch (type) {
    case TFM_Q8_0: return {scale, 0, (int8_t)block[2 + j]};
    case TFM_Q4_0: return {scale, 0, cuda_q4(block + 2, j) - 8};
    case TFM_Q5_0: return {scale, 0, cuda_q5(block + 2, j) - 16};
    case TFM_Q4_1: return {scale, cuda_half_at(block + 2), cuda_q4(block + 4, j)};
    default: /* Q5_1 */ return {scale, cuda_half_at(block + 2), cuda_q5(block + 4, j)};
  }
}

/* Value j of a block of 256: of eight groups, or, in Q6_K, of sixteen. */
__device__ static cuda_number cuda_number_of_256(const uint8_t *block, tfm_type type, int j) {
  const uint8_t *six = block + 4, *high = block + 16;
  const uint8_t *nibbles = high + (type == TFM_Q5_K ? 32 : 0);
  int g = j / 32, k = j % 32, q, scale, least;
  if (type == TFM_Q6_K) {
    int n = j / 128, part = j / 32 % 4;
    q = block[64 * n + part % 2 * 32 + k] >> part / 2 * 4 & 15;
    q |= (block[128 + 32 * n + k] >> 2 * part & 3) << 4;
    return {__fmul_rn(cuda_half_at(block + 208), (float)(int8_t)block[192 + j / 16]), 0, q - 32};
  }
  scale = g < 4 ? six[g] & 63 : (six[g + 4] & 15) | six[g - 4] >> 6 << 4;
  least = g < 4 ? six[g + 4] & 63 : six[g + 4] >> 4 | six[g] >> 6 << 4;
  q = nibbles[g / 2 * 32 + k] >> g % 2 * 4 & 15;
  if (type == TFM_Q5_K) q |= (high[k] >> g & 1) << 4;
  return {__fmul_rn(cuda_half_at(block), (float)scale),
          -__fmul_rn(cuda_half_at(block + 2), (float)least), q};
}

/* Number i of a line in a file's format in blocks. */
__device__ static cuda_number cuda_number_of(const uint8_t *line, tfm_type type, int64_t i) {
  const cuda_format f = cuda_format_of(type);
  const uint8_t *block = line + i / f.values * f.bytes;
  return f.values == 256 ? cuda_number_of_256(block, type, (int)(i % 256))
                         : cuda_number_of_32(block, type, (int)(i % 32));
}

/* Value i of a line in a file's format, at any alignment. */
__device__ static float cuda_file_value(const uint8_t *line, tfm_type type, int64_t i) {
  const uint8_t *value = line + i * cuda_format_of(type).bytes; /* where each stands by itself */
  switch (type) {
    case TFM_F32: return __uint_as_float(cuda_u16(value) | cuda_u16(value + 2) << 16);
    case TFM_BF16: return __uint_as_float(cuda_u16(value) << 16);
    case TFM_F16: return cuda_half_at(value);
    case TFM_F8_E5M2: return __half2float(__ushort_as_half((unsigned short)(value[0] << 8)));
    case TFM_F8_E4M3: return cuda_e4m3_value(value[0]);
    default: return cuda_value_of(cuda_number_of(line, type, i));
  }
}

/* Bit position of value j of a block in its 16 bytes. */
__device__ static int cuda_nibble(int j) { return j % 16 * 8 + j / 16 * 4; }

/* 32 numbers go to their place: a byte each, or nibbles, cuda_nibble. */
template <typename NUMBER>
__device__ __forceinline__ void cuda_put_numbers(uint8_t *to, int bits, NUMBER number) {
#pragma unroll 1
  for (int j = 0; j < 4 * bits; j++)
    to[j] = (uint8_t)(bits == 8 ? number(j) : (number(j) & 15) | number(j + 16) << 4);
}

/* 32 values become a block, with ggml's arithmetic; of Q4_1 the offset is that of number 8. */
__device__ static void cuda_quantise(const float *x, tfm_type type, uint8_t *to, __half *scale) {
  const cuda_shape shape = cuda_shape_of(type);
  const float half = shape.offset ? 0.5f : 8.5f;
  float low = x[0], high = x[0], extreme = 0, d, inverse;
  for (int j = 0; j < 32; j++) {
    if (fabsf(x[j]) > fabsf(extreme)) extreme = x[j];
    low = x[j] < low ? x[j] : low, high = x[j] > high ? x[j] : high;
  }
  if (!shape.offset) low = 0;
  d = shape.offset ? (high - low) / 15.0f : shape.bits == 8 ? fabsf(extreme) / 127.0f
                                                            : extreme / -8.0f;
  inverse = d != 0 ? 1.0f / d : 0.0f;
  scale[0] = __float2half_rn(d);
  if (shape.offset) scale[1] = __float2half_rn(low + 8.0f * d);
  cuda_put_numbers(to, shape.bits, [&](int j) {
    const float q = __fmul_rn(x[j] - low, inverse), whole = roundf(q), above = __fadd_rn(q, half);
    if (shape.bits == 8) return whole >= -127.0f && whole <= 127.0f ? (int)whole : 0;
    if (above >= 0.0f) return above < 15.0f ? (int)above - 8 : 7;
    return above < 0.0f || shape.offset ? -8 : 0; /* else NaN */
  });
}

/* 64 values become a block of F8. */
__device__ static void cuda_quantise_f8(const float *x, uint8_t *to, __half *scale) {
  float top = 0, inverse;
  int j;
  for (j = 0; j < 64; j++) top = fmaxf(top, fabsf(x[j]));
  *scale = __float2half_rn(fminf(top / 448.0f * CUDA_F8_SCALE, 65504.0f));
  inverse = __half2float(*scale) != 0 ? CUDA_F8_SCALE / __half2float(*scale) : 0.0f;
  for (j = 0; j < 64; j++)
    to[j] = __nv_cvt_float_to_fp8(x[j] * inverse, __NV_SATFINITE, __NV_E4M3);
}

/* Scales beside each other. */
__host__ __device__ static int cuda_scales_across(const tfm_scales &s, int cols) {
  return s.at ? (cols + s.wide - 1) / s.wide : 0;
}

__device__ static float cuda_piece_scale(const cuda_piece &p, int cols, int row, int col) {
  const tfm_scales &s = p.scales;
  if (!s.at) return 1;
  return s.at[(int64_t)(row / s.tall - p.scale_line) * cuda_scales_across(s, cols) + col / s.wide];
}

/* Where value (row, col) of the piece's part is found. */
__device__ static float cuda_piece_value(const cuda_piece &p, int64_t bytes, int cols, int row,
                                         int col) {
  return p.transposed ? cuda_file_value(p.data + (col - p.first) * bytes, p.type, row)
                      : cuda_file_value(p.data + (row - p.first) * bytes, p.type, col) *
                            cuda_piece_scale(p, cols, row, col);
}

/* Values of a row that a thread packs. */
__host__ __device__ static int cuda_pack_values(tfm_type type) {
  return cuda_shape_of(type).group > 32 ? cuda_shape_of(type).group : 32;
}

/* The numbers of a row from `col` on, as they are in the file, and their scales. */
__device__ static void cuda_keep(const cuda_weight &w, const cuda_piece &p, const uint8_t *line,
                                 int row, int col, uint8_t *to, __half *scale) {
  const cuda_shape shape = cuda_shape_of(w.type);
  const int middle = cuda_format_of(p.type).middle;
  if (w.type == TFM_F8_E4M3) {
#pragma unroll 1
    for (int j = 0; j < 64; j++) to[j] = line[col + j];
    *scale = __float2half_rn(cuda_piece_scale(p, w.cols, row, col) * CUDA_F8_SCALE);
    return;
  }
  cuda_put_numbers(to, shape.bits,
                   [&](int j) { return cuda_number_of(line, p.type, col + j).q - middle; });
#pragma unroll 1
  for (int j = 0; j < 32; j += shape.group) {
    const cuda_number n = cuda_number_of(line, p.type, col + j);
    *scale++ = __float2half_rn(n.scale);
    if (shape.offset) *scale++ = __float2half_rn(n.offset + (float)middle * n.scale);
  }
}

/* A thread for so many values of a row (transposed: rows run fastest, as they do in the file). */
__global__ void cuda_pack_kernel(cuda_weight w, cuda_piece p, int64_t bytes) {
  const int each = cuda_pack_values(w.type), blocks = (w.cols + each - 1) / each;
  const int values = cuda_vector_values(w.type);
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, at;
  int row, col, j;
  uint8_t *to;
  float x[64];
  if (p.transposed) row = (int)(i % p.rows), col = (int)(i / p.rows) * each + p.first;
  else row = (int)(i / blocks) + p.first, col = (int)(i % blocks) * each;
  if ((p.transposed ? col : row) >= p.first + p.lines) return;
  for (j = 0; j < each && !p.keep; j++)
    x[j] = col + j < w.cols ? cuda_piece_value(p, bytes, w.cols, row, col + j) : 0.0f;
  at = cuda_vector_at(w, cuda_line_of(w, p.row + row), col / values);
  to = w.data + at * 16;
  if (!w.scale)
    for (j = 0; j < each && col + j < w.vectors * values; j++) cuda_store(to, w.type, j, x[j]);
  else if (p.keep)
    cuda_keep(w, p, p.data + (row - p.first) * bytes, row, col, to, w.scale + cuda_scale_at(w, at));
  else if (w.type == TFM_F8_E4M3)
    cuda_quantise_f8(x, to, w.scale + cuda_scale_at(w, at));
  else
    cuda_quantise(x, w.type, to, w.scale + cuda_scale_at(w, at));
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

/* The scales of a piece's lines go to a buffer; bytes of it that they took. */
static size_t cuda_stage_scales(const cuda_weight *w, cuda_piece *p, char *to) {
  const tfm_scales *s = &p->scales;
  const int across = cuda_scales_across(*s, w->cols);
  size_t bytes;
  if (!s->at) return 0;
  p->scale_line = p->first / s->tall;
  bytes = (size_t)((p->first + p->lines - 1) / s->tall - p->scale_line + 1) * (size_t)across * 4;
  memcpy(to, s->at + (int64_t)p->scale_line * across, bytes);
  return bytes;
}

/* Sends a piece up and packs it; the next one's copy overlaps with this. */
static bool cuda_pack_piece(tfm_dev *d, const cuda_weight *w, cuda_piece p, const char *from) {
  cuda_state *s = cuda_of(d);
  size_t bytes = cuda_line_bytes(&p, w->cols), scales;
  int i = cuda_stage_next(d);
  const int each = cuda_pack_values(w->type);
  int64_t blocks = (w->cols + each - 1) / each;
  cuda_memcpy_job job;
  if (i < 0) return false;
  job.to = s->stage[i];
  job.from = from;
  job.bytes = bytes * (size_t)p.lines;
  tfm_parallel_for(d, (int32_t)((job.bytes + (1 << 20) - 1) >> 20), 1, cuda_memcpy_part, &job);
  scales = cuda_stage_scales(w, &p, s->stage[i] + cuda_align(job.bytes));
  cuda_move(d, s->device_stage[i], s->stage[i], cuda_align(job.bytes) + scales,
            cudaMemcpyHostToDevice);
  p.data = (const uint8_t *)s->device_stage[i];
  if (scales) p.scales.at = (const float *)(p.data + cuda_align(job.bytes));
  blocks = p.transposed ? (int64_t)((p.lines + each - 1) / each) * p.rows : blocks * p.lines;
  cuda_run(d, cuda_pack_kernel, dim3(cuda_blocks(blocks, 128)), 128, 0, *w, p, (int64_t)bytes);
  return cuda_check(d, cudaEventRecord(s->staged[i], s->stream), "cudaEventRecord");
}

static void cuda_pack_part(tfm_dev *d, const cuda_weight *w, const tfm_weight_source *s,
                           const tfm_part *part, int64_t row) {
  bool keep = w->scale && (!s->type || s->type == part->type) &&
              (w->type != TFM_F8_E4M3 || cuda_here(s, part) == TFM_F8_E4M3);
  cuda_piece p = {NULL, part->type, s->transposed, keep, 0, 0, part->rows, row, part->scales, 0};
  int32_t all = s->transposed ? s->cols : part->rows;
  size_t bytes = cuda_line_bytes(&p, s->cols);
  size_t room = bytes + (size_t)cuda_scales_across(part->scales, s->cols) * 4 + 1;
  int64_t most = (int64_t)((CUDA_STAGE - 64) / room) / 64 * 64;
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
  cuda_weight packed;
  int64_t row = 0;
  int32_t i;
  memset(w, 0, sizeof *w);
  for (i = 0; i < s->part_count; i++)
    if (!cuda_part_check(d, s, &s->parts[i])) return;
  packed = cuda_weight_of(s);
  w->rows = s->rows;
  w->cols = s->cols;
  w->experts = s->experts;
  w->roles = s->roles;
  w->host = host;
  w->device = device;
  w->bytes = (uint64_t)cuda_all_vectors(&packed, s->experts) * 16;
  packed.data = (uint8_t *)device;
  if (cuda_blocked(packed.type)) packed.scale = (__half *)(packed.data + cuda_align(w->bytes));
  w->bytes += cuda_scale_bytes(&packed, s->experts);
  memcpy(host, &packed, sizeof packed);
  if (!cuda_enter(d)) return;
  for (i = 0; i < s->part_count; i++) {
    cuda_pack_part(d, &packed, s, &s->parts[i], row);
    row += s->parts[i].rows;
  }
}

/* Value (row, col) of a packed weight. */
__device__ static float cuda_value(const cuda_weight &w, int64_t row, int col) {
  const int values = cuda_vector_values(w.type);
  const int64_t at = cuda_vector_at(w, cuda_line_of(w, row), col / values);
  const uint8_t *data = w.data + at * 16;
  float2 scale;
  int bit, q;
  if (!w.scale) return cuda_load(data, w.type, col % values);
  scale = cuda_scale_value(w, at);
  if (w.type == TFM_F8_E4M3) return scale.x * cuda_e4m3_value(data[col % values]);
  bit = cuda_nibble(col % values);
  q = values == 16 ? (int8_t)data[col % values] : ((data[bit / 8] >> bit % 8 & 15) ^ 8) - 8;
  return __fadd_rn(__fmul_rn(scale.x, (float)q), scale.y);
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

__device__ __forceinline__ float cuda_exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
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

/* Of what a block's warps left in room [CREW / 32]. */
template <int CREW> __device__ __forceinline__ float cuda_room_sum(const float *room) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < CREW / 128; i += 2) {
    const float4 a = ((const float4 *)room)[i], b = ((const float4 *)room)[i + 1];
    sum += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  }
  return sum;
}

/* Of a block of CREW threads; room: a float for each warp, not used again before the next
   barrier. */
template <int CREW> __device__ static float cuda_crew_sum(float v, float *room) {
  v = cuda_warp_sum(v);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  return cuda_room_sum<CREW>(room);
}

template <int CREW>
__device__ static float cuda_crew_max(float v, float *room) { /* of v >= 0; NaN is largest */
  uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(v));
  if (threadIdx.x % 32 == 0) ((uint32_t *)room)[threadIdx.x / 32] = bits;
  __syncthreads();
  bits = 0;
#pragma unroll
  for (int i = 0; i < CREW / 128; i++) {
    const uint4 a = ((const uint4 *)room)[i];
    bits = max(bits, max(max(a.x, a.y), max(a.z, a.w)));
  }
  return __uint_as_float(bits);
}

/* ---- norm ---- */

typedef struct cuda_norm {
  const float *w, *b;
  tfm_norm p;
} cuda_norm;

/* Values 4k to 4k + 3 of n, zeros beyond. */
template <bool CONSTANT>
__device__ __noinline__ float4 cuda_quad_slow(const float *x, int k, int n) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    v[i] = 4 * k + i >= n ? 0.0f : CONSTANT ? __ldg(x + 4 * k + i) : __ldcg(x + 4 * k + i);
  return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ float4 cuda_quad_const(const float *x, int k, int n) {
  if (4 * k + 3 < n && (uintptr_t)x % 16 == 0) return __ldg((const float4 *)x + k);
  return cuda_quad_slow<true>(x, k, n);
}

/* Four values, or zeros; without a branch, so that several are asked for before one is used. */
__device__ __forceinline__ float4 cuda_quad_if(const float *p, bool wanted) {
  float4 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
               "mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;\n"
               "mov.f32 %2, 0f00000000; mov.f32 %3, 0f00000000;\n"
               "@p ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4]; }"
               : "=&f"(v.x), "=&f"(v.y), "=&f"(v.z), "=&f"(v.w)
               : "l"(p), "r"((unsigned)wanted));
  return v;
}

/* Quads k, k + STRIDE, ... of a row of n values, zeros beyond it, past the first cache, where older
   values may lie. */
template <int STRIDE, int Q>
__device__ __forceinline__ void cuda_quads(float4 (&v)[Q], const float *x, int k, int n) {
  const bool plain = (((unsigned)(uintptr_t)x >> 2 | (unsigned)n) & 3) == 0;
#pragma unroll
  for (int i = 0; i < Q; i++)
    v[i] = cuda_quad_if(x + 4 * (k + i * STRIDE), plain && 4 * (k + i * STRIDE) < n);
  if (plain) return;
#pragma unroll
  for (int i = 0; i < Q; i++) v[i] = cuda_quad_slow<false>(x, k + i * STRIDE, n);
}

__device__ __forceinline__ float cuda_max(float a, float b) { /* NaN is largest */
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

__device__ __forceinline__ float cuda_largest(float4 v) {
  return cuda_max(cuda_max(fabsf(v.x), fabsf(v.y)), cuda_max(fabsf(v.z), fabsf(v.w)));
}

__device__ __forceinline__ float cuda_squares(float4 v) {
  return __fmaf_rn(v.x, v.x, v.y * v.y) + __fmaf_rn(v.z, v.z, v.w * v.w);
}

/* Without what lies beyond the row, of which `left` values are to come. */
__device__ __forceinline__ float4 cuda_within(float4 v, int left) {
  return make_float4(left > 0 ? v.x : 0.0f, left > 1 ? v.y : 0.0f, left > 2 ? v.z : 0.0f,
                     left > 3 ? v.w : 0.0f);
}

/* A row of n values, filled up with zeros to whole `quads`, of which a thread of CREW has
   threadIdx.x + i * CREW. It keeps Q of them; Q 8 will do for any row, but a wider one is fetched
   for every use, half of the quads while the other half is used. */
template <int Q, int CREW> struct cuda_row {
  const float *x;
  int n, quads;
  float4 v[Q < 4 ? 1 : Q / 4][Q < 4 ? Q : 4];
  static constexpr int four = 4 * CREW; /* from a thread's quad to the fourth after it */
  __device__ __forceinline__ bool kept() const { return Q < 8 || quads <= Q * CREW; }
};

template <int Q, int CREW>
__device__ __forceinline__ void cuda_row_fetch(cuda_row<Q, CREW> &r, const float *x, int n,
                                               int quads) {
  r.x = x, r.n = n, r.quads = quads;
#pragma unroll
  for (int half = 0; half < (Q + 3) / 4; half++)
    if (r.kept()) cuda_quads<CREW>(r.v[half], x, (int)threadIdx.x + half * r.four, n);
}

/* use(k, v) for every quad of the thread, in order; what it does to v lasts if the row is kept. */
template <int Q, int CREW, typename USE>
__device__ __forceinline__ void cuda_each(cuda_row<Q, CREW> &r, USE use) {
  auto use_half = [&](auto &v, int first) {
#pragma unroll
    for (int i = 0; i < (Q < 4 ? Q : 4); i++)
      if (first + i * CREW < r.quads) use(first + i * CREW, v[i]);
  };
  if (r.kept()) {
#pragma unroll
    for (int half = 0; half < (Q + 3) / 4; half++)
      use_half(r.v[half], (int)threadIdx.x + half * r.four);
    return;
  }
  if constexpr (Q == 8) {
    int first = threadIdx.x;
    cuda_quads<CREW>(r.v[0], r.x, first, r.n);
#pragma unroll 1
    for (; first < r.quads; first += 2 * r.four) {
      cuda_quads<CREW>(r.v[1], r.x, first + r.four, r.n);
      use_half(r.v[0], first);
      cuda_quads<CREW>(r.v[0], r.x, first + 2 * r.four, r.n);
      use_half(r.v[1], first + r.four);
    }
  }
}

/* Mean, where the norm takes it off, and 1/deviation of a row; each: 1 / n. room: 2 floats for each
   warp. */
template <int Q, int CREW>
__device__ __forceinline__ float2 cuda_row_stats(cuda_row<Q, CREW> &r, const tfm_norm &p,
                                                 float each, float *room) {
  const bool centred = p.kind == TFM_NORM_LAYER;
  float sum = 0, mean = 0;
  cuda_each(r, [&](int, float4 &v) {
    sum += centred ? (v.x + v.y) + (v.z + v.w) : cuda_squares(v);
  });
  if (centred) {
    mean = cuda_crew_sum<CREW>(sum, room) * each;
    sum = 0;
    cuda_each(r, [&](int k, float4 &v) {
      sum += cuda_squares(cuda_within(
          make_float4(v.x - mean, v.y - mean, v.z - mean, v.w - mean), r.n - 4 * k));
    });
  }
  return make_float2(mean, rsqrtf(cuda_crew_sum<CREW>(sum, room + CREW / 32) * each + p.eps));
}

/* Four values, normalised; `left` of them are the row's. */
__device__ __forceinline__ float4 cuda_normed(float4 v, int left, float2 stats, float4 w, float4 b,
                                              float offset) {
  v.x = __fmaf_rn(__fmul_rn(v.x - stats.x, stats.y), w.x + offset, b.x);
  v.y = __fmaf_rn(__fmul_rn(v.y - stats.x, stats.y), w.y + offset, b.y);
  v.z = __fmaf_rn(__fmul_rn(v.z - stats.x, stats.y), w.z + offset, b.z);
  v.w = __fmaf_rn(__fmul_rn(v.w - stats.x, stats.y), w.w + offset, b.w);
  return cuda_within(v, left);
}

/* y = norm(x), or what is added to it; a block for a vector. */
template <int Q>
__global__ void __launch_bounds__(CUDA_CREW) cuda_norm_kernel(tfm_mat y, tfm_mat x,
                                                              tfm_mat residual, float *stats,
                                                              cuda_norm t) {
  __shared__ __align__(16) float room[16];
  const int groups = (int)gridDim.y, n = x.cols / groups, g = (int)blockIdx.y;
  const int64_t row = blockIdx.x, to = row * y.stride + g * n;
  const float *from = (const float *)x.data + row * x.stride + g * n;
  const float *beside = (const float *)residual.data + row * residual.stride + g * n;
  const bool plain = !residual.data && ((to | n) & 3) == 0 && (uintptr_t)y.data % 16 == 0;
  cuda_row<Q, CUDA_CREW> r;
  float4 first[Q]; /* of the weights: there before x is */
  float2 s;
  cuda_launch_next();
  cuda_quads<CUDA_CREW>(first, t.w, (int)threadIdx.x, n);
  cuda_follow();
  cuda_row_fetch(r, from, n, (n + 3) / 4);
  s = cuda_row_stats(r, t.p, 1.0f / (float)n, room);
  cuda_each(r, [&](int k, float4 &v) {
    const float4 w = r.kept() ? first[(k - (int)threadIdx.x) / CUDA_CREW]
                              : cuda_quad_const(t.w, k, n);
    const float4 b = t.b ? cuda_quad_const(t.b, k, n) : make_float4(0, 0, 0, 0);
    const float4 u = cuda_normed(v, n - 4 * k, s, w, b, t.p.offset);
    const float f[4] = {u.x, u.y, u.z, u.w};
    if (plain) return cuda_store4(y.data, y.type, to + 4 * k, u);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (4 * k + i < n)
        cuda_store(y.data, y.type, to + 4 * k + i,
                   residual.data ? beside[4 * k + i] + f[i] : f[i]);
  });
  if (!stats || threadIdx.x) return;
  stats[2 * (row * groups + g)] = s.x;
  stats[2 * (row * groups + g) + 1] = s.y;
}

/* Quads of a row that a thread of CUDA_CREW keeps. */
static int cuda_row_quads(int n) { return n <= 4 * CUDA_CREW ? 1 : n <= 16 * CUDA_CREW ? 4 : 8; }

static void cuda_norm_run(tfm_dev *d, tfm_mat y, tfm_mat x, tfm_mat residual, float *stats,
                          const cuda_norm *t) {
  const int groups = t->p.groups > 0 ? t->p.groups : 1, q = cuda_row_quads(x.cols / groups);
  cuda_run(d, q == 1 ? cuda_norm_kernel<1> : q == 4 ? cuda_norm_kernel<4> : cuda_norm_kernel<8>,
           dim3((unsigned)x.rows, (unsigned)groups), CUDA_CREW, 0, y, x, residual, stats, *t);
}

static void cuda_norm_entry(tfm_dev *d, tfm_mat y, tfm_mat x, const float *w, const float *b,
                            tfm_mat residual, float *stats, const tfm_norm *p) {
  const cuda_norm t = {w, b, *p};
  if (cuda_enter(d)) cuda_norm_run(d, y, x, residual, stats, &t);
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
   On the tensor cores. Beside floats x keeps its 24 bits: a row of x is taken apart into 16-bit
   columns whose sum it is (halves hi + lo, after a power of two has brought its largest value below
   2^14; beside BF16 three of them), and every column is multiplied. Weights are fed in as they lie.
   Bytes and nibbles are multiplied as whole numbers, by x as one of 16 bits in two columns of 8,
   each 128 values of x having a scale of their own, so that one large value costs no others their
   bits; as a scale of W belongs to 32 or 16 values, their columns are zero beside those of others.
   F8 becomes halves, a piece's sum being multiplied by its scale. F32 weights are multiplied
   without tensor cores, in the same order of things.

   A tile is 8 units, a unit two rows of W that belong together: a pair that is rotated, a gate and
   what it opens, rows eight apart; or one row, twice (cuda_teams). A piece is 64 bytes of each of
   the tile's 16 rows: lane 4g + t has 16 bytes of both rows of unit g. A team of `split` warps
   shares a tile: each takes a stretch of pieces, CUDA_AHEAD of them asked for before they are used,
   those that come first even before x is there. The team's sums are added in order: the bits of a
   row depend on the shape of W alone. */

enum { CUDA_AHEAD = 8, CUDA_BLOCKS_AHEAD = 4 }; /* pieces; at most the first */

/* values: in 16 bytes of W. parts: of a value of x. columns: over which a row's sum is spread. */
template <int TYPE> struct cuda_operand {
  static constexpr bool f8 = TYPE == TFM_F8_E4M3, halves = TYPE == TFM_F16 || f8;
  static constexpr cuda_shape shape = cuda_shape_of((tfm_type)TYPE);
  static constexpr bool blocks = shape.group > 0, digits = cuda_numbered((tfm_type)TYPE);
  static constexpr bool offset = shape.offset;
  static constexpr int values = cuda_vector_values((tfm_type)TYPE);
  static constexpr bool nibbles = values == 32;
  static constexpr int parts = TYPE == TFM_F32 ? 1 : TYPE == TFM_BF16 ? 3 : 2;
  static constexpr int columns = halves ? 4 : 8;
  static constexpr int size = TYPE == TFM_F32 ? 4 : digits ? 1 : 2;
  static constexpr int scales = 8 * values; /* where those of x are: after its two digits */
  static constexpr int beside = !nibbles ? 64 : offset ? 32 : 16; /* them, and into all banks */
  static constexpr int pad = size == 2 ? 32 : digits ? beside : 0;
  static constexpr int bytes = 4 * values * parts * size + pad; /* of x, beside a piece */
  static constexpr int stride = blocks ? 32 : 4; /* vectors from a piece of a row to the next */
  static constexpr int shared = 1 << shape.shared; /* vectors that share a scale */
  static constexpr int ahead = blocks ? CUDA_BLOCKS_AHEAD : CUDA_AHEAD; /* what registers hold */
};

static int cuda_piece_bytes(tfm_type type) {
  return cuda_pick(type, [](auto t) { return cuda_operand<t.value>::bytes; });
}

/* Quads of a row, filled up to whole pieces and, where a warp's quads share a scale, to whole
   warps. */
__host__ __device__ static constexpr int cuda_quads_of(tfm_type type, int pieces) {
  return cuda_numbered(type) ? (pieces * cuda_vector_values(type) + 31) / 32 * 32
                             : pieces * cuda_vector_values(type);
}

/* Threads of a block where each keeps q quads of x. As every block reads all of x, of long rows a
   multiprocessor has one block as large as two. */
__host__ __device__ static constexpr int cuda_crew_of(int q) {
  return q == 8 ? 2 * CUDA_CREW : CUDA_CREW;
}

enum { CUDA_NORMED = 64 * CUDA_CREW }; /* wider rows of x are not kept, and not normalised */

/* Shared memory of a block that multiplies M rows of x. */
typedef struct cuda_crew_room {
  float *room;   /* [48] of sums over the block */
  float *factor; /* [M] what sums are to be multiplied by */
  float2 *part;  /* [2, warps, most tiles of columns, 32] sums of a team's warps */
  char *zeros;   /* [32] */
  float4 *norm;  /* [2, values / 4] weights and biases of a norm */
  char *planes;  /* [pieces + CUDA_AHEAD, M, parts, 4 lanes' values] */
} cuda_crew_room;

enum { CUDA_ROOM_FLOATS = 64 };

__host__ __device__ static constexpr int cuda_part_bytes(int crew) { return 2 * crew * 8; }

/* norms: vectors of a norm's weights and biases. */
static size_t cuda_crew_bytes(const cuda_weight *w, int m, int norms, int crew) {
  return sizeof(float) * CUDA_ROOM_FLOATS + (size_t)(m * cuda_part_bytes(crew)) +
         (size_t)((cuda_pieces(*w) + CUDA_AHEAD) * m) * (size_t)cuda_piece_bytes(w->type) +
         sizeof(float) * (size_t)(4 * norms * cuda_quads_of(w->type, cuda_pieces(*w)));
}

template <int TYPE, int M, int CREW>
__device__ __forceinline__ cuda_crew_room cuda_crew_lay_out(float *shared, const cuda_weight &w) {
  cuda_crew_room r;
  r.room = shared;
  r.factor = shared + 48;
  r.zeros = (char *)(shared + 56);
  r.part = (float2 *)(shared + CUDA_ROOM_FLOATS);
  r.planes = (char *)r.part + M * cuda_part_bytes(CREW);
  r.norm = (float4 *)(r.planes + (cuda_pieces(w) + CUDA_AHEAD) * M * cuda_operand<TYPE>::bytes);
  return r;
}

/* Read once: past the first cache. Zeros where it is not wanted, without a branch. */
__device__ __forceinline__ uint4 cuda_stream_load(const uint4 *p, bool wanted) {
  uint4 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
               "mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;\n"
               "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((unsigned)wanted));
  return v;
}

/* The same, but what is not wanted is anything. */
__device__ __forceinline__ uint4 cuda_stream_maybe(const uint4 *p, bool wanted) {
  uint4 v;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
               "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4]; }"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "r"((unsigned)wanted));
  return v;
}

/* c [16, 8] += a [16, 32] b [32, 8] */
__device__ __forceinline__ void cuda_mma8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
      "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* c [16, 8] += a [16, 16] b [16, 8] */
template <bool BF>
__device__ __forceinline__ void cuda_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if (BF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
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

/* Eight values of 16 bits. */
template <int TYPE> __device__ __forceinline__ uint4 cuda_narrow(const float (&f)[8]) {
  constexpr bool BF = TYPE == TFM_BF16;
  return make_uint4(cuda_pack2<BF>(f[0], f[1]), cuda_pack2<BF>(f[2], f[3]),
                    cuda_pack2<BF>(f[4], f[5]), cuda_pack2<BF>(f[6], f[7]));
}

/* The parts of two values: what one of 16 bits does not hold is left to the next. */
template <bool BF> __device__ __forceinline__ uint32_t cuda_part2(float &a, float &b) {
  uint32_t packed = cuda_pack2<BF>(a, b);
  if (BF) {
    a -= __uint_as_float(packed << 16);
    b -= __uint_as_float(packed & 0xffff0000u);
  } else {
    float2 v = __half22float2(*(__half2 *)&packed);
    a -= v.x;
    b -= v.y;
  }
  return packed;
}

/* Byte of a column at which quad `within` of a piece lies; its second half is 32 bytes further on
   where W has 16 bits. Parts beside nibbles are turned against each other: lanes read 16 bytes of
   two of them at a time. F8 is as two pieces of 16 bits, of the first and the last 8 of each 16. */
template <int TYPE> __device__ __forceinline__ int cuda_plane_at(int part, int within) {
  if (TYPE == TFM_F32) return within * 16;
  if (cuda_operand<TYPE>::nibbles) return part * 128 + (within * 4 ^ part * 16);
  if (TYPE == TFM_F8_E4M3)
    return within / 2 % 2 * 128 + part * 64 + (within / 4 * 2 + within % 2) * 4;
  return part * 64 + within * 4;
}

/* Four values of 128 that a warp has, as whole numbers in two digits of 8 bits with a sign, and the
   scale of all 128. What is not above 1e-30 is zero. */
__device__ __forceinline__ float cuda_digits(uint32_t (&digit)[2], float4 v) {
  const float most = 32639.0f; /* 127 * 256 + 127 */
  const float top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(cuda_largest(v))));
  const float by = top > 1e-30f ? __fdividef(most, top) : 0.0f;
  /* 2^23 + 2^22, and 128 for each digit, so that they are found by cutting the number up */
  const float base = 12582912.0f + 32896.0f;
  const uint32_t x = __float_as_uint(__fmaf_rn(v.x, by, base));
  const uint32_t y = __float_as_uint(__fmaf_rn(v.y, by, base));
  const uint32_t z = __float_as_uint(__fmaf_rn(v.z, by, base));
  const uint32_t w = __float_as_uint(__fmaf_rn(v.w, by, base));
  const uint32_t xy = __byte_perm(x, y, 0x5140), zw = __byte_perm(z, w, 0x5140);
  digit[0] = __byte_perm(xy, zw, 0x7632) ^ 0x80808080u;
  digit[1] = __byte_perm(xy, zw, 0x5410) ^ 0x80808080u;
  return top * (1.0f / most); /* NaN of what is not finite: 0 times infinity, too */
}

/* The sum of the values that are beside 16 bytes of W, which its offset is multiplied by. The lanes
   that have them are neighbours. */
template <int TYPE> __device__ __forceinline__ float cuda_sum_beside(float4 v) {
  float sum = (v.x + v.y) + (v.z + v.w);
#pragma unroll
  for (int i = 1; i < cuda_operand<TYPE>::values / 4; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
  return sum;
}

/* Of a piece, what its numbers' sums are to be multiplied by, and of each lane the sum beside. */
template <int TYPE>
__device__ __forceinline__ void cuda_scale_put(char *to, int within, float scale, float4 v) {
  constexpr int each = cuda_operand<TYPE>::values / 4;
  if (cuda_operand<TYPE>::nibbles) scale *= 1.0f / 16; /* as the products are 16 times too large */
  if constexpr (cuda_operand<TYPE>::offset) {
    const float sum = cuda_sum_beside<TYPE>(v);
    if (within % each == 0) ((float2 *)to)[within / each] = make_float2(scale, sum);
  } else if (within == 0) {
    *(float *)to = scale;
  }
}

/* Four values, k times four from the row's first, go to the planes. */
template <int TYPE, int M>
__device__ __forceinline__ void cuda_plane_put(char *planes, int m, int k, float4 v) {
  constexpr int V = cuda_operand<TYPE>::values;
  char *to = planes + (k / V * M + m) * cuda_operand<TYPE>::bytes;
  if constexpr (TYPE == TFM_F32) {
    *(float4 *)(to + cuda_plane_at<TYPE>(0, k % V)) = v;
  } else if constexpr (cuda_operand<TYPE>::digits) {
    uint32_t digit[2];
    const float scale = cuda_digits(digit, v);
    *(uint32_t *)(to + cuda_plane_at<TYPE>(0, k % V)) = digit[0];
    *(uint32_t *)(to + cuda_plane_at<TYPE>(1, k % V)) = digit[1];
    cuda_scale_put<TYPE>(to + cuda_operand<TYPE>::scales, k % V, scale, v);
  } else {
#pragma unroll
    for (int part = 0; part < cuda_operand<TYPE>::parts; part++) {
      char *at = to + cuda_plane_at<TYPE>(part, k % V);
      *(uint32_t *)at = cuda_part2<TYPE == TFM_BF16>(v.x, v.y);
      *(uint32_t *)(at + 32) = cuda_part2<TYPE == TFM_BF16>(v.z, v.w);
    }
  }
}

/* 2^e, of e from -126 to 127. */
__device__ __forceinline__ float cuda_power(int e) {
  return __uint_as_float((uint32_t)(127 + e) << 23);
}

/* What the sums of row m of x are to be multiplied by. */
template <int TYPE>
__device__ __forceinline__ float cuda_factor(const cuda_crew_room &r, int m) {
  return cuda_operand<TYPE>::digits ? 1.0f : r.factor[m];
}

/* What lies beyond a row in the planes: zeros. */
template <int TYPE, int M>
__device__ __forceinline__ void cuda_planes_end(const cuda_crew_room &r, const cuda_weight &w,
                                                int m) {
  constexpr int each = cuda_operand<TYPE>::bytes / 16; /* of a piece; no more than threads */
  const int pieces = cuda_quads_of((tfm_type)TYPE, cuda_pieces(w)) / cuda_operand<TYPE>::values;
  const int piece = pieces + (int)threadIdx.x / each, i = (int)threadIdx.x % each;
  if (threadIdx.x < 8) ((uint32_t *)r.zeros)[threadIdx.x] = 0;
  if (piece >= cuda_pieces(w) + CUDA_AHEAD) return;
  ((uint4 *)(r.planes + (piece * M + m) * cuda_operand<TYPE>::bytes))[i] = make_uint4(0, 0, 0, 0);
}

/* A norm's weights and biases come to shared memory, each quad to the thread that will use it. They
   are there before x is, unlike what a wait for other kernels leaves in the first cache. */
template <int TYPE, int CREW>
__device__ __forceinline__ void cuda_norm_bring(const cuda_crew_room &r, const cuda_weight &w,
                                                const cuda_norm &norm) {
  const int quads = cuda_quads_of((tfm_type)TYPE, cuda_pieces(w));
  auto bring = [&](float4 *to, const float *from) {
    const bool aligned = (uintptr_t)from % 16 == 0;
#pragma unroll 1
    for (int k = threadIdx.x; k < quads; k += CREW)
      if (aligned)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     : : "r"((uint32_t)__cvta_generic_to_shared(to + k)), "l"(from + 4 * k),
                         "r"(4 * max(min(w.cols - 4 * k, 4), 0)));
      else to[k] = cuda_quad_slow<true>(from, k, w.cols);
  };
  if (norm.w) bring(r.norm, norm.w);
  if (norm.b) bring(r.norm + quads, norm.b);
}

/* A row of x is multiplied by the norm's weights, and its sum of squares left to cuda_late: nobody
   waits for it. */
template <int Q, int CREW>
__device__ __forceinline__ void cuda_row_weigh(cuda_row<Q, CREW> &row, const cuda_norm &norm,
                                               const cuda_crew_room &r) {
  float sum = 0;
  asm volatile("cp.async.wait_all;" : : : "memory");
  cuda_each(row, [&](int k, float4 &v) {
    const float4 w = r.norm[k];
    sum += cuda_squares(v);
    v.x *= w.x + norm.p.offset, v.y *= w.y + norm.p.offset;
    v.z *= w.z + norm.p.offset, v.w *= w.w + norm.p.offset;
  });
  sum = cuda_warp_sum(sum);
  if (threadIdx.x % 32 == 0) r.room[threadIdx.x / 32] = sum;
}

/* Whether it is so: where x has scales of its own, and nothing is added. */
template <int TYPE> __device__ __forceinline__ bool cuda_is_late(const cuda_norm &norm) {
  return cuda_operand<TYPE>::digits && norm.w && !norm.b && norm.p.kind == TFM_NORM_RMS;
}

/* What the norm then multiplies sums by; each: 1 / the row's values. */
template <int CREW>
__device__ __forceinline__ float cuda_late(const cuda_crew_room &r, const tfm_norm &p, float each) {
  return rsqrtf(cuda_room_sum<CREW>(r.room) * each + p.eps);
}

template <int Q, int CREW>
__device__ __forceinline__ void cuda_row_norm(cuda_row<Q, CREW> &row, const cuda_norm &norm,
                                              float each, const cuda_crew_room &r) {
  const float2 s = cuda_row_stats(row, norm.p, each, r.room);
  asm volatile("cp.async.wait_all;" : : : "memory");
  cuda_each(row, [&](int k, float4 &v) {
    v = cuda_normed(v, row.n - 4 * k, s, r.norm[k],
                    norm.b ? r.norm[row.quads + k] : make_float4(0, 0, 0, 0), norm.p.offset);
  });
}

/* The power of two by which a row is multiplied before it becomes halves, so that its largest value
   is below 2^14. */
template <int Q, int CREW>
__device__ __forceinline__ int cuda_row_exponent(cuda_row<Q, CREW> &row, const cuda_crew_room &r) {
  float top = 0;
  cuda_each(row, [&](int, float4 &v) { top = cuda_max(top, cuda_largest(v)); });
  top = cuda_crew_max<CREW>(top, r.room + CREW / 16);
  return top > 0 && top < INFINITY ? -max(-100, (int)(__float_as_uint(top) >> 23) - 127 - 13) : 0;
}

/* x [cols], normalised where norm.w is there, becomes row m of the planes. All threads, of which
   each has its own quads; synchronised at the end. */
template <int TYPE, int M, int Q, int CREW>
__device__ __forceinline__ void cuda_planes(const cuda_crew_room &r, const cuda_weight &w,
                                            const float *x, const cuda_norm &norm, float each,
                                            int m) {
  constexpr bool halves = cuda_operand<TYPE>::halves;
  cuda_row<Q, CREW> row;
  float by = 1;
  int e = 0;
  cuda_row_fetch(row, x, w.cols, cuda_quads_of((tfm_type)TYPE, cuda_pieces(w)));
  if (cuda_is_late<TYPE>(norm)) cuda_row_weigh(row, norm, r);
  else if (norm.w) cuda_row_norm(row, norm, each, r);
  if (halves) e = cuda_row_exponent(row, r), by = cuda_power(e);
  cuda_each(row, [&](int k, float4 &v) {
    if (halves) v.x *= by, v.y *= by, v.z *= by, v.w *= by;
    cuda_plane_put<TYPE, M>(r.planes, m, k, v);
  });
  if (!cuda_operand<TYPE>::digits && threadIdx.x == 0)
    r.factor[m] = cuda_power(-e - (TYPE == TFM_F8_E4M3 ? 8 : 0)); /* W's are 2^8 times too large */
  __syncthreads();
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
    if (TYPE == TFM_F8_E4M3) {
      const uint32_t pair[2] = {cuda_e4m3(word[i] & 0xffff), cuda_e4m3(word[i] >> 16)};
      const float2 low = __half22float2(*(const __half2 *)&pair[0]);
      const float2 high = __half22float2(*(const __half2 *)&pair[1]);
      f[4 * i] = low.x, f[4 * i + 1] = low.y, f[4 * i + 2] = high.x, f[4 * i + 3] = high.y;
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
  for (int i = 0; i < 8; i++) { /* two bytes, each in a half; their numbers become 0 to 15 */
    uint32_t w = __byte_perm(word[i / 2] ^ 0x88888888u, 0, i % 2 ? 0x4342 : 0x4140);
    uint32_t a = (w & 0x000f000fu) | base, b = (w & 0x00f000f0u) | base;
    h[i] = __hsub2(*(__half2 *)&a, low);
    h[8 + i] = __hfma2(*(__half2 *)&b, sixteenth, high);
  }
}

typedef struct cuda_two { /* of a piece, a lane's bytes of both rows, and scales */
  uint4 a, b;
  uint32_t scale_a, scale_b; /* a half, and above it an offset */
} cuda_two;

/* A lane's column of one tile of eight columns: where its values lie in the planes. */
typedef struct cuda_column {
  const char *x, *scale; /* scale: of digits, and the sum of the lane's own values */
  int step, turn; /* of digits: bytes to the next piece; to the second half of 32 values */
  int apart;      /* of 16 bits: bytes to what is beside the unit's second row */
  bool there;
} cuda_column;

template <int TYPE, int M>
__device__ __forceinline__ cuda_column cuda_column_of(const cuda_crew_room &r, int n, int apart) {
  constexpr int V = cuda_operand<TYPE>::values, C = cuda_operand<TYPE>::columns;
  const int g = threadIdx.x / 4 % 8, t = threadIdx.x % 4, sub = (n * 8 + g) % C;
  const int part = cuda_operand<TYPE>::digits ? g % 2 : sub % (C / 2);
  const int m = cuda_operand<TYPE>::digits || TYPE == TFM_F32 ? n : min((n * 8 + g) / C, M - 1);
  const char *x = r.planes + m * cuda_operand<TYPE>::bytes;
  cuda_column c = {x, x + cuda_operand<TYPE>::scales, M * cuda_operand<TYPE>::bytes, 16, apart,
                   true};
  if (cuda_operand<TYPE>::offset) c.scale += t * 8;
  if (TYPE == TFM_F32) {
    c.x += t * 16;
  } else if (cuda_operand<TYPE>::digits) {
    c.there = t == g / 2;
    c.x += cuda_plane_at<TYPE>(part, t * V / 4);
    if (cuda_operand<TYPE>::nibbles && part) c.turn = -16;
    if (!c.there) c.x = r.zeros, c.step = c.turn = 0;
  } else {
    c.there = part < cuda_operand<TYPE>::parts && n * 8 + g < M * C;
    if (c.there) c.x += part * 64 + sub / (C / 2) * 32 + t * 8;
  }
  return c;
}

typedef struct cuda_sums { float a[4], b[4]; } cuda_sums; /* of both rows; of 16 bits all four */

/* Whole numbers, exactly, and their scales. A lane has both digits of the sum of its own values. */
template <int TYPE, int M>
__device__ __forceinline__ void cuda_use_digits(cuda_sums &c, const cuda_two &q,
                                                const cuda_column &col, int piece) {
  const uint32_t a[4] = {q.a.x, q.a.y, q.a.z, q.a.w}, b[4] = {q.b.x, q.b.y, q.b.z, q.b.w};
  const uint32_t mask = 0xf0f0f0f0u; /* sixteen times the numbers */
  const char *at = col.x + piece * col.step;
  const char *scale = col.scale + piece * M * cuda_operand<TYPE>::bytes;
  const uint4 x = *(const uint4 *)at;
  int v[4] = {0, 0, 0, 0};
  float by;
  if constexpr (cuda_operand<TYPE>::nibbles) {
    const uint4 y = *(const uint4 *)(at + col.turn);
    cuda_mma8(v, a[0] << 4 & mask, b[0] << 4 & mask, a[1] << 4 & mask, b[1] << 4 & mask, x.x, x.y);
    cuda_mma8(v, a[2] << 4 & mask, b[2] << 4 & mask, a[3] << 4 & mask, b[3] << 4 & mask, x.z, x.w);
    cuda_mma8(v, a[0] & mask, b[0] & mask, a[1] & mask, b[1] & mask, y.x, y.y);
    cuda_mma8(v, a[2] & mask, b[2] & mask, a[3] & mask, b[3] & mask, y.z, y.w);
  } else {
    cuda_mma8(v, a[0], b[0], a[1], b[1], x.x, x.y);
    cuda_mma8(v, a[2], b[2], a[3], b[3], x.z, x.w);
  }
  if constexpr (cuda_operand<TYPE>::offset) {
    const float2 both = *(const float2 *)scale;
    by = both.x;
    c.a[0] = __fmaf_rn(cuda_scale_of(q.scale_a, 1), both.y, c.a[0]);
    c.b[0] = __fmaf_rn(cuda_scale_of(q.scale_b, 1), both.y, c.b[0]);
  } else {
    by = *(const float *)scale;
  }
  c.a[0] = __fmaf_rn(cuda_scale_of(q.scale_a, 0) * by, (float)(v[0] * 256 + v[1]), c.a[0]);
  c.b[0] = __fmaf_rn(cuda_scale_of(q.scale_b, 0) * by, (float)(v[2] * 256 + v[3]), c.b[0]);
}

/* The scale of each row times what its 64 values make with the columns. */
__device__ __forceinline__ void cuda_use_f8(cuda_sums &c, const cuda_two &q, const char *x,
                                            bool there) {
  const uint32_t a[4] = {q.a.x, q.a.y, q.a.z, q.a.w}, b[4] = {q.b.x, q.b.y, q.b.z, q.b.w};
  const float scale_a = cuda_scale_of(q.scale_a, 0), scale_b = cuda_scale_of(q.scale_b, 0);
  cuda_sums sum = {};
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t u[4] = {cuda_e4m3(a[i] & 0xffff), cuda_e4m3(a[i] >> 16),
                           cuda_e4m3(a[i + 1] & 0xffff), cuda_e4m3(a[i + 1] >> 16)};
    const uint32_t v[4] = {cuda_e4m3(b[i] & 0xffff), cuda_e4m3(b[i] >> 16),
                           cuda_e4m3(b[i + 1] & 0xffff), cuda_e4m3(b[i + 1] >> 16)};
    uint2 by = make_uint2(0, 0);
    if (there) by = *(const uint2 *)(x + i * 64);
    cuda_mma<false>(sum.a, u, by.x, by.y);
    cuda_mma<false>(sum.b, v, by.x, by.y);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    c.a[i] = __fmaf_rn(scale_a, sum.a[i], c.a[i]);
    c.b[i] = __fmaf_rn(scale_b, sum.b[i], c.b[i]);
  }
}

/* c += a piece by the columns. Of 16 bits, rows of W multiply one by one: a row's 16 bytes are, as
   they come, what mma takes for a row of its upper half and one of its lower, so that a column is
   for values 0, 1, 4 and 5 of every eight, or for the others. */
template <int TYPE, int M>
__device__ __forceinline__ void cuda_use(cuda_sums &c, const cuda_two &q, const cuda_column &col,
                                         int piece) {
  const char *x = col.x + piece * M * cuda_operand<TYPE>::bytes;
  const uint32_t a[4] = {q.a.x, q.a.y, q.a.z, q.a.w}, b[4] = {q.b.x, q.b.y, q.b.z, q.b.w};
  if constexpr (cuda_operand<TYPE>::digits) {
    cuda_use_digits<TYPE, M>(c, q, col, piece);
  } else if constexpr (TYPE == TFM_F8_E4M3) {
    cuda_use_f8(c, q, x, col.there);
  } else if constexpr (TYPE == TFM_F32) {
    const float4 v = *(const float4 *)x;
    const float f[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c.a[0] = __fmaf_rn(__uint_as_float(a[i]), f[i], c.a[0]);
      c.b[0] = __fmaf_rn(__uint_as_float(b[i]), f[i], c.b[0]);
    }
  } else {
    uint2 v = make_uint2(0, 0), u = v;
    if (col.there) v = *(const uint2 *)x, u = *(const uint2 *)(x + col.apart);
    cuda_mma<TYPE == TFM_BF16>(c.a, a, v.x, v.y);
    cuda_mma<TYPE == TFM_BF16>(c.b, b, u.x, u.y);
  }
}

/* A lane's share of the products of both rows with a row of x. */
template <int TYPE> __device__ __forceinline__ float2 cuda_share_of_sums(const cuda_sums &c) {
  constexpr int C = cuda_operand<TYPE>::columns;
  const int t = threadIdx.x % 4;
  if (cuda_operand<TYPE>::halves || TYPE == TFM_BF16)
    return t / (C / 4) % 2 ? make_float2(c.a[2] + c.a[3], c.b[2] + c.b[3])
                           : make_float2(c.a[0] + c.a[1], c.b[0] + c.b[1]);
  return make_float2(c.a[0], c.b[0]);
}

typedef struct cuda_teams { /* how a block's warps share a product */
  int split, units; /* warps of a team */
  unsigned grid;    /* blocks */
  bool narrow; /* a unit is one row: the later half of a warp's pieces is as if another row's */
} cuda_teams;

/* Whether that is so, for what is not multiplied in pairs of rows: pairs would leave more than half
   of the blocks idle, while others read long rows. */
static bool cuda_narrow(const tfm_dev *d, const cuda_weight *w) {
  return !w->scale && w->type != TFM_F32 && w->cols >= 2 * w->rows &&
         w->rows <= 8 * cuda_of(d)->processors;
}

typedef struct cuda_unit { /* two rows of W, or the same twice */
  int a, b;
  float bias_a, bias_b;
  float x, y; /* of the caller, for each */
} cuda_unit;

typedef struct cuda_cursor { /* where a warp is */
  int tile, piece;
  const uint4 *a, *b; /* of this lane, at the piece */
  const __half *scale_a, *scale_b;
  cuda_unit unit;
} cuda_cursor;

template <int TYPE>
__device__ __forceinline__ void cuda_point(cuda_cursor &at, const cuda_weight &w, int piece,
                                           int half) {
  const int t = threadIdx.x % 4;
  int64_t a, b;
  at.piece = piece;
  if (cuda_operand<TYPE>::blocks) { /* cuda_vector_at */
    const int64_t line = (int64_t)cuda_pieces(w) * 32;
    a = at.unit.a / 8 * line + piece * 32 + at.unit.a % 8 * 4 + t;
    b = at.unit.b / 8 * line + piece * 32 + at.unit.b % 8 * 4 + t;
    at.scale_a = w.scale + a / cuda_operand<TYPE>::shared * (1 + cuda_operand<TYPE>::offset);
    at.scale_b = w.scale + b / cuda_operand<TYPE>::shared * (1 + cuda_operand<TYPE>::offset);
  } else {
    a = (int64_t)at.unit.a * w.vectors + piece * 4 + t;
    b = (int64_t)at.unit.b * w.vectors + (piece + half) * 4 + t;
  }
  at.a = (const uint4 *)w.data + a;
  at.b = (const uint4 *)w.data + b;
}

/* A half, or two where an offset follows it. */
template <int TYPE>
__device__ __forceinline__ uint32_t cuda_scale_load(const __half *scale, int i) {
  return cuda_operand<TYPE>::offset ? __ldg((const uint32_t *)scale + i)
                                    : __ldg((const unsigned short *)scale + i);
}

/* Piece number `ahead` of those at the cursor; this lane's vectors from the cursor on are left. */
template <int TYPE>
__device__ __forceinline__ void cuda_ask(cuda_two &q, const cuda_cursor &at, int left, int left_b,
                                         int ahead) {
  constexpr int stride = cuda_operand<TYPE>::stride, scales = stride / cuda_operand<TYPE>::shared;
  const bool there = 4 * ahead < left;
  if constexpr (cuda_operand<TYPE>::blocks) { /* what is not there counts zero times */
    q.a = cuda_operand<TYPE>::f8 ? cuda_stream_load(at.a + stride * ahead, there)
                                 : cuda_stream_maybe(at.a + stride * ahead, there);
    q.b = cuda_operand<TYPE>::f8 ? cuda_stream_load(at.b + stride * ahead, there)
                                 : cuda_stream_maybe(at.b + stride * ahead, there);
    q.scale_a = q.scale_b = 0;
    if (there) q.scale_a = cuda_scale_load<TYPE>(at.scale_a, scales * ahead);
    if (there) q.scale_b = cuda_scale_load<TYPE>(at.scale_b, scales * ahead);
  } else {
    q.a = cuda_stream_load(at.a + stride * ahead, there);
    q.b = cuda_stream_load(at.b + stride * ahead, 4 * ahead < left_b);
  }
}

/* The sum over lanes and over the team's warps: v of the team's first warp is whole. */
template <int C, int CREW, int N>
__device__ __forceinline__ void cuda_team_sum(float2 (&v)[N], float2 *part, int split, int turn) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float2 *mine = part + ((turn * (CREW / 32) + warp) * N) * 32 + lane;
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 1; i < C / 2; i *= 2) {
      v[n].x += __shfl_xor_sync(~0u, v[n].x, i);
      v[n].y += __shfl_xor_sync(~0u, v[n].y, i);
    }
  if (split == 1) return;
  if (warp % split)
#pragma unroll
    for (int n = 0; n < N; n++) mine[n * 32] = v[n];
  asm volatile("bar.sync %0, %1;" : : "r"(1 + warp / split), "r"(32 * split) : "memory");
  if (warp % split) return;
  for (int other = 1; other < split; other++)
#pragma unroll
    for (int n = 0; n < N; n++) {
      float2 u = mine[(other * N + n) * 32];
      v[n].x += u.x;
      v[n].y += u.y;
    }
}

/* All tiles of this warp's team. unit(u) tells a unit's rows and bias; ready(unit) runs when the
   first pieces have been asked for, and leaves x in the planes; done(unit, m, v) gets the products
   of a unit with row m of x, in one lane. A piece that has been used makes room for one further on
   at once, so that memory is never waited for from a standstill. */
template <int TYPE, int M, int CREW, typename UNIT, typename READY, typename DONE>
__device__ __forceinline__ void cuda_dots(const cuda_weight &w, const cuda_crew_room &r,
                                          const cuda_teams &teams, UNIT unit, READY ready,
                                          DONE done) {
  constexpr int C = cuda_operand<TYPE>::columns, N = (M * C + 7) / 8;
  constexpr int AHEAD = cuda_operand<TYPE>::ahead;
  const int warp = threadIdx.x / 32, g = threadIdx.x / 4 % 8, t = threadIdx.x % 4;
  const int split = teams.split, units = teams.units, tiles = (units + 7) / 8;
  const int step = (int)gridDim.x * (CREW / 32 / split);
  const int begin = warp % split * cuda_pieces(w) / split;
  const int last = (warp % split + 1) * cuda_pieces(w) / split;
  const bool narrow = !cuda_operand<TYPE>::blocks && teams.narrow; /* cuda_narrow */
  const int half = narrow ? (last - begin + 1) / 2 : 0, end = half ? begin + half : last;
  const bool any = warp / split * (int)gridDim.x + (int)blockIdx.x < tiles;
  const int lefts_b = any ? min(4 * last, w.vectors) - 4 * half - t : 0;
  const int lefts_a = any ? min(4 * end, w.vectors) - t : 0; /* of this lane, from piece 0 on */
  cuda_cursor at = {}, next;
  cuda_two q[AHEAD];
  cuda_column column[N];
  cuda_sums c[N] = {};
  int turn = 0;
  at.tile = warp / split * (int)gridDim.x + (int)blockIdx.x;
  at.unit = unit(min(at.tile * 8 + g, units - 1));
  cuda_point<TYPE>(at, w, begin, half);
#pragma unroll
  for (int i = 0; i < AHEAD; i++)
    cuda_ask<TYPE>(q[i], at, lefts_a - 4 * begin, lefts_b - 4 * begin, i);
#pragma unroll
  for (int n = 0; n < N; n++)
    column[n] = cuda_column_of<TYPE, M>(r, n, half * M * cuda_operand<TYPE>::bytes);
  ready(at.unit);
  auto use = [&](int i) {
#pragma unroll
    for (int n = 0; n < N; n++) cuda_use<TYPE, M>(c[n], q[i], column[n], at.piece + i);
  };
  while (at.tile < tiles) {
    next = at;
    next.piece += AHEAD;
    if (next.piece >= end) {
      next.tile += step;
      next.piece = begin;
    }
    if (next.tile < tiles) {
      if (next.tile != at.tile) next.unit = unit(min(next.tile * 8 + g, units - 1));
      cuda_point<TYPE>(next, w, next.piece, half);
#pragma unroll
      for (int i = 0; i < AHEAD; i++) {
        use(i);
        cuda_ask<TYPE>(q[i], next, lefts_a - 4 * next.piece, lefts_b - 4 * next.piece, i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < AHEAD; i++) use(i);
    }
    if (next.tile != at.tile) {
      float2 v[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        v[n] = cuda_share_of_sums<TYPE>(c[n]);
        if (half) v[n].x += v[n].y;
      }
      cuda_team_sum<C, CREW>(v, r.part, split, turn);
      turn ^= 1;
#pragma unroll
      for (int n = 0; n < N; n++) {
        int m = n * (8 / C) + t * 2 / C;
        if (warp % split == 0 && t % (C / 2) == 0 && m < M && at.tile * 8 + g < units)
          done(at.unit, m, v[n]);
        c[n] = {};
      }
    }
    at = next;
  }
}

/* Units of a matrix whose rows are as good as any: row 8 of a tile's 16 belongs to row 0, ... */
static int cuda_plain_units(int rows) {
  return rows / 16 * 8 + (rows % 16 < 8 ? rows % 16 : 8);
}

/* Blocks for a matrix: of large ones two a multiprocessor, of others the second place is for the
   kernel that follows. A team has as many warps as let all tiles take the least time. pairs: what
   belongs together says which two rows are a unit. */
static cuda_teams cuda_teams_of(const tfm_dev *d, const cuda_weight *w, bool pairs, int crew) {
  const bool large = (int64_t)w->rows * w->vectors >= 1 << 19 && crew == CUDA_CREW;
  const int blocks = cuda_of(d)->processors * (large ? 2 : 1), warps = crew / 32;
  const int pieces = cuda_pieces(*w);
  const int meet = w->type == TFM_Q4_0 ? 5 : 1; /* a tile's end, in halves of a piece: measured */
  int64_t least = INT64_MAX;
  cuda_teams t = {1, 0, 0, !pairs && cuda_narrow(d, w)};
  int split, tiles;
  t.units = pairs ? w->rows / 2 : t.narrow ? w->rows : cuda_plain_units(w->rows);
  tiles = (t.units + 7) / 8;
  for (split = 1; split <= warps; split *= 2) {
    int64_t teams = (int64_t)blocks * (warps / split);
    int each = (pieces + split - 1) / split, ahead = w->scale ? 4 : 2;
    int64_t cost = (tiles + teams - 1) / teams * (2 * ((each + ahead - 1) / ahead * ahead) + meet);
    if (cost < least) least = cost, t.split = split;
  }
  t.grid = cuda_blocks(t.units, 8 * (warps / t.split)); /* that have something to do */
  if (t.grid > (unsigned)blocks) t.grid = (unsigned)blocks;
  return t;
}

/* ---- matmul ---- */

__device__ static float *cuda_at(const tfm_mat &m, int64_t row, int col) {
  return (float *)m.data + row * m.stride + col;
}

/* Everything that follows a product; `bias` is e.bias[col]. */
__device__ static void cuda_epilogue(const tfm_mat &y, const tfm_epilogue &e, int row, int col,
                                     float v, float bias) {
  v += bias;
  if (e.aux.data) *cuda_at(e.aux, row, col) = v;
  v = cuda_cap(cuda_act(v, e.act), e.softcap);
  if (e.dropout.rate > 0) v *= cuda_dropout(e.dropout, row, col);
  if (e.residual.data) v += *cuda_at(e.residual, row, col);
  *cuda_at(y, row, col) = v;
}

__device__ static cuda_unit cuda_plain_unit(const float *bias, int u, int rows, bool narrow) {
  const int a = narrow ? u : u / 8 * 16 + u % 8, b = !narrow && a + 8 < rows ? a + 8 : a;
  return {a, b, bias ? __ldg(bias + a) : 0.0f, bias ? __ldg(bias + b) : 0.0f, 0, 0};
}

typedef struct cuda_experts { /* of matmul_moe: slot s multiplies by the matrix of expert[s] */
  const int32_t *expert;
  int32_t share; /* slots that share a row of x */
} cuda_experts;

/* Rows of x from `first` on, up to M; blockIdx.y counts slots of experts. */
template <int TYPE, int M>
__global__ void __launch_bounds__(CUDA_CREW, 2)
cuda_matmul_kernel(tfm_mat y, tfm_mat x, cuda_weight w, tfm_epilogue e, int first,
                   cuda_teams teams, cuda_experts experts) {
  extern __shared__ __align__(16) float shared[];
  const cuda_crew_room r = cuda_crew_lay_out<TYPE, M, CUDA_CREW>(shared, w);
  int count = min(M, x.rows - first);
  if (experts.expert) {
    int64_t base = cuda_vector_at(w, (int64_t)experts.expert[blockIdx.y] * cuda_lines(w), 0);
    w.data += base * 16;
    w.scale += cuda_scale_at(w, base);
    first = (int)blockIdx.y;
    count = 1;
  }
  auto unit = [&](int u) { return cuda_plain_unit(e.bias, u, w.rows, teams.narrow); };
  auto ready = [&](cuda_unit &) {
#pragma unroll 1
    for (int m = 0; m < count; m++) {
      cuda_planes_end<TYPE, M>(r, w, m);
      cuda_planes<TYPE, M, 8, CUDA_CREW>(r, w, cuda_at(x, (first + m) / experts.share, 0), {}, 0,
                                         m);
    }
  };
  auto done = [&](const cuda_unit &u, int m, float2 v) {
    const float by = cuda_factor<TYPE>(r, m);
    v.x *= by, v.y *= by;
    if (m < count) cuda_epilogue(y, e, first + m, u.a, v.x, u.bias_a);
    if (m < count && u.b != u.a) cuda_epilogue(y, e, first + m, u.b, v.y, u.bias_b);
  };
  cuda_dots<TYPE, M, CUDA_CREW>(w, r, teams, unit, ready, done);
}

typedef void (*cuda_matmul_function)(tfm_mat, tfm_mat, cuda_weight, tfm_epilogue, int, cuda_teams,
                                     cuda_experts);

static cuda_matmul_function cuda_matmul_choose(tfm_type type, int m) {
  return cuda_pick(type, [m](auto t) -> cuda_matmul_function {
    return m == 1 ? cuda_matmul_kernel<t.value, 1> : cuda_matmul_kernel<t.value, CUDA_COLUMNS>;
  });
}

/* As many rows at a time as shared memory holds. */
static void cuda_matmul_small(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w,
                              const tfm_epilogue *e) {
  const cuda_teams teams = cuda_teams_of(d, w, false, CUDA_CREW);
  cuda_experts none = {NULL, 1};
  bool fits = cuda_crew_bytes(w, CUDA_COLUMNS, 0, CUDA_CREW) <= CUDA_SHARED;
  int32_t first, m = x.rows > 1 && fits ? CUDA_COLUMNS : 1;
  const size_t bytes = cuda_crew_bytes(w, m, 0, CUDA_CREW);
  if (bytes > CUDA_SHARED)
    tfm_dev_fail(d, TFM_E_UNSUPPORTED, "a matrix with %d columns is too wide", (int)w->cols);
  for (first = 0; first < x.rows && d->status == TFM_OK; first += m)
    cuda_run(d, cuda_matmul_choose(w->type, m), teams.grid, CUDA_CREW, bytes, y, x, *w, *e,
             (int)first, teams, none);
}

static bool cuda_matmul_many(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w,
                             const tfm_epilogue *e);

static void cuda_matmul(tfm_dev *d, tfm_mat y, tfm_mat x, const tfm_weight *w,
                        const tfm_epilogue *e) {
  if (cuda_enter(d) && !cuda_matmul_many(d, y, x, cuda_packed(w), e))
    cuda_matmul_small(d, y, x, cuda_packed(w), e);
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
  const cuda_teams teams = cuda_teams_of(d, packed, false, CUDA_CREW);
  tfm_epilogue plain;
  memset(&plain, 0, sizeof plain);
  if (cuda_enter(d))
    cuda_run(d, cuda_matmul_choose(packed->type, 1),
             dim3(teams.grid, (unsigned)(r->tokens * r->top_k)), CUDA_CREW,
             cuda_crew_bytes(packed, 1, 0, CUDA_CREW), y, x, *packed, plain, 0, teams, experts);
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
  cuda_take_turn();
  if (col >= k.cols || rows.seq[row] < 0) return;
  at = cuda_kv_at(kv, rows.seq[row], rows.pos[row], col / kv.width) + col % kv.width;
  cuda_store(kv.k, kv.type, at, *cuda_at(k, row, col));
  cuda_store(kv.v, kv.type, at, *cuda_at(v, row, col));
}

/* Of Q8_0 a vector has all its numbers first, then the scales of each 32. It begins at a multiple
   of 4 bytes, or of 2 where `width` is an odd multiple of 32. */
__device__ __forceinline__ uint8_t *cuda_vector8(const void *p, int64_t at) {
  return (uint8_t *)p + at / 32 * 34;
}

/* As cuda_quantise: a warp has 32 values, of the row's keys or then of its values. */
__global__ void __launch_bounds__(CUDA_CREW) cuda_kv_put8_kernel(tfm_kv kv, tfm_mat k, tfm_mat v,
                                                                 tfm_rows rows) {
  const int row = (int)blockIdx.x, lane = threadIdx.x % 32, blocks = k.cols / 32;
  const int block = (int)(blockIdx.y * CUDA_CREW_WARPS + threadIdx.x / 32);
  const int col = block % blocks * 32 + lane, c = col % kv.width;
  const tfm_mat &from = block < blocks ? k : v;
  float x, scale, q;
  uint8_t *to;
  cuda_take_turn();
  if (block >= 2 * blocks || rows.seq[row] < 0) return;
  x = cuda_load(from.data, from.type, row * from.stride + col);
  scale = cuda_warp_max(fabsf(x)) / 127.0f;
  q = roundf(__fmul_rn(x, scale != 0 ? 1.0f / scale : 0.0f));
  to = cuda_vector8(block < blocks ? kv.k : kv.v,
                    cuda_kv_at(kv, rows.seq[row], rows.pos[row], col / kv.width));
  to[c] = (uint8_t)(int8_t)(q >= -127.0f && q <= 127.0f ? q : 0.0f);
  if (lane == 0) *(__half *)(to + kv.width + c / 32 * 2) = __float2half_rn(scale);
}

static void cuda_kv_put_run(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v,
                            const tfm_rows *rows) {
  const unsigned n = (unsigned)rows->n;
  if (kv->type == TFM_Q8_0)
    cuda_run(d, cuda_kv_put8_kernel, dim3(n, cuda_blocks(k.cols / 16, CUDA_CREW_WARPS)), CUDA_CREW,
             0, *kv, k, v, *rows);
  else
    cuda_run(d, cuda_kv_put_kernel, dim3(n, cuda_blocks(k.cols, 256)), 256, 0, *kv, k, v, *rows);
}

static void cuda_kv_put(tfm_dev *d, const tfm_kv *kv, tfm_mat k, tfm_mat v, const tfm_rows *rows) {
  if (cuda_enter(d)) cuda_kv_put_run(d, kv, k, v, rows);
}

__device__ __forceinline__ uint32_t cuda_word(const uint8_t *p) { /* past the first cache */
  if ((uintptr_t)p % 4 == 0) return __ldcg((const uint32_t *)p);
  return __ldcg((const uint16_t *)p) | (uint32_t)__ldcg((const uint16_t *)p + 1) << 16;
}

/* Values c to c + 7 of the vector at element `at`: of 16 bits as they lie, else two words of them
   and their scale. */
template <int TYPE>
__device__ __forceinline__ uint4 cuda_cached8(const void *p, int64_t at, int c, int width) {
  const uint8_t *v = cuda_vector8(p, at);
  if (TYPE != TFM_Q8_0) return __ldcg((const uint4 *)((const uint16_t *)p + at + c));
  return make_uint4(cuda_word(v + c), cuda_word(v + c + 4),
                    __ldcg((const uint16_t *)(v + width) + c / 32), 0);
}

/* ... as floats. */
template <int TYPE> __device__ __forceinline__ void cuda_eight(float (&f)[8], uint4 q) {
  if constexpr (TYPE == TFM_Q8_0) {
    const float scale = __half2float(__ushort_as_half((unsigned short)q.z));
    float v[16];
    cuda_widen<TFM_Q8_0>(v, q);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = v[i] * scale;
  } else {
    cuda_widen<TYPE>(f, q);
  }
}

/* ---- attn ----
   Keys go by in tiles of CUDA_KEYS, counted from the first that is visible. A tile's scores are
   computed by eight lanes a key; its values are summed by eight groups of eight keys, which are
   added in order, and tiles are merged in order (Milakov and Gimelshein 2018): whether one block
   takes all tiles or each block one, the bits are the same. B query heads share the keys. */

typedef struct cuda_tiles { /* of a pass; on the device: cuda_tiles_kernel */
  int4 *tile;     /* first row, rows, position of the first, sequence */
  int32_t *rest;  /* rows that are of no tile */
  int2 *run;      /* what is cut into tiles: sequence, keys that its last row sees */
  int32_t *count; /* [3] tiles; rows of none; runs */
} cuda_tiles;

typedef struct cuda_attn {
  tfm_mat y, q;
  tfm_kv kv;
  tfm_rows rows;
  float *lse;
  tfm_attn p;
  int32_t group;    /* query heads of a kv head */
  cuda_tiles tiles; /* what other kernels see to, and what is left; NULL: all rows are */
} cuda_attn;

/* Rows that are left, and number i of them. */
__device__ static int cuda_attn_rows(const cuda_attn &a) {
  return a.tiles.tile ? __ldcg(a.tiles.count + 1) : a.rows.n;
}
__device__ static int cuda_attn_row(const cuda_attn &a, int i) {
  return a.tiles.tile ? __ldcg(a.tiles.rest + i) : i;
}

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

/* Values c to c + 7 of the vector of `width` values at element `at`, zeros beyond it; past the
   first cache, where a line may be older than what another block has just stored. */
__device__ __forceinline__ void cuda_load8(float (&out)[8], const void *p, tfm_type type,
                                           int64_t at, int c, int width) {
  const char *from = (const char *)p + (at + c) * (type == TFM_F32 ? 4 : 2);
  const int n = width - c;
  const bool aligned = n >= 8 && (uintptr_t)from % 16 == 0;
  if (type == TFM_Q8_0) {
    cuda_eight<TFM_Q8_0>(out, cuda_cached8<TFM_Q8_0>(p, at, c, width));
  } else if (aligned && type != TFM_F32) {
    uint4 q = __ldcg((const uint4 *)from);
    if (type == TFM_F16) cuda_widen<TFM_F16>(out, q);
    else cuda_widen<TFM_BF16>(out, q);
  } else if (aligned) {
    float4 a = __ldcg((const float4 *)from), b = __ldcg((const float4 *)from + 1);
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = i < n ? cuda_load(p, type, at + c + i) : 0.0f;
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
      cuda_load8(k, keys, type, at, c, width);
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
                   cuda_key_at(a, a.kv.value_rows, tile, row, head, first, there), c, width);
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

/* Up to B heads of a row: all tiles one after the other. */
template <int B>
__device__ __forceinline__ void cuda_attn_one(const cuda_attn &a, cuda_tile_room &t, int row) {
  int head = (int)blockIdx.y, in_group = (int)blockIdx.z * B;
  int heads = min(B, a.group - in_group), query_head = head * a.group + in_group, first, i;
  int width = a.kv.width, width8 = cuda_width8(width);
  if (a.rows.seq[row] < 0) return;
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

/* A block takes rows one after the other. */
template <int B> __global__ void __launch_bounds__(128) cuda_attn_kernel(cuda_attn a) {
  extern __shared__ float shared[];
  cuda_tile_room t = cuda_tile_lay_out(shared, B, a.kv.width);
  cuda_take_turn();
  for (int i = (int)blockIdx.x; i < cuda_attn_rows(a); i += (int)gridDim.x) {
    cuda_attn_one<B>(a, t, cuda_attn_row(a, i));
    __syncthreads();
  }
}

/* ---- attn: of caches of 16 bits and 8 ----
   When nothing but the result is wanted: L lanes of a warp take a key, DEEP times, then the values;
   the sums of B query heads stay in registers. The warps of a block share a stretch of keys and are
   merged in order, and so are stretches: those of a row are one block's after the other, or each a
   block's (gridDim.z), of which the one that finishes last merges all. The bits are the same. */

enum { CUDA_STRETCH = 512 };

typedef struct cuda_stretches { /* of several blocks: their sums, and how many are there */
  float *part;       /* [rows, gridDim.y, gridDim.z, B * 8 * L, 3] */
  unsigned *arrived; /* [rows, gridDim.y], zero */
} cuda_stretches;

typedef struct cuda_sum { float out, sum, max; } cuda_sum; /* of one column; max of log2 */

#define CUDA_LEAST (-1e30f) /* as a maximum: no score is smaller */

__device__ static void cuda_take_in(cuda_sum &all, cuda_sum one) {
  float max = fmaxf(fmaxf(all.max, one.max), CUDA_LEAST);
  float x = cuda_exp2(all.max - max), y = cuda_exp2(one.max - max);
  all.out = __fmaf_rn(all.out, x, __fmul_rn(one.out, y));
  all.sum = __fmaf_rn(all.sum, x, __fmul_rn(one.sum, y));
  all.max = max;
}

/* Elements at which the keys from `from` on lie that are a lane's; beyond `last`, the last. */
template <int L, int DEEP>
__device__ __forceinline__ void cuda_keys_at(int64_t (&at)[DEEP], const tfm_kv &kv, int seq,
                                             int head, int from, int last) {
  const int lane = threadIdx.x % 32, end = min(from + 32 / L * DEEP - 1, last);
  const bool one = from / kv.page_tokens == end / kv.page_tokens;
  const int64_t base = cuda_kv_at(kv, seq, from, head);
#pragma unroll
  for (int i = 0; i < DEEP; i++) {
    int j = min(from + 32 / L * i + lane / L, last);
    at[i] = one ? base + (j - from) * kv.width : cuda_kv_at(kv, seq, j, head);
  }
}

template <int TYPE> __device__ __forceinline__ float cuda_dot8(const float (&q)[8], uint4 k) {
  float f[8], sum = 0;
  cuda_eight<TYPE>(f, k);
#pragma unroll
  for (int i = 0; i < 8; i++) sum = __fmaf_rn(q[i], f[i], sum);
  return sum;
}

template <int B> struct cuda_heads { float out[B][8], max[B], sum[B]; }; /* of a lane */

/* Scores of keys become powers of two below the heads' maxima, to which the sums are brought. */
template <int B, int L, int TYPE, int DEEP>
__device__ __forceinline__ void cuda_scores(float (&s)[B][DEEP], cuda_heads<B> &of,
                                            const float *q, const uint4 (&k)[DEEP], int left,
                                            float softcap) {
#pragma unroll
  for (int h = 0; h < B; h++) {
    const float4 *of_lane = (const float4 *)(q + (h * L + threadIdx.x % L) * 8);
    const float4 low = of_lane[0], high = of_lane[1];
    const float q8[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float best = of.max[h], by;
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
      float v = cuda_dot8<TYPE>(q8, k[i]);
#pragma unroll
      for (int n = 1; n < L; n *= 2) v += __shfl_xor_sync(~0u, v, n);
      v = cuda_cap(v, softcap) * 1.44269504f;
      s[h][i] = 32 / L * i + (int)(threadIdx.x % 32 / L) < left ? v : -INFINITY;
      best = fmaxf(best, s[h][i]);
    }
#pragma unroll
    for (int n = L; n < 32; n *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, n));
    by = exp2f(of.max[h] - best);
    of.max[h] = best;
    of.sum[h] *= by;
#pragma unroll
    for (int i = 0; i < 8; i++) of.out[h][i] *= by;
#pragma unroll
    for (int i = 0; i < DEEP; i++) of.sum[h] += s[h][i] = exp2f(s[h][i] - best);
  }
}

/* The warp's share of keys first to last; ready() is called by all warps, when the first keys have
   been asked for. */
template <int B, int L, int TYPE, int DEEP, typename READY>
__device__ __forceinline__ void cuda_attend_warp(cuda_heads<B> &of, const cuda_attn &a,
                                                 const float *q, int seq, int head, int first,
                                                 int last, READY ready) {
  constexpr int KEYS = 32 / L * DEEP;
  const int width = a.kv.width, c = min((int)threadIdx.x % L * 8, width - 8);
  int from = first + (int)threadIdx.x / 32 * KEYS;
  bool began = false;
#pragma unroll 1
  for (;; from += CUDA_CREW_WARPS * KEYS) {
    uint4 k[DEEP], v[DEEP];
    float s[B][DEEP];
    if (from <= last) {
      int64_t at[DEEP];
      cuda_keys_at<L>(at, a.kv, seq, head, from, last);
#pragma unroll
      for (int i = 0; i < DEEP; i++) k[i] = cuda_cached8<TYPE>(a.kv.k, at[i], c, width);
#pragma unroll
      for (int i = 0; i < DEEP; i++) v[i] = cuda_cached8<TYPE>(a.kv.v, at[i], c, width);
    }
    if (!began) ready();
    began = true;
    if (from > last) break;
    cuda_scores<B, L, TYPE>(s, of, q, k, last - from + 1, a.p.softcap);
#pragma unroll
    for (int i = 0; i < DEEP; i++) {
      float f[8];
      cuda_eight<TYPE>(f, v[i]);
#pragma unroll
      for (int h = 0; h < B; h++)
#pragma unroll
        for (int n = 0; n < 8; n++) of.out[h][n] = __fmaf_rn(s[h][i], f[n], of.out[h][n]);
    }
  }
}

/* Of the block's warps, in order: of(k) is warp k's. */
template <typename OF> __device__ __forceinline__ cuda_sum cuda_warps_sum(OF of) {
  cuda_sum one[CUDA_CREW_WARPS], all = {0, 0, CUDA_LEAST};
#pragma unroll
  for (int k = 0; k < CUDA_CREW_WARPS; k++) {
    one[k] = of(k);
    all.max = fmaxf(all.max, one[k].max);
  }
#pragma unroll
  for (int k = 0; k < CUDA_CREW_WARPS; k++) {
    float by = cuda_exp2(one[k].max - all.max);
    all.out = __fmaf_rn(one[k].out, by, all.out);
    all.sum = __fmaf_rn(one[k].sum, by, all.sum);
  }
  return all;
}

/* Between the groups of L lanes, and from there to shared memory. */
template <int B, int L>
__device__ __forceinline__ void cuda_heads_put(cuda_sum (*to)[B][8 * L], cuda_heads<B> &of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < B; h++) {
#pragma unroll
    for (int n = L; n < 32; n *= 2) {
      of.sum[h] += __shfl_xor_sync(~0u, of.sum[h], n);
#pragma unroll
      for (int i = 0; i < 8; i++) of.out[h][i] += __shfl_xor_sync(~0u, of.out[h][i], n);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (lane < L) to[threadIdx.x / 32][h][lane * 8 + i] = {of.out[h][i], of.sum[h], of.max[h]};
  }
}

__device__ static void cuda_attend_finish(const cuda_attn &a, int row, int query_head, int c,
                                          cuda_sum all) {
  cuda_store(a.y.data, a.y.type, row * a.y.stride + query_head * a.kv.width + c, all.out / all.sum);
  if (a.lse && c == 0)
    a.lse[(int64_t)row * a.p.heads + query_head] = all.max * 0.693147181f + logf(all.sum);
}

/* Whether all stretches of this row and these heads are there: true for the last that asks. */
__device__ static bool cuda_all_arrived(unsigned *arrived, int stretches) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1u) == (unsigned)stretches - 1;
    if (last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

/* The block's columns and those of the other stretches, in order; false: another block has them. */
template <int B, int L, int EACH>
__device__ __forceinline__ bool cuda_attend_meet(cuda_sum (&all)[EACH], const cuda_stretches &s,
                                                 int64_t of, int stretches) {
  constexpr int COLUMNS = B * 8 * L;
  float *part = s.part + of * gridDim.z * COLUMNS * 3;
  for (int e = 0; e < EACH; e++) {
    const int i = (int)threadIdx.x + e * CUDA_CREW;
    float *to = part + ((int64_t)blockIdx.z * COLUMNS + i) * 3;
    if (i < COLUMNS) {
      __stcg(to, all[e].out);
      __stcg(to + 1, all[e].sum);
      __stcg(to + 2, all[e].max);
    }
    all[e] = {0, 0, -INFINITY};
  }
  if (!cuda_all_arrived(s.arrived + of, stretches)) return false;
  for (int stretch = 0; stretch < stretches; stretch++)
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = (int)threadIdx.x + e * CUDA_CREW;
      const float *from = part + ((int64_t)stretch * COLUMNS + i) * 3;
      if (i < COLUMNS) cuda_take_in(all[e], {__ldcg(from), __ldcg(from + 1), __ldcg(from + 2)});
    }
  return true;
}

typedef struct cuda_row_keys { int pos, seq, first, stretches; } cuda_row_keys;

/* What a block has to attend to; false: nothing. */
__device__ __forceinline__ bool cuda_row_keys_of(cuda_row_keys &k, const cuda_attn &a, int row) {
  k.pos = __ldcg(a.rows.pos + row);
  k.seq = __ldcg(a.rows.seq + row);
  k.first = a.p.window > 0 && k.pos >= a.p.window ? k.pos - a.p.window + 1 : 0;
  k.stretches = (k.pos - k.first) / CUDA_STRETCH + 1;
  return k.seq >= 0 && (int)blockIdx.z < k.stretches;
}

/* Up to B heads of a row, and all stretches or one. */
template <int B, int L, int TYPE, int DEEP>
__device__ __forceinline__ void cuda_attend_one(const cuda_attn &a, const cuda_stretches &s,
                                                int row) {
  constexpr int EACH = (B * 8 * L + CUDA_CREW - 1) / CUDA_CREW;
  extern __shared__ __align__(16) float shared[];
  cuda_sum (*warps)[B][8 * L] = (cuda_sum (*)[B][8 * L])(void *)shared, all[EACH];
  const int blocks = (a.group + B - 1) / B;
  const int head = (int)blockIdx.y / blocks, in_group = (int)blockIdx.y % blocks * B;
  const int heads = min(B, a.group - in_group), query_head = head * a.group + in_group;
  __shared__ __align__(16) float q[B * 8 * L];
  cuda_row_keys keys;
  auto ready = [&]() { /* keys are on their way */
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = (int)threadIdx.x + e * CUDA_CREW, h = i / (8 * L), c = i % (8 * L);
      const int64_t at = row * a.q.stride + (query_head + h) * a.kv.width + c;
      if (i >= B * 8 * L) continue;
      q[i] = h < heads && c < a.kv.width ? cuda_load(a.q.data, a.q.type, at) * a.p.scale : 0.0f;
    }
    __syncthreads();
  };
  const bool any = cuda_row_keys_of(keys, a, row);
  cuda_follow();
  if (!any) return;
  for (int e = 0; e < EACH; e++) all[e] = {0, 0, -INFINITY};
  for (int stretch = (int)blockIdx.z; stretch < keys.stretches; stretch += (int)gridDim.z) {
    const int begin = keys.first + stretch * CUDA_STRETCH;
    cuda_heads<B> of = {};
    for (int h = 0; h < B; h++) of.max[h] = -INFINITY;
    cuda_attend_warp<B, L, TYPE, DEEP>(of, a, q, keys.seq, head, begin,
                                       min(begin + CUDA_STRETCH - 1, keys.pos), ready);
    cuda_heads_put<B, L>(warps, of);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = (int)threadIdx.x + e * CUDA_CREW;
      auto of_warp = [&](int k) { return warps[k][i / (8 * L)][i % (8 * L)]; };
      if (i < B * 8 * L) cuda_take_in(all[e], cuda_warps_sum(of_warp));
    }
    __syncthreads();
  }
  if (gridDim.z > 1 && keys.stretches > 1 &&
      !cuda_attend_meet<B, L, EACH>(all, s, (int64_t)row * gridDim.y + blockIdx.y, keys.stretches))
    return;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int i = (int)threadIdx.x + e * CUDA_CREW, h = i / (8 * L), c = i % (8 * L);
    if (h < heads && c < a.kv.width) cuda_attend_finish(a, row, query_head + h, c, all[e]);
  }
}

/* A block takes rows one after the other. */
template <int B, int L, int TYPE, int DEEP>
__global__ void __launch_bounds__(CUDA_CREW, 2)
cuda_attend_kernel(cuda_attn a, cuda_stretches s) {
  cuda_launch_next();
  for (int i = (int)blockIdx.x; i < cuda_attn_rows(a); i += (int)gridDim.x) {
    cuda_attend_one<B, L, TYPE, DEEP>(a, s, cuda_attn_row(a, i));
    __syncthreads();
  }
  cuda_follow(); /* what comes next counts on it */
}

/* ---- attn: of caches of 16 bits and 8 and heads of 64 or 128, on the tensor cores ----
   As W is by the rows of x: sixteen keys are multiplied by q, of which each of four heads has two
   columns, the parts of its values; then the values, turned, by the scores' exponentials, again in
   two parts. Lane 4g + t has keys g and g + 8, and of the values keys 2t, 2t + 1, 2t + 8, 2t + 9 at
   columns 8g to 8g + 7; its sums are head t's. Stretches and warps are merged as above. Numbers of
   8 bits are multiplied as BF16, which holds them: sums over 32 columns by the keys' scales, and
   the exponentials, once for each 32 columns, by the values' scales; there columns are 4g to
   4g + 3. */

template <int D> struct cuda_four { /* heads of a lane's: two columns of o for each four sums */
  float o[D / 16][4], top, sum;
};

template <int D, int TYPE> struct cuda_sixteen { /* of a lane */
  uint4 k[D / 32][2], v[D / 64][4];
};
template <int D> struct cuda_sixteen<D, TFM_Q8_0> { /* with scales, two in a word */
  uint2 k[D / 32][2];
  uint32_t v[D / 32][4], k_scale[D / 64][2], v_scale[D / 64][4];
};

/* Eight bytes of a vector of D values. */
template <int D> __device__ __forceinline__ uint2 cuda_eight_bytes(const uint8_t *p) {
  if (D % 128 == 0) return __ldcg((const uint2 *)p);
  return make_uint2(__ldcg((const uint32_t *)p), __ldcg((const uint32_t *)p + 1));
}

/* The vector of a key or value at element `at`, and its bytes. */
template <int TYPE>
__device__ __forceinline__ const uint8_t *cuda_vector_of(const void *data, int64_t at) {
  return TYPE == TFM_Q8_0 ? cuda_vector8(data, at) : (const uint8_t *)data + 2 * at;
}
template <int D, int TYPE> struct cuda_vector_bytes {
  static constexpr int n = TYPE == TFM_Q8_0 ? D + D / 16 : 2 * D;
};

typedef struct cuda_place { /* of sixteen keys: the lane's of those at g, and values at 2t */
  const uint8_t *k, *v;
  bool one; /* one page has them all */
} cuda_place;

/* As well, they come to the second cache. */
template <int D, int TYPE>
__device__ __forceinline__ cuda_place cuda_place_of(const tfm_kv &kv, int seq, int head, int from) {
  constexpr int bytes = cuda_vector_bytes<D, TYPE>::n;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t at = cuda_kv_at(kv, seq, from, head);
  cuda_place p = {cuda_vector_of<TYPE>(kv.k, at), cuda_vector_of<TYPE>(kv.v, at),
                  from / kv.page_tokens == (from + 15) / kv.page_tokens};
  if (p.one) {
    asm volatile("prefetch.global.L2 [%0];" : : "l"(p.k + lane * (bytes / 2)));
    asm volatile("prefetch.global.L2 [%0];" : : "l"(p.v + lane * (bytes / 2)));
  }
  p.k += g * bytes;
  p.v += 2 * t * bytes;
  if (TYPE != TFM_Q8_0) p.k += t * 16, p.v += g * 16;
  asm volatile("" : "+l"(p.k), "+l"(p.v)); /* to be there, not to be found again */
  return p;
}

/* key(i), value(i): the lane's bytes of keys g + i and of values 2t + i. */
template <int D, int TYPE, typename KEY, typename VALUE>
__device__ __forceinline__ void cuda_sixteen_load(cuda_sixteen<D, TYPE> &x, KEY key, VALUE value) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint8_t *from = key(8 * i);
#pragma unroll
    for (int j = 0; j < D / 32; j++)
      if constexpr (TYPE == TFM_Q8_0) x.k[j][i] = cuda_eight_bytes<D>(from + j * 32 + t * 8);
      else x.k[j][i] = __ldcg((const uint4 *)(from + j * 64));
#pragma unroll
    for (int j = 0; j < D / 64; j++)
      if constexpr (TYPE == TFM_Q8_0) x.k_scale[j][i] = __ldcg((const uint32_t *)(from + D) + j);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint8_t *from = value(i % 2 + i / 2 * 8);
#pragma unroll
    for (int j = 0; j < D / 64; j++)
      if constexpr (TYPE == TFM_Q8_0) x.v_scale[j][i] = __ldcg((const uint32_t *)(from + D) + j);
      else x.v[j][i] = __ldcg((const uint4 *)(from + j * 128));
#pragma unroll
    for (int j = 0; j < D / 32; j++)
      if constexpr (TYPE == TFM_Q8_0) x.v[j][i] = __ldcg((const uint32_t *)(from + j * 32 + g * 4));
  }
}

/* Keys from `from` on. What lies beyond `last` is of any value, or the last's. */
template <int D, int TYPE>
__device__ __forceinline__ void cuda_sixteen_ask(cuda_sixteen<D, TYPE> &x, const tfm_kv &kv,
                                                 int seq, int head, int from, int last,
                                                 cuda_place p) {
  constexpr int bytes = cuda_vector_bytes<D, TYPE>::n;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own_k = TYPE == TFM_Q8_0 ? 0 : t * 16, own_v = TYPE == TFM_Q8_0 ? 0 : g * 16;
  auto at = [&](int i) { return cuda_kv_at(kv, seq, min(from + i, last), head); };
  if (p.one)
    cuda_sixteen_load<D, TYPE>(x, [&](int i) { return p.k + i * bytes; },
                               [&](int i) { return p.v + i * bytes; });
  else
    cuda_sixteen_load<D, TYPE>(
        x, [&](int i) { return cuda_vector_of<TYPE>(kv.k, at(g + i)) + own_k; },
        [&](int i) { return cuda_vector_of<TYPE>(kv.v, at(2 * t + i)) + own_v; });
}

/* Keys from number `left` on count nothing: their values, which may be no numbers, become zeros. */
template <int D, int TYPE>
__device__ __forceinline__ void cuda_sixteen_mask(cuda_sixteen<D, TYPE> &x, int left) {
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < D / 64; j++)
      if ((int)threadIdx.x % 4 * 2 + i % 2 + i / 2 * 8 >= left) {
        if constexpr (TYPE == TFM_Q8_0) x.v_scale[j][i] = 0;
        else x.v[j][i] = make_uint4(0, 0, 0, 0);
      }
}

/* Which columns of o a lane's sums m are: this one and the next. */
template <int TYPE> __device__ __forceinline__ int cuda_four_column(int m, int g) {
  return TYPE == TFM_Q8_0 ? m / 2 * 32 + 4 * g + m % 2 * 2 : m / 4 * 64 + 8 * g + m % 4 * 2;
}

/* Two bytes with a sign, 2i and the next of a word, as BF16: what is below 128 beside 128 in the
   bits of the fraction, less 128, or 256 where there is a sign. */
__device__ __forceinline__ uint32_t cuda_bytes_bf(uint32_t w, int i) {
  const uint32_t pair = __byte_perm(w, 0, i ? 0x4342 : 0x4140);
  const uint32_t up = (pair & 0x007f007fu) | 0x43004300u, by = (pair & 0x00800080u) | 0x43004300u;
  const __nv_bfloat162 v = __hsub2(*(const __nv_bfloat162 *)&up, *(const __nv_bfloat162 *)&by);
  return *(const uint32_t *)&v;
}

/* c [keys, columns of q] += of 32 columns of the keys. */
template <bool BF>
__device__ __forceinline__ void cuda_score32(float (&c)[4], uint4 a, uint4 b, uint4 y) {
  const uint32_t front[4] = {a.x, b.x, a.y, b.y}, back[4] = {a.z, b.z, a.w, b.w};
  cuda_mma<BF>(c, front, y.x, y.y);
  cuda_mma<BF>(c, back, y.z, y.w);
}

__device__ __forceinline__ uint4 cuda_widen_bf(uint2 q) {
  return make_uint4(cuda_bytes_bf(q.x, 0), cuda_bytes_bf(q.x, 1), cuda_bytes_bf(q.y, 0),
                    cuda_bytes_bf(q.y, 1));
}

/* Scores of the lane's two keys, each of them in two parts. */
template <int D, int TYPE>
__device__ __forceinline__ void cuda_sixteen_scores(float (&c)[4], const cuda_sixteen<D, TYPE> &x,
                                                    const uint4 *q) {
#pragma unroll
  for (int j = 0; j < D / 32; j++) {
    const uint4 y = q[j * 4 + threadIdx.x % 4];
    if constexpr (TYPE == TFM_Q8_0) {
      float n[4] = {0, 0, 0, 0};
      cuda_score32<true>(n, cuda_widen_bf(x.k[j][0]), cuda_widen_bf(x.k[j][1]), y);
#pragma unroll
      for (int i = 0; i < 4; i++)
        c[i] = __fmaf_rn(n[i], cuda_scale_of(x.k_scale[j / 2][i / 2], j % 2), c[i]);
    } else {
      cuda_score32<TYPE == TFM_BF16>(c, x.k[j][0], x.k[j][1], y);
    }
  }
}

/* o becomes o `by` + values by exponentials p of keys 2t, 2t + 1, 2t + 8, 2t + 9. */
template <int D, int TYPE>
__device__ __forceinline__ void cuda_sixteen_values(cuda_four<D> &f,
                                                    const cuda_sixteen<D, TYPE> &x,
                                                    const float (&p)[4], float by) {
  constexpr bool BF = TYPE != TFM_F16;
  constexpr int EACH = TYPE == TFM_Q8_0 ? 2 : D / 16; /* sums of one scale */
  const bool odd = threadIdx.x / 4 % 2; /* which part of p is the lane's */
#pragma unroll
  for (int first = 0; first < D / 16; first += EACH) {
    float n[4] = {p[0], p[1], p[2], p[3]};
    uint32_t low, high;
    if constexpr (TYPE == TFM_Q8_0)
#pragma unroll
      for (int i = 0; i < 4; i++) n[i] *= cuda_scale_of(x.v_scale[first / 4][i], first / 2 % 2);
    low = cuda_part2<BF>(n[0], n[1]);
    high = cuda_part2<BF>(n[2], n[3]);
    if (odd) low = cuda_pack2<BF>(n[0], n[1]), high = cuda_pack2<BF>(n[2], n[3]);
#pragma unroll
    for (int m = first; m < first + EACH; m++) {
      uint32_t w[4], a[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        if constexpr (TYPE == TFM_Q8_0) w[i] = cuda_bytes_bf(x.v[m / 2][i], m % 2);
        else w[i] = ((const uint32_t *)&x.v[m / 4][i])[m % 4];
      a[0] = __byte_perm(w[0], w[1], 0x5410), a[1] = __byte_perm(w[0], w[1], 0x7632);
      a[2] = __byte_perm(w[2], w[3], 0x5410), a[3] = __byte_perm(w[2], w[3], 0x7632);
#pragma unroll
      for (int i = 0; i < 4; i++) f.o[m][i] *= by;
      cuda_mma<BF>(f.o[m], a, low, high);
    }
  }
}

/* Takes in sixteen keys, of which `left` are there. */
template <int D, int TYPE>
__device__ __forceinline__ void cuda_sixteen_use(cuda_four<D> &f, cuda_sixteen<D, TYPE> &x,
                                                 const uint4 *q, float factor, float softcap,
                                                 int left) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, from = 8 * t + g / 2;
  float c[4] = {0, 0, 0, 0}, best = f.top, by, p[2], n[4];
  cuda_sixteen_scores<D, TYPE>(c, x, q);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    p[i] = cuda_cap((c[2 * i] + c[2 * i + 1]) * factor, softcap) * 1.44269504f;
    if (g + 8 * i >= left) p[i] = -INFINITY;
    best = fmaxf(best, p[i]);
  }
#pragma unroll
  for (int i = 4; i < 32; i *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, i));
  best = fmaxf(best, CUDA_LEAST);
  by = cuda_exp2(f.top - best);
  f.top = best;
  p[0] = cuda_exp2(p[0] - best);
  p[1] = cuda_exp2(p[1] - best);
  f.sum = __fmaf_rn(f.sum, by, p[0] + p[1]);
#pragma unroll
  for (int i = 0; i < 4; i++) n[i] = __shfl_sync(~0u, p[i / 2], from + i % 2 * 4);
  if (left < 16) cuda_sixteen_mask<D, TYPE>(x, left);
  cuda_sixteen_values<D, TYPE>(f, x, n, by);
}

/* Shared memory of a block; pads against bank conflicts. */
template <int D> struct cuda_four_room {
  uint4 q[8][D / 8 + 1]; /* column 2h + part */
  float factor[4];       /* of heads' scores */
  float out[CUDA_CREW_WARPS][4][D + 4], top[CUDA_CREW_WARPS][4], sum[CUDA_CREW_WARPS][4];
};

/* The parts of four heads' q, of which `heads` are there, scaled so that halves hold them: a warp
   sees to a head. */
template <int D, bool BF>
__device__ __forceinline__ void cuda_four_queries(cuda_four_room<D> &r, const cuda_attn &a,
                                                  int row, int query_head, int heads) {
  constexpr int V = D / 32; /* values of a lane */
  const int h = (int)threadIdx.x / 32, lane = threadIdx.x % 32;
  float f[V] = {}, top = 0, by;
  int e = 0;
  if (h < 4) {
    if (h < heads)
      cuda_load_some(f, a.q.data, a.q.type,
                     row * a.q.stride + (query_head + h) * D + lane * V);
#pragma unroll
    for (int i = 0; i < V; i++) top = cuda_max(top, fabsf(f[i] *= a.p.scale));
    top = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(top)));
    if (!BF && top > 0 && top < INFINITY)
      e = max(-100, (int)(__float_as_uint(top) >> 23) - 127 - 13);
    by = cuda_power(-e);
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
      for (int i = 0; i < V; i += 2) {
        if (part == 0) f[i] *= by, f[i + 1] *= by;
        ((uint32_t *)r.q[2 * h + part])[(lane * V + i) / 2] = cuda_part2<BF>(f[i], f[i + 1]);
      }
    if (lane == 0) r.factor[h] = cuda_power(e);
  }
  __syncthreads();
}

template <int D, int TYPE>
__device__ __forceinline__ void cuda_four_put(cuda_four_room<D> &r, cuda_four<D> &f) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
#pragma unroll
  for (int i = 4; i < 32; i *= 2) f.sum += __shfl_xor_sync(~0u, f.sum, i);
#pragma unroll
  for (int m = 0; m < D / 16; m++)
    *(float2 *)&r.out[warp][t][cuda_four_column<TYPE>(m, g)] =
        make_float2(f.o[m][0] + f.o[m][1], f.o[m][2] + f.o[m][3]);
  if (g == 0) r.top[warp][t] = f.top, r.sum[warp][t] = f.sum;
}

/* Up to four heads of a row, and all stretches or one. */
template <int D, int TYPE>
__device__ __forceinline__ void cuda_four_one(const cuda_attn &a, const cuda_stretches &s,
                                              cuda_four_room<D> &r, int row) {
  constexpr int EACH = 4 * D / CUDA_CREW;
  const int blocks = (a.group + 3) / 4, warp = (int)threadIdx.x / 32;
  const int head = (int)blockIdx.y / blocks, in_group = (int)blockIdx.y % blocks * 4;
  const int heads = min(4, a.group - in_group), query_head = head * a.group + in_group;
  constexpr int STEP = CUDA_CREW_WARPS * 16;
  const int g = threadIdx.x / 4 % 8, t = threadIdx.x % 4;
  cuda_row_keys keys;
  cuda_sum all[EACH];
  cuda_sixteen<D, TYPE> x;
  cuda_place place = {};
  const bool any = cuda_row_keys_of(keys, a, row);
  int begin = keys.first + (int)blockIdx.z * CUDA_STRETCH;
  int end = min(begin + CUDA_STRETCH - 1, keys.pos), from = begin + warp * 16;
  if (any && from <= end) place = cuda_place_of<D, TYPE>(a.kv, keys.seq, head, from);
  cuda_follow();
  if (!any) return;
  for (int e = 0; e < EACH; e++) all[e] = {0, 0, -INFINITY};
  if (from <= end) cuda_sixteen_ask<D, TYPE>(x, a.kv, keys.seq, head, from, end, place);
  cuda_four_queries<D, TYPE != TFM_F16>(r, a, row, query_head, heads); /* keys are on their way */
  for (int stretch = (int)blockIdx.z; stretch < keys.stretches; stretch += (int)gridDim.z) {
    cuda_four<D> f = {};
    f.top = -INFINITY;
#pragma unroll 1
    while (from <= end) {
      const int next = from + STEP;
      if (next <= end) place = cuda_place_of<D, TYPE>(a.kv, keys.seq, head, next);
      cuda_sixteen_use<D, TYPE>(f, x, r.q[g], r.factor[t], a.p.softcap, end - from + 1);
      if (next <= end)
        cuda_sixteen_ask<D, TYPE>(x, a.kv, keys.seq, head, next, end, place);
      from = next;
    }
    begin += (int)gridDim.z * CUDA_STRETCH; /* the next stretch, if there is one */
    end = min(begin + CUDA_STRETCH - 1, keys.pos), from = begin + warp * 16;
    if (from <= end) {
      place = cuda_place_of<D, TYPE>(a.kv, keys.seq, head, from);
      cuda_sixteen_ask<D, TYPE>(x, a.kv, keys.seq, head, from, end, place);
    }
    if (stretch != (int)blockIdx.z) __syncthreads(); /* the sums before have been read */
    cuda_four_put<D, TYPE>(r, f);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const int i = (int)threadIdx.x + e * CUDA_CREW, h = i / D, c = i % D;
      cuda_take_in(all[e], cuda_warps_sum([&](int k) {
        return cuda_sum{r.out[k][h][c], r.sum[k][h], r.top[k][h]};
      }));
    }
  }
  if (gridDim.z > 1 && keys.stretches > 1 &&
      !cuda_attend_meet<4, D / 8, EACH>(all, s, (int64_t)row * gridDim.y + blockIdx.y,
                                        keys.stretches))
    return;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int i = (int)threadIdx.x + e * CUDA_CREW, h = i / D, c = i % D;
    if (h < heads) cuda_attend_finish(a, row, query_head + h, c, all[e]);
  }
}

/* A block takes rows one after the other. */
template <int D, int TYPE>
__global__ void __launch_bounds__(CUDA_CREW, 2) cuda_four_kernel(cuda_attn a, cuda_stretches s) {
  __shared__ cuda_four_room<D> r;
  cuda_launch_next();
  for (int i = (int)blockIdx.x; i < cuda_attn_rows(a); i += (int)gridDim.x) {
    cuda_four_one<D, TYPE>(a, s, r, cuda_attn_row(a, i));
    __syncthreads();
  }
  cuda_follow(); /* what comes next counts on it */
}

typedef void (*cuda_attend_function)(cuda_attn, cuda_stretches);

template <int D> static cuda_attend_function cuda_four_of(tfm_type type) {
  return type == TFM_F16    ? cuda_four_kernel<D, TFM_F16>
         : type == TFM_BF16 ? cuda_four_kernel<D, TFM_BF16> : cuda_four_kernel<D, TFM_Q8_0>;
}

static cuda_attend_function cuda_four_for(tfm_type type, int width) {
  return width == 64 ? cuda_four_of<64>(type) : cuda_four_of<128>(type);
}

/* The bits of a head depend on how many heads share the keys, not on how many a block takes. */
template <int L, int TYPE> static cuda_attend_function cuda_attend_for(int b, int group) {
  return b == 4      ? cuda_attend_kernel<4, L, TYPE, 4>
         : b == 2    ? cuda_attend_kernel<2, L, TYPE, 8>
         : group < 3 ? cuda_attend_kernel<1, L, TYPE, 8> : cuda_attend_kernel<1, L, TYPE, 4>;
}

template <int TYPE>
static cuda_attend_function cuda_attend_of(int b, int group, int width) {
  return width <= 64    ? cuda_attend_for<8, TYPE>(b, group)
         : width <= 128 ? cuda_attend_for<16, TYPE>(b, group) : cuda_attend_for<32, TYPE>(b, group);
}

static bool cuda_attend_knows(const tfm_kv *kv) {
  return kv->type != TFM_F32 && kv->width % 8 == 0 && kv->width <= 256;
}

static int cuda_heads_at_once(int group) { return group >= 3 ? 4 : group; }

static int cuda_lanes8(int width) { return width <= 64 ? 64 : width <= 128 ? 128 : 256; }

/* For the rows, each of which takes `heads` blocks: as many as there is place for at a time, as few
   rows are left of tiles as a rule. */
static unsigned cuda_attn_blocks(const tfm_dev *d, const cuda_attn *a, unsigned heads) {
  int32_t n = a->rows.n, most = 2 * cuda_of(d)->processors / (int32_t)heads;
  return (unsigned)(a->tiles.tile && n > most ? (most > 1 ? most : 1) : n);
}

/* `b` heads a block; stretches of the longest row, where they are dealt out to blocks, or 1. */
static void cuda_attend_run(tfm_dev *d, const cuda_attn *a, const cuda_stretches *s, int b,
                            int stretches) {
  int width = a->kv.width;
  unsigned heads = (unsigned)a->kv.heads * cuda_blocks(a->group, b);
  dim3 grid(cuda_attn_blocks(d, a, heads), heads, (unsigned)stretches);
  size_t shared = sizeof(cuda_sum) * (size_t)(CUDA_CREW_WARPS * b * cuda_lanes8(width));
  if (width == 64 || width == 128) {
    grid.y = (unsigned)a->kv.heads * cuda_blocks(a->group, 4);
    cuda_run(d, cuda_four_for(a->kv.type, width), grid, CUDA_CREW, 0, *a, *s);
    return;
  }
  cuda_run(d, a->kv.type == TFM_F16    ? cuda_attend_of<TFM_F16>(b, a->group, width)
              : a->kv.type == TFM_BF16 ? cuda_attend_of<TFM_BF16>(b, a->group, width)
                                       : cuda_attend_of<TFM_Q8_0>(b, a->group, width),
           grid, CUDA_CREW, shared, *a, *s);
}

static bool cuda_lone_knows(const tfm_dev *d, const cuda_attn *a);
static void cuda_lone_run(tfm_dev *d, const cuda_attn *a);

static void cuda_attn_run(tfm_dev *d, const cuda_attn *a) {
  cuda_stretches none = {NULL, NULL};
  int b = cuda_heads_at_once(a->group);
  dim3 grid(cuda_attn_blocks(d, a, (unsigned)a->kv.heads), (unsigned)a->kv.heads,
            cuda_blocks(a->group, b));
  if (cuda_lone_knows(d, a))
    cuda_lone_run(d, a);
  else if (a->kv.table && cuda_attend_knows(&a->kv) && !a->p.probs && a->p.dropout.rate == 0)
    cuda_attend_run(d, a, &none, b, 1);
  else
    cuda_run(d, b == 4 ? cuda_attn_kernel<4> : b == 2 ? cuda_attn_kernel<2> : cuda_attn_kernel<1>,
             grid, 128, sizeof(float) * cuda_tile_floats(b, a->kv.width), *a);
}

static void cuda_attn_entry(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv,
                            const tfm_rows *rows, float *lse, const tfm_attn *p) {
  cuda_attn a = {y, q, *kv, *rows, lse, *p, p->heads / kv->heads, {}};
  if (cuda_enter(d)) cuda_attn_run(d, &a);
}

/* ---- sample ----
   As the reference, on probabilities relative to the largest, in [0, 1]; but they are rounded to
   multiples of 2^-40, so that masses are sums of whole numbers and do not depend on the order. A
   row is the work of a cluster of blocks, each of which keeps a share of it on the chip: every lane
   of a warp some quads in registers, others in shared memory. Every warp has a stretch of its own,
   and tells all blocks what it finds there (cuda_tell). A threshold is found digit by digit of its
   bits: every block counts its share in bins, of which there are 32 to an octave, then 512 to a
   bin, and 512 to each of these; then every block adds up what all have of groups of 32 bins, and
   of the group that matters the bins. A bin's mass is the sum of its numbers' fractions, whole
   numbers, as they all have one exponent. */

enum {
  CUDA_BINS = 1344,               /* 41 octaves of 32, one for 1, and up to whole warps */
  CUDA_DIGIT = 9,                 /* bits of a digit below the bins */
  CUDA_ALL_BINS = CUDA_BINS + (1 << CUDA_DIGIT), /* of one digit, and of the next */
  CUDA_FLOOR = (127 - 41) << 23,  /* the bits of 2^-41, below which there is no mass */
  CUDA_ONE = 127 << 23,           /* the bits of 1 */
  CUDA_HELD = 4,                  /* quads of a lane in registers */
  CUDA_KEPT = 48 << 10,           /* values of a share that shared memory holds ... */
  CUDA_KEPT_FEW = 6 << 10         /* ... where there are no clusters */
};

typedef struct cuda_choice { /* of a block, in shared memory */
  uint32_t low[CUDA_ALL_BINS + 32], high[CUDA_ALL_BINS + 32]; /* halves of the bins' sums */
  unsigned long long group[2][CUDA_BINS / 32];      /* masses of 32 bins, by turns */
  unsigned long long told[2][CUDA_CLUSTER * CUDA_WARPS];
  unsigned long long warp[CUDA_WARPS], goal;
  int found;
} cuda_choice;

typedef struct cuda_share { /* of a row of n values: this warp's */
  float4 held[CUDA_HELD]; /* this lane's first quads */
  float4 *p;     /* the others of the warp */
  int n;
  int begin;     /* the warp's first value */
  int each;      /* quads of every lane: the warp's are dealt out to them */
  int turn;
  bool raw;      /* logits still: probabilities are powers of two of (p - top) * by */
  float top, by;
} cuda_share;

/* Quads of a lane, when a row is shared by that many threads; an even number of them if there are
   more than registers hold. */
__host__ __device__ static int cuda_share_each(int n, int threads) {
  const int each = (n + threads * 4 - 1) / (threads * 4);
  return each <= CUDA_HELD ? each : (each + 1) / 2 * 2;
}

/* Of these, those that are not in registers. */
__host__ __device__ static int cuda_share_left(int each) {
  return each > CUDA_HELD ? each - CUDA_HELD : 0;
}

__device__ __forceinline__ int cuda_warps() { return (int)blockDim.x / 32; }

/* work: where `kept` is NULL, and then rows are long. */
__device__ static cuda_share cuda_share_of(float4 *kept, float *work, int n) {
  const int warp = (int)blockIdx.x * cuda_warps() + (int)threadIdx.x / 32;
  cuda_share s;
  s.n = n;
  s.each = cuda_share_each(n, (int)(gridDim.x * blockDim.x));
  s.begin = warp * s.each * 128;
  s.p = kept ? kept + threadIdx.x / 32 * cuda_share_left(s.each) * 32
             : (float4 *)work + warp * cuda_share_left(s.each) * 32;
  s.turn = 0;
  s.raw = true;
  return s;
}

/* All threads of the row's blocks have come to cuda_arrive; what they stored before is seen. */
__device__ __forceinline__ void cuda_arrive() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive();
#endif
}

__device__ __forceinline__ void cuda_arrived() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_wait();
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void cuda_meet() {
  cuda_arrive();
  cuda_arrived();
}

/* The same place in the shared memory of another block of the row. */
template <typename T> __device__ __forceinline__ T *cuda_in_block(T *p, int block) {
#if __CUDA_ARCH__ >= 900
  return (T *)__cluster_map_shared_rank(p, (unsigned)block);
#else
  return p;
#endif
}

/* Larger values first, then lower ids; NaN is below all. */
__device__ static unsigned long long cuda_rank(float v, int id) {
  uint32_t bits = __float_as_uint(v);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  if (v == 0) bits = 0x80000000u;
  if (v != v) bits = 0;
  return (unsigned long long)bits << 32 | (uint32_t)~id;
}

__device__ static int cuda_rank_id(unsigned long long rank) { return (int)~(uint32_t)rank; }

__device__ static unsigned long long cuda_warp_best(unsigned long long v) {
  for (int i = 16; i; i /= 2) v = max(v, __shfl_xor_sync(~0u, v, i));
  return v;
}

__device__ static unsigned long long cuda_warp_total(unsigned long long v) {
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

__device__ static unsigned long long cuda_block_best(unsigned long long v,
                                                     unsigned long long *room) {
  v = cuda_warp_best(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = v;
  __syncthreads();
  for (int i = 0; i < (int)blockDim.x / 32; i++) v = max(v, room[i]);
  return v;
}

/* What each warp of the row's blocks has found, in order: [gridDim.x * cuda_warps()]. */
__device__ __forceinline__ const unsigned long long *cuda_tell(unsigned long long v,
                                                               cuda_share &s, cuda_choice *c) {
  const int lane = threadIdx.x % 32, mine = (int)blockIdx.x * cuda_warps() + (int)threadIdx.x / 32;
  s.turn ^= 1; /* what was told before may still be read */
  if (lane < (int)gridDim.x) *cuda_in_block(&c->told[s.turn][mine], lane) = v;
  cuda_meet();
  return c->told[s.turn];
}

__device__ __forceinline__ unsigned long long cuda_row_best(unsigned long long v, cuda_share &s,
                                                            cuda_choice *c) {
  const unsigned long long *told = cuda_tell(cuda_warp_best(v), s, c);
  for (int i = threadIdx.x % 32; i < (int)gridDim.x * cuda_warps(); i += 32) v = max(v, told[i]);
  return cuda_warp_best(v);
}

__device__ __forceinline__ unsigned long long cuda_row_sum(unsigned long long v, cuda_share &s,
                                                           cuda_choice *c) {
  const unsigned long long *told = cuda_tell(cuda_warp_total(v), s, c);
  v = 0;
  for (int i = threadIdx.x % 32; i < (int)gridDim.x * cuda_warps(); i += 32) v += told[i];
  return cuda_warp_total(v);
}

__device__ __forceinline__ float cuda_row_max(float v, cuda_share &s, cuda_choice *c) {
  const unsigned long long *told = cuda_tell(__float_as_uint(cuda_warp_max(v)), s, c);
  for (int i = threadIdx.x % 32; i < (int)gridDim.x * cuda_warps(); i += 32)
    v = fmaxf(v, __uint_as_float((uint32_t)told[i]));
  return cuda_warp_max(v);
}

__device__ __forceinline__ float cuda_top4(float4 v) {
  return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w));
}

/* use(i, v) for number i of the lane's quads of a row, four of which are fetched at a time; what is
   beyond the row is -infinity. */
template <typename USE>
__device__ __forceinline__ void cuda_share_quads(const float *row, const cuda_share &s, USE use) {
#pragma unroll 1
  for (int first = 0; first < s.each; first += 4) {
    const int k = s.begin / 4 + first * 32 + (int)threadIdx.x % 32;
    float4 v[4];
    cuda_quads<32>(v, row, k, s.n);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int left = first + i < s.each ? s.n - 4 * (k + 32 * i) : 0;
      if (left < 4)
        v[i] = make_float4(left > 0 ? v[i].x : -INFINITY, left > 1 ? v[i].y : -INFINITY,
                           left > 2 ? v[i].z : -INFINITY, -INFINITY);
      use(first + i, i, v[i]);
    }
  }
}

__device__ __forceinline__ float4 *cuda_share_at(const cuda_share &s, int i) {
  return s.p + (i - CUDA_HELD) * 32 + (int)threadIdx.x % 32;
}

/* A logit's probability, beside the largest's: rounded to a multiple of 2^-40. */
__device__ __forceinline__ float cuda_probable(float v, const cuda_share &s) {
  const float unit = 1.0f / (1 << 17);
  return __fadd_rn(__fadd_rn(cuda_exp2((v - s.top) * s.by), unit), -unit);
}

/* use(i, v) for number i of the lane's quads, which become probabilities if need be. */
template <bool PROBABLE, typename USE>
__device__ __forceinline__ void cuda_share_use(cuda_share &s, USE use) {
  const bool turn = PROBABLE && s.raw;
  auto probable = [&](float4 v) {
    return make_float4(cuda_probable(v.x, s), cuda_probable(v.y, s), cuda_probable(v.z, s),
                       cuda_probable(v.w, s));
  };
#pragma unroll
  for (int i = 0; i < CUDA_HELD; i++) {
    if (turn) s.held[i] = probable(s.held[i]);
    if (i < s.each) use(i, s.held[i]);
  }
  float4 *at = cuda_share_at(s, CUDA_HELD);
#pragma unroll 1
  for (int i = CUDA_HELD; i < s.each; i += 2, at += 2 * 32) {
    float4 v = at[0], u = at[32];
    if (turn) at[0] = v = probable(v), at[32] = u = probable(u);
    use(i, v);
    use(i + 1, u);
  }
  if (PROBABLE) s.raw = false;
}

/* The share is filled with the logits; returns the row's largest. What is no number stays so, and
   is nowhere counted. Nothing is told to a block before it has begun. */
__device__ __forceinline__ float cuda_share_fill(const float *logits, cuda_share &s,
                                                 cuda_choice *c) {
  float top = -INFINITY;
  cuda_arrive();
  cuda_share_quads(logits, s, [&](int i, int turn, float4 v) {
    top = fmaxf(top, cuda_top4(v));
    if (i == turn) s.held[turn] = v;
    else if (i < s.each) *cuda_share_at(s, i) = v;
  });
  cuda_arrived();
  return cuda_row_max(top, s, c);
}

/* Value number `at` of the warp's is made less likely, by the lane that has it. */
__device__ __forceinline__ void cuda_penalise_at(const float *logits, float penalty, int at,
                                                 cuda_share &s) {
  const int lane = at / 4 % 32, i = at / 128;
  float l;
  if ((int)threadIdx.x % 32 != lane) return;
  l = __ldcg(logits + s.begin + at);
  if (l != l) return;
  l = l < 0 ? l * penalty : l / penalty;
  if (i >= CUDA_HELD) ((float *)cuda_share_at(s, i))[at % 4] = l;
#pragma unroll
  for (int k = 0; k < CUDA_HELD; k++) {
    if (i == k && at % 4 == 0) s.held[k].x = l;
    if (i == k && at % 4 == 1) s.held[k].y = l;
    if (i == k && at % 4 == 2) s.held[k].z = l;
    if (i == k && at % 4 == 3) s.held[k].w = l;
  }
}

/* The largest after ids that were there already have been made less likely. */
__device__ __forceinline__ float cuda_penalise(const float *logits, float penalty, int pos,
                                               const int32_t *history, cuda_share &s,
                                               cuda_choice *c) {
  float top = -INFINITY;
  for (int i = 0; i < pos; i += 32) {
    const int mine = i + (int)threadIdx.x % 32;
    const int id = mine < pos ? history[mine] : -1, at = id - s.begin;
    uint32_t here = __ballot_sync(~0u, id >= 0 && id < s.n && at >= 0 && at < s.each * 128);
    for (; here; here &= here - 1)
      cuda_penalise_at(logits, penalty, __shfl_sync(~0u, at, __ffs((int)here) - 1), s);
  }
  cuda_share_use<false>(s, [&](int, float4 v) { top = fmaxf(top, cuda_top4(v)); });
  return cuda_row_max(top, s, c);
}

/* The first id that has the largest logit; where nothing is above -infinity, that has a number. */
__device__ __forceinline__ int cuda_first_best(float top, cuda_share &s, cuda_choice *c) {
  unsigned long long best = 0;
  cuda_share_use<false>(s, [&](int i, float4 v) {
    const float of[4] = {v.x, v.y, v.z, v.w};
    const int id = s.begin + i * 128 + (int)threadIdx.x % 32 * 4;
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (id + k < s.n && (top > -INFINITY ? of[k] == top : of[k] == of[k]))
        best = max(best, 1ull << 32 | (uint32_t)~(id + k));
  });
  best = cuda_row_best(best, s, c);
  return best ? cuda_rank_id(best) : 0;
}

/* ---- Thresholds ---- */

typedef struct cuda_digit {
  int number, groups, at; /* its bins: groups of 32 from number `at` on */
  int octave;     /* of all these bins; -1: each group has one */
  uint32_t low;   /* the bits of the first bin's least value */
  uint32_t from;  /* of the least that counts */
  uint32_t beyond; /* of the first that does not any more */
  int shift;      /* a bin for each value of the bits from number `shift` on */
  bool count;     /* else masses */
} cuda_digit;

/* The share's elements go to the digit's bins, those that do not count to a lane's own. Two
   additions of 32 bits are faster than one of 64, and the second is rare. */
__device__ __forceinline__ void cuda_bins_fill(cuda_share &s, const cuda_digit &d,
                                               cuda_choice *c) {
  const int other = CUDA_ALL_BINS + (int)threadIdx.x % 32;
  const uint32_t span = d.beyond - d.from;
  const uint32_t and_of = d.count ? 0 : 0x7fffffu, or_of = d.count ? 1 : 0x800000u;
  cuda_share_use<true>(s, [&](int, float4 v) {
    const uint32_t bits[4] = {__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z),
                              __float_as_uint(v.w)};
    int bin[4];
    uint32_t old[4], part[4];
    if (min(min(bits[0] - d.from, bits[1] - d.from), min(bits[2] - d.from, bits[3] - d.from)) >=
        span) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      part[i] = (bits[i] & and_of) | or_of;
      bin[i] = bits[i] - d.from < span ? d.at + (int)((bits[i] - d.low) >> d.shift) : other;
      old[i] = atomicAdd(&c->low[bin[i]], part[i]);
    }
    if (!((old[0] + part[0] < old[0]) | (old[1] + part[1] < old[1]) |
          (old[2] + part[2] < old[2]) | (old[3] + part[3] < old[3]))) return;
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (old[i] + part[i] < old[i]) atomicAdd(&c->high[bin[i]], 1u);
  });
}

/* What is in a bin of that octave, counted or as mass in units of 2^-40, exactly. */
__device__ __forceinline__ unsigned long long cuda_bin_mass(uint32_t low, uint32_t high,
                                                            int octave, bool count) {
  const unsigned long long v = low + ((unsigned long long)high << 32);
  return count ? v : octave >= 24 ? v << (octave - 24) : v >> (24 - octave);
}

__device__ __forceinline__ unsigned long long cuda_warp_run(unsigned long long v) { /* up to here */
  for (int i = 1; i < 32; i *= 2) {
    const unsigned long long other = __shfl_up_sync(~0u, v, i);
    if ((int)threadIdx.x % 32 >= i) v += other;
  }
  return v;
}

/* Of lanes whose values, one after the other, follow `before`: that with which there is the goal,
   or 32. `before` is then what comes before it. */
__device__ __forceinline__ int cuda_warp_reach(unsigned long long v, unsigned long long goal,
                                               unsigned long long &before) {
  const unsigned long long run = before + cuda_warp_run(v);
  const uint32_t there = __ballot_sync(~0u, run >= goal);
  const int lane = there ? __ffs((int)there) - 1 : 31;
  before = __shfl_sync(~0u, there ? run - v : run, lane);
  return there ? lane : 32;
}

/* A group's mass, or a bin's, in all blocks; lanes have their own. */
__device__ __forceinline__ unsigned long long cuda_group_sum(cuda_choice *c, int turn, int group) {
  unsigned long long v = 0;
#pragma unroll 8
  for (int i = 0; i < (int)gridDim.x && group >= 0; i++)
    v += *cuda_in_block(&c->group[turn][group], i);
  return v;
}

__device__ __forceinline__ unsigned long long cuda_bin_sum(cuda_choice *c, int bin, int octave,
                                                           bool count) {
  unsigned long long v = 0;
#pragma unroll 8
  for (int i = 0; i < (int)gridDim.x; i++)
    v += cuda_bin_mass(*cuda_in_block(&c->low[bin], i), *cuda_in_block(&c->high[bin], i), octave,
                       count);
  return v;
}

/* One warp of every block: the highest bin from which on, upwards, there is at least the goal; -1:
   there is none. The first digit's goal is `asked`, or that part of the whole. */
__device__ __forceinline__ void cuda_bin_search(const cuda_digit &d, double asked,
                                                cuda_choice *c) {
  const int lane = threadIdx.x, turn = d.number & 1;
  unsigned long long first = cuda_group_sum(c, turn, d.groups - 1 - lane), before = 0;
  unsigned long long second = cuda_group_sum(c, turn, d.groups - 33 - lane), goal = c->goal;
  int group, bin;
  if (d.number == 0) {
    const double all = (double)cuda_warp_total(first + second);
    goal = (unsigned long long)(asked < 1 ? ceil(all * asked) : asked);
  }
  group = cuda_warp_reach(first, goal, before);
  if (group == 32) group += cuda_warp_reach(second, goal, before);
  group = d.groups - 1 - group;
  if (group < 0) {
    if (lane == 0) c->found = -1;
    return;
  }
  bin = cuda_warp_reach(cuda_bin_sum(c, d.at + group * 32 + 31 - lane,
                                     d.octave < 0 ? group : d.octave, d.count), goal, before);
  __syncwarp(); /* all lanes have read the old goal */
  if (lane == 0) c->goal = goal - before, c->found = group * 32 + 31 - bin;
}

/* The number of this digit: all blocks find the same. */
__device__ __forceinline__ int cuda_digit_find(cuda_share &s, const cuda_digit &d, double asked,
                                               cuda_choice *c) {
  cuda_bins_fill(s, d, c);
  __syncthreads();
  for (int g = threadIdx.x / 32; g < d.groups; g += cuda_warps()) {
    const int bin = d.at + g * 32 + (int)threadIdx.x % 32;
    const unsigned long long v = cuda_warp_total(
        cuda_bin_mass(c->low[bin], c->high[bin], d.octave < 0 ? g : d.octave, d.count));
    if (threadIdx.x % 32 == 0) c->group[d.number & 1][g] = v;
  }
  cuda_meet();
  if (threadIdx.x < 32) cuda_bin_search(d, asked, c);
  __syncthreads();
  return c->found;
}

/* The largest t such that the elements >= t, of those >= least, are at least `asked`, or where that
   is below 1 have that part of their mass; 0: all that have any. */
__device__ __forceinline__ float cuda_threshold(cuda_share &s, float least, double asked,
                                                cuda_choice *c) {
  const uint32_t from = max(__float_as_uint(least), (uint32_t)CUDA_FLOOR);
  cuda_digit d = {0, CUDA_BINS / 32, 0, -1, CUDA_FLOOR, from, CUDA_ONE + 1, 2 * CUDA_DIGIT,
                  asked >= 1};
  for (int i = threadIdx.x; i < CUDA_ALL_BINS; i += (int)blockDim.x) c->low[i] = c->high[i] = 0;
  __syncthreads();
#pragma unroll 1
  for (;; d.number++) {
    const int found = cuda_digit_find(s, d, asked, c);
    if (found < 0) return 0;
    d.low += (uint32_t)found << d.shift;
    if (d.number == 2) return __uint_as_float(d.low);
    d.from = max(d.low, from);
    d.beyond = d.low + (1u << d.shift);
    d.shift -= CUDA_DIGIT;
    d.groups = (1 << CUDA_DIGIT) / 32;
    d.at = d.number == 0 ? CUDA_BINS : 0;
    d.octave = (int)((d.low - CUDA_FLOOR) >> 23);
    for (int i = threadIdx.x; i < 1 << CUDA_DIGIT && d.number == 1; i += (int)blockDim.x)
      c->low[i] = c->high[i] = 0; /* nobody reads the first digit's any more */
    if (d.number == 1) __syncthreads();
  }
}

__device__ __forceinline__ float cuda_least(cuda_share &s, const tfm_sampling &how,
                                            cuda_choice *c) {
  float least = 0;
#pragma unroll 1
  for (int mass = 0; mass < 2; mass++) {
    if (mass ? !(how.top_p > 0 && how.top_p < 1) : !(how.top_k > 0 && how.top_k < s.n)) continue;
    if (!s.raw) cuda_meet(); /* nobody reads the bins any more */
    least = fmaxf(least, cuda_threshold(s, least, mass ? (double)how.top_p : (double)how.top_k, c));
  }
  if (how.min_p > least) least = how.min_p < 1 ? how.min_p : 1.0f;
  return least;
}

/* ---- The draw ---- */

__device__ static unsigned long long cuda_mass(float p) {
  return (unsigned long long)(p * 1099511627776.0f);
}

typedef struct cuda_masses { uint32_t high; int low; } cuda_masses; /* of 2^-20 and 2^-40 */

/* A sum grows by p, in [0, 1]; of up to 4,096 of these. The sum of p and a power of two is rounded
   to a multiple of the unit in which its bits count. */
__device__ __forceinline__ void cuda_masses_add(cuda_masses &m, float p) {
  const float middle = 3.0f / (1 << 18), a = __fadd_rn(p, 8.0f);
  const float rest = __fadd_rn(p, __fsub_rn(8.0f + middle, a));
  m.high += __float_as_uint(a) - __float_as_uint(8.0f);
  m.low += (int)(__float_as_uint(rest) - __float_as_uint(middle));
}

__device__ __forceinline__ void cuda_masses_add4(cuda_masses &m, float4 v, float least) {
  cuda_masses_add(m, v.x >= least ? v.x : 0.0f);
  cuda_masses_add(m, v.y >= least ? v.y : 0.0f);
  cuda_masses_add(m, v.z >= least ? v.z : 0.0f);
  cuda_masses_add(m, v.w >= least ? v.w : 0.0f);
}

__device__ __forceinline__ unsigned long long cuda_masses_all(const cuda_masses &m) {
  return ((unsigned long long)m.high << 20) + (unsigned long long)(long long)m.low;
}

__device__ static void cuda_tell_found(int found, cuda_choice *c) {
  for (int i = 0; i < (int)gridDim.x; i++) *cuda_in_block(&c->found, i) = found;
}

/* The id among 128 of the warp's, from `first` on, at which the running sum, which is `before` at
   its begin, exceeds the goal: one thread tells all. v: of each lane four. */
__device__ __forceinline__ void cuda_draw_at(float4 v, float least, unsigned long long before,
                                             double goal, int first, cuda_choice *c) {
  const float of[4] = {v.x, v.y, v.z, v.w};
  unsigned long long m[4], run, sum;
  uint32_t over;
  int i;
#pragma unroll
  for (i = 0; i < 4; i++) m[i] = of[i] >= least ? cuda_mass(of[i]) : 0;
  sum = (m[0] + m[1]) + (m[2] + m[3]);
  run = cuda_warp_run(sum);
  over = __ballot_sync(~0u, (double)(before + run) > goal);
  if ((int)threadIdx.x % 32 != __ffs((int)over) - 1) return;
  before += run - sum;
  for (i = 0; i < 3 && !((double)(before + m[i]) > goal); i++) before += m[i];
  cuda_tell_found(first + (int)threadIdx.x % 32 * 4 + i, c);
}

/* The same among all of the warp's, where there is one. */
__device__ __forceinline__ void cuda_draw_in(cuda_share &s, float least, unsigned long long before,
                                             double goal, cuda_choice *c) {
  int found = -1;
  float4 there = make_float4(0, 0, 0, 0);
  cuda_share_use<true>(s, [&](int i, float4 v) {
    cuda_masses m = {0, 0};
    unsigned long long more;
    if (found >= 0) return;
    cuda_masses_add4(m, v, least);
    m.high = __reduce_add_sync(~0u, m.high);
    m.low = __reduce_add_sync(~0u, m.low);
    more = cuda_masses_all(m);
    if ((double)(before + more) > goal) found = s.begin + i * 128, there = v;
    else before += more;
  });
  cuda_draw_at(there, least, before, goal, found, c);
}

/* The first id where the running sum of what is left exceeds u of the whole. */
__device__ __forceinline__ int cuda_draw(cuda_share &s, float least, float u, cuda_choice *c) {
  const int lane = threadIdx.x % 32, me = (int)blockIdx.x * cuda_warps() + (int)threadIdx.x / 32;
  cuda_masses m = {0, 0};
  unsigned long long mine, before = 0, all = 0;
  const unsigned long long *told;
  double goal;
  cuda_share_use<true>(s, [&](int, float4 v) { cuda_masses_add4(m, v, least); });
  mine = cuda_warp_total(cuda_masses_all(m));
  told = cuda_tell(mine, s, c);
  for (int i = lane; i < (int)gridDim.x * cuda_warps(); i += 32) {
    before += i < me ? told[i] : 0;
    all += told[i];
  }
  before = cuda_warp_total(before);
  goal = (double)cuda_warp_total(all) * (double)u;
  if ((double)before <= goal && (double)(before + mine) > goal)
    cuda_draw_in(s, least, before, goal, c);
  cuda_meet();
  return c->found;
}

/* All threads of the row's blocks; every one returns the choice. */
__device__ __forceinline__ int cuda_choose(const float *logits, cuda_share &s,
                                           const tfm_sampling &how, int pos,
                                           const int32_t *history, cuda_choice *c) {
  const bool penalised = how.repetition_penalty != 0 && how.repetition_penalty != 1;
  uint32_t word[4];
  s.top = cuda_share_fill(logits, s, c);
  if (penalised && s.top > -INFINITY)
    s.top = cuda_penalise(logits, how.repetition_penalty, pos, history, s, c);
  if (!(fabsf(s.top) < INFINITY) || !(how.temperature > 0))
    return cuda_first_best(s.top, s, c);
  s.by = fminf(1.44269504f / how.temperature, 1e38f);
  cuda_philox(word, how.seed, (uint64_t)pos, how.sequence);
  return cuda_draw(s, cuda_least(s, how, c), (float)(word[0] >> 8) * (1.0f / 16777216.0f), c);
}

/* Nothing is kept of the row. */
__device__ __forceinline__ float cuda_log_sum_exp(const float *x, cuda_share &s, cuda_choice *c) {
  float top = -INFINITY;
  cuda_masses m = {0, 0};
  cuda_share_quads(x, s, [&](int, int, float4 v) { top = fmaxf(top, cuda_top4(v)); });
  top = cuda_row_max(top, s, c);
  if (!(fabsf(top) < INFINITY)) return top;
  s.top = top;
  s.by = 1.44269504f;
  cuda_share_quads(x, s, [&](int, int, float4 v) { /* what is no number is not above 0 */
    cuda_masses_add4(m, make_float4(cuda_probable(v.x, s), cuda_probable(v.y, s),
                                    cuda_probable(v.z, s), cuda_probable(v.w, s)), 0);
  });
  return top + logf((float)cuda_row_sum(cuda_masses_all(m), s, c) / 1099511627776.0f);
}

/* Shared memory that a share takes; 0: it lies in the row's scratch. */
static size_t cuda_share_bytes(int n, int cluster, int threads) {
  const int quads = cuda_share_left(cuda_share_each(n, cluster * threads)) * threads;
  const bool many = cluster > 1; /* such devices have more of it */
  return 4 * quads <= (many ? CUDA_KEPT : CUDA_KEPT_FEW) ? sizeof(float4) * (size_t)quads : 0;
}

/* Whether the row needs none of its scratch. */
static bool cuda_share_kept(int n, int cluster, int threads) {
  return cuda_share_left(cuda_share_each(n, cluster * threads)) == 0 ||
         cuda_share_bytes(n, cluster, threads) > 0;
}

__global__ void __launch_bounds__(CUDA_SAMPLERS)
cuda_sample_kernel(int32_t *ids, float *logprobs, tfm_mat logits, tfm_sampler s, bool kept) {
  extern __shared__ __align__(16) float shared[];
  __shared__ cuda_choice c;
  const int row = (int)blockIdx.y, n = logits.cols;
  const float *l = cuda_at(logits, row, 0);
  cuda_share share = cuda_share_of(kept ? (float4 *)shared : NULL,
                                   s.work + (int64_t)row * (2 * n / 4 * 4), n);
  float all = 0;
  int id;
  if (s.seq[row] < 0) return;
  id = cuda_choose(l, share, s.params[row], s.pos[row],
                   s.history + (int64_t)s.seq[row] * s.history_stride, &c);
  if (logprobs) all = cuda_log_sum_exp(l, share, &c);
  if (blockIdx.x || threadIdx.x) return;
  ids[row] = id;
  if (logprobs) logprobs[row] = l[id] - all;
}

static void cuda_sample(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits,
                        const tfm_sampler *s) {
  int cluster = cuda_of(d)->cluster;
  if (!cuda_enter(d)) return;
  while (cluster > 2 && cluster * logits.rows > cuda_of(d)->processors) cluster /= 2;
  cuda_run_clusters(d, cuda_sample_kernel, cluster, dim3((unsigned)cluster, (unsigned)logits.rows),
                    CUDA_SAMPLERS, cuda_share_bytes(logits.cols, cluster, CUDA_SAMPLERS), ids,
                    logprobs, logits, *s, cuda_share_kept(logits.cols, cluster, CUDA_SAMPLERS));
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
  const int row = (int)blockIdx.y;
  cuda_share share = cuda_share_of(NULL, NULL, logits.cols);
  const float all = cuda_log_sum_exp(cuda_at(logits, row, 0), share, &c);
  for (int i = threadIdx.x; i < k; i += CUDA_THREADS) logprobs[(int64_t)row * k + i] -= all;
}

static void cuda_top(tfm_dev *d, int32_t *ids, float *logprobs, tfm_mat logits, int32_t k) {
  if (!cuda_enter(d)) return;
  cuda_run(d, cuda_top_kernel, dim3((unsigned)logits.rows, cuda_blocks(logits.cols, 256)), 256, 0,
           ids, logprobs, logits, (int)k);
  if (logprobs)
    cuda_run(d, cuda_top_finish_kernel, dim3(1, (unsigned)logits.rows), CUDA_THREADS, 0, logprobs,
             logits, (int)k);
}

/* ---- decode ----
   A token is a chain of small kernels: five a layer, then the head and the choice, which also
   writes what the next token begins with. The chain of four tokens is a graph. Each kernel may
   start when the one before it has (programmatic dependent launch): it asks for its first weights,
   of every block 64 KB, and then waits until the other is complete. So the next weights are on
   their way while blocks come together, which costs less than a barrier of one big kernel. What
   kernels hand on to each other is read past the first cache. A block normalises the whole
   residual row for itself. */

enum cuda_kind { CUDA_ADD, CUDA_UP, CUDA_GATED, CUDA_QKV, CUDA_LOGITS };

typedef struct cuda_phase { /* what becomes of W norm(x) */
  cuda_weight w;
  int kind;
  cuda_teams teams;
  const float *x;
  cuda_norm norm; /* w NULL: none */
  const float *bias;
  float *to;
  tfm_act act;
  float softcap;
  unsigned long long *best; /* [blocks], of logits */
  tfm_rope rope;            /* of q, k and v: these and the following */
  tfm_kv kv;
  int heads;
  const int32_t *pos, *seq; /* not of the chain: known from its beginning */
} cuda_phase;

static bool cuda_pairs(int kind) { return kind == CUDA_GATED || kind == CUDA_QKV; }

__device__ static cuda_unit cuda_unit_of(const cuda_phase &p, int u) {
  int half = p.kv.width / 2, head = 0, first = 0;
  int2 pair;
  cuda_unit v;
  if (p.kind == CUDA_GATED) {
    v.a = u;
    v.b = u + p.w.rows / 2;
  } else if (p.kind == CUDA_QKV) {
    head = u / half;
    first = u - head * half;
    pair = make_int2(2 * first, 2 * first + 1);
    if (head < p.heads + p.kv.heads) pair = cuda_pair(p.rope, first);
    v.a = head * p.kv.width + pair.x;
    v.b = head * p.kv.width + pair.y;
  } else {
    return cuda_plain_unit(p.bias, u, p.w.rows, p.teams.narrow);
  }
  v.bias_a = p.bias ? __ldg(p.bias + v.a) : 0.0f;
  v.bias_b = p.bias ? __ldg(p.bias + v.b) : 0.0f;
  v.x = 1;
  v.y = 0;
  if (p.kind == CUDA_QKV && head < p.heads + p.kv.heads && first < p.rope.rot / 2) {
    float2 turn = cuda_turn(p.rope, __ldg(p.pos), first);
    v.x = turn.x;
    v.y = turn.y;
  }
  return v;
}

/* Two columns of q, k or v, rotated, to where attention reads them. */
__device__ static void cuda_finish_qkv(const cuda_phase &p, const cuda_unit &u, float2 v,
                                       int64_t kv_at) {
  const int kv_head = u.a / p.kv.width - p.heads, page = p.kv.page_tokens * p.kv.width;
  const bool is_k = kv_head < p.kv.heads;
  int64_t at = kv_at - (int64_t)(p.heads + kv_head) * p.kv.width;
  if (is_k) v = cuda_rotate(v.x, v.y, make_float2(u.x, u.y));
  if (kv_head < 0 || p.kv.type == TFM_Q8_0) { /* whose scales are of whole 32 */
    __stcg(p.to + u.a, v.x);
    __stcg(p.to + u.b, v.y);
    return;
  }
  at += (int64_t)(is_k ? kv_head : kv_head - p.kv.heads) * page;
  cuda_store(is_k ? p.kv.k : p.kv.v, p.kv.type, at + u.a, v.x);
  cuda_store(is_k ? p.kv.k : p.kv.v, p.kv.type, at + u.b, v.y);
}

/* What the phases do with a sum of one row of W. */
__device__ static void cuda_finish_row(const cuda_phase &p, int row, float v, float old,
                                       unsigned long long &best) {
  if (p.kind == CUDA_ADD) v += old;
  else if (p.kind == CUDA_UP) v = cuda_act(v, p.act);
  else best = max(best, cuda_rank(v = cuda_cap(v, p.softcap), row));
  __stcg(p.to + row, v);
}

template <int TYPE, int Q>
__global__ void __launch_bounds__(cuda_crew_of(Q), 2 * CUDA_CREW / cuda_crew_of(Q))
cuda_phase_kernel(const __grid_constant__ cuda_phase p) {
  constexpr int CREW = cuda_crew_of(Q);
  extern __shared__ __align__(16) float shared[];
  __shared__ unsigned long long bests[CREW / 32];
  const cuda_crew_room r = cuda_crew_lay_out<TYPE, 1, CREW>(shared, p.w);
  unsigned long long best = 0;
  const float each = 1.0f / (float)p.w.cols;
  int64_t kv_at = p.kind == CUDA_QKV ? cuda_kv_at(p.kv, __ldg(p.seq), __ldg(p.pos), 0) : 0;
  bool following = false;
  cuda_norm_bring<TYPE, CREW>(r, p.w, p.norm); /* before W, which is more */
  auto unit = [&](int u) {
    cuda_unit v = cuda_unit_of(p, u);
    if (p.kind == CUDA_ADD && following) v.x = __ldcg(p.to + v.a), v.y = __ldcg(p.to + v.b);
    return v;
  };
  auto ready = [&](cuda_unit &u) {
    cuda_planes_end<TYPE, 1>(r, p.w, 0);
    cuda_launch_next();
    cuda_follow();
    following = true;
    if (p.kind == CUDA_ADD) u.x = __ldcg(p.to + u.a), u.y = __ldcg(p.to + u.b);
    cuda_planes<TYPE, 1, Q, CREW>(r, p.w, p.x, p.norm, each, 0);
  };
  auto done = [&](const cuda_unit &u, int, float2 v) {
    const float by = cuda_is_late<TYPE>(p.norm) ? cuda_late<CREW>(r, p.norm.p, each)
                                                : cuda_factor<TYPE>(r, 0);
    v.x = __fmaf_rn(v.x, by, u.bias_a);
    v.y = __fmaf_rn(v.y, by, u.bias_b);
    if (p.kind == CUDA_QKV) {
      cuda_finish_qkv(p, u, v, kv_at);
    } else if (p.kind == CUDA_GATED) {
      __stcg(p.to + u.a, __fmul_rn(cuda_act(v.x, p.act), v.y));
    } else {
      cuda_finish_row(p, u.a, v.x, u.x, best);
      if (u.b != u.a) cuda_finish_row(p, u.b, v.y, u.y, best);
    }
  };
  cuda_dots<TYPE, 1, CREW>(p.w, r, p.teams, unit, ready, done);
  if (p.kind != CUDA_LOGITS) return;
  best = cuda_block_best(best, bests);
  if (threadIdx.x == 0) __stcg(p.best + blockIdx.x, best);
}

enum { CUDA_TOKENS = 4 }; /* of a graph: as many as the engine asks for at a time */

typedef struct cuda_call { /* of `decode`, on the device; constant while the chain runs */
  int32_t *ids;
  int32_t pos[CUDA_TOKENS + 1], seq;
} cuda_call;

typedef struct cuda_end { /* of a token: the choice, and what the next one begins with */
  cuda_weight embed, positions;
  float embed_scale;
  int width, vocabulary, blocks, token; /* token: number of it in the call */
  float *x, *logits, *work;
  bool kept; /* shared memory holds the logits */
  unsigned long long *best;
  int32_t *id, *pos, *sample_pos, *history;
  const int32_t *seq;
  const tfm_sampling *params;
  cuda_call *call;
} cuda_end;

/* All threads of all blocks; every one returns the token. */
__device__ __forceinline__ int cuda_end_choose(const cuda_end &s, int pos, float4 *kept,
                                               cuda_choice *c) {
  const tfm_sampling how = *s.params;
  unsigned long long best = 0;
  if (how.temperature > 0 || (how.repetition_penalty != 0 && how.repetition_penalty != 1)) {
    cuda_share share = cuda_share_of(s.kept ? kept : NULL, s.work, s.vocabulary);
    return cuda_choose(s.logits, share, how, pos, s.history, c);
  }
  for (int i = threadIdx.x; i < s.blocks; i += CUDA_THREADS) best = max(best, __ldcg(s.best + i));
  return cuda_rank_id(cuda_block_best(best, c->warp));
}

/* What the token at `pos` begins with. */
__device__ static void cuda_begin(const cuda_end &s, int id, int pos) {
  for (int i = (int)(blockIdx.x * CUDA_THREADS + threadIdx.x); i < s.width;
       i += (int)gridDim.x * CUDA_THREADS)
    __stcg(s.x + i, cuda_embedding(s.embed, s.positions, s.embed_scale, id,
                                   min(pos, s.positions.rows - 1), i));
}

__global__ void __launch_bounds__(CUDA_THREADS) cuda_begin_kernel(cuda_end s) {
  cuda_begin(s, *s.id, *s.pos);
  if (blockIdx.x) return;
  if (threadIdx.x <= CUDA_TOKENS) s.call->pos[threadIdx.x] = *s.pos + (int)threadIdx.x;
  if (threadIdx.x == 0) s.call->seq = *s.seq;
}

__global__ void __launch_bounds__(CUDA_THREADS, 2)
cuda_end_kernel(const __grid_constant__ cuda_end s) {
  extern __shared__ __align__(16) float shared[];
  __shared__ cuda_choice c;
  const int pos = s.call->pos[s.token] + 1;
  int32_t *ids = s.call->ids;
  int id;
  cuda_launch_next();
  cuda_follow();
  id = cuda_end_choose(s, pos, (float4 *)shared, &c);
  cuda_begin(s, id, pos);
  if (blockIdx.x || threadIdx.x) return;
  *s.id = id;
  *s.pos = pos;
  *s.sample_pos = pos + 1;
  s.history[pos] = id;
  *(volatile int32_t *)&ids[s.token] = id;
  __threadfence_system();
}

/* ---- What decode keeps between calls ---- */

typedef struct cuda_decoder {
  bool refused; /* it was tried, and is not possible */
  const tfm_net *net; /* NULL: nothing is made yet */
  const tfm_kv *kv;
  const void *work;
  float *x, *q, *attn, *h;
  cuda_stretches stretches;
  int stretch_count;
  cuda_end end;
  cudaGraphExec_t exec; /* of CUDA_TOKENS tokens; NULL: kernels are launched one by one */
} cuda_decoder;

typedef struct cuda_room { char *base; size_t used; } cuda_room; /* base NULL: only measures */

static void *cuda_take(cuda_room *r, size_t count, size_t size) {
  char *at = r->base ? r->base + r->used : NULL;
  r->used += cuda_align256(count * size);
  return at;
}

/* Lays the buffers of decode out in the engine's workspace. */
static void cuda_decoder_lay_out(cuda_decoder *c, cuda_room *r, const tfm_net *net, int32_t context,
                                 int processors) {
  size_t inner = (size_t)(net->heads * net->head_width);
  size_t kv = (size_t)(net->kv_heads * net->head_width);
  int group = net->kv_heads ? net->heads / net->kv_heads : 1; /* blocks have one head, or four */
  size_t of = (size_t)net->kv_heads * cuda_blocks(group, 4) * 4;
  c->stretch_count = context / CUDA_STRETCH + 1;
  c->x = (float *)cuda_take(r, (size_t)net->width, sizeof(float));
  c->q = (float *)cuda_take(r, inner + 2 * kv, sizeof(float)); /* k and v, for a cache of Q8_0 */
  c->attn = (float *)cuda_take(r, inner, sizeof(float));
  c->h = (float *)cuda_take(r, (size_t)net->ffn_width, sizeof(float));
  c->end.logits = (float *)cuda_take(r, (size_t)net->vocabulary, sizeof(float));
  c->stretches.part = (float *)cuda_take(r, of * (size_t)c->stretch_count,
                                         (size_t)cuda_lanes8(net->head_width) * 3 * sizeof(float));
  c->stretches.arrived = (unsigned *)cuda_take(r, of, sizeof(unsigned));
  c->end.best = (unsigned long long *)cuda_take(r, (size_t)processors * 2, sizeof *c->end.best);
  c->end.call = (cuda_call *)cuda_take(r, 1, sizeof(cuda_call));
}

/* What the kernels do not know how to compute. */
static bool cuda_layer_plain(const tfm_layer *l) {
  return l->norm1 && l->norm2 && !l->post1 && !l->post2 && !l->q_norm && !l->k_norm &&
         !l->router.rows && !l->shared_gate.rows && l->up.rows && l->attn.dropout.rate == 0;
}

/* Whether its bits are not those of `layer` and `matmul` in a deterministic engine. */
static bool cuda_decode_alone(const tfm_dev *d, const tfm_net *net);

static bool cuda_decode_knows(const tfm_dev *d, const tfm_run_ahead *r) {
  const tfm_net *net = r->net;
  int32_t i;
  if (!d->work || d->host_visible || r->rows.n != 1 || net->head_width % 2 || net->experts ||
      net->width > CUDA_NORMED || (d->deterministic && cuda_decode_alone(d, net)))
    return false;
  for (i = 0; i < net->layers; i++) {
    const tfm_layer *l = &net->layer[i];
    if (!cuda_layer_plain(l) || cuda_narrow(d, cuda_packed(&l->qkv)) ||
        (net->gated && cuda_narrow(d, cuda_packed(&l->up)))) /* whose rows go in pairs */
      return false;
  }
  return true;
}

/* Quads of x that a thread of a phase keeps. Narrow rows have no kernel of their own: phases that
   are the same kernel follow faster. */
static int cuda_phase_quads(const cuda_weight *w) {
  return cuda_quads_of(w->type, cuda_pieces(*w)) <= 4 * CUDA_CREW ? 4 : 8;
}

/* norms: vectors of its norm's weights and biases. */
static size_t cuda_phase_bytes(const cuda_weight *w, int norms) {
  return cuda_crew_bytes(w, 1, norms, cuda_crew_of(cuda_phase_quads(w)));
}

/* Bytes of shared memory of the widest product. */
static size_t cuda_decoder_shared(const tfm_net *net) {
  size_t most = cuda_phase_bytes(cuda_packed(&net->head), 2);
  int32_t i, k;
  for (i = 0; i < net->layers; i++) {
    const tfm_layer *l = &net->layer[i];
    const tfm_weight *w[4] = {&l->qkv, &l->up, &l->out, &l->down};
    for (k = 0; k < 4; k++)
      most = cuda_larger(most, cuda_phase_bytes(cuda_packed(w[k]), k < 2 ? 2 : 0));
  }
  return most;
}

static void cuda_end_fill(cuda_end *s, const tfm_run_ahead *r) {
  const tfm_net *net = r->net;
  s->embed = *cuda_packed(&net->embed);
  if (net->positions.rows) s->positions = *cuda_packed(&net->positions);
  s->embed_scale = net->embed_scale != 0 ? net->embed_scale : 1.0f;
  s->width = net->width, s->vocabulary = net->vocabulary;
  s->work = r->sampler.work;
  s->id = (int32_t *)r->rows.id, s->pos = (int32_t *)r->rows.pos, s->seq = r->rows.seq;
  s->sample_pos = (int32_t *)r->sampler.pos;
  s->history = (int32_t *)r->sampler.history;
  s->params = r->sampler.params;
}

typedef void (*cuda_phase_function)(cuda_phase);

static cuda_phase_function cuda_phase_choose(tfm_type type, int q) {
  return cuda_pick(type, [q](auto t) -> cuda_phase_function {
    return q == 4 ? cuda_phase_kernel<t.value, 4> : cuda_phase_kernel<t.value, 8>;
  });
}

static void cuda_phase_run(tfm_dev *d, cuda_phase *p, const cuda_weight *w) {
  const int q = cuda_phase_quads(w), crew = cuda_crew_of(q);
  p->w = *w;
  p->teams = cuda_teams_of(d, w, cuda_pairs(p->kind), crew);
  cuda_run(d, cuda_phase_choose(w->type, q), p->teams.grid, crew,
           cuda_phase_bytes(w, !!p->norm.w + !!p->norm.b), *p);
}

static cuda_phase cuda_phase_of(int kind, const float *x, const float *bias, float *to) {
  cuda_phase p;
  memset(&p, 0, sizeof p);
  p.kind = kind, p.x = x, p.bias = bias, p.to = to;
  return p;
}

/* Keys and values that qkv has left beside q. */
static void cuda_decode_append(tfm_dev *d, const cuda_decoder *c, const tfm_rows *rows,
                               int32_t layer) {
  const tfm_net *net = c->net;
  int32_t inner = net->heads * net->head_width, wide = net->kv_heads * net->head_width;
  tfm_mat k = {c->q + inner, TFM_F32, 1, wide, wide}, v = k;
  v.data = c->q + inner + wide;
  cuda_kv_put_run(d, &c->kv[layer], k, v, rows);
}

static void cuda_decode_attend(tfm_dev *d, const cuda_decoder *c, const tfm_rows *rows,
                               int32_t layer) {
  const tfm_net *net = c->net;
  int32_t inner = net->heads * net->head_width;
  tfm_mat y = {c->attn, TFM_F32, 1, inner, inner}, q = {c->q, TFM_F32, 1, inner, inner};
  cuda_attn a = {y, q, c->kv[layer], *rows, NULL, net->layer[layer].attn,
                 net->heads / net->kv_heads, {}};
  if (cuda_attend_knows(&a.kv)) cuda_attend_run(d, &a, &c->stretches, 1, c->stretch_count);
  else cuda_attn_run(d, &a);
}

static void cuda_decode_layer(tfm_dev *d, const cuda_decoder *c, const tfm_rows *rows,
                              int32_t layer) {
  const tfm_net *net = c->net;
  const tfm_layer *l = &net->layer[layer];
  cuda_phase qkv = cuda_phase_of(CUDA_QKV, c->x, l->qkv_bias, c->q);
  cuda_phase out = cuda_phase_of(CUDA_ADD, c->attn, l->out_bias, c->x);
  cuda_phase up = cuda_phase_of(net->gated ? CUDA_GATED : CUDA_UP, c->x, l->up_bias, c->h);
  cuda_phase down = cuda_phase_of(CUDA_ADD, c->h, l->down_bias, c->x);
  qkv.norm.w = l->norm1, qkv.norm.b = l->norm1_bias, qkv.norm.p = net->norm;
  qkv.rope = l->rope, qkv.kv = c->kv[layer], qkv.heads = net->heads;
  qkv.pos = rows->pos, qkv.seq = rows->seq;
  up.norm.w = l->norm2, up.norm.b = l->norm2_bias, up.norm.p = net->norm;
  up.act = net->act;
  cuda_phase_run(d, &qkv, cuda_packed(&l->qkv));
  cuda_of(d)->chained = true;
  if (qkv.kv.type == TFM_Q8_0) cuda_decode_append(d, c, rows, layer);
  cuda_decode_attend(d, c, rows, layer);
  cuda_phase_run(d, &out, cuda_packed(&l->out));
  cuda_phase_run(d, &up, cuda_packed(&l->up));
  cuda_phase_run(d, &down, cuda_packed(&l->down));
}

/* One token, from what it begins with to what the next one does. */
static void cuda_decode_token(tfm_dev *d, const cuda_decoder *c, int token) {
  const tfm_net *net = c->net;
  cuda_phase head = cuda_phase_of(CUDA_LOGITS, c->x, net->head_bias, c->end.logits);
  cuda_end end = c->end;
  tfm_rows rows = {1, NULL, c->end.call->pos + token, &c->end.call->seq, true};
  const int cluster = cuda_of(d)->cluster;
  const size_t kept = cuda_share_bytes(net->vocabulary, cluster, CUDA_THREADS);
  int32_t i;
  cuda_of(d)->chained = token > 0; /* a call's first kernel needs all of what was before */
  for (i = 0; i < net->layers; i++) cuda_decode_layer(d, c, &rows, i);
  head.norm.w = net->final_norm, head.norm.b = net->final_norm_bias, head.norm.p = net->norm;
  head.softcap = net->logit_softcap;
  head.best = c->end.best;
  cuda_phase_run(d, &head, cuda_packed(&net->head));
  end.blocks = (int)head.teams.grid;
  end.token = token;
  end.kept = cuda_share_kept(net->vocabulary, cluster, CUDA_THREADS);
  cuda_run_clusters(d, cuda_end_kernel, cluster, dim3((unsigned)cluster), CUDA_THREADS, kept, end);
  cuda_of(d)->chained = false;
}

static bool cuda_decode_record(tfm_dev *d, cuda_decoder *c) {
  cudaGraph_t graph = NULL;
  int i;
  if (!cuda_check(d, cudaStreamBeginCapture(cuda_stream(d), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture")) return false;
  for (i = 0; i < CUDA_TOKENS; i++) cuda_decode_token(d, c, i);
  cuda_check(d, cudaStreamEndCapture(cuda_stream(d), &graph), "cudaStreamEndCapture");
  if (graph && d->status == TFM_OK)
    cuda_check(d, cudaGraphInstantiate(&c->exec, graph, 0), "cudaGraphInstantiate");
  if (graph) cudaGraphDestroy(graph);
  return d->status == TFM_OK;
}

/* Once for an engine. */
static bool cuda_decoder_make(tfm_dev *d, const tfm_run_ahead *r) {
  cuda_state *s = cuda_of(d);
  cuda_decoder *c = s->decoder;
  cuda_room room = {(char *)d->work, 0};
  if (c->exec) cuda_check(d, cudaGraphExecDestroy(c->exec), "cudaGraphExecDestroy");
  memset(c, 0, sizeof *c);
  c->net = r->net, c->kv = r->kv, c->work = d->work;
  cuda_decoder_lay_out(c, &room, r->net, r->sampler.history_stride, s->processors);
  cuda_end_fill(&c->end, r);
  c->end.x = c->x;
  c->refused = cuda_decoder_shared(r->net) > CUDA_SHARED;
  if (c->refused) return false;
  cuda_zero(d, c->stretches.arrived, (size_t)((char *)c->end.best - (char *)c->stretches.arrived));
  if (!cuda_decode_record(d, c)) c->net = NULL;
  return c->net != NULL;
}

static bool cuda_decode(tfm_dev *d, const tfm_run_ahead *r, int32_t steps) {
  cuda_decoder *c = cuda_of(d)->decoder;
  int i;
  if (!cuda_decode_knows(d, r) || steps > CUDA_TOKENS || !cuda_enter(d)) return false;
  if (c->net != r->net && !cuda_decoder_make(d, r)) return false;
  if (c->refused) return false;
  cuda_put(d, &c->end.call->ids, &r->ids, sizeof r->ids);
  cuda_run(d, cuda_begin_kernel, dim3(1), CUDA_THREADS, 0, c->end);
  if (steps == CUDA_TOKENS)
    cuda_check(d, cudaGraphLaunch(c->exec, cuda_stream(d)), "cudaGraphLaunch");
  else
    for (i = 0; i < steps; i++) cuda_decode_token(d, c, i);
  return true;
}

/* ---- attn: tiles ----
   A pass's runs of rows of one sequence, at positions that follow each other, are cut into tiles of
   CUDA_TILE rows; what is left of shorter runs is listed row by row. Tiles with many keys come
   first. All that is found on the device, once for a pass.

   A block multiplies a tile and a head on the tensor cores. Each of its 8 warps keeps 16 rows of q,
   of scores and of the output in registers, while 64 keys and values at a time pass through shared
   memory, two deep. Hopper has a way of its own, below. */

enum {
  CUDA_TILE = 128,
  CUDA_RUN = 16,     /* rows that are worth a tile */
  CUDA_LISTED = 1024 /* threads that make the list; tiles that are put in order */
};

/* Rows [begin, end) are a run; count: of tiles, of rows of none, of runs. */
__device__ static void cuda_tiles_cut(const cuda_tiles &to, const tfm_rows &rows, int begin,
                                      int end, int32_t *count) {
  const int seq = rows.seq[begin], pos = rows.pos[begin], n = end - begin;
  int at;
  if (seq < 0) return;
  if (n < CUDA_RUN) {
    at = atomicAdd(count + 1, n);
    for (int i = 0; i < n; i++) to.rest[at + i] = begin + i;
    return;
  }
  to.run[atomicAdd(count + 2, 1)] = make_int2(seq, pos + n);
  at = atomicAdd(count, (n + CUDA_TILE - 1) / CUDA_TILE);
  for (int i = 0; i < n; i += CUDA_TILE)
    to.tile[at + i / CUDA_TILE] = make_int4(begin + i, min(CUDA_TILE, n - i), pos + i, seq);
}

/* The tiles whose last rows see most keys first, by counting those of as many tiles of keys. */
__device__ static void cuda_tiles_sort(const cuda_tiles &to, int n) {
  __shared__ int begin[CUDA_LISTED], warps[32];
  const int i = threadIdx.x, lane = i % 32;
  int4 mine = make_int4(0, 0, 0, 0);
  int key = 0, at = 0, own, sum, before = 0;
  begin[i] = 0;
  __syncthreads();
  if (i < n) {
    mine = to.tile[i];
    key = max(CUDA_LISTED - 1 - (mine.y + mine.z) / CUDA_TILE, 0);
    at = atomicAdd(&begin[key], 1);
  }
  __syncthreads();
  sum = own = begin[i];
  for (int k = 1; k < 32; k *= 2) {
    const int other = __shfl_up_sync(~0u, sum, k);
    if (lane >= k) sum += other;
  }
  if (lane == 31) warps[i / 32] = sum;
  __syncthreads();
  for (int k = 0; k < i / 32; k++) before += warps[k];
  begin[i] = before + sum - own;
  __syncthreads();
  if (i < n) to.tile[begin[key] + at] = mine;
}

enum { CUDA_LOOKED = 8 }; /* times 32 rows that a warp looks at together */

/* One block, whose warps look for beginnings in a stretch of rows each: all but a stretch's first
   end a run that began there. */
__global__ void __launch_bounds__(CUDA_LISTED, 1) cuda_tiles_kernel(cuda_tiles to, tfm_rows rows) {
  __shared__ int latest[CUDA_LISTED / 32], count[3];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, step = 32 * CUDA_LOOKED;
  const int each = (rows.n / (CUDA_LISTED / 32 * step) + 1) * step, from = warp * each;
  int first = 0, last = -1;
  if (threadIdx.x < 3) count[threadIdx.x] = 0;
  __syncthreads();
  for (int at = from; at < from + each && at <= rows.n; at += step) {
    bool begins[CUDA_LOOKED];
#pragma unroll
    for (int k = 0; k < CUDA_LOOKED; k++) {
      const int i = at + 32 * k + lane, own = min(i, rows.n - 1), old = max(own - 1, 0);
      begins[k] = (rows.seq[own] != rows.seq[old]) | (rows.pos[own] != rows.pos[old] + 1) |
                  (i == rows.n);
      begins[k] &= i <= rows.n;
    }
#pragma unroll
    for (int k = 0; k < CUDA_LOOKED; k++) {
      const int begin = at + 32 * k, i = begin + lane;
      const unsigned all = __ballot_sync(~0u, begins[k]), below = all & ((1u << lane) - 1);
      if (!all) continue;
      const int before = below ? begin + 31 - __clz((int)below) : last;
      if (begins[k] && before >= 0) cuda_tiles_cut(to, rows, before, i, count);
      else if (begins[k]) first = i;
      last = begin + 31 - __clz((int)all);
    }
  }
  if (lane == 0) latest[warp] = last;
  __syncthreads();
  if (first > 0) {
    last = 0;
    for (int k = 0; k < warp; k++) last = max(last, latest[k]);
    cuda_tiles_cut(to, rows, last, first, count);
  }
  __syncthreads();
  if (threadIdx.x < 3) to.count[threadIdx.x] = count[threadIdx.x];
  if (count[0] <= CUDA_LISTED) cuda_tiles_sort(to, count[0]);
}

/* In tfm_dev.work; for passes of up to `rows` rows. */
static cuda_tiles cuda_tiles_lay_out(cuda_room *r, int32_t rows) {
  cuda_tiles t;
  t.tile = (int4 *)cuda_take(r, (size_t)rows / CUDA_RUN + 1, sizeof(int4));
  t.rest = (int32_t *)cuda_take(r, (size_t)rows, sizeof(int32_t));
  t.run = (int2 *)cuda_take(r, (size_t)rows / CUDA_RUN + 1, sizeof(int2));
  t.count = (int32_t *)cuda_take(r, 3, sizeof(int32_t));
  return t;
}

static cuda_tiles cuda_tiles_of(const tfm_dev *d) {
  cuda_room room = {(char *)d->work + cuda_of(d)->tiles_at, 0};
  return cuda_tiles_lay_out(&room, cuda_of(d)->tiles_rows);
}

static bool cuda_tiles_fit(const tfm_dev *d, const tfm_rows *rows) {
  return d->work && !rows->apart && rows->n >= CUDA_RUN && rows->n <= cuda_of(d)->tiles_rows;
}

static void cuda_tiles_list(tfm_dev *d, const tfm_rows *rows) {
  cuda_run(d, cuda_tiles_kernel, dim3(1), CUDA_LISTED, 0, cuda_tiles_of(d), *rows);
}

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
__device__ __forceinline__ void cuda_flash_one(const cuda_attn &a, int4 tile, int head) {
  extern __shared__ __align__(128) uint8_t tiles[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = tile.x, n = tile.y, row = begin + warp * 16 + lane / 4;
  const int low = tile.z, last = low + n - 1, seq = tile.w;
  const uint32_t base = (uint32_t)__cvta_generic_to_shared(tiles), stage = CUDA_KEYS * D * 2;
  int pos[2], first, turn = 0;
  uint32_t q[D / 16][4];
  float o[D / 8][4], s[8][4], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
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
  for (int r = 0; r < 2; r++) pos[r] = row + 8 * r < begin + n ? low + row - begin + 8 * r : -1;
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

template <int D, bool BF>
__global__ void __launch_bounds__(256, 1) cuda_flash_kernel(cuda_attn a) {
  const int pieces = __ldcg(a.tiles.count) * a.p.heads;
  for (int i = (int)blockIdx.x; i < pieces; i += (int)gridDim.x) {
    cuda_flash_one<D, BF>(a, __ldcg(a.tiles.tile + i / a.p.heads), i % a.p.heads);
    __syncthreads();
  }
}

static bool cuda_flash_knows(const cuda_attn *a) {
  return a->kv.width == 64 || a->kv.width == 128;
}

template <bool BF> static void cuda_flash_run(tfm_dev *d, const cuda_attn *a) {
  cuda_run(d, a->kv.width == 64 ? cuda_flash_kernel<64, BF> : cuda_flash_kernel<128, BF>,
           dim3((unsigned)cuda_of(d)->processors), 256,
           (size_t)4 * CUDA_KEYS * 2 * (size_t)a->kv.width, *a);
}

/* ---- attn: tiles on Hopper ----
   A block of three warpgroups stays for many pieces of work, each a tile and a head. A thread of
   the first one has q, and then keys and values from the last to the first, copied into rings of
   shared memory by the tensor copy engine. The other two multiply, 64 rows each (wgmma: q and keys
   from shared memory, probabilities from registers), and take turns: while one has products on the
   way, the other makes exponentials, of scores that it asked for before the values of the tile
   before them. A row's maximum is followed only where it grows by more than 2^8; heads are filled
   up with zeros to 64, 128 or 256 columns. */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CUDA_HOPPER 1
#else
#define CUDA_HOPPER 0
#endif

/* Of heads of up to D values. */
template <int D> struct cuda_hopper {
  static constexpr int keys = D == 256 ? 64 : 128, panels = D / 64;  /* panels of 64 columns */
  static constexpr int stages = D == 64 ? 4 : 2;
  static constexpr int q_bytes = CUDA_TILE * D * 2, tile_bytes = keys * D * 2;
  static constexpr int shared = 1024 + q_bytes + 2 * stages * tile_bytes; /* 1024: to align them */
  static constexpr int out = D == 64 ? 64 : 128, outs = D / out;  /* columns of one product */
};

typedef struct cuda_maps { CUtensorMap q, k, v; } cuda_maps;

typedef struct cuda_hopper_attn {
  cuda_attn a;
  float scale, cap; /* of powers of two; of scores before them, 0: none */
  int box;          /* keys that one copy brings */
} cuda_hopper_attn;

enum { CUDA_Q_FULL, CUDA_Q_EMPTY, CUDA_K_FULL, CUDA_K_EMPTY = 6, CUDA_V_FULL = 10,
       CUDA_V_EMPTY = 14, CUDA_BARRIERS = 18 }; /* one for each of up to 4 stages */

#if CUDA_HOPPER
__device__ __forceinline__ void cuda_barrier_init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               : : "r"((uint32_t)__cvta_generic_to_shared(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void cuda_barrier_wait(uint32_t barrier, int parity) {
  asm volatile("{ .reg .pred p;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@p bra done;\nbra again;\ndone: }" : : "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void cuda_barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               : : "r"(barrier), "r"(bytes) : "memory");
}

/* Once for a warp. */
__device__ __forceinline__ void cuda_barrier_arrive(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void cuda_copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier,
                                              int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];"
               : : "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z) : "memory");
}

__device__ __forceinline__ void cuda_products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}

__device__ __forceinline__ void cuda_products_end() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}

template <int LEFT> __device__ __forceinline__ void cuda_products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(LEFT) : "memory");
}

/* The compiler moves no use of these registers to the other side. */
template <int N> __device__ __forceinline__ void cuda_settle(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i]) : : "memory");
}

template <int N> __device__ __forceinline__ void cuda_settle(uint32_t (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(v[i]) : : "memory");
}

/* What wgmma is told of a matrix in panels of 64 columns, whose rows of 128 bytes are turned as the
   copy engine does it; panel: bytes from one to the next, where columns are what is summed over. */
__device__ __forceinline__ uint64_t cuda_matrix_at(uint32_t at, uint32_t panel) {
  return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(panel >> 4) << 16 |
         (uint64_t)((at & 0x3ffff) >> 4);
}

#define CUDA_IN4(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
#define CUDA_IN16(v, i) CUDA_IN4(v, i), CUDA_IN4(v, i + 4), CUDA_IN4(v, i + 8), CUDA_IN4(v, i + 12)
#define CUDA_IN32(v) CUDA_IN16(v, 0), CUDA_IN16(v, 16)
#define CUDA_IN64(v) CUDA_IN32(v), CUDA_IN16(v, 32), CUDA_IN16(v, 48)
#define CUDA_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUDA_32 CUDA_8 ", %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CUDA_64 CUDA_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, " \
  "%45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CUDA_WGMMA(n, type, out, a, b, add, turned) \
  "{ .reg .pred p; setp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." \
  type "." type " {" out "}, " a ", " b ", p, 1, 1, " turned "; }"

#define CUDA_WGMMA_OF(n, out, a, b, add, turned, ...) \
  do { \
    if (BF) asm volatile(CUDA_WGMMA(n, "bf16", out, a, b, add, turned) : __VA_ARGS__); \
    else asm volatile(CUDA_WGMMA(n, "f16", out, a, b, add, turned) : __VA_ARGS__); \
  } while (0)

/* c [64, 128] = a b^T, or c += a b^T where `add`: a [64, 16], b [128, 16] in shared memory. */
template <bool BF>
__device__ __forceinline__ void cuda_wgmma(float (&c)[64], uint64_t a, uint64_t b, int add) {
  CUDA_WGMMA_OF("128", CUDA_64, "%64", "%65", "%66", "0, 0", CUDA_IN64(c) : "l"(a), "l"(b),
                "r"(add));
}

/* The same for b [64, 16]. */
template <bool BF>
__device__ __forceinline__ void cuda_wgmma(float (&c)[32], uint64_t a, uint64_t b, int add) {
  CUDA_WGMMA_OF("64", CUDA_32, "%32", "%33", "%34", "0, 0", CUDA_IN32(c) : "l"(a), "l"(b),
                "r"(add));
}

/* With a in registers, and b [16, 128]. */
template <bool BF>
__device__ __forceinline__ void cuda_wgmma(float (&c)[64], const uint32_t *a, uint64_t b, int add) {
  CUDA_WGMMA_OF("128", CUDA_64, "{%64, %65, %66, %67}", "%68", "%69", "1", CUDA_IN64(c) : "r"(a[0]),
                "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* And b [16, 64]. */
template <bool BF>
__device__ __forceinline__ void cuda_wgmma(float (&c)[32], const uint32_t *a, uint64_t b, int add) {
  CUDA_WGMMA_OF("64", CUDA_32, "{%32, %33, %34, %35}", "%36", "%37", "1", CUDA_IN32(c) : "r"(a[0]),
                "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* And for b [16, 16] in shared memory. */
template <bool BF>
__device__ __forceinline__ void cuda_wgmma(float (&c)[8], uint64_t a, uint64_t b, int add) {
  CUDA_WGMMA_OF("16", CUDA_8, "%8", "%9", "%10", "0, 0", CUDA_IN4(c, 0), CUDA_IN4(c, 4) : "l"(a),
                "l"(b), "r"(add));
}

typedef struct cuda_rings { uint32_t q, k, v, barriers; } cuda_rings; /* in shared memory */

/* Barrier number `which` of use number `use` of the ring. */
template <int D> __device__ __forceinline__ uint32_t cuda_ring_at(const cuda_rings &r, int which,
                                                                  int use) {
  return r.barriers + (which + use % cuda_hopper<D>::stages) * 8;
}

template <int D> __device__ __forceinline__ void cuda_ring_wait(const cuda_rings &r, int which,
                                                                int use, int parity) {
  cuda_barrier_wait(cuda_ring_at<D>(r, which, use), (use / cuda_hopper<D>::stages & 1) ^ parity);
}

typedef struct cuda_piece_of { /* of work */
  int row, rows, pos, seq, head;
  int low, high; /* tiles of keys */
} cuda_piece_of;

/* Number `round` of this block, there and back again; false: there are no more. */
template <int D>
__device__ __forceinline__ bool cuda_piece_next(cuda_piece_of &m, const cuda_attn &a, int pieces,
                                                int round) {
  const int blocks = (int)gridDim.x, block = (int)blockIdx.x;
  const int i = round * blocks + (round & 1 ? blocks - 1 - block : block);
  int4 t;
  if (i >= pieces) return false;
  t = __ldg(a.tiles.tile + i / a.p.heads);
  m.row = t.x, m.rows = t.y, m.pos = t.z, m.seq = t.w;
  m.head = i % a.p.heads;
  m.high = (m.pos + m.rows - 1) / cuda_hopper<D>::keys;
  m.low = 0;
  if (a.p.window > 0 && m.pos >= a.p.window)
    m.low = (m.pos - a.p.window + 1) / cuda_hopper<D>::keys;
  return true;
}

/* Keys or values of a tile, as far as there are any; in boxes, none of which leaves a page. */
template <int D>
__device__ __forceinline__ void cuda_fetch_tile(const cuda_hopper_attn &h, const CUtensorMap *map,
                                                uint32_t to, uint32_t barrier,
                                                const cuda_piece_of &m, int tile) {
  constexpr int KEYS = cuda_hopper<D>::keys;
  const tfm_kv &kv = h.a.kv;
  const int first = tile * KEYS, left = min(m.pos + m.rows - first, KEYS);
  const int boxes = (left + h.box - 1) / h.box;
  cuda_barrier_expect(barrier, boxes * h.box * D * 2);
  for (int b = 0; b < boxes; b++) {
    const int key = first + b * h.box;
    const int page = __ldg(kv.table + (int64_t)m.seq * kv.max_pages + key / kv.page_tokens);
    for (int p = 0; p < cuda_hopper<D>::panels; p++)
      cuda_copy_box(to + p * KEYS * 128 + b * h.box * 128, map, barrier, p * 64,
                    key % kv.page_tokens, page * kv.heads + m.head / h.a.group);
  }
}

/* One thread. */
template <int D>
__device__ __forceinline__ void cuda_fetch(const cuda_hopper_attn &h, const cuda_maps &maps,
                                           const cuda_rings &r, int pieces) {
  typedef cuda_hopper<D> shape;
  cuda_piece_of m;
  int use = 0;
  for (int round = 0; cuda_piece_next<D>(m, h.a, pieces, round); round++) {
    cuda_barrier_wait(r.barriers + CUDA_Q_EMPTY * 8, (round & 1) ^ 1);
    cuda_barrier_expect(r.barriers + CUDA_Q_FULL * 8, shape::q_bytes);
    for (int p = 0; p < shape::panels; p++)
      cuda_copy_box(r.q + p * CUDA_TILE * 128, &maps.q, r.barriers + CUDA_Q_FULL * 8, p * 64,
                    m.head, m.row);
    for (int tile = m.high; tile >= m.low; tile--, use++) {
      const int at = use % shape::stages * shape::tile_bytes;
      cuda_ring_wait<D>(r, CUDA_K_EMPTY, use, 1);
      cuda_fetch_tile<D>(h, &maps.k, r.k + at, cuda_ring_at<D>(r, CUDA_K_FULL, use), m, tile);
      cuda_ring_wait<D>(r, CUDA_V_EMPTY, use, 1);
      cuda_fetch_tile<D>(h, &maps.v, r.v + at, cuda_ring_at<D>(r, CUDA_V_FULL, use), m, tile);
    }
  }
}

/* What a thread of those that multiply keeps. Elements 0, 1 of four belong to the warp's row lane /
   4, elements 2, 3 to the row eight below; the next four lie eight columns on. */
template <int D> struct cuda_rows64 {
  float s[cuda_hopper<D>::keys / 2];                           /* scores */
  uint32_t p[cuda_hopper<D>::keys / 4];                        /* probabilities, of 16 bits */
  float o[cuda_hopper<D>::outs][cuda_hopper<D>::out / 2];      /* sums of values */
  float top[2], sum[2], by[2]; /* what stands for a row's maximum; o is to be multiplied by */
  int half, first, pos;        /* of the tile's rows; positions of its first row and of lane / 4 */
};

template <int D> __device__ __forceinline__ void cuda_settle_out(cuda_rows64<D> &t) {
#pragma unroll
  for (int h = 0; h < cuda_hopper<D>::outs; h++) cuda_settle(t.o[h]);
}

/* Of the first N keys of a tile. */
template <int D, bool BF, int N>
__device__ __forceinline__ void cuda_ask_scores(cuda_rows64<D> &t, const cuda_rings &r, int use) {
  typedef cuda_hopper<D> shape;
  float (&s)[N / 2] = *(float (*)[N / 2])t.s;
  const uint32_t q = r.q + t.half * 64 * 128, k = r.k + use % shape::stages * shape::tile_bytes;
  cuda_settle(t.s);
  cuda_products_begin();
#pragma unroll
  for (int i = 0; i < D / 16; i++)
    cuda_wgmma<BF>(s, cuda_matrix_at(q + i / 4 * CUDA_TILE * 128 + i % 4 * 32, 16),
                   cuda_matrix_at(k + i / 4 * shape::keys * 128 + i % 4 * 32, 16), i > 0);
  cuda_products_end();
}

template <int D, bool BF>
__device__ __forceinline__ void cuda_ask_values(cuda_rows64<D> &t, const cuda_rings &r, int use,
                                                bool add) {
  typedef cuda_hopper<D> shape;
  const uint32_t v = r.v + use % shape::stages * shape::tile_bytes, panel = shape::keys * 128;
  cuda_settle(t.p);
  cuda_settle_out(t);
  cuda_products_begin();
#pragma unroll
  for (int h = 0; h < shape::outs; h++)
#pragma unroll
    for (int i = 0; i < shape::keys / 16; i++)
      cuda_wgmma<BF>(t.o[h], t.p + 4 * i,
                     cuda_matrix_at(v + (uint32_t)h * 2 * panel + (uint32_t)i * 2048, panel),
                     add || i);
  cuda_products_end();
}

/* Of one of the thread's two rows, and N keys. */
template <int D, int N, bool MASK>
__device__ __forceinline__ void cuda_row_exp(cuda_rows64<D> &t, int r, float scale, int key,
                                             int window) {
  const int pos = t.pos + 8 * r;
  float best = t.top[r], base, sum[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float &v = t.s[i / 2 * 4 + 2 * r + i % 2];
    const int at = key + i / 2 * 8 + i % 2;
    if (MASK && (at > pos || pos - at >= window)) v = -INFINITY;
    best = fmaxf(best, v);
  }
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
  if ((best - t.top[r]) * scale <= 8.0f) best = t.top[r];
  base = MASK && best == -INFINITY ? 0 : best * scale;
  t.by[r] = cuda_exp2(__fmaf_rn(t.top[r], scale, -base));
  t.top[r] = best;
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    float &v = t.s[i / 2 * 4 + 2 * r + i % 2];
    v = cuda_exp2(__fmaf_rn(v, scale, -base));
    sum[i % 2] += v;
  }
  t.sum[r] = __fmaf_rn(t.sum[r], t.by[r], sum[0] + sum[1]);
}

/* Scores become powers of two. */
template <int D, int N>
__device__ __forceinline__ void cuda_exponentials(cuda_rows64<D> &t, const cuda_hopper_attn &h,
                                                  int tile) {
  const int window = h.a.p.window > 0 ? h.a.p.window : INT32_MAX;
  const int first = tile * cuda_hopper<D>::keys, key = first + (int)threadIdx.x % 4 * 2;
  if (h.cap != 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) t.s[i] = tanhf(t.s[i] * h.cap);
  }
  if (first + N - 1 > t.first || t.first + 63 - first >= window) {
    cuda_row_exp<D, N, true>(t, 0, h.scale, key, window);
    cuda_row_exp<D, N, true>(t, 1, h.scale, key, window);
  } else {
    cuda_row_exp<D, N, false>(t, 0, h.scale, key, window);
    cuda_row_exp<D, N, false>(t, 1, h.scale, key, window);
  }
}

/* p is the first N scores, which are exponentials now, and zeros. */
template <int D, bool BF, int N>
__device__ __forceinline__ void cuda_probabilities(cuda_rows64<D> &t) {
#pragma unroll
  for (int i = 0; i < cuda_hopper<D>::keys / 4; i++)
    t.p[i] = i < N / 4 ? cuda_pack2<BF>(t.s[2 * i], t.s[2 * i + 1]) : 0;
}

/* o follows the rows' maxima. */
template <int D> __device__ __forceinline__ void cuda_follow_top(cuda_rows64<D> &t) {
  if (!__any_sync(~0u, t.by[0] != 1 || t.by[1] != 1)) return;
#pragma unroll
  for (int h = 0; h < cuda_hopper<D>::outs; h++)
#pragma unroll
    for (int i = 0; i < cuda_hopper<D>::out / 2; i++) t.o[h][i] *= t.by[i / 2 % 2];
}

/* Values of keys from number `from` of a tile on become zero: what lies there has no meaning, and
   may be no numbers. Both halves do all of it. */
template <int D>
__device__ __forceinline__ void cuda_clear_values(const cuda_rows64<D> &t, const cuda_rings &r,
                                                  int use, int from) {
  typedef cuda_hopper<D> shape;
  const uint32_t v = r.v + use % shape::stages * shape::tile_bytes;
  const int rows = shape::keys - from;
  cuda_ring_wait<D>(r, CUDA_V_FULL, use, 0);
  for (int i = threadIdx.x % 128; i < rows * D / 8; i += 128)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                 : : "r"(v + i / 8 / rows * shape::keys * 128 + (from + i / 8 % rows) * 128 +
                         i % 8 * 16), "r"(0) : "memory");
  asm volatile("fence.proxy.async.shared::cta;\nbar.sync %0, 128;" : : "r"(3 + t.half) : "memory");
}

/* The turn to ask for products goes from half to half. */
__device__ __forceinline__ void cuda_turn_wait(int half) {
  asm volatile("bar.sync %0, 256;" : : "r"(1 + half) : "memory");
}
__device__ __forceinline__ void cuda_turn_pass(int half) {
  asm volatile("bar.arrive %0, 256;" : : "r"(2 - half) : "memory");
}

/* Four lanes have a column of words each and get a row each: lane k's word i is word k of i's. */
__device__ __forceinline__ void cuda_turn4(uint32_t (&w)[4]) {
#pragma unroll
  for (int by = 1; by < 4; by *= 2) {
    const bool odd = threadIdx.x & by;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (k & by) continue;
      const uint32_t sent = odd ? w[k] : w[k + by];
      const uint32_t got = __shfl_xor_sync(~0u, sent, by);
      if (odd) w[k] = got;
      else w[k + by] = got;
    }
  }
}

template <int D, bool BF>
__device__ __forceinline__ void cuda_rows64_store(cuda_rows64<D> &t, const cuda_attn &a,
                                                  const cuda_piece_of &m) {
  constexpr int OUT = cuda_hopper<D>::out;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = t.pos - m.pos + 8 * r;
    uint16_t *to = (uint16_t *)a.y.data + (m.row + row) * a.y.stride + m.head * a.kv.width;
    float by;
    t.sum[r] += __shfl_xor_sync(~0u, t.sum[r], 1);
    t.sum[r] += __shfl_xor_sync(~0u, t.sum[r], 2);
    by = 1 / t.sum[r];
#pragma unroll
    for (int i = 0; i < D / 8; i += 4) {
      const int col = (i + lane % 4) * 8;
      uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float *o = &t.o[i / (OUT / 8)][(i + k) % (OUT / 8) * 4 + 2 * r];
        w[k] = cuda_pack2<BF>(o[0] * by, o[1] * by);
      }
      cuda_turn4(w);
      if (row < m.rows && col < a.kv.width)
        *(uint4 *)(to + col) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
}

/* The last tile of keys, of which N are visible to some row. */
template <int D, bool BF, int N>
__device__ __forceinline__ void cuda_attend_last(cuda_rows64<D> &t, const cuda_hopper_attn &h,
                                                 const cuda_rings &r, const cuda_piece_of &m,
                                                 int use) {
  cuda_turn_wait(t.half);
  cuda_ask_scores<D, BF, N>(t, r, use);
  cuda_turn_pass(t.half);
  cuda_products_wait<0>();
  cuda_settle(t.s);
  cuda_barrier_arrive(cuda_ring_at<D>(r, CUDA_K_EMPTY, use));
  if (m.high == m.low) cuda_barrier_arrive(r.barriers + CUDA_Q_EMPTY * 8);
  cuda_exponentials<D, N>(t, h, m.high);
  cuda_probabilities<D, BF, N>(t);
}

/* A piece of work, whose first tile of keys is use number `use` of the rings. */
template <int D, bool BF>
__device__ __forceinline__ void cuda_attend64(cuda_rows64<D> &t, const cuda_hopper_attn &h,
                                              const cuda_rings &r, const cuda_piece_of &m,
                                              int use) {
  constexpr int N = cuda_hopper<D>::keys;
  const int tiles = m.high - m.low + 1, from = m.pos + m.rows - m.high * N;
  t.first = m.pos + t.half * 64;
  t.pos = t.first + (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4;
  t.top[0] = t.top[1] = -INFINITY;
  t.sum[0] = t.sum[1] = 0;
  cuda_ring_wait<D>(r, CUDA_K_FULL, use, 0);
  if (t.first + 63 < m.high * N + 64) cuda_attend_last<D, BF, 64>(t, h, r, m, use);
  else cuda_attend_last<D, BF, N>(t, h, r, m, use);
  if (from < N) cuda_clear_values<D>(t, r, use, from);
  for (int i = 1; i < tiles; i++) {
    cuda_ring_wait<D>(r, CUDA_K_FULL, use + i, 0);
    cuda_turn_wait(t.half);
    cuda_ask_scores<D, BF, N>(t, r, use + i);
    cuda_ring_wait<D>(r, CUDA_V_FULL, use + i - 1, 0);
    cuda_ask_values<D, BF>(t, r, use + i - 1, i > 1);
    cuda_turn_pass(t.half);
    cuda_products_wait<1>();
    cuda_settle(t.s);
    cuda_barrier_arrive(cuda_ring_at<D>(r, CUDA_K_EMPTY, use + i));
    if (i == tiles - 1) cuda_barrier_arrive(r.barriers + CUDA_Q_EMPTY * 8);
    cuda_exponentials<D, N>(t, h, m.high - i);
    cuda_products_wait<0>();
    cuda_settle_out(t);
    cuda_settle(t.p);
    cuda_barrier_arrive(cuda_ring_at<D>(r, CUDA_V_EMPTY, use + i - 1));
    cuda_follow_top(t);
    cuda_probabilities<D, BF, N>(t);
  }
  cuda_ring_wait<D>(r, CUDA_V_FULL, use + tiles - 1, 0);
  cuda_turn_wait(t.half);
  cuda_ask_values<D, BF>(t, r, use + tiles - 1, tiles > 1);
  cuda_turn_pass(t.half);
  cuda_products_wait<0>();
  cuda_settle_out(t);
  cuda_barrier_arrive(cuda_ring_at<D>(r, CUDA_V_EMPTY, use + tiles - 1));
  cuda_rows64_store<D, BF>(t, h.a, m);
}

template <int D, bool BF>
__device__ __forceinline__ void cuda_attend_pieces(const cuda_hopper_attn &h, const cuda_rings &r,
                                                   int pieces) {
  cuda_rows64<D> t;
  cuda_piece_of m;
  int use = 0;
  t.half = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1; /* the same for a warp, by its looks */
  if (t.half == 1) cuda_turn_pass(1);
  for (int round = 0; cuda_piece_next<D>(m, h.a, pieces, round); round++) {
    cuda_barrier_wait(r.barriers + CUDA_Q_FULL * 8, round & 1);
    cuda_attend64<D, BF>(t, h, r, m, use);
    use += m.high - m.low + 1;
  }
}

__device__ __forceinline__ void cuda_barriers_init(uint64_t *barriers) {
  for (int i = 0; i < CUDA_BARRIERS; i++) {
    const bool empty = i == CUDA_Q_EMPTY || (i >= CUDA_K_EMPTY && i < CUDA_V_FULL) ||
                       i >= CUDA_V_EMPTY;
    cuda_barrier_init(barriers + i, empty ? 8 : 1); /* warps that have read; the one that fetches */
  }
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}
#endif

/* Empty where it is not compiled for Hopper (cuda_hopper_open). */
template <int D, bool BF>
__global__ void __launch_bounds__(384, 1)
cuda_hopper_kernel(const __grid_constant__ cuda_maps maps,
                   const __grid_constant__ cuda_hopper_attn h) {
#if CUDA_HOPPER
  typedef cuda_hopper<D> shape;
  extern __shared__ __align__(128) uint8_t tiles[];
  __shared__ uint64_t barriers[CUDA_BARRIERS];
  const uint32_t q = ((uint32_t)__cvta_generic_to_shared(tiles) + 1023) & ~1023u;
  const uint32_t keys = q + shape::q_bytes, values = keys + shape::stages * shape::tile_bytes;
  const cuda_rings r = {q, keys, values, (uint32_t)__cvta_generic_to_shared(barriers)};
  const int pieces = __ldg(h.a.tiles.count) * h.a.p.heads;
  if (threadIdx.x == 0) cuda_barriers_init(barriers);
  __syncthreads();
  if (__shfl_sync(~0u, threadIdx.x / 128, 0) == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) cuda_fetch<D>(h, maps, r, pieces);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    cuda_attend_pieces<D, BF>(h, r, pieces);
  }
#endif
}

/* Whether the device, Hopper, finds the kernel compiled for it: else it needs no shared memory. */
static bool cuda_hopper_open(tfm_dev *d) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  cudaFuncAttributes kernel = {};
  void *encode = NULL;
  if (!cuda_check(d, cudaFuncGetAttributes(&kernel, (const void *)cuda_hopper_kernel<64, false>),
                  "cudaFuncGetAttributes") ||
      !cuda_check(d, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                                      cudaEnableDefault, &found),
                  "cudaGetDriverEntryPointByVersion")) return false;
  if (kernel.sharedSizeBytes > 0 && found == cudaDriverEntryPointSuccess)
    cuda_of(d)->encode = (PFN_cuTensorMapEncodeTiled_v12000)encode;
  return true;
}

/* Keys that lie together in every page, as far as a tile wants them; at least 8, or 0. */
static int cuda_hopper_box(const tfm_kv *kv) {
  int keys = kv->width <= 128 ? 128 : 64, box = 8;
  if (kv->max_pages == 1) return keys;
  if (kv->page_tokens % box) return 0;
  while (box < keys && kv->page_tokens % (2 * box) == 0) box *= 2;
  return box;
}

static bool cuda_hopper_knows(const tfm_dev *d, const cuda_attn *a) {
  const tfm_kv *kv = &a->kv;
  return cuda_of(d)->encode && kv->width % 8 == 0 && kv->width <= 256 && cuda_hopper_box(kv) &&
         a->p.scale > 0 && (a->q.stride | a->y.stride) % 8 == 0 &&
         ((uintptr_t)kv->k | (uintptr_t)kv->v | (uintptr_t)a->q.data | (uintptr_t)a->y.data) % 16 ==
             0;
}

/* Values of 16 bits, of which a copy brings a box; lines: bytes from one to the next of all
   dimensions but the first. */
static void cuda_map(tfm_dev *d, CUtensorMap *map, tfm_type type, void *data, int rank,
                     const cuuint64_t *dims, const cuuint64_t *lines, const cuuint32_t *box) {
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  CUresult result = cuda_of(d)->encode(
      map, type == TFM_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      (cuuint32_t)rank, data, dims, lines, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    tfm_dev_fail(d, TFM_E_DEVICE, "CUDA device %d: cuTensorMapEncodeTiled: error %d", (int)d->index,
                 (int)result);
}

/* [z, y, width] values, of which a copy brings 64 columns of [box_z, box_y] rows. */
static void cuda_map_heads(tfm_dev *d, CUtensorMap *map, tfm_type type, void *data, int32_t width,
                           const int64_t of[2], const int64_t strides[2], int box_y, int box_z) {
  const cuuint64_t dims[3] = {(cuuint64_t)width, (cuuint64_t)of[0], (cuuint64_t)of[1]};
  const cuuint64_t lines[2] = {(cuuint64_t)strides[0] * 2, (cuuint64_t)strides[1] * 2};
  const cuuint32_t box[3] = {64, (cuuint32_t)box_y, (cuuint32_t)box_z};
  cuda_map(d, map, type, data, 3, dims, lines, box);
}

template <int D> static void cuda_hopper_launch(tfm_dev *d, const cuda_maps &maps,
                                                const cuda_hopper_attn &h) {
  cuda_run(d, h.a.q.type == TFM_F16 ? cuda_hopper_kernel<D, false> : cuda_hopper_kernel<D, true>,
           dim3((unsigned)cuda_of(d)->processors), 384, cuda_hopper<D>::shared, maps, h);
}

static void cuda_hopper_run(tfm_dev *d, const cuda_attn *a) {
  const int64_t width = a->kv.width, page = a->kv.page_tokens;
  const int64_t rows[2] = {a->p.heads, a->rows.n}, row_strides[2] = {width, a->q.stride};
  const int64_t keys[2] = {page, (int64_t)1 << 31}, key_strides[2] = {width, page * width};
  const float log2e = 1.44269504f, cap = a->p.softcap;
  cuda_hopper_attn h = {*a, a->p.scale * log2e, 0, cuda_hopper_box(&a->kv)};
  cuda_maps maps;
  if (cap != 0) h.cap = a->p.scale / cap, h.scale = cap * log2e;
  cuda_map_heads(d, &maps.q, a->q.type, a->q.data, a->kv.width, rows, row_strides, 1, CUDA_TILE);
  cuda_map_heads(d, &maps.k, a->kv.type, a->kv.k, a->kv.width, keys, key_strides, h.box, 1);
  cuda_map_heads(d, &maps.v, a->kv.type, a->kv.v, a->kv.width, keys, key_strides, h.box, 1);
  if (a->kv.width <= 64) cuda_hopper_launch<64>(d, maps, h);
  else if (a->kv.width <= 128) cuda_hopper_launch<128>(d, maps, h);
  else cuda_hopper_launch<256>(d, maps, h);
}

/* ---- attn: rows by themselves on Hopper ----
   A block stays for many pieces of work, each a row and the heads that share keys. Its eight warps
   deal out the keys, sixteen at a time. Each has a ring of its own in shared memory, and asks the
   copy engine for keys and values some items ahead, on into the next pieces; for the first ones
   before what the kernel follows is complete, but not for those that the pass itself may append. A
   warp multiplies its keys by q, of which the heads are the upper rows of mma's A, and its values
   by the exponentials, rounded to 16 bits; then the warps are merged in order. So a row's bits
   depend on nothing beside it. */

enum { CUDA_ITEM = 16, CUDA_LONE_HEADS = 8, CUDA_LONE_SLOTS = 6 };

template <int D> struct cuda_lone_shape {
  static constexpr int panel = CUDA_ITEM * 128, part = D / 64 * panel, item = 2 * part; /* bytes */
};

typedef struct cuda_lone_merge { float *out, *top, *sum; } cuda_lone_merge;

typedef struct cuda_lone_items { /* of a piece, those of a warp */
  int piece, row, head; /* head: of keys */
  int pos, low;         /* the row's; the first item of all warps */
  int seq, count, at;   /* of the warp: how many, and the next */
  int page;             /* of number at / 32 * 32 + lane */
} cuda_lone_items;

#if CUDA_HOPPER
/* The first key of the warp's item number i. */
__device__ __forceinline__ int cuda_lone_first(const cuda_lone_items &t, int i) {
  return (t.low + (int)threadIdx.x / 32 + i * CUDA_CREW_WARPS) * CUDA_ITEM;
}

/* A piece, if there is one. */
__device__ __forceinline__ void cuda_lone_open(cuda_lone_items &t, const cuda_attn &a, int pieces,
                                               int piece) {
  t.piece = piece, t.at = t.count = 0;
  if (piece >= pieces) return;
  t.row = cuda_attn_row(a, piece / a.kv.heads);
  t.head = piece % a.kv.heads;
  t.pos = __ldcg(a.rows.pos + t.row);
  t.seq = __ldcg(a.rows.seq + t.row);
  t.low = a.p.window > 0 && t.pos >= a.p.window ? (t.pos - a.p.window + 1) / CUDA_ITEM : 0;
  if (t.seq >= 0)
    t.count = (t.pos / CUDA_ITEM - t.low - (int)threadIdx.x / 32 + CUDA_CREW_WARPS) /
              CUDA_CREW_WARPS;
}

/* Asks for the next item, or the next piece's first one; pages are looked up by all lanes. False:
   there is none; or, where it is early, the pass may still append to it. */
template <int D>
__device__ __forceinline__ bool cuda_lone_ask(cuda_lone_items &t, const cuda_maps &maps,
                                              const cuda_attn &a, int pieces, uint32_t to,
                                              uint32_t barrier, bool early) {
  typedef cuda_lone_shape<D> shape;
  const int lane = threadIdx.x % 32;
  int first, page;
  while (t.at >= t.count) {
    if (t.piece >= pieces) return false;
    cuda_lone_open(t, a, pieces, t.piece + (int)gridDim.x);
  }
  first = cuda_lone_first(t, t.at);
  if (early && first + CUDA_ITEM + a.rows.n > t.pos) return false;
  if (t.at % 32 == 0) {
    const int key = cuda_lone_first(t, t.at + lane);
    t.page = t.at + lane < t.count
               ? __ldg(a.kv.table + (int64_t)t.seq * a.kv.max_pages + key / a.kv.page_tokens) : 0;
  }
  page = __shfl_sync(~0u, t.page, t.at % 32);
  t.at++;
  if (lane == 0) {
    cuda_barrier_expect(barrier, shape::item);
    for (int p = 0; p < D / 64; p++) {
      cuda_copy_box(to + p * shape::panel, &maps.k, barrier, p * 64, first % a.kv.page_tokens,
                    page * a.kv.heads + t.head);
      cuda_copy_box(to + shape::part + p * shape::panel, &maps.v, barrier, p * 64,
                    first % a.kv.page_tokens, page * a.kv.heads + t.head);
    }
  }
  return true;
}

/* Where 16 bytes of a key lie. */
__device__ __forceinline__ uint32_t cuda_lone_at(int key, int eighth) {
  return (uint32_t)(eighth / 8 * (CUDA_ITEM * 128) + key * 128 + ((eighth % 8 ^ key % 8) * 16));
}

/* q's rows are heads: of four registers of A, the first and the third. */
template <int D>
__device__ __forceinline__ void cuda_lone_queries(uint32_t (&q)[D / 16][2], const cuda_attn &a,
                                                  const cuda_lone_items &t) {
  const int lane = threadIdx.x % 32, h = min(lane / 4, a.group - 1);
  const uint32_t *from = (const uint32_t *)((const uint16_t *)a.q.data +
                                            t.row * a.q.stride + (t.head * a.group + h) * D);
#pragma unroll
  for (int k = 0; k < D / 16; k++)
#pragma unroll
    for (int i = 0; i < 2; i++) q[k][i] = __ldcg(from + k * 8 + i * 4 + lane % 4);
}

template <int D> struct cuda_lone { /* of a lane: head lane / 4, columns lane % 4 * 2 of eights */
  float o[D / 8][4], top, sum;
};

/* Values of keys from `left` on may be no numbers. */
template <int D> __device__ __forceinline__ void cuda_lone_clear(uint32_t values, int left) {
  for (int i = threadIdx.x % 32; i < (CUDA_ITEM - left) * (D / 8); i += 32)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                 : : "r"(values + cuda_lone_at(left + i / (D / 8), i % (D / 8))), "r"(0)
                 : "memory");
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
  __syncwarp();
}

/* Takes in the item that lies at `keys`, whose first key is `first`. */
template <int D, bool BF>
__device__ __forceinline__ void cuda_lone_use(cuda_lone<D> &f, const uint32_t (&q)[D / 16][2],
                                              const cuda_attn &a, uint32_t keys, int first,
                                              int pos) {
  const int lane = threadIdx.x % 32, window = a.p.window > 0 ? a.p.window : INT32_MAX;
  const uint32_t values = keys + cuda_lone_shape<D>::part;
  float s[2][4] = {}, best = f.top, by;
  uint32_t p[4] = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    const uint32_t of_q[4] = {q[k][0], 0, q[k][1], 0};
    uint32_t b[4];
    cuda_matrices(b, keys + cuda_lone_at(lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2), false);
    cuda_mma<BF>(s[0], of_q, b[0], b[1]);
    cuda_mma<BF>(s[1], of_q, b[2], b[3]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int key = first + i / 2 * 8 + lane % 4 * 2 + i % 2;
    float &v = s[i / 2][i % 2];
    v = cuda_cap(v * a.p.scale, a.p.softcap) * 1.44269504f;
    if (key > pos || pos - key >= window) v = -INFINITY;
    best = fmaxf(best, v);
  }
  best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
  best = fmaxf(fmaxf(best, __shfl_xor_sync(~0u, best, 2)), CUDA_LEAST);
  by = cuda_exp2(f.top - best);
  f.top = best;
#pragma unroll
  for (int i = 0; i < 4; i++) s[i / 2][i % 2] = cuda_exp2(s[i / 2][i % 2] - best);
  f.sum = __fmaf_rn(f.sum, by, (s[0][0] + s[0][1]) + (s[1][0] + s[1][1]));
  p[0] = cuda_pack2<BF>(s[0][0], s[0][1]);
  p[2] = cuda_pack2<BF>(s[1][0], s[1][1]);
  if (first + CUDA_ITEM - 1 > pos) cuda_lone_clear<D>(values, pos - first + 1);
#pragma unroll
  for (int n = 0; n < D / 8; n++) f.o[n][0] *= by, f.o[n][1] *= by;
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
    uint32_t b[4];
    cuda_matrices(b, values + cuda_lone_at(lane % 16, n * 2 + lane / 16), true);
    cuda_mma<BF>(f.o[2 * n], p, b[0], b[1]);
    cuda_mma<BF>(f.o[2 * n + 1], p, b[2], b[3]);
  }
}

/* The warps' sums of a piece, in order, to y. */
template <int D>
__device__ __forceinline__ void cuda_lone_merged(cuda_lone<D> &f, const cuda_attn &a,
                                                 const cuda_lone_merge &m,
                                                 const cuda_lone_items &t) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = lane / 4;
  const int row = warp * a.group + h;
  f.sum += __shfl_xor_sync(~0u, f.sum, 1);
  f.sum += __shfl_xor_sync(~0u, f.sum, 2);
  if (h < a.group) {
#pragma unroll
    for (int n = 0; n < D / 8; n++)
      *(float2 *)(m.out + row * (D + 8) + n * 8 + lane % 4 * 2) = make_float2(f.o[n][0], f.o[n][1]);
    if (lane % 4 == 0) m.top[row] = f.top, m.sum[row] = f.sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.group * D && t.seq >= 0; i += CUDA_CREW)
    cuda_attend_finish(a, t.row, t.head * a.group + i / D, i % D, cuda_warps_sum([&](int k) {
      const int of = k * a.group + i / D;
      return cuda_sum{m.out[of * (D + 8) + i % D], m.sum[of], m.top[of]};
    }));
  __syncthreads();
}
#endif

/* Empty where it is not compiled for Hopper. */
template <int D, bool BF>
__global__ void __launch_bounds__(CUDA_CREW, 1)
cuda_lone_kernel(const __grid_constant__ cuda_maps maps, const __grid_constant__ cuda_attn a,
                 int slots) {
#if CUDA_HOPPER
  typedef cuda_lone_shape<D> shape;
  extern __shared__ __align__(128) uint8_t tiles[];
  __shared__ uint64_t barriers[CUDA_CREW_WARPS * CUDA_LONE_SLOTS];
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  const int pieces = cuda_attn_rows(a) * a.kv.heads;
  const uint32_t base = ((uint32_t)__cvta_generic_to_shared(tiles) + 1023) & ~1023u;
  const uint32_t ring = base + (uint32_t)(warp * slots * shape::item);
  const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(barriers + warp * CUDA_LONE_SLOTS);
  float *rest = (float *)(tiles + (base - (uint32_t)__cvta_generic_to_shared(tiles)) +
                          CUDA_CREW_WARPS * slots * shape::item);
  const int rows = CUDA_CREW_WARPS * a.group;
  const cuda_lone_merge merge = {rest, rest + rows * (D + 8), rest + rows * (D + 9)};
  cuda_lone_items ask, t, next;
  uint32_t q[D / 16][2];
  int asked = 0, use = 0;
  cuda_launch_next();
  if (threadIdx.x == 0) {
    for (int i = 0; i < CUDA_CREW_WARPS * CUDA_LONE_SLOTS; i++) cuda_barrier_init(barriers + i, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  __syncthreads();
  auto more = [&](bool early) {
    const int slot = asked % slots;
    if (!cuda_lone_ask<D>(ask, maps, a, pieces, ring + slot * shape::item, barrier + slot * 8,
                          early)) return false;
    asked++;
    return true;
  };
  cuda_lone_open(ask, a, pieces, (int)blockIdx.x);
  while (asked < slots && more(true)) continue;
  cuda_follow();
  while (asked < slots && more(false)) continue;
  cuda_lone_open(t, a, pieces, (int)blockIdx.x);
  if (t.piece < pieces) cuda_lone_queries<D>(q, a, t);
  for (; t.piece < pieces; t = next) {
    cuda_lone<D> f = {};
    f.top = -INFINITY;
    cuda_lone_open(next, a, pieces, t.piece + (int)gridDim.x);
    for (int i = 0; i < t.count; i++, use++) {
      const int slot = use % slots;
      cuda_barrier_wait(barrier + slot * 8, use / slots & 1);
      cuda_lone_use<D, BF>(f, q, a, ring + slot * shape::item, cuda_lone_first(t, i), t.pos);
      __syncwarp();
      more(false);
    }
    if (next.piece < pieces) cuda_lone_queries<D>(q, a, next); /* while this one is merged */
    cuda_lone_merged<D>(f, a, merge, t);
  }
#endif
}

static size_t cuda_lone_merge_bytes(const cuda_attn *a) {
  return (size_t)CUDA_CREW_WARPS * (size_t)a->group * (size_t)(a->kv.width + 10) * sizeof(float);
}

/* Whatever the number of rows. Heads of 64 are faster as above. */
static bool cuda_lone_knows(const tfm_dev *d, const cuda_attn *a) {
  const tfm_kv *kv = &a->kv;
  return cuda_of(d)->encode && kv->width == 128 && kv->type == a->q.type &&
         a->group <= CUDA_LONE_HEADS && kv->table && !a->lse && !a->p.probs &&
         a->p.dropout.rate == 0 && (kv->page_tokens % CUDA_ITEM == 0 || kv->max_pages == 1) &&
         ((uintptr_t)kv->k | (uintptr_t)kv->v) % 16 == 0 && a->q.stride % 2 == 0 &&
         (uintptr_t)a->q.data % 4 == 0;
}

static void cuda_lone_run(tfm_dev *d, const cuda_attn *a) {
  const int64_t width = a->kv.width, page = a->kv.page_tokens;
  const int64_t keys[2] = {page, (int64_t)1 << 31}, strides[2] = {width, page * width};
  const size_t merge = cuda_lone_merge_bytes(a), item = (size_t)(CUDA_ITEM * width * 4);
  int slots = (int)((CUDA_SHARED - 1024 - merge) / (CUDA_CREW_WARPS * item));
  const int most = cuda_of(d)->processors, pieces = a->rows.n * a->kv.heads;
  cuda_maps maps = {};
  if (slots > CUDA_LONE_SLOTS) slots = CUDA_LONE_SLOTS;
  cuda_map_heads(d, &maps.k, a->kv.type, a->kv.k, a->kv.width, keys, strides, CUDA_ITEM, 1);
  cuda_map_heads(d, &maps.v, a->kv.type, a->kv.v, a->kv.width, keys, strides, CUDA_ITEM, 1);
  cuda_run(d, a->q.type == TFM_BF16 ? cuda_lone_kernel<128, true> : cuda_lone_kernel<128, false>,
           dim3((unsigned)(pieces < most ? pieces : most)), CUDA_CREW,
           1024 + merge + CUDA_CREW_WARPS * item * (size_t)slots, maps, *a, slots);
}

/* ---- Products of few rows on Hopper ----
   y = x W^T for up to CUDA_FEW columns: rows of x of 16 bits, or the two parts of rows of F32. W is
   read once; its rows are the side of wgmma that has 64. A block has a tile, 128 rows of W, after
   the other; where there are few tiles, a cluster of up to four shares one, each block a stretch of
   its columns. A warp brings units, 64 columns of W's rows and of x, by the copy engine into a ring
   of shared memory, W's first ones before what the kernel follows is complete; two warpgroups
   multiply. Their sums lie in shared memory then, a column of y after the other; every block has
   some columns, adds up what the blocks of the cluster have of them, in order, and finishes them,
   four rows of W at a time: the bits depend on the shape of W alone, not on the number of rows. A
   gate and what it opens, and the halves of a head that is rotated, come eight rows by eight, so
   that a thread has both. */

enum {
  CUDA_FEW = 128,
  CUDA_FEW_ROWS = 128,  /* of W in a tile */
  CUDA_FEW_GROUPS = CUDA_FEW_ROWS / 16, /* of a warp's rows: eight, and eight that lie apart */
  CUDA_FEW_LINE = CUDA_FEW_ROWS + 4, /* floats, of a column's sums: all banks are met */
  CUDA_FEW_DEEP = 64,   /* columns of W and x in a unit */
  CUDA_FEW_CREW = 256,  /* threads that multiply */
  CUDA_FEW_SPLIT = 4    /* blocks that share a tile, at most */
};

template <int N> struct cuda_few_shape { /* of N columns */
  static constexpr int w_bytes = CUDA_FEW_ROWS * CUDA_FEW_DEEP * 2;
  static constexpr int unit = w_bytes + N * CUDA_FEW_DEEP * 2;
  static constexpr int sums = N * CUDA_FEW_LINE * 4;
  static constexpr int units = (CUDA_SHARED - 1024 - sums) / unit; /* 1024: to align them */
  static constexpr int shared = 1024 + units * unit + sums;
};

typedef struct cuda_few_maps { CUtensorMap w, x; } cuda_few_maps;

typedef struct cuda_few_heads { /* what q, k and v become: cuda_append */
  tfm_rope rope;
  tfm_kv kv;
  tfm_rows rows;
  int count; /* heads of q; 0: W's rows are something else */
} cuda_few_heads;

typedef struct cuda_few_job {
  tfm_mat y;           /* of 16 bits, or F32 */
  tfm_epilogue e;
  const float *factor; /* of rows in two parts, else NULL */
  int rows, steps;     /* of W; units of a tile */
  int tiles, split;    /* blocks that share one */
  int apart;           /* from a row to the other that a thread has: 8; of pairs, cuda_few_map */
  bool gated;          /* the later half of W's rows is opened by the earlier one's act */
  bool aligned;        /* four values of y, and of what is added, are one vector */
  cuda_few_heads heads;
} cuda_few_job;

#if CUDA_HOPPER
typedef struct cuda_few_share { /* of a block */
  int tile, apart;  /* the first, and from one to the next */
  int begin, steps; /* of each, these units */
  int units;        /* of all */
} cuda_few_share;

__device__ __forceinline__ cuda_few_share cuda_few_share_of(const cuda_few_job &p) {
  const int rank = (int)blockIdx.x % p.split;
  cuda_few_share s = {(int)blockIdx.x / p.split, (int)gridDim.x / p.split, 0, 0, 0};
  s.begin = p.steps * rank / p.split;
  s.steps = p.steps * (rank + 1) / p.split - s.begin;
  s.units = (p.tiles - s.tile + s.apart - 1) / s.apart * s.steps;
  return s;
}

/* A weight passes through the second cache; what is to stay there is x. */
__device__ __forceinline__ uint64_t cuda_policy(bool once) {
  uint64_t policy;
  if (once) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void cuda_copy_box5(uint32_t to, const CUtensorMap *map,
                                               uint32_t barrier, int x, int y, int z, int t,
                                               uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4, %7, %5, %6}], [%2], %8;"
               : : "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(t), "r"(0),
                   "l"(policy) : "memory");
}

/* One thread's work. */
template <int N>
__device__ __forceinline__ void cuda_few_fetch(const cuda_few_maps &maps, const cuda_few_job &p,
                                               uint32_t room, uint32_t barriers,
                                               const cuda_few_share &share) {
  typedef cuda_few_shape<N> shape;
  constexpr int S = shape::units;
  const int ahead = min(share.units, S);
  const uint64_t once = cuda_policy(true), stays = cuda_policy(false);
  auto ask_w = [&](int i) {
    const int group = (share.tile + i / share.steps * share.apart) * CUDA_FEW_GROUPS;
    const int each = p.apart / 8;
    cuda_barrier_expect(barriers + i % S * 8, shape::unit);
    cuda_copy_box5(room + i % S * shape::unit, &maps.w, barriers + i % S * 8,
                   (share.begin + i % share.steps) * CUDA_FEW_DEEP, each > 1 ? 0 : 16 * group,
                   group % each, each > 1 ? group / each : 0, once);
  };
  auto ask_x = [&](int i) {
    cuda_copy_box5(room + i % S * shape::unit + shape::w_bytes, &maps.x, barriers + i % S * 8,
                   (share.begin + i % share.steps) * CUDA_FEW_DEEP, 0, 0, 0, stays);
  };
  for (int i = 0; i < ahead; i++) ask_w(i);
  cuda_follow();
  for (int i = 0; i < ahead; i++) ask_x(i);
  for (int i = ahead; i < share.units; i++) {
    cuda_barrier_wait(barriers + (S + i % S) * 8, (i / S & 1) ^ 1);
    ask_w(i);
    ask_x(i);
  }
}

/* Quads of sums: of a column of y and four rows of W; those of the four rows `apart` lie eight
   further. A block of a cluster has every split-th column. */
typedef struct cuda_few_quads {
  int m, at, row; /* column; where the sums are; row of W */
} cuda_few_quads;

__device__ __forceinline__ cuda_few_quads cuda_few_quads_of(const cuda_few_job &p, int tile,
                                                            int i) {
  const int group = tile * CUDA_FEW_GROUPS + i % 16 / 2, each = p.apart / 8;
  const int m = i / 16 * p.split + (int)blockIdx.x % p.split;
  return {m, m * CUDA_FEW_LINE + i % 16 / 2 * 16 + i % 2 * 4,
          group / each * 2 * p.apart + group % each * 8 + i % 2 * 4};
}

/* use(q, number) for those of a thread. */
template <typename USE>
__device__ __forceinline__ void cuda_few_each(const cuda_few_job &p, int tile, USE use) {
  for (int i = threadIdx.x, n = 0;; i += CUDA_FEW_CREW, n++) {
    const cuda_few_quads q = cuda_few_quads_of(p, tile, i);
    if (q.m >= p.y.rows) return;
    use(q, n);
  }
}

__device__ __forceinline__ float4 cuda_plus(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* The sums of all blocks of a cluster, in order, all asked for before one is used. */
__device__ __forceinline__ float4 cuda_few_sum(const cuda_few_job &p, float *sums) {
  float4 v[CUDA_FEW_SPLIT];
#pragma unroll
  for (int k = 0; k < CUDA_FEW_SPLIT; k++)
    if (k < p.split) v[k] = *(const float4 *)(p.split > 1 ? cuda_in_block(sums, k) : sums);
#pragma unroll
  for (int k = 1; k < CUDA_FEW_SPLIT; k++)
    if (k < p.split) v[0] = cuda_plus(v[0], v[k]);
  return v[0];
}

__device__ __forceinline__ float4 cuda_few_act(const cuda_few_job &p, float4 v) {
  if (p.e.act != TFM_ACT_NONE)
    v = make_float4(cuda_act(v.x, p.e.act), cuda_act(v.y, p.e.act), cuda_act(v.z, p.e.act),
                    cuda_act(v.w, p.e.act));
  if (p.e.softcap != 0)
    v = make_float4(cuda_cap(v.x, p.e.softcap), cuda_cap(v.y, p.e.softcap),
                    cuda_cap(v.z, p.e.softcap), cuda_cap(v.w, p.e.softcap));
  return v;
}

/* To four places, as far as they are y's. */
__device__ __forceinline__ void cuda_few_store(const cuda_few_job &p, int m, int row, float4 v) {
  const int64_t to = m * p.y.stride + row;
  const float f[4] = {v.x, v.y, v.z, v.w};
  if (row + 4 <= p.y.cols && p.aligned) return cuda_store4(p.y.data, p.y.type, to, v);
  for (int i = 0; i < 4 && row + i < p.y.cols; i++) cuda_store(p.y.data, p.y.type, to + i, f[i]);
}

/* What follows the product, but for the gate's. */
__device__ __forceinline__ void cuda_few_end(const cuda_few_job &p, int m, int row, float4 v) {
  v = cuda_few_act(p, v);
  if (p.e.residual.data && row < p.rows) {
    const float *old = cuda_at(p.e.residual, m, row);
    v = cuda_plus(v, p.aligned && row + 4 <= p.rows ? __ldcg((const float4 *)old)
                                                    : cuda_quad_slow<false>(old, 0, p.rows - row));
  }
  cuda_few_store(p, m, row, v);
}

typedef struct cuda_few_place { /* of quads of q, k and v */
  float2 turn[4];
  int64_t at; /* in the cache; below zero: nowhere */
} cuda_few_place;

/* Looked up before it is needed, as that takes time. */
__device__ __forceinline__ cuda_few_place cuda_few_look(const cuda_few_job &p,
                                                        const cuda_few_quads &q) {
  const cuda_few_heads &h = p.heads;
  const int kv_head = q.row / h.kv.width - h.count, within = q.row % h.kv.width;
  const int seq = __ldg(h.rows.seq + q.m), pos = __ldg(h.rows.pos + q.m);
  cuda_few_place place = {{{1, 0}, {1, 0}, {1, 0}, {1, 0}}, -1};
  for (int i = 0; i < 4 && kv_head < h.kv.heads && h.rope.rot; i++)
    place.turn[i] = cuda_turn(h.rope, pos, within + i);
  if (kv_head >= 0 && seq >= 0 && q.row < p.rows)
    place.at = cuda_kv_at(h.kv, seq, pos, kv_head % h.kv.heads) + within;
  return place;
}

/* Halves of heads, rotated, to where attention reads them. */
__device__ __forceinline__ void cuda_few_append(const cuda_few_job &p, const cuda_few_quads &q,
                                                float4 a, float4 b, const cuda_few_place &place) {
  const int kv_head = q.row / p.heads.kv.width - p.heads.count;
  const float2 x = cuda_rotate(a.x, b.x, place.turn[0]), y = cuda_rotate(a.y, b.y, place.turn[1]);
  const float2 z = cuda_rotate(a.z, b.z, place.turn[2]), w = cuda_rotate(a.w, b.w, place.turn[3]);
  void *to = p.y.data;
  int64_t at = q.row < p.rows ? q.m * p.y.stride + q.row : -1;
  if (kv_head >= 0) to = kv_head < p.heads.kv.heads ? p.heads.kv.k : p.heads.kv.v, at = place.at;
  if (at < 0) return;
  cuda_store4(to, p.y.type, at, make_float4(x.x, y.x, z.x, w.x));
  cuda_store4(to, p.y.type, at + p.apart, make_float4(x.y, y.y, z.y, w.y));
}

/* Those who multiply, and nobody else. */
__device__ __forceinline__ void cuda_few_meet() {
  asm volatile("bar.sync 1, %0;" : : "n"((int)CUDA_FEW_CREW) : "memory");
}

/* A tile's sums to shared memory, and from there, with what follows them, to y. */
template <int N>
__device__ __forceinline__ void cuda_few_finish(const float (&c)[N / 2], const cuda_few_job &p,
                                                float *sums, int tile,
                                                const cuda_few_place *place) {
  float *to = sums + (int)threadIdx.x % 4 * 2 * CUDA_FEW_LINE + (int)threadIdx.x / 32 * 16 +
              (int)threadIdx.x % 32 / 4;
  cuda_few_meet(); /* the last tile's are no longer read */
#pragma unroll
  for (int i = 0; i < N / 8; i++, to += 8 * CUDA_FEW_LINE) {
    to[0] = c[4 * i], to[CUDA_FEW_LINE] = c[4 * i + 1];
    to[8] = c[4 * i + 2], to[CUDA_FEW_LINE + 8] = c[4 * i + 3];
  }
  if (p.split > 1) cuda_meet();
  else cuda_few_meet();
  cuda_few_each(p, tile, [&](const cuda_few_quads &q, int n) {
    float4 a = cuda_few_sum(p, sums + q.at), b = cuda_few_sum(p, sums + q.at + 8);
    if (p.factor) { /* the rows' other parts */
      const float by = __ldcg(p.factor + q.m);
      a = cuda_plus(a, cuda_few_sum(p, sums + q.at + N / 2 * CUDA_FEW_LINE));
      b = cuda_plus(b, cuda_few_sum(p, sums + q.at + 8 + N / 2 * CUDA_FEW_LINE));
      a = make_float4(a.x * by, a.y * by, a.z * by, a.w * by);
      b = make_float4(b.x * by, b.y * by, b.z * by, b.w * by);
    }
    if (p.e.bias) {
      a = cuda_plus(a, cuda_quad_const(p.e.bias, q.row / 4, p.rows));
      b = cuda_plus(b, cuda_quad_const(p.e.bias, (q.row + p.apart) / 4, p.rows));
    }
    if (p.heads.count) return cuda_few_append(p, q, a, b, place[n]);
    if (!p.gated) return cuda_few_end(p, q.m, q.row, a), cuda_few_end(p, q.m, q.row + p.apart, b);
    a = cuda_few_act(p, a);
    cuda_few_store(p, q.m, q.row, make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w));
  });
  if (p.split > 1) cuda_meet(); /* nobody reads here any more */
}

/* Before the wait: where a tile's quads go; after it: what is added to, to the second cache. */
__device__ __forceinline__ void cuda_few_prepare(const cuda_few_job &p, int tile,
                                                 cuda_few_place *place) {
  if (p.heads.count)
    cuda_few_each(p, tile, [&](const cuda_few_quads &q, int n) { place[n] = cuda_few_look(p, q); });
  cuda_follow();
  if (p.e.residual.data)
    cuda_few_each(p, tile, [&](const cuda_few_quads &q, int) {
      if (q.row < p.rows)
        asm volatile("prefetch.global.L2 [%0];" : : "l"(cuda_at(p.e.residual, q.m, q.row)));
    });
}

template <int N, bool BF>
__device__ __forceinline__ void cuda_few_multiply(const cuda_few_job &p, uint32_t room,
                                                  uint32_t barriers, float *sums,
                                                  const cuda_few_share &share) {
  typedef cuda_few_shape<N> shape;
  constexpr int S = shape::units;
  const uint32_t half = (uint32_t)__shfl_sync(~0u, (int)threadIdx.x / 128, 0);
  float c[N / 2];
  cuda_few_place place[N / 16];
  int use = 0;
  for (int tile = share.tile; tile < p.tiles; tile += share.apart) {
    cuda_few_prepare(p, tile, place);
    for (int i = 0; i < share.steps; i++, use++) {
      const uint32_t w = room + use % S * shape::unit, x = w + shape::w_bytes;
      cuda_barrier_wait(barriers + use % S * 8, use / S & 1);
      cuda_products_begin();
#pragma unroll
      for (int k = 0; k < CUDA_FEW_DEEP * 2; k += 32)
        cuda_wgmma<BF>(c, cuda_matrix_at(w + half * (shape::w_bytes / 2) + k, 0),
                       cuda_matrix_at(x + k, 0), i > 0 || k > 0);
      cuda_products_end();
      cuda_products_wait<1>();
      if (i > 0) cuda_barrier_arrive(barriers + (S + (use - 1) % S) * 8);
    }
    cuda_products_wait<0>();
    cuda_settle(c);
    cuda_barrier_arrive(barriers + (S + (use - 1) % S) * 8);
    cuda_few_finish<N>(c, p, sums, tile, place);
  }
}
#endif

/* Empty where it is not compiled for Hopper. */
template <int N, bool BF>
__global__ void __launch_bounds__(CUDA_FEW_CREW + 32, 1)
cuda_few_kernel(const __grid_constant__ cuda_few_maps maps,
                const __grid_constant__ cuda_few_job p) {
#if CUDA_HOPPER
  typedef cuda_few_shape<N> shape;
  constexpr int S = shape::units;
  extern __shared__ __align__(128) uint8_t tiles[]; /* sums, units */
  __shared__ uint64_t barriers[2 * S]; /* a place is full; it is empty */
  const uint32_t room = ((uint32_t)__cvta_generic_to_shared(tiles + shape::sums) + 1023) & ~1023u;
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(barriers);
  const cuda_few_share share = cuda_few_share_of(p);
  cuda_launch_next();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * S; i++) cuda_barrier_init(barriers + i, i < S ? 1 : CUDA_FEW_CREW / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
  }
  if (p.split > 1) cuda_meet(); /* their shared memory is there */
  else __syncthreads();
  if (__shfl_sync(~0u, threadIdx.x / 32, 0) < CUDA_FEW_CREW / 32)
    cuda_few_multiply<N, BF>(p, room, at, (float *)tiles, share);
  else if (threadIdx.x % 32 == 0)
    cuda_few_fetch<N>(maps, p, room, at, share);
#endif
}

static bool cuda_few_knows(const tfm_dev *d, const cuda_weight *w, bool gated) {
  return cuda_of(d)->encode && w->cols % 8 == 0 &&
         (w->type == TFM_F16 || w->type == TFM_BF16) && (!gated || w->rows % 16 == 0);
}

/* Halves of heads that are turned as a whole are brought together. */
static bool cuda_few_turns(const cuda_few_heads *h, tfm_type type) {
  const int width = h->kv.width, each = width / 16;
  return h->kv.type == type && width % 16 == 0 && !h->rope.interleaved &&
         ((uintptr_t)h->kv.k | (uintptr_t)h->kv.v) % 8 == 0 &&
         (h->rope.rot == 0 || h->rope.rot == width) &&
         (each % CUDA_FEW_GROUPS == 0 || CUDA_FEW_GROUPS % each == 0);
}

/* What wgmma is to read of W: 128 rows as they lie, or eight rows and those `apart` from them by
   turns, of stretches of twice as many rows; and of x, rows' first parts and then their others. */
static void cuda_few_map(tfm_dev *d, cuda_few_maps *maps, const cuda_weight *w, tfm_mat x, int rows,
                         int parts, int columns, int apart) {
  const cuuint64_t cols = (cuuint64_t)w->cols, line = (cuuint64_t)w->vectors * 16;
  const cuuint64_t n = (cuuint64_t)w->rows, far = (cuuint64_t)apart, lx = (cuuint64_t)x.stride * 2;
  const cuuint64_t plain[5] = {cols, n, 1, 1, 1}, pairs[5] = {cols, 8, 2, far / 8, n / far / 2};
  const cuuint64_t of_x[5] = {cols, (cuuint64_t)rows, (cuuint64_t)parts, 1, 1};
  const cuuint64_t lines[4] = {line, line * far, line * 8, line * far * 2};
  const cuuint64_t lines_x[4] = {lx, lx * (cuuint64_t)rows, lx, lx};
  const cuuint32_t each = (cuuint32_t)apart / 8, groups = CUDA_FEW_GROUPS;
  const cuuint32_t together = groups % each ? groups : each;
  const cuuint32_t box[5] = {CUDA_FEW_DEEP, CUDA_FEW_ROWS, 1, 1, 1};
  const cuuint32_t box_pairs[5] = {CUDA_FEW_DEEP, 8, 2, together, groups / together};
  const cuuint32_t box_x[5] = {CUDA_FEW_DEEP, (cuuint32_t)(columns / parts), (cuuint32_t)parts, 1,
                               1};
  cuda_map(d, &maps->w, w->type, w->data, 5, each > 1 ? pairs : plain, lines,
           each > 1 ? box_pairs : box);
  cuda_map(d, &maps->x, w->type, x.data, 5, of_x, lines_x, box_x);
}

template <int N> static void cuda_few_launch(tfm_dev *d, const cuda_few_maps &maps,
                                             const cuda_few_job &p, tfm_type type) {
  const int most = cuda_of(d)->processors;
  const int blocks = p.split > 1 || p.tiles < most ? p.tiles * p.split : most;
  cuda_run_clusters(d, type == TFM_F16 ? cuda_few_kernel<N, false> : cuda_few_kernel<N, true>,
                    p.split, dim3((unsigned)blocks), CUDA_FEW_CREW + 32, cuda_few_shape<N>::shared,
                    maps, p);
}

/* Rows of a matrix, if it is there, are whole vectors of four values. */
static bool cuda_quads_in(const tfm_mat *m) {
  return m->stride % 4 == 0 && (uintptr_t)m->data % (4 * cuda_size(m->type)) == 0;
}

/* y = x W^T and what e says, or heads; with a factor, x has all rows' first parts, then their
   second ones. Up to CUDA_FEW rows of x. Clusters do not fill a GPU, as they stay within a part of
   it: three quarters of the multiprocessors are asked for. */
static void cuda_few_run(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w,
                         const tfm_epilogue *e, const float *factor, bool gated,
                         const cuda_few_heads *heads) {
  const int parts = factor ? 2 : 1, columns = y.rows * parts;
  const int n = columns <= 16 ? 16 : columns <= 64 ? 64 : CUDA_FEW;
  cuda_few_job p = {y, *e, factor, w->rows, (w->cols + CUDA_FEW_DEEP - 1) / CUDA_FEW_DEEP,
                    (w->rows + CUDA_FEW_ROWS - 1) / CUDA_FEW_ROWS, 1,
                    gated ? w->rows / 2 : heads ? heads->kv.width / 2 : 8, gated,
                    cuda_quads_in(&y) && cuda_quads_in(&e->residual), {}};
  cuda_few_maps maps;
  while (p.split < CUDA_FEW_SPLIT && p.steps >= 2 * (p.split + 1) &&
         (p.split + 1) * p.tiles <= cuda_of(d)->processors * 3 / 4)
    p.split++;
  if (heads) p.heads = *heads;
  cuda_few_map(d, &maps, w, x, y.rows, parts, n, p.apart);
  if (n == 16) cuda_few_launch<16>(d, maps, p, w->type);
  else if (n == 64) cuda_few_launch<64>(d, maps, p, w->type);
  else cuda_few_launch<CUDA_FEW>(d, maps, p, w->type);
}

/* ---- attn: tiles of a cache of 8 bits ----
   What the runs of a pass see of a layer's cache is widened, once for all rows and heads, and then
   attended to as any cache of 16 bits. A sequence has one page of it. */

static tfm_kv cuda_wide_lay_out(cuda_room *r, int32_t heads, int32_t width, int32_t sequences,
                                int32_t context) {
  const size_t values = (size_t)sequences * (size_t)heads * (size_t)context * (size_t)width;
  tfm_kv kv = {};
  kv.k = cuda_take(r, values, 2);
  kv.v = cuda_take(r, values, 2);
  kv.table = (int32_t *)cuda_take(r, (size_t)sequences, sizeof(int32_t));
  kv.max_pages = 1;
  kv.page_tokens = context;
  kv.heads = heads;
  kv.width = width;
  return kv;
}

/* blockIdx.y: a head's keys, or its values; eight a thread. */
template <int TYPE>
__global__ void __launch_bounds__(CUDA_CREW) cuda_wide_kernel(tfm_kv to, tfm_kv from,
                                                              cuda_tiles tiles) {
  const int head = (int)blockIdx.y / 2, eights = from.width / 8;
  const void *data = blockIdx.y % 2 ? from.v : from.k;
  uint16_t *out = (uint16_t *)(blockIdx.y % 2 ? to.v : to.k);
  for (int r = 0; r < __ldcg(tiles.count + 2); r++) {
    const int2 run = __ldcg(tiles.run + r);
    const int64_t first = ((int64_t)run.x * to.heads + head) * to.page_tokens * to.width;
    if (blockIdx.x + blockIdx.y + threadIdx.x == 0) ((int32_t *)to.table)[run.x] = run.x;
    for (int i = (int)(blockIdx.x * CUDA_CREW + threadIdx.x); i < run.y * eights;
         i += (int)gridDim.x * CUDA_CREW) {
      float f[8];
      const int64_t at = cuda_kv_at(from, run.x, i / eights, head);
      cuda_eight<TFM_Q8_0>(f, cuda_cached8<TFM_Q8_0>(data, at, i % eights * 8, from.width));
      *(uint4 *)(out + first + (int64_t)i * 8) = cuda_narrow<TYPE>(f);
    }
  }
}

/* The cache that tiles are to attend to; its type is Q8_0 still where there is no room for another,
   and they are not listed. */
static tfm_kv cuda_wide_of(const tfm_dev *d, const cuda_attn *a) {
  const cuda_state *s = cuda_of(d);
  cuda_room room = {(char *)d->work + s->wide_at, 0};
  tfm_kv kv = a->kv;
  if (kv.type == TFM_Q8_0 && s->wide_at) {
    kv = cuda_wide_lay_out(&room, kv.heads, kv.width, s->wide_sequences, s->wide_context);
    kv.type = a->q.type;
  }
  return kv;
}

static void cuda_wide_run(tfm_dev *d, const cuda_attn *wide, const tfm_kv *kv) {
  const unsigned heads = 2 * (unsigned)kv->heads;
  const dim3 grid(cuda_blocks(8 * cuda_of(d)->processors, heads), heads);
  cuda_run(d, wide->kv.type == TFM_F16 ? cuda_wide_kernel<TFM_F16> : cuda_wide_kernel<TFM_BF16>,
           grid, CUDA_CREW, 0, wide->kv, *kv, wide->tiles);
}

/* Tiles first, where they have been listed, then what is left. q and y have the same 16 bits. */
static void cuda_attn_tiles(tfm_dev *d, cuda_attn *a) {
  cuda_attn t = *a;
  const bool chained = cuda_of(d)->chained;
  bool hopper;
  t.kv = cuda_wide_of(d, a);
  hopper = cuda_hopper_knows(d, &t);
  if (cuda_tiles_fit(d, &a->rows) && t.kv.type == a->q.type && a->y.type == a->q.type &&
      (hopper || cuda_flash_knows(&t))) {
    a->tiles = t.tiles = cuda_tiles_of(d);
    cuda_of(d)->chained = false; /* these do not wait by themselves */
    if (a->kv.type == TFM_Q8_0) cuda_wide_run(d, &t, &a->kv);
    if (hopper) cuda_hopper_run(d, &t);
    else if (t.kv.type == TFM_F16) cuda_flash_run<false>(d, &t);
    else cuda_flash_run<true>(d, &t);
  }
  cuda_of(d)->chained = chained;
  cuda_attn_run(d, a);
}

/* ---- layer: passes of many rows, on the tensor cores ----
   Activations have 16 bits: BF16 where the weights do, else F16; the residual stream stays F32, as
   cuBLASLt adds to it. Quantised weights are widened a stretch at a time. Attention goes by
   tiles. */

/* q is rotated in place, k and v go to the cache, or if it is of Q8_0 stay too: pair i of a row's
   heads, q then k then v. */
__global__ void cuda_append_kernel(tfm_mat qkv, const float *bias, tfm_rope p, tfm_kv kv,
                                   tfm_rows rows, int heads) {
  int i = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x, half = kv.width / 2;
  int head = i / half, kv_head = head - heads, seq = rows.seq[row];
  bool is_k = kv_head < kv.heads;
  int2 pair = make_int2(2 * (i % half), 2 * (i % half) + 1);
  int64_t from = row * qkv.stride + head * kv.width, at;
  float2 v;
  cuda_take_turn();
  if (i >= qkv.cols / 2 || seq < 0) return;
  if (is_k) pair = cuda_pair(p, i % half);
  v = make_float2(cuda_load(qkv.data, qkv.type, from + pair.x),
                  cuda_load(qkv.data, qkv.type, from + pair.y));
  if (bias) v.x += bias[head * kv.width + pair.x], v.y += bias[head * kv.width + pair.y];
  if (is_k && i % half < p.rot / 2)
    v = cuda_rotate(v.x, v.y, cuda_turn(p, rows.pos[row], i % half));
  if (kv_head < 0 || kv.type == TFM_Q8_0) {
    cuda_store(qkv.data, qkv.type, from + pair.x, v.x);
    cuda_store(qkv.data, qkv.type, from + pair.y, v.y);
    return;
  }
  at = cuda_kv_at(kv, seq, rows.pos[row], is_k ? kv_head : kv_head - kv.heads);
  cuda_store(is_k ? kv.k : kv.v, kv.type, at + pair.x, v.x);
  cuda_store(is_k ? kv.k : kv.v, kv.type, at + pair.y, v.y);
}

__device__ __forceinline__ void cuda_rotate_pairs(float (&v)[8], const float2 *turn) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 r = cuda_rotate(v[2 * i], v[2 * i + 1], turn[i]);
    v[2 * i] = r.x, v[2 * i + 1] = r.y;
  }
}

__device__ __forceinline__ void cuda_rotate_halves(float (&a)[8], float (&b)[8],
                                                   const float2 *turn) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float2 r = cuda_rotate(a[i], b[i], turn[i]);
    a[i] = r.x, b[i] = r.y;
  }
}

/* The same for heads of whole 16 values, in the cache's 16 bits: a block has a row, a thread 16
   values of a head, whole pairs; what they are turned by is the same in all heads. */
template <int TYPE>
__global__ void __launch_bounds__(128) cuda_append16_kernel(tfm_mat qkv, const float *bias,
                                                            tfm_rope p, tfm_kv kv, tfm_rows rows,
                                                            int heads) {
  __shared__ float2 turn[128];
  const int row = (int)blockIdx.x, seq = rows.seq[row], pos = rows.pos[row], each = kv.width / 16;
  uint16_t *from = (uint16_t *)qkv.data + row * qkv.stride;
  int64_t at = 0;
  cuda_launch_next();
  if (seq >= 0) at = cuda_kv_at(kv, seq, pos, 0);
  for (int i = threadIdx.x; i < p.rot / 2; i += blockDim.x) turn[i] = cuda_turn(p, pos, i);
  cuda_follow();
  __syncthreads();
  if (seq < 0) return;
  for (int i = threadIdx.x; i < qkv.cols / 16; i += blockDim.x) {
    const int head = i / each, c = i % each, kv_head = head - heads;
    const bool is_k = kv_head < kv.heads, turned = is_k && c < p.rot / 16;
    const int low = turned && !p.interleaved ? 8 * c : 16 * c;
    const int high = turned && !p.interleaved ? p.rot / 2 + 8 * c : 16 * c + 8;
    uint16_t *to = from + head * kv.width;
    float a[8], b[8];
    cuda_widen<TYPE>(a, *(const uint4 *)(to + low));
    cuda_widen<TYPE>(b, *(const uint4 *)(to + high));
#pragma unroll
    for (int k = 0; k < 8 && bias; k++) {
      a[k] += bias[head * kv.width + low + k];
      b[k] += bias[head * kv.width + high + k];
    }
    if (turned && p.interleaved) {
      cuda_rotate_pairs(a, turn + 8 * c);
      cuda_rotate_pairs(b, turn + 8 * c + 4);
    } else if (turned) {
      cuda_rotate_halves(a, b, turn + 8 * c);
    }
    if (kv_head >= 0 && kv.type != TFM_Q8_0)
      to = (uint16_t *)(is_k ? kv.k : kv.v) + at +
           (int64_t)(is_k ? kv_head : kv_head - kv.heads) * kv.page_tokens * kv.width;
    *(uint4 *)(to + low) = cuda_narrow<TYPE>(a);
    *(uint4 *)(to + high) = cuda_narrow<TYPE>(b);
  }
}

static tfm_mat cuda_columns(tfm_mat m, int32_t first, int32_t cols) {
  m.data = (char *)m.data + (size_t)first * cuda_size(m.type);
  m.cols = cols;
  return m;
}

/* From row `first` on, `most` or what there is. */
static tfm_mat cuda_rows_of(tfm_mat m, int32_t first, int32_t most) {
  m.data = (char *)m.data + (size_t)first * (size_t)m.stride * cuda_size(m.type);
  m.rows = m.rows - first < most ? m.rows - first : most;
  return m;
}

static void cuda_append(tfm_dev *d, tfm_mat qkv, const float *bias, const tfm_rope *p,
                        const tfm_kv *kv, const tfm_rows *rows, int heads) {
  const int32_t inner = heads * kv->width, wide = kv->heads * kv->width;
  const bool eight = kv->type == TFM_Q8_0;
  if ((kv->type == qkv.type || eight) && kv->width % 16 == 0 && p->rot % 16 == 0 && p->rot <= 256)
    cuda_run(d, qkv.type == TFM_F16 ? cuda_append16_kernel<TFM_F16>
                                    : cuda_append16_kernel<TFM_BF16>,
             dim3((unsigned)rows->n), 128, 0, qkv, bias, *p, *kv, *rows, heads);
  else
    cuda_run(d, cuda_append_kernel, dim3((unsigned)rows->n, cuda_blocks(qkv.cols / 2, 256)), 256, 0,
             qkv, bias, *p, *kv, *rows, heads);
  if (eight)
    cuda_kv_put_run(d, kv, cuda_columns(qkv, inner, wide), cuda_columns(qkv, inner + wide, wide),
                    rows);
}

/* As cuda_glu_kernel, eight values a thread; y and x of one type of 16 bits. */
template <int TYPE>
__global__ void cuda_glu8_kernel(tfm_mat y, tfm_mat x, const float *bias, tfm_act act, bool gated) {
  const int col = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 8, row = (int)blockIdx.x;
  const uint16_t *from = (const uint16_t *)x.data + row * x.stride + col;
  float v[8], up[8];
  if (col >= y.cols) return;
  cuda_widen<TYPE>(v, *(const uint4 *)from);
  if (gated) cuda_widen<TYPE>(up, *(const uint4 *)(from + y.cols));
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] = cuda_act(bias ? v[i] + bias[col + i] : v[i], act);
    if (gated) v[i] *= bias ? up[i] + bias[col + i + y.cols] : up[i];
  }
  *(uint4 *)((uint16_t *)y.data + row * y.stride + col) = cuda_narrow<TYPE>(v);
}

/* Rows of a quantised weight, 16 bytes a thread, as halves. */
__global__ void cuda_widen_kernel(__half *to, cuda_weight w, int first, int rows) {
  int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / w.vectors, at;
  int v = (int)(i % w.vectors), k;
  uint4 q;
  if (row >= rows) return;
  at = cuda_vector_at(w, first + row, v);
  q = ((const uint4 *)w.data)[at];
  const float2 scale = cuda_scale_value(w, at);
  if (cuda_shape_of(w.type).bits == 8) {
    float f[16];
    if (w.type == TFM_F8_E4M3) cuda_widen<TFM_F8_E4M3>(f, q);
    else cuda_widen<TFM_Q8_0>(f, q);
#pragma unroll
    for (k = 0; k < 8; k++)
      ((__half2 *)(to + row * w.cols + v * 16))[k] =
          __floats2half2_rn(f[2 * k] * scale.x + scale.y, f[2 * k + 1] * scale.x + scale.y);
  } else {
    const __half2 by = __float2half2_rn(scale.x), offset = __float2half2_rn(scale.y);
    __half2 h[16];
    cuda_widen_q4(h, q);
#pragma unroll
    for (k = 0; k < 16; k++)
      ((__half2 *)(to + row * w.cols + v * 32))[k] = __hfma2(h[k], by, offset);
  }
}

typedef struct cuda_product_shape { int32_t m, n, k, ldx, ldy; tfm_type in, out; bool add, bias; }
  cuda_product_shape;

typedef struct cuda_choice_of { /* cuBLASLt's kernel for a shape */
  cuda_product_shape shape;
  cublasLtMatmulAlgo_t algorithm;
  bool timed; /* the fastest; else the first that was proposed */
} cuda_choice_of;

enum { CUDA_SHAPES = 128, CUDA_PROPOSALS = 8 };

typedef struct cuda_lt { /* for tfm_dev.state */
  cublasLtHandle_t handle;
  cudaEvent_t timer[2];
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

/* What cuBLASLt proposes, the best first. */
static int cuda_lt_proposals(tfm_dev *d, const cuda_lt_job *j, const cuda_product_shape *p,
                             size_t space, cublasLtMatmulHeuristicResult_t found[CUDA_PROPOSALS]) {
  cublasLtMatmulPreference_t preference = NULL;
  int n = 0;
  if (cuda_lt_check(d, cublasLtMatmulPreferenceCreate(&preference), "preference") &&
      cuda_lt_check(d, cublasLtMatmulPreferenceSetAttribute(
                           preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space,
                           sizeof space), "MAX_WORKSPACE_BYTES") &&
      cuda_lt_aligned(d, preference))
    cuda_lt_check(d, cublasLtMatmulAlgoGetHeuristic(cuda_of(d)->lt->handle, j->what, j->w, j->x,
                                                    j->y, j->y, preference, CUDA_PROPOSALS, found,
                                                    &n), "cublasLtMatmulAlgoGetHeuristic");
  if (preference) cublasLtMatmulPreferenceDestroy(preference);
  if (d->status == TFM_OK && n == 0)
    tfm_dev_fail(d, TFM_E_DEVICE, "cuBLASLt has no kernel for a product of %d x %d x %d", p->m,
                 p->n, p->k);
  return d->status == TFM_OK ? n : 0;
}

typedef struct cuda_product { /* y = x w^T + beta y, as it lies on the device */
  const void *w, *x;
  void *y, *space;
  size_t space_bytes;
  float beta;
} cuda_product;

static bool cuda_lt_run(tfm_dev *d, const cuda_lt_job *j, const cuda_product *p,
                        const cublasLtMatmulAlgo_t *algorithm) {
  float one = 1;
  return cuda_lt_check(d, cublasLtMatmul(cuda_of(d)->lt->handle, j->what, &one, p->w, j->w, p->x,
                                         j->x, &p->beta, p->y, j->y, p->y, j->y, algorithm,
                                         p->space, p->space_bytes, cuda_stream(d)),
                       "cublasLtMatmul");
}

/* Microseconds of a proposal, the second time it runs. y is spoilt unless beta is 0. */
static float cuda_lt_time(tfm_dev *d, const cuda_lt_job *j, const cuda_product *p,
                          const cublasLtMatmulAlgo_t *algorithm) {
  cuda_lt *lt = cuda_of(d)->lt;
  float ms = 0;
  if (cuda_lt_run(d, j, p, algorithm) &&
      cuda_check(d, cudaEventRecord(lt->timer[0], cuda_stream(d)), "cudaEventRecord") &&
      cuda_lt_run(d, j, p, algorithm) &&
      cuda_check(d, cudaEventRecord(lt->timer[1], cuda_stream(d)), "cudaEventRecord") &&
      cuda_check(d, cudaEventSynchronize(lt->timer[1]), "cudaEventSynchronize"))
    cuda_check(d, cudaEventElapsedTime(&ms, lt->timer[0], lt->timer[1]), "cudaEventElapsedTime");
  return ms;
}

/* The fastest of the proposals. */
static bool cuda_lt_race(tfm_dev *d, const cuda_lt_job *j, const cuda_product *trial,
                         const cublasLtMatmulHeuristicResult_t found[CUDA_PROPOSALS], int n,
                         cublasLtMatmulAlgo_t *out) {
  float least = INFINITY;
  int i;
  for (i = 0; i < n && n > 1 && trial->y && d->status == TFM_OK; i++) {
    float ms = cuda_lt_time(d, j, trial, &found[i].algo);
    if (ms < least) least = ms, *out = found[i].algo;
  }
  return d->status == TFM_OK;
}

static cuda_choice_of *cuda_lt_known(cuda_lt *lt, const cuda_product_shape *p) {
  int i;
  for (i = 0; i < lt->choices; i++)
    if (memcmp(&lt->choice[i].shape, p, sizeof *p) == 0) return &lt->choice[i];
  return NULL;
}

/* Remembered. What may be recorded is timed at once, as it is not chosen again; passes of more
   rows, which come in any number, when their shape is met a second time. */
static bool cuda_lt_choose(tfm_dev *d, const cuda_lt_job *j, const cuda_product_shape *p,
                           const cuda_product *trial, cublasLtMatmulAlgo_t *out) {
  cuda_lt *lt = cuda_of(d)->lt;
  cuda_choice_of *known = cuda_lt_known(lt, p);
  cublasLtMatmulHeuristicResult_t found[CUDA_PROPOSALS];
  bool first = !known;
  int n;
  if (known && (known->timed || cuda_of(d)->recording)) return *out = known->algorithm, true;
  n = cuda_lt_proposals(d, j, p, trial->space_bytes, found);
  if (n == 0) return false;
  *out = found[0].algo;
  if (cuda_of(d)->recording || (first && lt->choices == CUDA_SHAPES)) return true;
  if (first) known = &lt->choice[lt->choices++];
  known->shape = *p;
  known->timed = !first || p->m <= CUDA_RECORDED;
  if (known->timed && !cuda_lt_race(d, j, trial, found, n, out)) return false;
  known->algorithm = *out;
  return true;
}

typedef struct cuda_pass { /* what a layer computes with, in tfm_dev.work */
  tfm_mat h, qkv, up, act; /* of 16 bits */
  tfm_type type;
  bool few;                /* products are cuda_few_run's, kernels a chain */
  __half *wide;            /* widened weights */
  size_t wide_bytes;
  void *space;             /* cuBLAS's own */
  size_t space_bytes;
  void *trial;             /* where products are timed that are to be added; NULL: nowhere */
  size_t trial_bytes;
} cuda_pass;

/* y = x w^T, or y += x w^T + bias; w as it lies, of 16 bits. */
static void cuda_lt_product(tfm_dev *d, const cuda_pass *pass, tfm_mat y, tfm_mat x, const void *w,
                            int32_t ldw, const float *bias, bool add) {
  cuda_product_shape p;
  cublasLtMatmulAlgo_t algorithm;
  cuda_product product = {w, x.data, y.data, pass->space, pass->space_bytes, add ? 1.0f : 0.0f};
  cuda_product trial = product;
  cuda_lt_job job;
  memset(&p, 0, sizeof p);
  p.m = y.rows, p.n = y.cols, p.k = x.cols, p.ldx = (int32_t)x.stride, p.ldy = (int32_t)y.stride;
  p.in = x.type, p.out = y.type, p.add = add, p.bias = bias != NULL;
  if (add)
    trial.y = (size_t)y.rows * (size_t)y.stride * cuda_size(y.type) <= pass->trial_bytes
                  ? pass->trial : NULL;
  if (d->status != TFM_OK) return;
  if (cuda_lt_describe(d, &job, &p, ldw, bias) && cuda_lt_choose(d, &job, &p, &trial, &algorithm))
    cuda_lt_run(d, &job, &product, &algorithm);
  cuda_lt_forget(&job);
}

/* The same by cuda_few_run, act included; y is of 16 bits unless something is added. Of more rows,
   where the bits must not depend on their number, as many at a time as it can. */
static void cuda_few_rows(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w, const float *bias,
                          tfm_act act, bool add, bool gated, const cuda_few_heads *heads) {
  cuda_few_heads here;
  int32_t first;
  for (first = 0; first < y.rows && d->status == TFM_OK; first += CUDA_FEW) {
    const tfm_mat part = cuda_rows_of(y, first, CUDA_FEW);
    tfm_epilogue e = {};
    e.bias = bias, e.act = act;
    if (add) e.residual = part;
    if (heads) here = *heads, here.rows.pos += first, here.rows.seq += first;
    cuda_few_run(d, part, cuda_rows_of(x, first, CUDA_FEW), w, &e, NULL, gated,
                 heads ? &here : NULL);
  }
}

/* The same for packed weights: quantised ones in stretches of rows. */
static void cuda_gemm(tfm_dev *d, const cuda_pass *pass, tfm_mat y, tfm_mat x, const cuda_weight *w,
                      const float *bias, bool add) {
  int32_t first, n, most = (int32_t)(pass->wide_bytes / 2 / (size_t)w->cols) / 8 * 8;
  if (pass->few) {
    cuda_few_rows(d, y, x, w, bias, TFM_ACT_NONE, add, false, NULL);
    return;
  }
  if (!w->scale) {
    cuda_lt_product(d, pass, y, x, w->data, w->vectors * cuda_vector_values(w->type), bias, add);
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

static cuda_pass cuda_pass_lay_out(cuda_room *r, const tfm_net *net, tfm_type type, int32_t rows) {
  size_t inner = (size_t)(net->heads * net->head_width), c = (size_t)net->width;
  size_t widest = (size_t)net->ffn_width * (net->gated ? 2 : 1), wide = inner > c ? inner : c;
  cuda_pass p;
  if (widest < inner * 3) widest = inner * 3;
  p.type = type;
  p.few = false;
  p.h = cuda_take_mat(r, type, rows, (int32_t)wide);
  p.qkv = cuda_take_mat(r, type, rows, (net->heads + 2 * net->kv_heads) * net->head_width);
  p.up = cuda_take_mat(r, type, rows, net->ffn_width * (net->gated ? 2 : 1));
  p.act = cuda_take_mat(r, type, rows, net->ffn_width);
  p.wide_bytes = cuda_least_of(widest * cuda_larger(wide, (size_t)net->ffn_width) * 2,
                               (size_t)64 << 20);
  p.wide = (__half *)cuda_take(r, p.wide_bytes, 1);
  p.space_bytes = c < 512 ? (size_t)1 << 20 : (size_t)32 << 20;
  p.space = cuda_take(r, p.space_bytes, 1);
  p.trial = p.up.data; /* not in use when something is added */
  p.trial_bytes = (size_t)rows * (size_t)p.up.stride * cuda_size(type);
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

static bool cuda_layer_knows(const tfm_dev *d, const tfm_net *net, const tfm_layer *l,
                             const tfm_kv *kv) {
  const tfm_weight *w[4] = {&l->qkv, &l->out, &l->up, &l->down};
  int i;
  for (i = 0; i < 4; i++)
    if (w[i]->cols % 8 || w[i]->rows % 8) return false;
  return d->work && cuda_of(d)->pass_at && kv->table && !net->experts && kv->width % 2 == 0 &&
         cuda_layer_plain(l);
}

static bool cuda_layer_few(const tfm_dev *d, const tfm_net *net, const tfm_layer *l) {
  return cuda_few_knows(d, cuda_packed(&l->qkv), false) &&
         cuda_few_knows(d, cuda_packed(&l->out), false) &&
         cuda_few_knows(d, cuda_packed(&l->up), net->gated) &&
         cuda_few_knows(d, cuda_packed(&l->down), false);
}

static bool cuda_lt_open(tfm_dev *d) {
  cuda_lt *lt = cuda_of(d)->lt;
  if (lt->handle) return true;
  return cuda_lt_check(d, cublasLtCreate(&lt->handle), "cublasLtCreate") &&
         cuda_check(d, cudaEventCreate(&lt->timer[0]), "cudaEventCreate") &&
         cuda_check(d, cudaEventCreate(&lt->timer[1]), "cudaEventCreate");
}

/* A large matrix of 16 bits by many rows, whose bits then depend on their number: a row of x is the
   sum of two of 16 bits, after a power of two. cuBLASLt multiplies both while it reads W once. */
template <bool BF>
__global__ void __launch_bounds__(CUDA_CREW) cuda_parts_kernel(tfm_mat parts, float *factor,
                                                               tfm_mat x) {
  __shared__ __align__(16) float room[8];
  const int row = (int)blockIdx.x, pairs = x.cols / 2;
  const float *from = (const float *)x.data + row * x.stride;
  uint32_t *high = (uint32_t *)parts.data + row * pairs, *low = high + x.rows * pairs;
  float top = 0, by;
  int e = 0, k;
  cuda_take_turn();
  for (k = threadIdx.x; k < x.cols; k += CUDA_CREW) top = fmaxf(top, fabsf(from[k]));
  top = cuda_crew_max<CUDA_CREW>(top, room);
  if (!BF && top > 0 && top < INFINITY) e = max(-100, (int)(__float_as_uint(top) >> 23) - 127 - 13);
  by = cuda_power(-e);
  for (k = threadIdx.x; k < pairs; k += CUDA_CREW) {
    float a = from[2 * k] * by, b = from[2 * k + 1] * by;
    high[k] = cuda_part2<BF>(a, b);
    low[k] = cuda_part2<BF>(a, b);
  }
  if (threadIdx.x == 0) factor[row] = cuda_power(e);
}

/* Columns of y from `first` on, from the sums of both parts. */
__global__ void cuda_parts_end_kernel(tfm_mat y, tfm_mat sums, const float *factor, tfm_epilogue e,
                                      int first) {
  const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
  const int col = first + i;
  if (i < sums.cols)
    cuda_epilogue(y, e, row, col,
                  (*cuda_at(sums, row, i) + *cuda_at(sums, row + y.rows, i)) * factor[row],
                  e.bias ? e.bias[col] : 0.0f);
}

enum { CUDA_SUMS = 32 << 20 }; /* bytes of sums at a time: the second cache holds them */

/* In a chain of two kernels; of more rows, as many at a time as there are columns for. */
static void cuda_matmul_parts(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w,
                              const tfm_epilogue *e) {
  cuda_room room = {(char *)cuda_align256((size_t)d->work + cuda_of(d)->parts_at), 0};
  const tfm_mat both = cuda_take_mat(&room, w->type, CUDA_FEW, x.cols);
  float *factor = (float *)cuda_take(&room, CUDA_FEW / 2, sizeof(float));
  int32_t first;
  cuda_of(d)->chained = true;
  for (first = 0; first < x.rows && d->status == TFM_OK; first += CUDA_FEW / 2) {
    const tfm_mat part = cuda_rows_of(x, first, CUDA_FEW / 2);
    tfm_epilogue rest = *e;
    if (e->residual.data) rest.residual = cuda_rows_of(e->residual, first, CUDA_FEW / 2);
    cuda_run(d, w->type == TFM_BF16 ? cuda_parts_kernel<true> : cuda_parts_kernel<false>,
             dim3((unsigned)part.rows), CUDA_CREW, 0, both, factor, part);
    cuda_few_run(d, cuda_rows_of(y, first, CUDA_FEW / 2), both, w, &rest, factor, false,
                 NULL);
  }
  cuda_of(d)->chained = false;
}

/* What is taken by x in two parts: large matrices of 16 bits, by more rows than cuda_dots takes; or
   by any number where the bits must not depend on it. cuBLASLt is not asked for a few. */
static bool cuda_parts_know(const tfm_dev *d, const tfm_mat &x, const cuda_weight *w) {
  return d->work && (size_t)CUDA_FEW * (size_t)x.cols * 2 + 4096 <= cuda_of(d)->parts_bytes &&
         (w->type == TFM_F16 || w->type == TFM_BF16) &&
         (int64_t)w->rows * w->vectors >= 1 << 19 && x.cols % 8 == 0 &&
         (cuda_few_knows(d, w, false) ? d->deterministic || x.rows > CUDA_COLUMNS
                                      : !d->deterministic && x.rows >= 16);
}

static bool cuda_matmul_many(tfm_dev *d, tfm_mat y, tfm_mat x, const cuda_weight *w,
                             const tfm_epilogue *e) {
  cuda_state *s = cuda_of(d);
  cuda_room room = {(char *)cuda_align256((size_t)d->work + s->parts_at), 0};
  const bool bf = w->type == TFM_BF16;
  int32_t first, n, most;
  cuda_pass pass;
  tfm_mat parts, sums;
  float *factor;
  if (!cuda_parts_know(d, x, w) || e->aux.data || e->dropout.rate > 0) return false;
  if (cuda_few_knows(d, w, false)) return cuda_matmul_parts(d, y, x, w, e), true;
  if (e->residual.data == y.data) return false;
  memset(&pass, 0, sizeof pass);
  parts = cuda_take_mat(&room, w->type, 2 * x.rows, x.cols);
  factor = (float *)cuda_take(&room, (size_t)x.rows, sizeof(float));
  pass.space_bytes = (size_t)4 << 20;
  pass.space = cuda_take(&room, pass.space_bytes, 1);
  most = CUDA_SUMS / (int32_t)sizeof(float) / (2 * x.rows) / 8 * 8;
  sums = cuda_take_mat(&room, TFM_F32, 2 * x.rows, most);
  if (room.used > s->parts_bytes || !cuda_lt_open(d)) return false;
  cuda_run(d, bf ? cuda_parts_kernel<true> : cuda_parts_kernel<false>, dim3((unsigned)x.rows),
           CUDA_CREW, 0, parts, factor, x);
  for (first = 0; first < w->rows && d->status == TFM_OK; first += n) {
    n = w->rows - first < most ? w->rows - first : most;
    cuda_lt_product(d, &pass, cuda_columns(sums, 0, n), parts,
                    w->data + (size_t)first * (size_t)w->vectors * 16, x.cols, NULL, false);
    cuda_run(d, cuda_parts_end_kernel, dim3((unsigned)y.rows, cuda_blocks(n, 256)), 256, 0, y,
             cuda_columns(sums, 0, n), factor, *e, (int)first);
  }
  return true;
}

static bool cuda_decode_alone(const tfm_dev *d, const tfm_net *net) {
  const tfm_mat row = {NULL, TFM_F32, 1, net->width, net->width};
  bool alone = cuda_parts_know(d, row, cuda_packed(&net->head));
  int32_t i;
  for (i = 0; i < net->layers; i++) alone |= cuda_layer_few(d, net, &net->layer[i]);
  return alone;
}

static void cuda_layer_up(tfm_dev *d, const cuda_pass *p, tfm_mat act, tfm_mat h,
                          const tfm_net *net, const tfm_layer *l) {
  const tfm_mat up = cuda_columns(p->up, 0, l->up.rows);
  if (p->few) {
    cuda_few_rows(d, act, h, cuda_packed(&l->up), l->up_bias, net->act, false, net->gated,
                  NULL);
    return;
  }
  cuda_gemm(d, p, up, h, cuda_packed(&l->up), NULL, false);
  cuda_run(d, p->type == TFM_F16 ? cuda_glu8_kernel<TFM_F16> : cuda_glu8_kernel<TFM_BF16>,
           dim3((unsigned)h.rows, cuda_blocks(act.cols, 8 * 128)), 128, 0, act, up, l->up_bias,
           net->act, net->gated);
}

/* q, rotated, in p->qkv; keys and values in the cache. */
static void cuda_layer_qkv(tfm_dev *d, const cuda_pass *p, tfm_mat h, const tfm_net *net,
                           const tfm_layer *l, const tfm_kv *kv, const tfm_rows *rows) {
  const cuda_few_heads heads = {l->rope, *kv, *rows, (int)net->heads};
  if (p->few && cuda_few_turns(&heads, p->type)) {
    cuda_few_rows(d, p->qkv, h, cuda_packed(&l->qkv), l->qkv_bias, TFM_ACT_NONE, false, false,
                  &heads);
    return;
  }
  cuda_gemm(d, p, p->qkv, h, cuda_packed(&l->qkv), NULL, false);
  cuda_append(d, p->qkv, l->qkv_bias, &l->rope, kv, rows, (int)net->heads);
}

/* chained: after a layer of the same pass. */
static void cuda_layer_run(tfm_dev *d, cuda_pass *p, tfm_mat x, const tfm_net *net,
                           const tfm_layer *l, const tfm_kv *kv, const tfm_rows *rows,
                           bool chained) {
  int32_t inner = net->heads * net->head_width;
  cuda_attn a = {cuda_columns(p->h, 0, inner), cuda_columns(p->qkv, 0, inner), *kv, *rows, NULL,
                 l->attn, net->heads / net->kv_heads, {}};
  cuda_norm norm1 = {l->norm1, l->norm1_bias, net->norm}, norm2 = {l->norm2, l->norm2_bias,
                                                                  net->norm};
  tfm_mat h = cuda_columns(p->h, 0, net->width), none = {};
  tfm_mat act = cuda_columns(p->act, 0, l->down.cols);
  norm1.p.groups = norm2.p.groups = 0;
  cuda_of(d)->chained = p->few && chained;
  cuda_norm_run(d, h, x, none, NULL, &norm1);
  cuda_of(d)->chained = p->few;
  cuda_layer_qkv(d, p, h, net, l, kv, rows);
  if (d->deterministic) cuda_attn_run(d, &a);
  else cuda_attn_tiles(d, &a);
  cuda_gemm(d, p, x, a.y, cuda_packed(&l->out), l->out_bias, true);
  cuda_norm_run(d, h, x, none, NULL, &norm2);
  cuda_layer_up(d, p, act, h, net, l);
  cuda_gemm(d, p, x, act, cuda_packed(&l->down), l->down_bias, true);
  cuda_of(d)->chained = false;
}

static bool cuda_layer_entry(tfm_dev *d, tfm_mat x, const tfm_net *net, int32_t index,
                             const tfm_kv *kv, const tfm_rows *rows) {
  const tfm_layer *l = &net->layer[index];
  const bool chained = index > cuda_of(d)->tiles_layer;
  bool few;
  cuda_room room;
  cuda_pass pass;
  tfm_type type;
  if (d->status != TFM_OK) return true; /* nothing is to be done any more */
  if (!cuda_layer_knows(d, net, l, kv)) return false;
  type = cuda_layer_type(l);
  few = cuda_layer_few(d, net, l) && (d->deterministic || (x.rows > 1 && x.rows <= CUDA_FEW));
  if (type == TFM_F32 || (!few && (d->deterministic || x.rows <= CUDA_COLUMNS)) ||
      !cuda_enter(d) || (!few && !cuda_lt_open(d)))
    return false;
  room.base = (char *)cuda_align256((size_t)d->work + cuda_of(d)->pass_at); /* cuBLAS wants that */
  room.used = 0;
  pass = cuda_pass_lay_out(&room, net, type, x.rows);
  pass.few = few;
  if (index <= cuda_of(d)->tiles_layer && cuda_tiles_fit(d, rows)) cuda_tiles_list(d, rows);
  cuda_of(d)->tiles_layer = index;
  cuda_layer_run(d, &pass, x, net, l, kv, rows, chained);
  return true;
}

/* attn where q has 16 bits: as `layer` has it computed, unless the bits must not depend on the rows
   beside, or more than y is wanted. */
static void cuda_attn_halves(tfm_dev *d, tfm_mat y, tfm_mat q, const tfm_kv *kv,
                             const tfm_rows *rows, float *lse, const tfm_attn *p) {
  cuda_attn a = {y, q, *kv, *rows, lse, *p, p->heads / kv->heads, {}};
  bool aligned = (uintptr_t)q.data % 16 == 0 && q.stride % 8 == 0 && y.stride % 2 == 0;
  bool plain = q.type != TFM_F32 && kv->table && !lse && !p->probs && p->dropout.rate == 0;
  if (d->deterministic || !plain || !aligned) cuda_attn_entry(d, y, q, kv, rows, lse, p);
  else if (cuda_enter(d)) {
    if (cuda_tiles_fit(d, rows)) cuda_tiles_list(d, rows);
    cuda_attn_tiles(d, &a);
  }
}

/* ---- What tfm_dev.state holds for the parts above ---- */

static void cuda_parts_free(tfm_dev *d) {
  cuda_state *s = cuda_of(d);
  int i;
  if (s->lt && s->lt->handle) cublasLtDestroy(s->lt->handle);
  for (i = 0; i < 2; i++)
    if (s->lt && s->lt->timer[i])
      cuda_check(d, cudaEventDestroy(s->lt->timer[i]), "cudaEventDestroy");
  if (s->lt) cuda_host_memory(d, s->lt, sizeof *s->lt, 0);
  if (s->decoder && s->decoder->exec)
    cuda_check(d, cudaGraphExecDestroy(s->decoder->exec), "cudaGraphExecDestroy");
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

/* What cuda_matmul_many takes for up to 512 rows of the network's width. */
static size_t cuda_parts_bytes(const tfm_net *net, int32_t rows) {
  cuda_room room = {NULL, 0};
  if (rows > 512) rows = 512;
  cuda_take_mat(&room, TFM_F16, 2 * rows, net->width);
  cuda_take(&room, (size_t)rows, sizeof(float));
  cuda_take(&room, (size_t)4 << 20, 1);
  cuda_take(&room, CUDA_SUMS, 1);
  return net->width < 512 ? 0 : room.used;
}

static size_t cuda_work_bytes(tfm_dev *d, const tfm_net *net, int32_t rows, int32_t sequences,
                              int32_t context) {
  cuda_room room = {NULL, 0};
  cuda_decoder decoder;
  cuda_decoder_lay_out(&decoder, &room, net, context, cuda_of(d)->processors);
  cuda_of(d)->pass_at = room.used;
  cuda_pass_lay_out(&room, net, TFM_F16, rows);
  room.used += 256; /* cuda_align256 */
  cuda_of(d)->tiles_at = room.used;
  cuda_of(d)->tiles_rows = rows;
  cuda_of(d)->tiles_layer = INT32_MAX;
  cuda_tiles_lay_out(&room, rows);
  cuda_of(d)->wide_at = d->cache == TFM_Q8_0 ? room.used : 0;
  cuda_of(d)->wide_sequences = sequences;
  cuda_of(d)->wide_context = context;
  if (cuda_of(d)->wide_at)
    cuda_wide_lay_out(&room, net->kv_heads, net->head_width, sequences, context);
  cuda_of(d)->parts_at = room.used;
  cuda_of(d)->parts_bytes = cuda_parts_bytes(net, rows);
  return room.used + 256 + cuda_of(d)->parts_bytes;
}

static const tfm_backend cuda_table = {
  TFM_BACKEND_ABI, "cuda", TFM_F32, TFM_F32, 1, 2048, true, true,
  cuda_open, cuda_close, cuda_sync, cuda_alloc, cuda_release,
  cuda_put, cuda_get, cuda_copy, cuda_zero,
  cuda_alloc_shared, cuda_release_shared, cuda_work_bytes, cuda_replay, cuda_record,
  cuda_pack_size, cuda_pack, cuda_unpack,
  cuda_cast, cuda_embed, cuda_gather, cuda_norm_entry, cuda_matmul, cuda_rope,
  cuda_kv_put, cuda_attn_halves,
  cuda_glu, cuda_route, cuda_matmul_moe, cuda_combine, cuda_sample, cuda_top,
  NULL, cuda_layer_entry, cuda_decode,                  /* matmul_glu */
  NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,       /* loss matmul_dx matmul_dw epilogue_bwd
                                                           norm_bwd attn_bwd glu_bwd embed_bwd */
  NULL, NULL, NULL, NULL, NULL, NULL,                   /* route_bwd combine_bwd moe_dx moe_dw sumsq
                                                           adamw */
  cuda_moe_bias, cuda_add_gated, NULL, NULL,            /* moe_bias_bwd add_gated_bwd */
  cuda_mark, cuda_usage
};

extern "C" const tfm_backend *tfm_backend_cuda(void) { return &cuda_table; }
