/* What all handlers of XLA's foreign function interface share. */
#include "ffi.h"

#include <string.h>

bool polyxla_ffi_prepares(const FfiCall *call) {
  if (call->extensions == NULL || call->extensions->type != FFI_METADATA) return call->stage != FFI_EXECUTE;
  FfiMetadata *metadata = ((FfiMetadataExtension *)call->extensions)->metadata;
  metadata->version.major = FFI_MAJOR;
  metadata->version.minor = FFI_MINOR;
  return true;
}

void *polyxla_ffi_error(const FfiCall *call, int code, const char *text) {
  FfiErrorArgs args = {.size = sizeof args, .message = text, .code = code};
  return call->api->create_error(&args);
}

const void *polyxla_ffi_attribute(const FfiCall *call, const char *name) {
  const FfiAttributes *attributes = &call->attributes;
  for (int64_t i = 0; i < attributes->count; i++)
    if (attributes->names[i]->length == strlen(name) &&
        memcmp(attributes->names[i]->text, name, strlen(name)) == 0)
      return attributes->values[i];
  return NULL;
}

int64_t polyxla_ffi_number(const FfiCall *call, const char *name) {
  return *(const int64_t *)((const FfiScalar *)polyxla_ffi_attribute(call, name))->value;
}

void polyxla_ffi_numbers(const FfiCall *call, const char *name, int64_t *numbers) {
  const FfiArray *found = polyxla_ffi_attribute(call, name);
  memcpy(numbers, found->data, found->count * sizeof *numbers);
}
