#include "torch_library.h"

#include <string.h>

TorchLibrary polyxla_torch;

/* Takes the addresses of the functions, in the order of TorchLibrary. */
void polyxla_set_torch(const void *functions) { memcpy(&polyxla_torch, functions, sizeof polyxla_torch); }

Array polyxla_array(const FfiBuffer *buffer) {
  Array array = {.data = buffer->data, .rank = buffer->rank};
  int64_t stride = 1;
  for (int64_t i = array.rank - 1; i >= 0; i--) {
    array.sizes[i] = buffer->dims[i], array.strides[i] = stride;
    stride *= array.sizes[i];
  }
  return array;
}

int64_t polyxla_count(const Array *array) { return array->sizes[0] * array->strides[0]; }

Array polyxla_part(Array whole, int dimension, Part part) {
  int64_t size = whole.sizes[dimension], start = size * part.index / part.count;
  whole.data += start * whole.strides[dimension];
  whole.sizes[dimension] = size * (part.index + 1) / part.count - start;
  return whole;
}

Tensor polyxla_tensor(const Array *array) {
  Tensor tensor = NULL;
  polyxla_torch.make(array->data, array->rank, array->sizes, array->strides, 0, polyxla_torch.float32(),
                     polyxla_torch.cpu(), 0, &tensor);
  return tensor;
}

int polyxla_use_one_thread(void) {
  polyxla_torch.set_up_threads();
  int threads = polyxla_torch.threads();
  polyxla_torch.set_threads(1);
  return threads;
}
