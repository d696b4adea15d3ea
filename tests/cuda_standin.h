/* What tests see of the stand-in for the CUDA runtime: see cuda_standin.c. */
#ifndef CUDA_STANDIN_H
#define CUDA_STANDIN_H

typedef struct standin {
  long calls, fail_at; /* calls so far; which of them fails, 0: none */
  long live, launches; /* allocations, streams, events and so on that are not given back */
  int devices;         /* that the driver lists */
  int unordered;       /* copies and launches on something that is no stream */
} standin;

#ifdef __cplusplus
extern "C"
#else
extern
#endif
standin cuda_standin;

#endif
