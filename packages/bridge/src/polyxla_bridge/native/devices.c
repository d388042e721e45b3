/* Questions about devices that torch_xla asks for each array: of each upload, and of each argument of a
 * partitioned program, on each device, from several threads at once. */
#include "objects.h"

static struct {
  void *const *handles;
  size_t count;
} local;

/* Called by Python: the handles of this process's devices, which stay where they are. */
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

/* A device's handle is that of its memory. */
Error *PJRT_Device_DefaultMemory(PJRT_Device_DefaultMemory_Args *args) {
  args->memory = args->device;
  return NULL;
}
