/* Buffers, and the queue by which Python hears which were made and which were given up. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"

/* What changes is guarded by the queue's lock. */
struct Buffer {
  Buffer *next;
  /* Two at first: torch_xla, and Python, or the queue for it. */
  int owners;
  bool is_deleted;
  /* Whether Python has heard of it. */
  bool is_known;
  /* From the host, until Python takes it. */
  void *data;
  size_t size;
  /* A device and its one memory have the same handle. */
  void *place;
  Event *ready;
  int type;
  size_t rank;
  /* The sizes, then the dimensions from minor to major. */
  int64_t dims[];
};

static struct {
  pthread_mutex_t lock;
  pthread_cond_t filled;
  bool is_stopped;
  Buffer *first;
  Buffer **last;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER, .last = &queue.first};

static void lock(void) { pthread_mutex_lock(&queue.lock); }

static void unlock(void) { pthread_mutex_unlock(&queue.lock); }

static size_t size_of(int type, size_t rank, const int64_t *dims) {
  size_t size = DTYPES[type].width;
  for (size_t i = 0; i < rank; i++) size *= (size_t)dims[i];
  return size;
}

static Buffer *make(void *place, int type, size_t rank, const int64_t *dims) {
  Buffer *buffer = polyxla_allocate(sizeof(Buffer) + 2 * rank * sizeof(int64_t));
  *buffer = (Buffer){.owners = 2, .place = place, .type = type, .rank = rank};
  buffer->size = size_of(type, rank, dims);
  buffer->ready = polyxla_event();
  for (size_t i = 0; i < rank; i++) {
    buffer->dims[i] = dims[i];
    buffer->dims[rank + i] = (int64_t)(rank - 1 - i);
  }
  return buffer;
}

static void drop(Buffer *buffer) {
  if (--buffer->owners > 0) return;
  polyxla_event_drop(buffer->ready);
  free(buffer->data);
  free(buffer);
}

static void put(Buffer *buffer) {
  buffer->next = NULL;
  *queue.last = buffer;
  queue.last = &buffer->next;
  pthread_cond_signal(&queue.filled);
}

static Buffer *get(void) {
  Buffer *buffer = queue.first;
  if (buffer == NULL) return NULL;
  queue.first = buffer->next;
  if (queue.first == NULL) queue.last = &queue.first;
  return buffer;
}

static void delete(Buffer *buffer) {
  if (buffer->is_deleted) return;
  buffer->is_deleted = true;
  if (buffer->is_known) {
    put(buffer);
    return;
  }
  /* Python will not want it when it finds it in the queue. */
  free(buffer->data);
  buffer->data = NULL;
}

/* What Python calls. */

/* Make the results of an execution. Python knows them, and completes their events. */
void polyxla_outputs(void *place, size_t count, const int *types, const size_t *ranks, const int64_t *dims,
                     Buffer **buffers, Event **events) {
  for (size_t i = 0; i < count; dims += ranks[i++]) {
    buffers[i] = make(place, types[i], ranks[i], dims);
    buffers[i]->is_known = true;
    events[i] = buffers[i]->ready;
  }
}

/* Wait until there is something to take; false once stopped. */
bool polyxla_wait(void) {
  lock();
  while (queue.first == NULL && !queue.is_stopped) pthread_cond_wait(&queue.filled, &queue.lock);
  bool is_stopped = queue.is_stopped;
  unlock();
  return !is_stopped;
}

/* Take what was made or given up next; false when there is nothing. A buffer that was given up before Python
 * heard of it is not mentioned. */
bool polyxla_take(Record *record) {
  Buffer *buffer;
  lock();
  while ((buffer = get()) != NULL && buffer->is_deleted && !buffer->is_known) drop(buffer);
  if (buffer != NULL) {
    *record = (Record){.buffer = buffer,
                       .is_deleted = buffer->is_deleted,
                       .data = buffer->data,
                       .size = buffer->size,
                       .place = buffer->place,
                       .type = buffer->type,
                       .dims = buffer->dims,
                       .num_dims = buffer->rank};
    buffer->is_known = true;
    buffer->data = NULL;
  }
  unlock();
  return buffer != NULL;
}

/* Free the data of a record. */
void polyxla_free(void *data) { free(data); }

/* Give up Python's share of a buffer that was deleted. */
void polyxla_drop(Buffer *buffer) {
  lock();
  drop(buffer);
  unlock();
}

/* A buffer's memory went to another one. */
void polyxla_delete(Buffer *buffer) {
  lock();
  delete(buffer);
  unlock();
}

/* End all waiting. */
void polyxla_stop(void) {
  lock();
  queue.is_stopped = true;
  pthread_cond_broadcast(&queue.filled);
  unlock();
}

/* What torch_xla calls. */

static Error *check_type(int type) {
  size_t count = sizeof DTYPES / sizeof *DTYPES;
  if (type >= 0 && (size_t)type < count && DTYPES[type].width > 0) return NULL;
  const char *name = type >= 0 && (size_t)type < count ? DTYPES[type].name : "unknown";
  return polyxla_error_of(INVALID_ARGUMENT, "arrays of type %s (%d) cannot be copied to a device", name, type);
}

static Error *check_dense(const PJRT_Client_BufferFromHostBuffer_Args *args) {
  const int64_t *dims = args->dims, *strides = args->byte_strides;
  int64_t dense = (int64_t)DTYPES[args->type].width;
  for (size_t i = args->num_byte_strides; i-- > 0; dense *= dims[i]) {
    /* The stride of a dimension of one element says nothing. */
    if (dims[i] > 1 && strides[i] != dense)
      return polyxla_error_of(UNIMPLEMENTED,
                              "dimension %zu has a stride of %lld bytes where %lld were expected: "
                              "only dense row-major arrays can be copied",
                              i, (long long)strides[i], (long long)dense);
    /* Without elements there is nothing to be dense. */
    if (dims[i] == 0) break;
  }
  return NULL;
}

Error *PJRT_Client_BufferFromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args *args) {
  Error *error = check_type(args->type);
  if (error == NULL) error = check_dense(args);
  if (error != NULL) return error;
  size_t size = size_of(args->type, args->num_dims, args->dims);
  void *data = size > 0 ? malloc(size) : NULL;
  if (size > 0 && data == NULL)
    return polyxla_error_of(RESOURCE_EXHAUSTED, "no memory for %zu bytes from the host", size);
  if (size > 0) memcpy(data, args->data, size);
  void *place = args->device != NULL ? args->device : args->memory;
  Buffer *buffer = make(place, args->type, args->num_dims, args->dims);
  buffer->data = data;
  /* What fails on the way to the device shows where the array is used. */
  polyxla_event_complete(buffer->ready, NULL);
  Event *done = polyxla_event();
  polyxla_event_complete(done, NULL);
  args->done_with_host_buffer = done;
  args->buffer = buffer;
  lock();
  put(buffer);
  unlock();
  return NULL;
}

Error *PJRT_Buffer_Delete(PJRT_Buffer_Delete_Args *args) {
  lock();
  delete(args->buffer);
  unlock();
  return NULL;
}

Error *PJRT_Buffer_Destroy(PJRT_Buffer_Destroy_Args *args) {
  if (args->buffer == NULL) return NULL;
  lock();
  delete(args->buffer);
  drop(args->buffer);
  unlock();
  return NULL;
}

Error *PJRT_Buffer_IsDeleted(PJRT_Buffer_IsDeleted_Args *args) {
  lock();
  args->is_deleted = ((Buffer *)args->buffer)->is_deleted;
  unlock();
  return NULL;
}

Error *PJRT_Buffer_ElementType(PJRT_Buffer_ElementType_Args *args) {
  args->type = ((Buffer *)args->buffer)->type;
  return NULL;
}

Error *PJRT_Buffer_Dimensions(PJRT_Buffer_Dimensions_Args *args) {
  Buffer *buffer = args->buffer;
  args->dims = buffer->dims;
  args->num_dims = buffer->rank;
  return NULL;
}

Error *PJRT_Buffer_UnpaddedDimensions(PJRT_Buffer_UnpaddedDimensions_Args *args) {
  Buffer *buffer = args->buffer;
  args->unpadded_dims = buffer->dims;
  args->num_dims = buffer->rank;
  return NULL;
}

Error *PJRT_Buffer_DynamicDimensionIndices(PJRT_Buffer_DynamicDimensionIndices_Args *args) {
  args->dynamic_dim_indices = NULL;
  args->num_dynamic_dims = 0;
  return NULL;
}

Error *PJRT_Buffer_GetMemoryLayout(PJRT_Buffer_GetMemoryLayout_Args *args) {
  Buffer *buffer = args->buffer;
  args->layout.type = 0;
  args->layout.layout.tiled = (Tiled){.struct_size = sizeof(Tiled),
                                      .minor_to_major = buffer->dims + buffer->rank,
                                      .minor_to_major_size = buffer->rank};
  return NULL;
}

Error *PJRT_Buffer_OnDeviceSizeInBytes(PJRT_Buffer_OnDeviceSizeInBytes_Args *args) {
  args->on_device_size_in_bytes = ((Buffer *)args->buffer)->size;
  return NULL;
}

Error *PJRT_Buffer_Device(PJRT_Buffer_Device_Args *args) {
  args->device = ((Buffer *)args->buffer)->place;
  return NULL;
}

Error *PJRT_Buffer_Memory(PJRT_Buffer_Memory_Args *args) {
  args->memory = ((Buffer *)args->buffer)->place;
  return NULL;
}

Error *PJRT_Buffer_IsOnCpu(PJRT_Buffer_IsOnCpu_Args *args) {
  /* True would let torch_xla read the memory itself, before it is computed. */
  args->is_on_cpu = false;
  return NULL;
}

Error *PJRT_Buffer_ReadyEvent(PJRT_Buffer_ReadyEvent_Args *args) {
  args->event = polyxla_event_share(((Buffer *)args->buffer)->ready);
  return NULL;
}

/* Asked for by every BufferFromHostBuffer, so it may not wait for Python either. */
Error *PJRT_Device_DefaultMemory(PJRT_Device_DefaultMemory_Args *args) {
  args->memory = args->device;
  return NULL;
}
