/* A profiler that records nothing. Without a profiler extension, torch_xla warns in every process, and ends a
 * process that takes a profile. torch_xla records programs and steps itself; the bridge has nothing to add.
 *
 * No function fails, so the error functions do nothing.
 */
#include <stddef.h>

#include "abi.h"

void *polyxla_nothing(void *args);

static char profiler;

static void *create(PLUGIN_Profiler_Create_Args *args) {
  args->profiler = &profiler;
  return NULL;
}

/* An XSpace without planes is serialised to zero bytes. */
static void *collect_data(PLUGIN_Profiler_CollectData_Args *args) {
  args->buffer_size_in_bytes = 0;
  return NULL;
}

static PLUGIN_Profiler_Api api = {
    .struct_size = sizeof api,
    .error_destroy = polyxla_nothing,
    .error_message = polyxla_nothing,
    .error_get_code = polyxla_nothing,
    .create = create,
    .destroy = polyxla_nothing,
    .start = polyxla_nothing,
    .stop = polyxla_nothing,
    .collect_data = collect_data,
};

PJRT_Profiler_Extension polyxla_profiler = {
    .base = {.struct_size = sizeof polyxla_profiler, .type = PJRT_Extension_Type_Profiler},
    .profiler_api = &api,
};
