/* transformer_cuda.cu - CUDA kernels for transformer.h                       MIT licence: LICENSE

   Optional: nvcc -arch=sm_90a -O3 -DTFM_USE_CUDA app.c transformer_cuda.cu

   How it works. transformer.h computes through a table of kernels (see >>backend there). This file
   hands out such a table, tfm_backend_cuda. Each open makes a stream of its own; work is enqueued
   on it in order, and a failed CUDA call becomes the device's sticky failure (tfm_dev_fail), which
   sync reports. When kernels of the reference are to run between (host_visible), memory is managed.

   What is declined. All computing entries are NULL for now: TFM_AUTO passes over this table, with a
   line in the log, and the next one computes; asking for TFM_CUDA with no_fallback is answered by
   TFM_E_UNSUPPORTED. replay and record decline, so nothing is recorded.

   Where its owner starts. The device entries below are complete. Next come pack_size, pack and
   unpack, the entries of one decode step (embed, norm, matmul of one row, rope, kv_put, attn, glu,
   sample), each checked by tests against tfm_backend_ref(), then graphs behind replay and record:
   what changes from step to step is in device arrays already. put waits for its copy; a ring of
   pinned memory would not have to. Nothing mutable may be static; what must last lives in
   tfm_dev.state, which is the stream now. */

#include "transformer.h"
#include <cuda_runtime.h>

static cudaStream_t cuda_stream(const tfm_dev *d) { return (cudaStream_t)d->state; }

/* True when all is well; else the failure sticks to the device. */
static bool cuda_check(tfm_dev *d, cudaError_t error, const char *call) {
  if (error == cudaSuccess) return true;
  tfm_dev_fail(d, error == cudaErrorMemoryAllocation ? TFM_E_MEMORY : TFM_E_DEVICE,
               "CUDA device %d: %s: %s", (int)d->index, call, cudaGetErrorString(error));
  return false;
}

/* Every entry starts here: engines may be driven from any thread, and each thread of a process has
   a current device of its own. False: the device has failed, skip the work. */
static bool cuda_enter(tfm_dev *d) {
  return d->status == TFM_OK && cuda_check(d, cudaSetDevice(d->index), "cudaSetDevice");
}

static tfm_status cuda_open(tfm_dev *d) {
  cudaStream_t stream = NULL;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  d->state = NULL;
  if (error != cudaSuccess || count == 0)
    tfm_dev_fail(d, TFM_E_DEVICE, "no CUDA device can be used: %s",
                 error != cudaSuccess ? cudaGetErrorString(error) : "the driver lists none");
  else if (d->index < 0 || d->index >= count)
    tfm_dev_fail(d, TFM_E_DEVICE, "device_index is %d; expected 0 to %d", (int)d->index, count - 1);
  else if (cuda_enter(d) &&
           cuda_check(d, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                      "cudaStreamCreateWithFlags"))
    d->state = stream;
  return d->status;
}

static void cuda_close(tfm_dev *d) {
  if (!d->state) return;
  d->status = TFM_OK; /* whatever failed: the stream is to be destroyed on its own device */
  if (cuda_enter(d)) cuda_check(d, cudaStreamDestroy(cuda_stream(d)), "cudaStreamDestroy");
  d->state = NULL;
}

static tfm_status cuda_sync(tfm_dev *d) {
  tfm_status status;
  if (cuda_enter(d)) cuda_check(d, cudaStreamSynchronize(cuda_stream(d)), "cudaStreamSynchronize");
  status = d->status;
  d->status = TFM_OK;
  return status;
}

/* Running out of memory is an answer here, not a failure of the device. */
static void *cuda_alloc(tfm_dev *d, size_t bytes) {
  void *p = NULL;
  cudaError_t error;
  if (!cuda_enter(d)) return NULL;
  if (d->host_visible) error = cudaMallocManaged(&p, bytes, cudaMemAttachGlobal);
  else error = cudaMalloc(&p, bytes);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError(); /* not to be met again by a later launch */
    return NULL;
  }
  return cuda_check(d, error, d->host_visible ? "cudaMallocManaged" : "cudaMalloc") ? p : NULL;
}

/* Also after a failure. */
static void cuda_release(tfm_dev *d, void *p, size_t bytes) {
  (void)bytes;
  if (p && cuda_check(d, cudaSetDevice(d->index), "cudaSetDevice"))
    cuda_check(d, cudaFree(p), "cudaFree");
}

static void cuda_move(tfm_dev *d, void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
  if (bytes == 0 || !cuda_enter(d)) return;
  cuda_check(d, cudaMemcpyAsync(dst, src, bytes, kind, cuda_stream(d)), "cudaMemcpyAsync");
  if (kind != cudaMemcpyDeviceToDevice) /* which is in order on the stream; these are waited for */
    cuda_check(d, cudaStreamSynchronize(cuda_stream(d)), "cudaStreamSynchronize");
}

static void cuda_put(tfm_dev *d, void *dst, const void *host, size_t bytes) {
  cuda_move(d, dst, host, bytes, cudaMemcpyHostToDevice);
}

static void cuda_get(tfm_dev *d, void *host, const void *src, size_t bytes) {
  cuda_move(d, host, src, bytes, cudaMemcpyDeviceToHost);
}

static void cuda_copy(tfm_dev *d, void *dst, const void *src, size_t bytes) {
  cuda_move(d, dst, src, bytes, cudaMemcpyDeviceToDevice);
}

static void cuda_zero(tfm_dev *d, void *dst, size_t bytes) {
  if (bytes && cuda_enter(d))
    cuda_check(d, cudaMemsetAsync(dst, 0, bytes, cuda_stream(d)), "cudaMemsetAsync");
}

/* Pinned, and at the same address on both sides. */
static void *cuda_alloc_shared(tfm_dev *d, size_t bytes) {
  void *p = NULL;
  if (!cuda_enter(d)) return NULL;
  if (cudaHostAlloc(&p, bytes, cudaHostAllocDefault) == cudaSuccess) return p;
  (void)cudaGetLastError();
  return NULL;
}

static void cuda_release_shared(tfm_dev *d, void *p, size_t) {
  if (p && cuda_enter(d)) cuda_check(d, cudaFreeHost(p), "cudaFreeHost");
}

static size_t cuda_work_bytes(tfm_dev *, const tfm_net *, int32_t, int32_t, int32_t) { return 0; }
static bool cuda_replay(tfm_dev *, uint64_t) { return false; }
static bool cuda_record(tfm_dev *, uint64_t, bool) { return false; }

static const tfm_backend cuda_table = {
  TFM_BACKEND_ABI, "cuda", TFM_F32, TFM_F32, 1,
  cuda_open, cuda_close, cuda_sync, cuda_alloc, cuda_release,
  cuda_put, cuda_get, cuda_copy, cuda_zero,
  cuda_alloc_shared, cuda_release_shared, cuda_work_bytes, cuda_replay, cuda_record,
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

extern "C" const tfm_backend *tfm_backend_cuda(void) { return &cuda_table; }
