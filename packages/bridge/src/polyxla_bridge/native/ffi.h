/* The part of XLA's foreign function interface that a handler needs: a program calls the handler by its name.
 *
 * Source: xla/ffi/api/c_api.h, API version 0.3, as of jaxlib 0.10.2.
 */
#ifndef POLYXLA_FFI_H
#define POLYXLA_FFI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { FFI_MAJOR = 0, FFI_MINOR = 3, FFI_METADATA = 1, FFI_EXECUTE = 3 };

typedef enum {
  FFI_PRED = 1,
  FFI_S8 = 2,
  FFI_S16 = 3,
  FFI_S32 = 4,
  FFI_S64 = 5,
  FFI_U8 = 6,
  FFI_U16 = 7,
  FFI_U32 = 8,
  FFI_U64 = 9,
  FFI_F16 = 10,
  FFI_F32 = 11,
  FFI_F64 = 12,
  FFI_C64 = 15,
  FFI_BF16 = 16,
  FFI_C128 = 18,
} FfiType;

typedef enum {
  FFI_CANCELLED = 1,
  FFI_RESOURCE_EXHAUSTED = 8,
  FFI_FAILED_PRECONDITION = 9,
  FFI_UNIMPLEMENTED = 12,
  FFI_INTERNAL = 13,
  FFI_UNAVAILABLE = 14,
} FfiCode;

typedef struct FfiExtension {
  size_t size;
  int type;
  struct FfiExtension *next;
} FfiExtension;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  int major, minor;
} FfiVersion;

typedef struct {
  size_t size;
  FfiVersion version;
  uint32_t traits;
} FfiMetadata;

typedef struct {
  FfiExtension base;
  FfiMetadata *metadata;
} FfiMetadataExtension;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  const char *message;
  int code;
} FfiErrorArgs;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  void *error;
} FfiDestroyArgs;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  void *context;
  void (*task)(void *data);
  void *data;
} FfiScheduleArgs;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  void *context;
  int64_t *count;
} FfiThreadsArgs;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  FfiVersion version;
  const void *internal;
  void *(*create_error)(FfiErrorArgs *args);
  void *get_message;
  void (*destroy_error)(FfiDestroyArgs *args);
  void *others[8];
  /* Both return an error if there are no threads. */
  void *(*schedule)(FfiScheduleArgs *args);
  void *(*count_threads)(FfiThreadsArgs *args);
} FfiApi;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  int type;
  void *data;
  int64_t rank;
  int64_t *dims;
} FfiBuffer;

/* Arguments, or results. */
typedef struct {
  size_t size;
  FfiExtension *extensions;
  int64_t count;
  int *types;
  FfiBuffer **buffers;
} FfiBuffers;

typedef struct {
  const char *text;
  size_t length;
} FfiText;

typedef struct {
  int type;
  void *value;
} FfiScalar;

typedef struct {
  int type;
  size_t count;
  void *data;
} FfiArray;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  int64_t count;
  int *types;
  FfiText **names;
  void **values;
} FfiAttributes;

typedef struct {
  size_t size;
  FfiExtension *extensions;
  const FfiApi *api;
  void *context;
  int stage;
  FfiBuffers arguments, results;
  FfiAttributes attributes;
} FfiCall;

/* Returns whether XLA asks for the handler's version, which this tells it, or prepares a call: there is nothing to do. */
bool polyxla_ffi_prepares(const FfiCall *call);

/* Returns an error for XLA, with a copy of the text. */
void *polyxla_ffi_error(const FfiCall *call, int code, const char *text);

/* Returns the value of an attribute: an FfiScalar or an FfiArray. */
const void *polyxla_ffi_attribute(const FfiCall *call, const char *name);

int64_t polyxla_ffi_number(const FfiCall *call, const char *name);

/* Copies the numbers of an attribute that is an array. */
void polyxla_ffi_numbers(const FfiCall *call, const char *name, int64_t *numbers);

#endif
