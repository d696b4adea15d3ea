/* The stand-in's interface (cuda_standin.h) on the real runtime: the calls that transformer_cuda.cu
   makes pass through here on their way to libcudart and libcublasLt, are counted, and can be made
   to fail instead. So cuda_host.c runs on a GPU with the same tests; what is misused,
   compute-sanitizer finds. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_NEXT */
#endif
#include "cuda_standin.h"
#include <cuda_runtime_api.h>
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCKS = 4096 }; /* of device memory at a time */

cuda_standin standin = {1, 0, false, cudaErrorUnknown, 0, 7, 0, 0, 0, {0}, 0, 0, ""};

static struct { void *address; size_t bytes; } blocks[BLOCKS];

void standin_reset(void) {
  static const cuda_standin fresh = {1, 0, false, cudaErrorUnknown, 0, 7, 0, 0, 0, {0}, 0, 0, ""};
  standin = fresh;
}

long standin_live(void) {
  long n = 0;
  int kind;
  for (kind = 0; kind < STANDIN_KINDS; kind++) n += standin.live[kind];
  return n;
}

/* Counts a call that may fail; true when it is to. */
static bool fails(void) {
  long n = ++standin.calls;
  return standin.fail_at && (n == standin.fail_at || (standin.for_ever && n > standin.fail_at));
}

/* The function behind ours. */
static void *behind(const char *name) {
  void *f = dlsym(RTLD_NEXT, name);
  if (f) return f;
  fprintf(stderr, "%s is not in the CUDA libraries\n", name);
  exit(1);
}

#define TEXT(name) #name
#define NAME(name) TEXT(name) /* after the headers have renamed it */
#define REAL(type, name, parameters)             \
  static type(*real) parameters;                 \
  if (!real) *(void **)&real = behind(NAME(name))

/* Fails instead of doing anything. */
#define CALL(name, parameters, arguments)          \
  cudaError_t name parameters {                    \
    REAL(cudaError_t, name, parameters);           \
    if (fails()) return (cudaError_t)standin.error; \
    return real arguments;                         \
  }

/* ... and makes an object. */
#define CREATE(kind, name, parameters, arguments)            \
  cudaError_t name parameters {                              \
    cudaError_t result;                                      \
    REAL(cudaError_t, name, parameters);                     \
    if (fails()) return (cudaError_t)standin.error;          \
    result = real arguments;                                 \
    standin.live[kind] += result == cudaSuccess;             \
    return result;                                           \
  }

/* A lost device fails here too, yet what it had is gone. */
#define DESTROY(kind, name, parameters, arguments)                           \
  cudaError_t name parameters {                                              \
    bool failed = fails() && standin.for_ever;                               \
    cudaError_t result;                                                      \
    REAL(cudaError_t, name, parameters);                                     \
    result = real arguments;                                                 \
    standin.live[kind]--;                                                    \
    return failed ? (cudaError_t)standin.error : result;                     \
  }

/* ---- Devices and memory ---- */

bool standin_works(void) {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

cudaError_t cudaGetDeviceCount(int *count) {
  REAL(cudaError_t, cudaGetDeviceCount, (int *));
  if (fails()) return (cudaError_t)standin.error;
  if (standin.devices) return real(count);
  *count = 0;
  return cudaErrorNoDevice;
}

CALL(cudaSetDevice, (int device), (device))
CALL(cudaDeviceGetAttribute, (int *v, enum cudaDeviceAttr a, int d), (v, a, d))
CALL(cudaMemGetInfo, (size_t *left, size_t *all), (left, all))

/* Whether memory is to be had: what is answered without asking the device, or else cudaSuccess. */
static cudaError_t memory_left(void **p, size_t bytes) {
  *p = NULL;
  if (fails()) return (cudaError_t)standin.error;
  if (standin.memory_limit && bytes > standin.memory_limit - standin.bytes)
    return cudaErrorMemoryAllocation;
  return cudaSuccess;
}

static cudaError_t memory_taken(cudaError_t e, void *p, size_t bytes) {
  int i = 0;
  if (e != cudaSuccess) return e;
  while (i < BLOCKS - 1 && blocks[i].address) i++;
  blocks[i].address = p;
  blocks[i].bytes = bytes;
  standin.bytes += bytes;
  if (standin.bytes > standin.peak) standin.peak = standin.bytes;
  standin.live[STANDIN_MEMORY]++;
  return e;
}

cudaError_t cudaMalloc(void **p, size_t bytes) {
  cudaError_t e = memory_left(p, bytes);
  REAL(cudaError_t, cudaMalloc, (void **, size_t));
  if (e == cudaSuccess) e = real(p, bytes);
  return memory_taken(e, *p, bytes);
}

cudaError_t cudaMallocManaged(void **p, size_t bytes, unsigned flags) {
  cudaError_t e = memory_left(p, bytes);
  REAL(cudaError_t, cudaMallocManaged, (void **, size_t, unsigned));
  if (e == cudaSuccess) e = real(p, bytes, flags);
  return memory_taken(e, *p, bytes);
}

cudaError_t cudaFree(void *p) {
  bool failed = fails() && standin.for_ever;
  cudaError_t e;
  int i = 0;
  REAL(cudaError_t, cudaFree, (void *));
  while (i < BLOCKS - 1 && blocks[i].address != p) i++;
  standin.bytes -= blocks[i].bytes;
  standin.live[STANDIN_MEMORY]--;
  blocks[i].address = NULL;
  e = real(p);
  return failed ? (cudaError_t)standin.error : e;
}

CREATE(STANDIN_PINNED, cudaHostAlloc, (void **p, size_t bytes, unsigned flags), (p, bytes, flags))
DESTROY(STANDIN_PINNED, cudaFreeHost, (void *p), (p))
CALL(cudaMemcpyAsync, (void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s),
     (to, from, n, k, s))
CALL(cudaMemsetAsync, (void *to, int value, size_t n, cudaStream_t s), (to, value, n, s))

/* ---- Streams and events ---- */

CREATE(STANDIN_STREAM, cudaStreamCreateWithFlags, (cudaStream_t *s, unsigned flags), (s, flags))
DESTROY(STANDIN_STREAM, cudaStreamDestroy, (cudaStream_t s), (s))
CALL(cudaStreamSynchronize, (cudaStream_t s), (s))
CREATE(STANDIN_EVENT, cudaEventCreate, (cudaEvent_t *e), (e))
CREATE(STANDIN_EVENT, cudaEventCreateWithFlags, (cudaEvent_t *e, unsigned flags), (e, flags))
DESTROY(STANDIN_EVENT, cudaEventDestroy, (cudaEvent_t e), (e))
CALL(cudaEventRecord, (cudaEvent_t e, cudaStream_t s), (e, s))
CALL(cudaEventSynchronize, (cudaEvent_t e), (e))
CALL(cudaEventQuery, (cudaEvent_t e), (e))
CALL(cudaEventElapsedTime, (float *ms, cudaEvent_t a, cudaEvent_t b), (ms, a, b))

/* ---- Graphs ---- */

CALL(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode m), (s, m))

/* Also where it fails, capturing has ended. */
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
  bool failed = fails();
  cudaError_t e;
  REAL(cudaError_t, cudaStreamEndCapture, (cudaStream_t, cudaGraph_t *));
  e = real(s, g);
  standin.live[STANDIN_GRAPH] += *g != NULL;
  if (!failed) return e;
  if (*g) cudaGraphDestroy(*g);
  *g = NULL;
  return (cudaError_t)standin.error;
}

CREATE(STANDIN_EXEC, cudaGraphInstantiate,
       (cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags), (exec, g, flags))
DESTROY(STANDIN_GRAPH, cudaGraphDestroy, (cudaGraph_t g), (g))
DESTROY(STANDIN_EXEC, cudaGraphExecDestroy, (cudaGraphExec_t g), (g))

cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) {
  REAL(cudaError_t, cudaGraphLaunch, (cudaGraphExec_t, cudaStream_t));
  if (fails()) return (cudaError_t)standin.error;
  standin.replays++;
  return real(g, s);
}

/* ---- Kernels ---- */

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) {
  REAL(cudaError_t, cudaLaunchKernelExC, (const cudaLaunchConfig_t *, const void *, void **));
  if (fails()) return (cudaError_t)standin.error;
  standin.launches++;
  return real(c, f, args);
}

CALL(cudaFuncSetAttribute, (const void *f, enum cudaFuncAttribute a, int v), (f, a, v))

/* ---- cuBLASLt: its products count as launches ---- */

cublasStatus_t cublasLtCreate(cublasLtHandle_t *h) {
  cublasStatus_t e;
  REAL(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t *));
  if (fails()) return CUBLAS_STATUS_EXECUTION_FAILED;
  e = real(h);
  standin.live[STANDIN_BLAS] += e == CUBLAS_STATUS_SUCCESS;
  return e;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h) {
  REAL(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t));
  standin.live[STANDIN_BLAS]--;
  return real(h);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *alpha,
                              const void *a, cublasLtMatrixLayout_t la, const void *b,
                              cublasLtMatrixLayout_t lb, const void *beta, const void *c,
                              cublasLtMatrixLayout_t lc, void *y, cublasLtMatrixLayout_t ly,
                              const cublasLtMatmulAlgo_t *algorithm, void *work, size_t bytes,
                              cudaStream_t s) {
  REAL(cublasStatus_t, cublasLtMatmul,
       (cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *, cublasLtMatrixLayout_t,
        const void *, cublasLtMatrixLayout_t, const void *, const void *, cublasLtMatrixLayout_t,
        void *, cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
        cudaStream_t));
  if (fails()) return CUBLAS_STATUS_EXECUTION_FAILED;
  standin.launches++;
  return real(h, d, alpha, a, la, b, lb, beta, c, lc, y, ly, algorithm, work, bytes, s);
}
