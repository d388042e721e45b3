/* The extension for memory of the host from which a device copies: torch calls it pinned. The devices are this
 * machine's CPU, for which any memory will do. */
#include <stdlib.h>

#include "objects.h"

/* XLA's CPU client aligns its buffers so. */
enum { ALIGNMENT = 64 };

static void release(void *memory, void *unused) {
  (void)unused;
  free(memory);
}

static Error *allocate(PJRT_HostMemoryAllocator_Allocate_Args *args) {
  /* At least one byte, in whole multiples of the alignment, as aligned_alloc requires. */
  size_t blocks = args->size / ALIGNMENT + 1;
  args->ptr = aligned_alloc(ALIGNMENT, blocks * ALIGNMENT);
  args->deleter = release;
  args->deleter_arg = NULL;
  if (args->ptr != NULL) return NULL;
  return polyxla_error_of(RESOURCE_EXHAUSTED, "no %zu bytes of memory are left on this host", args->size);
}

const PJRT_HostMemoryAllocator_Extension polyxla_host_memory = {
    .base = {.struct_size = sizeof(PJRT_HostMemoryAllocator_Extension), .type = HOST_MEMORY_ALLOCATOR},
    .allocate = allocate,
};
