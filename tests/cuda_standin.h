/* A stand-in for the CUDA runtime, so that the host side of transformer_cuda.cu runs without a GPU:
   what nvcc compiled is linked with cuda_standin.c instead of libcudart and libcublasLt.

   Device memory is the host's, zero at first. Streams are queues that run only when somebody waits
   for them, so a pinned buffer that is written again too early, or a result that is read too early,
   is noticed.
   Kernels do nothing, but that the cooperative one, which runs whole steps, answers with token 0.
   Every call can be made to fail; what is misused is told in one sentence.

   cuda_real.c has the same interface before the real libraries. */
#ifndef CUDA_STANDIN_H
#define CUDA_STANDIN_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { STANDIN_MEMORY, STANDIN_PINNED, STANDIN_STREAM, STANDIN_EVENT, STANDIN_GRAPH, STANDIN_EXEC,
       STANDIN_BLAS, STANDIN_KINDS };

typedef struct cuda_standin {
  /* To be set by the test. */
  int devices;          /* that are there */
  long fail_at;         /* the call that fails, from 1; 0: none */
  bool for_ever;        /* and all after it: a device that is lost */
  int error;            /* cudaError_t that it fails with */
  size_t memory_limit;  /* bytes of device memory; 0: any */
  long step;            /* from one call that fails to the next that is worth the time, after 60 */
  /* To be read by it. */
  long calls;           /* that could have failed */
  long launches;
  long replays;         /* of recorded graphs */
  long live[STANDIN_KINDS];
  size_t bytes, peak;   /* of device memory */
  char misuse[240];     /* the first, "" when there was none */
} cuda_standin;

extern cuda_standin standin;

/* Everything back to a fresh process with one device. Objects still alive are forgotten. */
void standin_reset(void);
long standin_live(void); /* objects of all kinds */
bool standin_works(void); /* false: the real libraries, without a GPU */

#ifdef __cplusplus
}
#endif
#endif
