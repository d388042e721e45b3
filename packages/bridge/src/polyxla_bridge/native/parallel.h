#ifndef POLYXLA_PARALLEL_H
#define POLYXLA_PARALLEL_H

#include "ffi.h"

/* Marks a function whose loops the compiler makes vector instructions of, also of those that only some processors
 * have. Its results are the same on all. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Returns how many threads XLA has for a program. */
int64_t polyxla_threads(const FfiCall *call);

/* Computes the pieces 0 to count - 1 of a call, with the help of XLA's threads, and returns when all are computed.
 * Returns false, before any is, if there is no memory. */
bool polyxla_in_parallel(const FfiCall *call, int64_t count, void (*compute)(void *data, int64_t piece), void *data);

#endif
