/* A profiler that has seen nothing. torch_xla warns in every process when a plugin has none, and ends a process
 * that profiles without one. It records programs and steps itself; there is no device of ours to add to that.
 *
 * No function here fails, so there is never an error to ask about.
 */
#include <stddef.h>

#include "abi.h"

void *polyxla_nothing(void *args);

static char profiler;

static void *create(PLUGIN_Profiler_Create_Args *args) {
  args->profiler = &profiler;
  return NULL;
}

/* An XSpace without planes is serialized to no bytes at all. */
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
