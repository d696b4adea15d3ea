/* cuda_micro.cu - what a GPU gives and what it asks for: the figures that decode is planned by.

   build and run: nvcc -arch=sm_90a -O3 -o build/cuda_micro bench/cuda_micro.cu && build/cuda_micro
   output: read bandwidth by blocks and loads in flight, the time of a node of a graph, of a launch,
   and of a barrier of all blocks. */
#include <cstdio>
#include <cuda_runtime.h>

#define CHECK(call)                                                                     \
  do {                                                                                  \
    cudaError_t error = (call);                                                         \
    if (error != cudaSuccess) return printf("%s: %s\n", #call, cudaGetErrorString(error)), 1; \
  } while (0)

/* Sums up n vectors; every thread keeps AHEAD loads in flight. */
template <int AHEAD> __global__ void read_kernel(const uint4 *p, size_t n, unsigned *out) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
  unsigned sum = 0;
  for (; i < n; i += AHEAD * step) {
    uint4 v[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
      if (i + u * step < n)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w)
                     : "l"(p + i + u * step));
      else v[u] = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < AHEAD; u++) sum += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (sum == 0x12345678) *out = sum;
}

__global__ void tiny_kernel(unsigned *p) { if (threadIdx.x == 0 && blockIdx.x == 0) *p += 1; }

/* n barriers of all blocks, one counter. */
__global__ void barrier_kernel(unsigned *counter, int n) {
  unsigned target = 0, now;
  for (int i = 0; i < n; i++) {
    __syncthreads();
    if (threadIdx.x == 0) {
      target += gridDim.x;
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" : : "l"(counter) : "memory");
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
      while ((int)(now - target) < 0);
    }
    __syncthreads();
  }
}

struct timer {
  cudaEvent_t begin, end;
  timer() { cudaEventCreate(&begin), cudaEventCreate(&end); }
  void start(cudaStream_t s) { cudaEventRecord(begin, s); }
  double stop(cudaStream_t s) { /* seconds */
    float ms = 0;
    cudaEventRecord(end, s);
    cudaEventSynchronize(end);
    cudaEventElapsedTime(&ms, begin, end);
    return ms * 1e-3;
  }
};

template <int AHEAD> static void read_rates(const uint4 *p, size_t bytes, unsigned *out, int sms,
                                            cudaStream_t s) {
  static const int threads[] = {256, 512, 1024};
  timer t;
  for (int per = 1; per <= 4; per *= 2)
    for (int k = 0; k < 3; k++) {
      if (per * threads[k] > 2048) continue;
      double best = 1;
      for (int i = 0; i < 4; i++) {
        t.start(s);
        read_kernel<AHEAD><<<sms * per, threads[k], 0, s>>>(p, bytes / 16, out);
        double time = t.stop(s);
        if (time < best) best = time;
      }
      printf("read: %d blocks an SM of %4d threads, %2d loads ahead: %6.0f GB/s\n", per, threads[k],
             AHEAD, (double)bytes / best / 1e9);
    }
}

int main() {
  const size_t bytes = (size_t)4 << 30;
  int sms = 0, i;
  char *p;
  unsigned *out;
  cudaStream_t s;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  timer t;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaStreamCreate(&s));
  CHECK(cudaMalloc(&p, bytes));
  CHECK(cudaMalloc(&out, 256));
  for (size_t at = 0; at < bytes; at += bytes / 64)
    CHECK(cudaMemsetAsync(p + at, (int)(at >> 24) * 37 + 11, bytes / 64, s));
  CHECK(cudaMemsetAsync(out, 0, 256, s));
  read_rates<4>((const uint4 *)p, bytes, out, sms, s);
  read_rates<8>((const uint4 *)p, bytes, out, sms, s);
  tiny_kernel<<<1, 32, 0, s>>>(out);
  t.start(s);
  for (i = 0; i < 1000; i++) tiny_kernel<<<sms, 512, 0, s>>>(out);
  printf("launch: %.2f us each of 1000\n", t.stop(s) * 1e3);
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  for (i = 0; i < 500; i++) tiny_kernel<<<sms, 512, 0, s>>>(out);
  CHECK(cudaStreamEndCapture(s, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphLaunch(exec, s));
  t.start(s);
  CHECK(cudaGraphLaunch(exec, s));
  printf("graph: %.2f us a node of 500\n", t.stop(s) * 1e6 / 500);
  for (int threads = 128; threads <= 1024; threads *= 2) {
    int n = 2000;
    void *arguments[] = {&out, &n};
    CHECK(cudaMemsetAsync(out, 0, 4, s));
    t.start(s);
    CHECK(cudaLaunchCooperativeKernel((const void *)barrier_kernel, dim3(sms), dim3(threads),
                                      arguments, 0, s));
    printf("barrier: %.2f us, %d blocks of %d threads\n", t.stop(s) * 1e6 / n, sms, threads);
  }
  CHECK(cudaDeviceSynchronize());
  return 0;
}
