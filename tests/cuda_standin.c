/* A stand-in for the CUDA runtime and cuBLASLt, to be linked with transformer_cuda.o in their place:
   memory is the host's, copies are done at once, kernels do nothing, and the call that a test names
   fails. It has what the object asks for, no more; the linker tells when that grows. */
#include "cuda_standin.h"
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

standin cuda_standin = {0, 0, 0, 0, 1, 0};

enum { OK = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, UNKNOWN = 999, CUBLAS_FAILED = 14 };

static int failing(int error) {
  return ++cuda_standin.calls == cuda_standin.fail_at ? error : OK;
}

/* Anything that has to be given back again. */
static int take(void **out, size_t bytes, int error) {
  int status = failing(error);
  *out = NULL;
  if (status != OK) return status;
  *out = aligned_alloc(256, (bytes + 256) / 256 * 256);
  if (bytes < 1 << 20) memset(*out, 0, bytes); /* larger ones are written before they are read */
  cuda_standin.live++;
  return OK;
}

static int give(void *p) { /* giving back works, or leaks would be the stand-in's */
  if (p) cuda_standin.live--;
  free(p);
  return OK;
}

static int enqueue(void *stream, int error) {
  if (!stream) cuda_standin.unordered++;
  return failing(error);
}

/* ---- What nvcc's own code calls ---- */

void **__cudaRegisterFatBinary(void *code);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *a, void *b, void *c, void *d, int *e);
int __cudaPopCallConfiguration(void *grid, void *block, size_t *shared, void *stream);
int __cudaGetKernel(void **kernel, const void *entry);
int __cudaLaunchKernel(void *kernel, uint64_t grid0, uint32_t grid1, uint64_t block0,
                       uint32_t block1, void **arguments, size_t shared, void *stream);

void **__cudaRegisterFatBinary(void *code) {
  static void *handle;
  (void)code;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int threads, void *a, void *b, void *c, void *d, int *e) {
  (void)handle, (void)host, (void)device, (void)name, (void)threads;
  (void)a, (void)b, (void)c, (void)d, (void)e;
}
int __cudaPopCallConfiguration(void *grid, void *block, size_t *shared, void *stream) {
  (void)grid, (void)block, (void)shared, (void)stream;
  return UNKNOWN;
}
int __cudaGetKernel(void **kernel, const void *entry) {
  *kernel = (void *)(uintptr_t)entry;
  return OK;
}
int __cudaLaunchKernel(void *kernel, uint64_t grid0, uint32_t grid1, uint64_t block0,
                       uint32_t block1, void **arguments, size_t shared, void *stream) {
  (void)kernel, (void)grid0, (void)grid1, (void)block0, (void)block1, (void)arguments, (void)shared;
  return enqueue(stream, UNKNOWN);
}

/* ---- Device, memory, streams ---- */

int cudaGetDeviceCount(int *count);
int cudaSetDevice(int device);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaGetLastError(void);
const char *cudaGetErrorString(int error);
int cudaMalloc(void **p, size_t bytes);
int cudaMallocManaged(void **p, size_t bytes, unsigned flags);
int cudaHostAlloc(void **p, size_t bytes, unsigned flags);
int cudaFree(void *p);
int cudaFreeHost(void *p);
int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamDestroy(void *stream);
int cudaStreamSynchronize(void *stream);
int cudaEventCreateWithFlags(void **event, unsigned flags);
int cudaEventDestroy(void *event);
int cudaEventRecord(void *event, void *stream);
int cudaEventSynchronize(void *event);
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream);
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream);

int cudaGetDeviceCount(int *count) {
  *count = cuda_standin.devices;
  return cuda_standin.devices ? failing(UNKNOWN) : NO_DEVICE;
}
int cudaSetDevice(int device) { return device < cuda_standin.devices ? OK : NO_DEVICE; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 132;
  return failing(UNKNOWN);
}
int cudaGetLastError(void) { return OK; }
const char *cudaGetErrorString(int error) {
  return error == OUT_OF_MEMORY ? "stand-in: out of memory" : "stand-in: failed as told";
}
int cudaMalloc(void **p, size_t bytes) { return take(p, bytes, OUT_OF_MEMORY); }
int cudaMallocManaged(void **p, size_t bytes, unsigned flags) {
  (void)flags;
  return take(p, bytes, OUT_OF_MEMORY);
}
int cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  (void)flags;
  return take(p, bytes, OUT_OF_MEMORY);
}
int cudaFree(void *p) { return give(p); }
int cudaFreeHost(void *p) { return give(p); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
  (void)flags;
  return take(stream, 1, UNKNOWN);
}
int cudaStreamDestroy(void *stream) { return give(stream); }
int cudaStreamSynchronize(void *stream) { return enqueue(stream, UNKNOWN); }
int cudaEventCreateWithFlags(void **event, unsigned flags) {
  (void)flags;
  return take(event, 1, UNKNOWN);
}
int cudaEventDestroy(void *event) { return give(event); }
int cudaEventRecord(void *event, void *stream) { return event ? enqueue(stream, UNKNOWN) : UNKNOWN; }
int cudaEventSynchronize(void *event) { return event ? failing(UNKNOWN) : UNKNOWN; }
int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  int status = enqueue(stream, UNKNOWN);
  (void)kind;
  if (status == OK) memcpy(to, from, bytes);
  return status;
}
int cudaMemsetAsync(void *to, int value, size_t bytes, void *stream) {
  int status = enqueue(stream, UNKNOWN);
  if (status == OK) memset(to, value, bytes);
  return status;
}

/* ---- Launches and graphs ---- */

int cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments);
int cudaFuncSetAttribute(const void *kernel, int attribute, int value);
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                           int threads, size_t shared,
                                                           unsigned flags);
int cudaStreamBeginCapture(void *stream, int mode);
int cudaStreamEndCapture(void *stream, void **graph);
int cudaGraphInstantiate(void **exec, void *graph, unsigned long long flags);
int cudaGraphLaunch(void *exec, void *stream);
int cudaGraphDestroy(void *graph);
int cudaGraphExecDestroy(void *exec);

int cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments) {
  (void)config, (void)kernel, (void)arguments;
  cuda_standin.launches++;
  return failing(UNKNOWN);
}
int cudaFuncSetAttribute(const void *kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return failing(UNKNOWN);
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel,
                                                           int threads, size_t shared,
                                                           unsigned flags) {
  (void)kernel, (void)threads, (void)shared, (void)flags;
  *blocks = 0; /* so that decode is refused: nobody would store its ids */
  return failing(UNKNOWN);
}
int cudaStreamBeginCapture(void *stream, int mode) {
  (void)mode;
  return enqueue(stream, UNKNOWN);
}
int cudaStreamEndCapture(void *stream, void **graph) {
  if (!stream) cuda_standin.unordered++;
  return take(graph, 1, UNKNOWN);
}
int cudaGraphInstantiate(void **exec, void *graph, unsigned long long flags) {
  (void)flags;
  return graph ? take(exec, 1, UNKNOWN) : UNKNOWN;
}
int cudaGraphLaunch(void *exec, void *stream) { return exec ? enqueue(stream, UNKNOWN) : UNKNOWN; }
int cudaGraphDestroy(void *graph) { return give(graph); }
int cudaGraphExecDestroy(void *exec) { return give(exec); }

/* ---- cuBLASLt ---- */

int cublasLtCreate(void **handle);
int cublasLtDestroy(void *handle);
int cublasLtMatmulDescCreate(void **what, int compute, int scale);
int cublasLtMatmulDescDestroy(void *what);
int cublasLtMatmulDescSetAttribute(void *what, int attribute, const void *value, size_t bytes);
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld);
int cublasLtMatrixLayoutDestroy(void *layout);
int cublasLtMatmulPreferenceCreate(void **preference);
int cublasLtMatmulPreferenceDestroy(void *preference);
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value,
                                         size_t bytes);
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found);
int cublasLtMatmul(void *handle, void *what, const void *alpha, const void *a, void *la,
                   const void *b, void *lb, const void *beta, const void *c, void *lc, void *d,
                   void *ld, const void *algorithm, void *space, size_t bytes, void *stream);

int cublasLtCreate(void **handle) { return take(handle, 1, CUBLAS_FAILED); }
int cublasLtDestroy(void *handle) { return give(handle); }
int cublasLtMatmulDescCreate(void **what, int compute, int scale) {
  (void)compute, (void)scale;
  return take(what, 1, CUBLAS_FAILED);
}
int cublasLtMatmulDescDestroy(void *what) { return give(what); }
int cublasLtMatmulDescSetAttribute(void *what, int attribute, const void *value, size_t bytes) {
  (void)attribute, (void)bytes;
  return what && value ? failing(CUBLAS_FAILED) : CUBLAS_FAILED;
}
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
  (void)type, (void)cols;
  return (uint64_t)ld < rows ? CUBLAS_FAILED : take(layout, 1, CUBLAS_FAILED);
}
int cublasLtMatrixLayoutDestroy(void *layout) { return give(layout); }
int cublasLtMatmulPreferenceCreate(void **preference) { return take(preference, 1, CUBLAS_FAILED); }
int cublasLtMatmulPreferenceDestroy(void *preference) { return give(preference); }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value,
                                         size_t bytes) {
  (void)attribute, (void)bytes;
  return preference && value ? failing(CUBLAS_FAILED) : CUBLAS_FAILED;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found) {
  (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted, (void)results;
  *found = 1;
  return handle && what ? failing(CUBLAS_FAILED) : CUBLAS_FAILED;
}
int cublasLtMatmul(void *handle, void *what, const void *alpha, const void *a, void *la,
                   const void *b, void *lb, const void *beta, const void *c, void *lc, void *d,
                   void *ld, const void *algorithm, void *space, size_t bytes, void *stream) {
  (void)handle, (void)what, (void)alpha, (void)a, (void)la, (void)b, (void)lb, (void)beta, (void)c;
  (void)lc, (void)d, (void)ld, (void)algorithm, (void)bytes;
  if ((uintptr_t)space % 256) return CUBLAS_FAILED; /* the real one wants that, too */
  return enqueue(stream, CUBLAS_FAILED);
}
