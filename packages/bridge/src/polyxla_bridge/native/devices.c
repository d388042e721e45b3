/* Functions for devices that torch_xla calls for each upload, and for each argument of a partitioned program on each
 * device, from several threads at once. They are in C, so that those threads need not wait for the GIL. */
#include "objects.h"

static struct {
  void *const *handles;
  size_t count;
} local;

/* Called by Python with the handles of this process's devices, which stay where they are. */
void polyxla_set_local(void *const *handles, size_t count) {
  local.handles = handles;
  local.count = count;
}

Error *PJRT_Device_IsAddressable(PJRT_Device_IsAddressable_Args *args) {
  args->is_addressable = false;
  for (size_t i = 0; i < local.count; i++)
    if (local.handles[i] == args->device) args->is_addressable = true;
  return NULL;
}

/* A device and its memory have the same handle. */
Error *PJRT_Device_DefaultMemory(PJRT_Device_DefaultMemory_Args *args) {
  args->memory = args->device;
  return NULL;
}
