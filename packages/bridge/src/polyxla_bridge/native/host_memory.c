/* Memory of the host that XLA's CPU client uses without a copy. Through the extension, a framework allocates memory
 * from which a device copies, which torch calls pinned. */
#include <stdlib.h>

#include "objects.h"

/* XLA's CPU client uses memory with this alignment as it is, and copies other memory. */
enum { ALIGNMENT = 64 };

void *polyxla_allocate_data(size_t size) {
  /* At least one byte, in whole multiples of the alignment, as aligned_alloc requires. */
  size_t blocks = size / ALIGNMENT + 1;
  return aligned_alloc(ALIGNMENT, blocks * ALIGNMENT);
}

static void release(void *memory, void *unused) {
  (void)unused;
  free(memory);
}

static Error *allocate(PJRT_HostMemoryAllocator_Allocate_Args *args) {
  args->ptr = polyxla_allocate_data(args->size);
  args->deleter = release;
  args->deleter_arg = NULL;
  if (args->ptr != NULL) return NULL;
  return polyxla_error_of(RESOURCE_EXHAUSTED, "no %zu bytes of memory are left on this host", args->size);
}

const PJRT_HostMemoryAllocator_Extension polyxla_host_memory = {
    .base = {.struct_size = sizeof(PJRT_HostMemoryAllocator_Extension), .type = HOST_MEMORY_ALLOCATOR},
    .allocate = allocate,
};
