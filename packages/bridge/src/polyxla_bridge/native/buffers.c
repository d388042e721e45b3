/* Buffers, and the queue that reports new and deleted buffers to Python. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "objects.h"

/* The queue's lock guards the fields that change. */
struct Buffer {
  Buffer *next;
  /* There are two references at first: torch_xla's, and Python's or the queue's. */
  int owners;
  bool is_deleted;
  /* Whether Python has taken the buffer from the queue, or made it. */
  bool is_known;
  /* The data from the host, until Python takes it. */
  void *data;
  size_t size;
  /* Handle of the device, which is also that of its only memory. */
  void *place;
  Event *ready;
  int type;
  size_t rank;
  /* Size of each dimension, then the indices of the dimensions from minor to major. */
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

/* Release a reference. The caller holds the lock. */
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

/* Mark a buffer as deleted. If Python knows the buffer, the queue also tells it to release the array. The caller
 * holds the lock. */
static void delete(Buffer *buffer) {
  if (buffer->is_deleted) return;
  buffer->is_deleted = true;
  if (buffer->is_known) {
    put(buffer);
    return;
  }
  /* The buffer is still in the queue, where polyxla_take skips it, so the data is no longer needed. */
  free(buffer->data);
  buffer->data = NULL;
}

/* Called by Python. */

/* Make the results of an execution, which Python knows from the start. Python completes their events. */
void polyxla_outputs(void *place, size_t count, const int *types, const size_t *ranks, const int64_t *dims,
                     Buffer **buffers, Event **events) {
  for (size_t i = 0; i < count; dims += ranks[i++]) {
    buffers[i] = make(place, types[i], ranks[i], dims);
    buffers[i]->is_known = true;
    events[i] = buffers[i]->ready;
  }
}

/* Wait until the queue has had an entry for a while; return false once the queue is stopped.
 *
 * Frameworks delete many arrays one after the other, and Python takes them all at once: for each time, the thread that
 * does needs the GIL, which those that compute need, too. */
bool polyxla_wait(void) {
  static const struct timespec while_more_follow = {.tv_nsec = 1000000};
  lock();
  while (queue.first == NULL && !queue.is_stopped) pthread_cond_wait(&queue.filled, &queue.lock);
  bool is_stopped = queue.is_stopped;
  unlock();
  if (!is_stopped) nanosleep(&while_more_follow, NULL);
  return !is_stopped;
}

/* Take the next entry; return false if the queue is empty. A buffer that was deleted before Python knew it is
 * skipped. */
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

/* Release Python's reference to a deleted buffer. */
void polyxla_drop(Buffer *buffer) {
  lock();
  drop(buffer);
  unlock();
}

/* Mark a donated buffer as deleted. torch_xla keeps its reference until it destroys the buffer. */
void polyxla_delete(Buffer *buffer) {
  lock();
  delete(buffer);
  unlock();
}

/* Stop the queue: polyxla_wait returns false from now on. polyxla_take still returns what is in the queue. */
void polyxla_stop(void) {
  lock();
  queue.is_stopped = true;
  pthread_cond_broadcast(&queue.filled);
  unlock();
}

/* Called by torch_xla. */

static Error *check_type(int type) {
  size_t count = sizeof DTYPES / sizeof *DTYPES;
  if (type >= 0 && (size_t)type < count && DTYPES[type].width > 0) return NULL;
  const char *name = type >= 0 && (size_t)type < count ? DTYPES[type].name : "unknown";
  return polyxla_error_of(INVALID_ARGUMENT, "arrays of type %s (%d) cannot be copied to a device", name, type);
}

static bool is_dense(const PJRT_Client_BufferFromHostBuffer_Args *args) {
  const int64_t *dims = args->dims, *strides = args->byte_strides;
  int64_t dense = (int64_t)DTYPES[args->type].width;
  /* Without strides, an array is dense; the stride of a dimension of size 1 has no effect. */
  for (size_t i = args->num_byte_strides; i-- > 0; dense *= dims[i])
    if (dims[i] > 1 && strides[i] != dense) return false;
  return true;
}

/* Copies the elements of an array in their order; returns where the next one goes. */
static char *gather(char *into, const char *from, size_t width, size_t rank, const int64_t *dims,
                    const int64_t *strides) {
  if (rank == 0 || (rank == 1 && *strides == (int64_t)width)) {
    size_t size = rank == 0 ? width : *dims * width;
    memcpy(into, from, size);
    return into + size;
  }
  for (int64_t i = 0; i < *dims; i++)
    into = gather(into, from + i * *strides, width, rank - 1, dims + 1, strides + 1);
  return into;
}

Error *PJRT_Client_BufferFromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args *args) {
  Error *error = check_type(args->type);
  if (error != NULL) return error;
  size_t size = size_of(args->type, args->num_dims, args->dims);
  void *data = size > 0 ? polyxla_allocate_data(size) : NULL;
  if (size > 0 && data == NULL)
    return polyxla_error_of(RESOURCE_EXHAUSTED, "no memory for %zu bytes from the host", size);
  if (size > 0 && is_dense(args))
    memcpy(data, args->data, size);
  else if (size > 0)
    gather(data, args->data, DTYPES[args->type].width, args->num_dims, args->dims, args->byte_strides);
  void *place = args->device != NULL ? args->device : args->memory;
  Buffer *buffer = make(place, args->type, args->num_dims, args->dims);
  buffer->data = data;
  /* The buffer is ready at once, because an error on the way to the device is raised where the array is used. */
  polyxla_event_complete(buffer->ready, NULL);
  /* The bytes are copied, so torch_xla may reuse its memory. */
  Event *done = polyxla_event();
  polyxla_event_complete(done, NULL);
  args->done_with_host_buffer = done;
  args->buffer = buffer;
  /* Queue the buffer last: from then on, another thread may take it. */
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
  /* If true, torch_xla would read the memory itself, before it is computed. */
  args->is_on_cpu = false;
  return NULL;
}

Error *PJRT_Buffer_ReadyEvent(PJRT_Buffer_ReadyEvent_Args *args) {
  args->event = polyxla_event_share(((Buffer *)args->buffer)->ready);
  return NULL;
}
