/* The stand-in of cuda_standin.h: the part of the CUDA runtime that transformer_cuda.cu links to.
   One lock guards everything. An address or a handle is an entry of `objects`; work is an `op` in a
   stream's queue, in a graph while the stream is being captured. */
#include "cuda_standin.h"
#include <cuda_runtime_api.h>
#include <cublasLt.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

cuda_standin standin = {1, 0, false, cudaErrorUnknown, 0, 1, 0, 0, 0, {0}, 0, 0, ""};

enum {
  ALIGNMENT = 256, /* of memory; of what cuBLASLt takes for its work */
  LARGE = 1 << 20  /* bytes of a block that is mapped */
};

typedef struct object {
  int kind;
  char *address;
  void *block; /* that free takes */
  size_t bytes;
  int device;
} object;

typedef enum op_kind { OP_COPY, OP_SET, OP_RECORD, OP_WAIT } op_kind;

typedef struct op {
  op_kind kind;
  char *dst;
  const char *src;
  char *staged;    /* source of a pageable copy, taken when it was asked for */
  size_t bytes;
  int value;
  bool pinned;     /* the source is: it must not change until the copy has run */
  uint64_t sum;    /* of a pinned source when it was asked for */
  struct event *event;
  struct op *next;
} op;

typedef struct queue {
  op *first, **end;
} queue;

typedef struct stream {
  queue work;
  struct graph *capture; /* where work goes instead */
} stream;

typedef struct event {
  stream *where; /* that has to be run for it; NULL: it has happened */
} event;

typedef struct graph {
  queue work;
} graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static object *objects;
static size_t object_count, object_room;
static stream legacy; /* stream 0 */
static _Thread_local cudaError_t last_error;
static _Thread_local int current_device;
static _Thread_local struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} pushed;

/* ---- Misuse and failures ---- */

static void misuse(const char *what, const char *where) {
  if (!standin.misuse[0]) snprintf(standin.misuse, sizeof standin.misuse, "%s: %s", where, what);
}

static cudaError_t answer(cudaError_t e) {
  if (e != cudaSuccess) last_error = e;
  return e;
}

/* Counts a call that may fail; true when it is to. */
static bool fails(void) {
  long n = ++standin.calls;
  return standin.fail_at && (n == standin.fail_at || (standin.for_ever && n > standin.fail_at));
}

#define ENTER() \
  pthread_mutex_lock(&lock); \
  if (fails()) return leave(answer((cudaError_t)standin.error))

static cudaError_t leave(cudaError_t e) {
  pthread_mutex_unlock(&lock);
  return e;
}

/* A call that does nothing here, and may fail. */
static cudaError_t succeed(void) {
  ENTER();
  return leave(cudaSuccess);
}

/* ---- Objects ---- */

static void object_add(int kind, void *address, void *block, size_t bytes) {
  if (object_count == object_room) {
    object_room = object_room ? 2 * object_room : 64;
    objects = (object *)realloc(objects, object_room * sizeof *objects);
  }
  objects[object_count].kind = kind;
  objects[object_count].address = (char *)address;
  objects[object_count].block = block;
  objects[object_count].bytes = bytes;
  objects[object_count++].device = current_device;
  standin.live[kind]++;
}

static object *object_of(int kind, const void *address) {
  size_t i;
  for (i = 0; i < object_count; i++)
    if (objects[i].kind == kind && objects[i].address == address) return &objects[i];
  return NULL;
}

/* The allocation of that kind which holds all of [p, p + bytes). */
static object *object_around(int kind, const void *p, size_t bytes) {
  const char *at = (const char *)p;
  size_t i;
  for (i = 0; i < object_count; i++) {
    object *o = &objects[i];
    if (o->kind == kind && at >= o->address && at + bytes <= o->address + o->bytes) return o;
  }
  return NULL;
}

/* Memory of zeros. Large blocks are not the sanitizer's, which would touch a share of each. */
static void *block_new(size_t bytes) {
  void *p;
  if (bytes < LARGE) return calloc(1, bytes);
  p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

/* Takes it off the books, and frees it. */
static void object_free(int kind, const void *address, const char *where) {
  object *o = object_of(kind, address);
  if (!o) {
    misuse("not alive, or of another kind", where);
    return;
  }
  if (o->device != current_device) misuse("belongs to another device than the current one", where);
  if (kind == STANDIN_MEMORY) standin.bytes -= o->bytes;
  standin.live[kind]--;
  if (o->block != o->address && o->bytes + ALIGNMENT >= LARGE)
    munmap(o->block, o->bytes + ALIGNMENT);
  else free(o->block);
  *o = objects[--object_count];
}

void standin_reset(void) {
  static const cuda_standin fresh = {1, 0, false, cudaErrorUnknown, 0, 1, 0, 0, 0, {0}, 0, 0, ""};
  standin = fresh;
  object_count = 0;
  last_error = cudaSuccess;
}

bool standin_works(void) { return true; }

long standin_live(void) {
  long n = 0;
  int kind;
  for (kind = 0; kind < STANDIN_KINDS; kind++) n += standin.live[kind];
  return n;
}

/* ---- Queues ---- */

static uint64_t checksum(const char *p, size_t bytes) { /* FNV-1a */
  uint64_t h = 14695981039346656037u;
  while (bytes--) h = (h ^ (unsigned char)*p++) * 1099511628211u;
  return h;
}

static stream *stream_of(cudaStream_t s, const char *where) {
  if (!s) return &legacy;
  if (!object_of(STANDIN_STREAM, s)) {
    misuse("the stream is not alive", where);
    return &legacy;
  }
  return (stream *)s;
}

static void queue_add(queue *q, const op *o) {
  op *copy = (op *)malloc(sizeof *copy);
  *copy = *o;
  copy->next = NULL;
  if (!q->first) q->end = &q->first;
  *q->end = copy;
  q->end = &copy->next;
}

static void enqueue(stream *s, const op *o) {
  queue_add(s->capture ? &s->capture->work : &s->work, o);
}

static void run_stream(stream *s);

static void op_run(const op *o) {
  switch (o->kind) {
  case OP_COPY:
    if (o->pinned && checksum(o->src, o->bytes) != o->sum)
      misuse("the pinned source was written before its copy had run", "cudaMemcpyAsync");
    memcpy(o->dst, o->staged ? o->staged : o->src, o->bytes);
    break;
  case OP_SET: memset(o->dst, o->value, o->bytes); break;
  case OP_RECORD: o->event->where = NULL; break;
  case OP_WAIT:
    if (o->event->where) run_stream(o->event->where);
    break;
  }
}

static void run_stream(stream *s) {
  while (s->work.first) {
    op *o = s->work.first;
    s->work.first = o->next;
    op_run(o);
    free(o->staged);
    free(o);
  }
}

static void queue_drop(queue *q) {
  while (q->first) {
    op *o = q->first;
    q->first = o->next;
    free(o->staged);
    free(o);
  }
}

/* ---- Devices ---- */

cudaError_t cudaGetDeviceCount(int *count) {
  ENTER();
  *count = standin.devices;
  return leave(answer(standin.devices ? cudaSuccess : cudaErrorNoDevice));
}

cudaError_t cudaSetDevice(int device) {
  ENTER();
  if (device < 0 || device >= standin.devices) return leave(answer(cudaErrorInvalidDevice));
  current_device = device;
  return leave(cudaSuccess);
}

cudaError_t cudaGetDevice(int *device) {
  ENTER();
  *device = current_device;
  return leave(cudaSuccess);
}

/* An H200's figures, where the host side asks. */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  static const struct {
    enum cudaDeviceAttr attribute;
    int value;
  } figures[] = {
    {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrL2CacheSize, 60 << 20}, {cudaDevAttrWarpSize, 32},
    {cudaDevAttrCooperativeLaunch, 1}, {cudaDevAttrConcurrentKernels, 1},
  };
  size_t i;
  ENTER();
  if (device < 0 || device >= standin.devices) return leave(answer(cudaErrorInvalidDevice));
  for (i = 0, *value = 0; i < sizeof figures / sizeof figures[0]; i++)
    if (figures[i].attribute == attribute) *value = figures[i].value;
  return leave(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  ENTER();
  if (device < 0 || device >= standin.devices) return leave(answer(cudaErrorInvalidDevice));
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "stand-in");
  p->major = 9;
  p->multiProcessorCount = 132;
  p->sharedMemPerBlockOptin = 232448;
  p->totalGlobalMem = (size_t)139 << 30;
  return leave(cudaSuccess);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  ENTER();
  *total = standin.memory_limit ? standin.memory_limit : (size_t)139 << 30;
  *free_bytes = *total > standin.bytes ? *total - standin.bytes : 0;
  return leave(cudaSuccess);
}

cudaError_t cudaGetLastError(void) {
  cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorString(cudaError_t e) {
  if (e == cudaErrorMemoryAllocation) return "out of memory";
  return e == cudaSuccess ? "no error" : "failed on demand";
}

const char *cudaGetErrorName(cudaError_t e) {
  return e == cudaSuccess ? "cudaSuccess" : "cudaErrorOnDemand";
}

/* ---- Memory ---- */

static cudaError_t allocate(int kind, void **p, size_t bytes) {
  void *block;
  ENTER();
  *p = NULL;
  if (kind == STANDIN_MEMORY) {
    if (standin.memory_limit && bytes > standin.memory_limit - standin.bytes)
      return leave(answer(cudaErrorMemoryAllocation));
    standin.bytes += bytes;
    if (standin.bytes > standin.peak) standin.peak = standin.bytes;
  }
  block = block_new(bytes + ALIGNMENT);
  *p = (char *)block + (ALIGNMENT - (uintptr_t)block % ALIGNMENT);
  object_add(kind, *p, block, bytes);
  return leave(cudaSuccess);
}

/* Work that is queued may still use the memory: as CUDA does, run it first. */
static void run_all(void) {
  size_t i;
  run_stream(&legacy);
  for (i = 0; i < object_count; i++)
    if (objects[i].kind == STANDIN_STREAM) run_stream((stream *)(void *)objects[i].address);
}

/* A lost device fails here too, yet the memory is gone with it. */
static cudaError_t deallocate(int kind, void *p, const char *where) {
  bool failed;
  if (!p) return cudaSuccess;
  pthread_mutex_lock(&lock);
  failed = fails() && standin.for_ever;
  run_all();
  object_free(kind, p, where);
  return leave(answer(failed ? (cudaError_t)standin.error : cudaSuccess));
}

cudaError_t cudaMalloc(void **p, size_t bytes) { return allocate(STANDIN_MEMORY, p, bytes); }
cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags) {
  (void)flags;
  return allocate(STANDIN_MEMORY, p, bytes);
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  (void)flags;
  return allocate(STANDIN_PINNED, p, bytes);
}
cudaError_t cudaMallocHost(void **p, size_t bytes) { return allocate(STANDIN_PINNED, p, bytes); }
cudaError_t cudaFree(void *p) { return deallocate(STANDIN_MEMORY, p, "cudaFree"); }
cudaError_t cudaFreeHost(void *p) { return deallocate(STANDIN_PINNED, p, "cudaFreeHost"); }

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
  (void)flags;
  ENTER();
  if (!object_around(STANDIN_PINNED, host, 1)) misuse("not pinned", "cudaHostGetDevicePointer");
  *device = host;
  return leave(cudaSuccess);
}

static bool on_device(const void *p, size_t bytes) {
  return object_around(STANDIN_MEMORY, p, bytes) != NULL;
}

/* Which side must be whose; pinned memory counts as either. */
static void check_sides(const void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
  bool to = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  bool from = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault) return;
  if (to && !on_device(dst, bytes) && !object_around(STANDIN_PINNED, dst, bytes))
    misuse("the destination is not whole device memory", "cudaMemcpyAsync");
  if (from && !on_device(src, bytes) && !object_around(STANDIN_PINNED, src, bytes))
    misuse("the source is not whole device memory", "cudaMemcpyAsync");
  if (!to && on_device(dst, 1)) misuse("the destination is device memory", "cudaMemcpyAsync");
  if (!from && on_device(src, 1)) misuse("the source is device memory", "cudaMemcpyAsync");
}

/* A pageable source is taken at once and a pageable destination filled before the return; pinned
   memory is read and written when the stream gets there. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s) {
  op o = {OP_COPY, (char *)dst, (const char *)src, NULL, bytes, 0, false, 0, NULL, NULL};
  stream *at;
  ENTER();
  at = stream_of(s, "cudaMemcpyAsync");
  check_sides(dst, src, bytes, kind);
  if (object_around(STANDIN_PINNED, src, bytes)) {
    o.pinned = !at->capture; /* a graph reads what is there when it is launched */
    o.sum = o.pinned ? checksum(o.src, bytes) : 0;
  } else if (!on_device(src, bytes)) {
    o.staged = (char *)malloc(bytes ? bytes : 1);
    memcpy(o.staged, src, bytes);
  }
  enqueue(at, &o);
  if (!at->capture && !on_device(dst, bytes) && !object_around(STANDIN_PINNED, dst, bytes))
    run_stream(at);
  return leave(cudaSuccess);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind) {
  cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, NULL);
  pthread_mutex_lock(&lock);
  run_all();
  return leave(e);
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t s) {
  op o = {OP_SET, (char *)dst, NULL, NULL, bytes, value, false, 0, NULL, NULL};
  ENTER();
  if (!on_device(dst, bytes)) misuse("the destination is not device memory", "cudaMemsetAsync");
  enqueue(stream_of(s, "cudaMemsetAsync"), &o);
  return leave(cudaSuccess);
}

/* ---- Streams and events ---- */

static cudaError_t create(int kind, void **handle, size_t bytes) {
  ENTER();
  *handle = calloc(1, bytes);
  object_add(kind, *handle, *handle, bytes);
  return leave(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) {
  (void)flags;
  return create(STANDIN_STREAM, (void **)s, sizeof(stream));
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  (void)priority;
  return cudaStreamCreateWithFlags(s, flags);
}

cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithFlags(s, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) {
  return deallocate(STANDIN_STREAM, s, "cudaStreamDestroy");
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  stream *at;
  ENTER();
  at = stream_of(s, "cudaStreamSynchronize");
  if (at->capture) misuse("the stream is being captured", "cudaStreamSynchronize");
  run_stream(at);
  return leave(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void) {
  ENTER();
  run_all();
  return leave(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaStreamSynchronize(s); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  (void)flags;
  return create(STANDIN_EVENT, (void **)e, sizeof(event));
}

cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
  return deallocate(STANDIN_EVENT, e, "cudaEventDestroy");
}

/* Both calls: work about an event on a stream. */
static cudaError_t mark(op_kind kind, cudaEvent_t e, cudaStream_t s, const char *where) {
  op o = {kind, NULL, NULL, NULL, 0, 0, false, 0, (event *)e, NULL};
  stream *at;
  ENTER();
  at = stream_of(s, where);
  if (!object_of(STANDIN_EVENT, e)) {
    misuse("the event is not alive", where);
    return leave(answer(cudaErrorInvalidResourceHandle));
  }
  if (kind == OP_RECORD && !at->capture) o.event->where = at;
  enqueue(at, &o);
  return leave(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  return mark(OP_RECORD, e, s, "cudaEventRecord");
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) {
  (void)flags;
  return mark(OP_WAIT, e, s, "cudaStreamWaitEvent");
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  event *at = (event *)e;
  ENTER();
  if (!object_of(STANDIN_EVENT, e)) misuse("the event is not alive", "cudaEventSynchronize");
  else if (at->where) run_stream(at->where);
  return leave(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaEventSynchronize(e); }

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  (void)from, (void)to;
  ENTER();
  *ms = 0.001f;
  return leave(cudaSuccess);
}

/* ---- Graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
  stream *at;
  (void)mode;
  ENTER();
  at = stream_of(s, "cudaStreamBeginCapture");
  if (at->capture) misuse("the stream is being captured already", "cudaStreamBeginCapture");
  else at->capture = (graph *)calloc(1, sizeof(graph));
  return leave(cudaSuccess);
}

/* Also where it fails, capturing has ended. */
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *out) {
  stream *at;
  graph *g;
  bool failed;
  pthread_mutex_lock(&lock);
  failed = fails();
  at = stream_of(s, "cudaStreamEndCapture");
  g = at->capture;
  at->capture = NULL;
  *out = NULL;
  if (!g) misuse("the stream is not being captured", "cudaStreamEndCapture");
  else if (failed) queue_drop(&g->work), free(g);
  else object_add(STANDIN_GRAPH, g, g, sizeof *g), *out = (cudaGraph_t)g;
  return leave(answer(failed ? (cudaError_t)standin.error : cudaSuccess));
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  ENTER();
  *status = stream_of(s, "cudaStreamIsCapturing")->capture ? cudaStreamCaptureStatusActive
                                                            : cudaStreamCaptureStatusNone;
  return leave(cudaSuccess);
}

static void queue_copy(queue *to, const queue *from) {
  const op *o;
  for (o = from->first; o; o = o->next) {
    op copy = *o;
    if (o->staged) {
      copy.staged = (char *)malloc(o->bytes ? o->bytes : 1);
      memcpy(copy.staged, o->staged, o->bytes);
    }
    queue_add(to, &copy);
  }
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags) {
  graph *copy;
  (void)flags;
  ENTER();
  *exec = NULL;
  if (!object_of(STANDIN_GRAPH, g)) {
    misuse("the graph is not alive", "cudaGraphInstantiate");
    return leave(answer(cudaErrorInvalidValue));
  }
  copy = (graph *)calloc(1, sizeof *copy);
  queue_copy(&copy->work, &((graph *)g)->work);
  object_add(STANDIN_EXEC, copy, copy, sizeof *copy);
  *exec = (cudaGraphExec_t)copy;
  return leave(cudaSuccess);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t g,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(exec, g, flags);
}

static cudaError_t graph_destroy(int kind, void *g, const char *where) {
  pthread_mutex_lock(&lock);
  run_all();
  if (g && object_of(kind, g)) queue_drop(&((graph *)g)->work);
  pthread_mutex_unlock(&lock);
  return deallocate(kind, g, where);
}

cudaError_t cudaGraphDestroy(cudaGraph_t g) {
  return graph_destroy(STANDIN_GRAPH, g, "cudaGraphDestroy");
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) {
  return graph_destroy(STANDIN_EXEC, g, "cudaGraphExecDestroy");
}

/* Tokens that the device is to choose by itself: the host waits for each -1 to become an id. */
static void answer_tokens(void) {
  size_t i, j;
  pthread_mutex_lock(&lock);
  run_all();
  for (i = 0; i < object_count; i++)
    for (j = 0; objects[i].kind == STANDIN_PINNED && j < objects[i].bytes / sizeof(int32_t); j++) {
      int32_t *id = (int32_t *)(void *)objects[i].address + j;
      if (*id == -1) *id = 0;
    }
  pthread_mutex_unlock(&lock);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
  ENTER();
  if (!object_of(STANDIN_EXEC, g)) misuse("the graph is not alive", "cudaGraphLaunch");
  else queue_copy(&stream_of(s, "cudaGraphLaunch")->work, &((graph *)g)->work);
  standin.replays++;
  leave(cudaSuccess);
  answer_tokens();
  return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t g, cudaStream_t s) {
  (void)g, (void)s;
  return succeed();
}

/* ---- Kernels: checked as the hardware would, and then nothing happens ---- */

static cudaError_t launch(dim3 grid, dim3 block, size_t shared, cudaStream_t s) {
  ENTER();
  stream_of(s, "a kernel");
  standin.launches++;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535 ||
      block.x * block.y * block.z == 0 || block.x * block.y * block.z > 1024 || shared > 232448) {
    misuse("grid, block or shared memory out of bounds", "a kernel");
    return leave(answer(cudaErrorInvalidConfiguration));
  }
  return leave(cudaSuccess);
}

cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared,
                             cudaStream_t s) {
  (void)f, (void)args;
  return launch(grid, block, shared, s);
}

cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args,
                                        size_t shared, cudaStream_t s) {
  return cudaLaunchKernel(f, grid, block, args, shared, s);
}

static bool captured(cudaStream_t s) {
  bool yes;
  pthread_mutex_lock(&lock);
  yes = stream_of(s, "a kernel")->capture != NULL;
  pthread_mutex_unlock(&lock);
  return yes;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
  cudaError_t e = launch(c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
  unsigned i;
  (void)f, (void)args;
  for (i = 0; i < c->numAttrs && e == cudaSuccess; i++)
    if (c->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
        !captured(c->stream))
      answer_tokens();
  return e;
}

cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute attribute, int value) {
  (void)f, (void)attribute, (void)value;
  return succeed();
}

/* Of every kernel: one that has a body. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *f) {
  (void)f;
  ENTER();
  memset(of, 0, sizeof *of);
  of->sharedSizeBytes = 1;
  return leave(cudaSuccess);
}

/* The driver's function that describes a matrix to the copy engine: nothing is copied here. */
static int encode(void) { return 0; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  (void)version, (void)flags;
  ENTER();
  if (strcmp(name, "cuTensorMapEncodeTiled") != 0)
    misuse("no such function", "cudaGetDriverEntryPointByVersion");
  *(int (**)(void))(void *)function = encode;
  *found = cudaDriverEntryPointSuccess;
  return leave(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
  (void)f, (void)threads, (void)shared, (void)flags;
  ENTER();
  *blocks = 1;
  return leave(cudaSuccess);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads,
                                                          size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, threads, shared, 0);
}

/* What nvcc's own code calls: registration before main, and around each <<<>>>. */
void **__cudaRegisterFatBinary(void *fat);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *tid, void *bid, void *bdim, void *gdim, int *wsize);
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                       size_t size, int constant, int global);
char __cudaInitModule(void **handle);
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *s);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s);
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f);
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t s);

void **__cudaRegisterFatBinary(void *fat) {
  static void *handle;
  (void)fat;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *tid, void *bid, void *bdim, void *gdim, int *wsize) {
  (void)handle, (void)host, (void)device, (void)name, (void)threads;
  (void)tid, (void)bid, (void)bdim, (void)gdim, (void)wsize;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext,
                       size_t size, int constant, int global) {
  (void)handle, (void)host, (void)device, (void)name, (void)ext, (void)size, (void)constant;
  (void)global;
}
char __cudaInitModule(void **handle) {
  (void)handle;
  return 1;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *s) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared = shared;
  pushed.stream = (cudaStream_t)s;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *s) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared = pushed.shared;
  *(cudaStream_t *)s = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) {
  *kernel = (cudaKernel_t)(uintptr_t)f;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args,
                               size_t shared, cudaStream_t s) {
  return cudaLaunchKernel((const void *)kernel, grid, block, args, shared, s);
}

/* ---- cuBLASLt: objects are counted, products do nothing ---- */

static cublasStatus_t blas(cudaError_t e) {
  return e == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

static cublasStatus_t blas_destroy(void *p, const char *where) {
  return p ? blas(deallocate(STANDIN_BLAS, p, where)) : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) {
  return blas(create(STANDIN_BLAS, (void **)handle, 8));
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return blas_destroy(handle, "cublasLtDestroy");
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  (void)compute, (void)scale;
  return blas(create(STANDIN_BLAS, (void **)d, 8));
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) {
  return blas_destroy(d, "cublasLtMatmulDescDestroy");
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
  (void)d, (void)attribute, (void)value, (void)bytes;
  return blas(succeed());
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t stride) {
  (void)type, (void)rows, (void)cols, (void)stride;
  return blas(create(STANDIN_BLAS, (void **)l, 8));
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) {
  return blas_destroy(l, "cublasLtMatrixLayoutDestroy");
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void *value, size_t bytes) {
  (void)l, (void)attribute, (void)value, (void)bytes;
  return blas(succeed());
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
  return blas(create(STANDIN_BLAS, (void **)p, 8));
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) {
  return blas_destroy(p, "cublasLtMatmulPreferenceDestroy");
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void *value, size_t bytes) {
  (void)p, (void)attribute, (void)value, (void)bytes;
  return blas(succeed());
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t y,
                                              cublasLtMatmulPreference_t p, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int *found) {
  (void)handle, (void)d, (void)a, (void)b, (void)c, (void)y, (void)p;
  memset(results, 0, (size_t)wanted * sizeof *results);
  *found = 1;
  return blas(succeed());
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *y, cublasLtMatrixLayout_t ly,
                              const cublasLtMatmulAlgo_t *algorithm, void *work, size_t bytes,
                              cudaStream_t s) {
  static const dim3 one = {1, 1, 1};
  (void)handle, (void)d, (void)alpha, (void)a, (void)la, (void)b, (void)lb, (void)beta, (void)c;
  (void)lc, (void)y, (void)ly, (void)algorithm, (void)bytes;
  if ((uintptr_t)work % ALIGNMENT) misuse("the workspace is not aligned", "cublasLtMatmul");
  return blas(launch(one, one, 0, s));
}
