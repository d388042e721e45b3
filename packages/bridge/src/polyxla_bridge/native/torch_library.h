/* torch's library, as far as programs call it. */
#ifndef POLYXLA_TORCH_LIBRARY_H
#define POLYXLA_TORCH_LIBRARY_H

#include "ffi.h"

typedef void *Tensor;

/* Functions of torch's library. Those that return an int, but for the last three, return whether they failed.
 *
 * Source: torch/csrc/inductor/aoti_torch/c/shim.h and generated/c_shim_cpu.h, as of torch 2.9 and 2.15. The last three
 * are at::get_num_threads, which sets up OpenMP in a thread, and OpenMP's own.
 */
typedef struct {
  int32_t (*cpu)(void), (*float32)(void);
  int (*make)(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t type,
              int32_t device, int32_t index, Tensor *made);
  int (*copy)(Tensor to, Tensor from, int32_t is_asynchronous);
  int (*drop)(Tensor tensor);
  int (*convolve)(Tensor image, Tensor kernel, Tensor *bias, const int64_t *stride, int64_t, const int64_t *padding,
                  int64_t, const int64_t *dilation, int64_t, int32_t is_transposed, const int64_t *output_padding,
                  int64_t, int64_t groups, Tensor *result);
  int (*convolve_back)(Tensor gradient, Tensor image, Tensor kernel, const int64_t **bias_sizes, int64_t,
                       const int64_t *stride, int64_t, const int64_t *padding, int64_t, const int64_t *dilation,
                       int64_t, int32_t is_transposed, const int64_t *output_padding, int64_t, int64_t groups,
                       const int32_t *is_wanted, int64_t, Tensor *of_image, Tensor *of_kernel, Tensor *of_bias);
  int (*multiply)(Tensor result, Tensor left, Tensor right);
  int (*set_up_threads)(void);
  int (*threads)(void);
  void (*set_threads)(int count);
} TorchLibrary;

extern TorchLibrary polyxla_torch;

enum { MOST_DIMENSIONS = 5 };

/* An array, or a part of one, of float32 numbers. */
typedef struct {
  float *data;
  int64_t rank, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Array;

/* A range that is one of several nearly equal parts. */
typedef struct {
  int64_t index, count;
} Part;

Array polyxla_array(const FfiBuffer *buffer);

/* Returns how many numbers an array has that is not a part of one. */
int64_t polyxla_count(const Array *array);

Array polyxla_part(Array whole, int dimension, Part part);

/* Returns a tensor that has the array's memory, NULL if there is no memory for it. */
Tensor polyxla_tensor(const Array *array);

/* Lets torch compute with this thread alone, and returns how many it would have used. */
int polyxla_use_one_thread(void);

#endif
