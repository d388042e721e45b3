/* Convolutions by torch's library, which programs call by XLA's foreign function interface.
 *
 * XLA's own convolutions on a CPU are Eigen's, torch's are oneDNN's. A convolution is cut into pieces, which XLA's
 * threads compute. Each piece is computed by one thread: OpenMP would add a team of threads to each thread of XLA.
 */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"

/* With less work than this, in multiplications, a piece takes longer to pass to another thread than to compute. */
enum { PIECE = 1 << 20, MOST_DIMENSIONS = 5 };

typedef void *Tensor;

/* Functions of torch's library. Those that return an int, but for the last three, return whether they failed.
 *
 * Source: torch/csrc/inductor/aoti_torch/c/shim.h and generated/c_shim_cpu.h, as of torch 2.9 and 2.15. The last three
 * are at::get_num_threads, which sets up OpenMP in a thread, and OpenMP's own.
 */
static struct {
  int32_t (*cpu)(void), (*float32)(void);
  int (*make)(void *data, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset, int32_t type,
              int32_t device, int32_t index, Tensor *made);
  int (*copy)(Tensor to, Tensor from, int32_t is_asynchronous);
  int (*drop)(Tensor tensor);
  int (*forward)(Tensor image, Tensor kernel, Tensor *bias, const int64_t *stride, int64_t, const int64_t *padding,
                 int64_t, const int64_t *dilation, int64_t, int32_t is_transposed, const int64_t *output_padding,
                 int64_t, int64_t groups, Tensor *result);
  int (*backward)(Tensor gradient, Tensor image, Tensor kernel, const int64_t **bias_sizes, int64_t,
                  const int64_t *stride, int64_t, const int64_t *padding, int64_t, const int64_t *dilation, int64_t,
                  int32_t is_transposed, const int64_t *output_padding, int64_t, int64_t groups,
                  const int32_t *is_wanted, int64_t, Tensor *of_image, Tensor *of_kernel, Tensor *of_bias);
  int (*set_up)(void);
  int (*threads)(void);
  void (*set_threads)(int count);
} torch;

/* Takes the addresses of the functions, in their order above. */
void polyxla_set_torch(const void *functions) { memcpy(&torch, functions, sizeof torch); }

/* An array, or a part of one, of float32 numbers. */
typedef struct {
  float *data;
  int64_t rank, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS];
} Array;

static int64_t count_of(const Array *array) { return array->sizes[0] * array->strides[0]; }

static Array array_of(const FfiBuffer *buffer) {
  Array array = {.data = buffer->data, .rank = buffer->rank};
  int64_t stride = 1;
  for (int64_t i = array.rank - 1; i >= 0; i--) {
    array.sizes[i] = buffer->dims[i], array.strides[i] = stride;
    stride *= array.sizes[i];
  }
  return array;
}

/* A range that is one of several nearly equal parts. */
typedef struct {
  int64_t index, count;
} Part;

static Array part_of(Array whole, int dimension, Part part) {
  int64_t size = whole.sizes[dimension], start = size * part.index / part.count;
  whole.data += start * whole.strides[dimension];
  whole.sizes[dimension] = size * (part.index + 1) / part.count - start;
  return whole;
}

static Tensor tensor_of(const Array *array) {
  Tensor tensor = NULL;
  torch.make(array->data, array->rank, array->sizes, array->strides, 0, torch.float32(), torch.cpu(), 0, &tensor);
  return tensor;
}

/* Images are [batch, feature, ...], kernels [output feature, input feature of the group, ...]. */
typedef enum { FORWARD, IMAGE_GRADIENT, KERNEL_GRADIENT } Kind;

/* A convolution, which is cut into parts of the batch times parts of the features. */
typedef struct {
  Kind kind;
  int64_t rank, stride[3], padding[3], dilation[3], groups;
  Array operands[2], result;
  /* Of a kernel's gradient, all parts of the batch but the first have a sum of their own. */
  float *sums;
  int64_t batches, features;
  atomic_bool has_failed;
} Convolution;

static bool compute_part(const Convolution *work, Part batch, Part feature) {
  Array first = part_of(work->operands[0], 0, batch), second = work->operands[1], result = work->result;
  if (work->kind == KERNEL_GRADIENT) {
    if (batch.index > 0) result.data = work->sums + (batch.index - 1) * count_of(&result);
    second = part_of(part_of(second, 0, batch), 1, feature);
    result = part_of(result, 0, feature);
  } else {
    second = part_of(second, work->kind == FORWARD ? 0 : 1, feature);
    result = part_of(part_of(result, 0, batch), 1, feature);
  }
  static const int64_t zeros[3];
  const int32_t is_wanted[3] = {work->kind == IMAGE_GRADIENT, work->kind == KERNEL_GRADIENT, false};
  Tensor operand = tensor_of(&first), other = tensor_of(&second), into = tensor_of(&result);
  Tensor computed[3] = {NULL, NULL, NULL};
  int64_t rank = work->rank;
  bool has_failed = operand == NULL || other == NULL || into == NULL;
  if (!has_failed && work->kind == FORWARD)
    has_failed = torch.forward(operand, other, NULL, work->stride, rank, work->padding, rank, work->dilation, rank,
                               false, zeros, rank, work->groups, &computed[0]) != 0;
  else if (!has_failed)
    /* Only the shape is read of the operand whose gradient is computed. */
    has_failed = torch.backward(work->kind == IMAGE_GRADIENT ? operand : other,
                                work->kind == IMAGE_GRADIENT ? into : operand,
                                work->kind == IMAGE_GRADIENT ? other : into, NULL, 0, work->stride, rank,
                                work->padding, rank, work->dilation, rank, false, zeros, rank, work->groups, is_wanted,
                                3, &computed[0], &computed[1], &computed[2]) != 0;
  has_failed = has_failed || torch.copy(into, computed[work->kind == KERNEL_GRADIENT], false) != 0;
  Tensor all[] = {operand, other, into, computed[0], computed[1], computed[2]};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i] != NULL) torch.drop(all[i]);
  return !has_failed;
}

static void compute(void *data, int64_t piece) {
  Convolution *work = data;
  Part batch = {piece / work->features, work->batches}, feature = {piece % work->features, work->features};
  torch.set_up();
  int threads = torch.threads();
  torch.set_threads(1);
  if (!compute_part(work, batch, feature)) atomic_store(&work->has_failed, true);
  torch.set_threads(threads);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Cuts the work along the batch, and along features if the batch is too small. */
static void cut(Convolution *work, int64_t threads) {
  const Array *kernel = work->kind == KERNEL_GRADIENT ? &work->result : &work->operands[1];
  const Array *image = work->kind == FORWARD ? &work->result : &work->operands[work->kind == KERNEL_GRADIENT];
  /* Each number of the kernel meets each place of the convolution's result. */
  int64_t places = count_of(image) / image->sizes[1];
  int64_t pieces = least(threads, 1 + places * count_of(kernel) / PIECE);
  int64_t features = work->kind == KERNEL_GRADIENT ? kernel->sizes[0] : work->result.sizes[1];
  work->batches = least(pieces, work->operands[0].sizes[0]);
  work->features = work->groups > 1 ? 1 : least(pieces / work->batches, features);
}

/* Adds the sums of the parts of the batch, always in the same order. */
static void add_sums(Convolution *work) {
  int64_t count = count_of(&work->result);
  for (int64_t batch = 1; batch < work->batches; batch++) {
    const float *sum = work->sums + (batch - 1) * count;
    for (int64_t i = 0; i < count; i++) work->result.data[i] += sum[i];
  }
}

static void read_numbers(const FfiCall *call, const char *name, int64_t *numbers) {
  const FfiArray *found = polyxla_ffi_attribute(call, name);
  memcpy(numbers, found->data, found->count * sizeof *numbers);
}

void *polyxla_convolution(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  if (torch.set_threads == NULL)
    return polyxla_ffi_error(call, FFI_FAILED_PRECONDITION, "this process has not opened torch's library");
  Convolution work = {
      .kind = polyxla_ffi_number(call, "kind"),
      .groups = polyxla_ffi_number(call, "groups"),
      .operands = {array_of(call->arguments.buffers[0]), array_of(call->arguments.buffers[1])},
      .result = array_of(call->results.buffers[0]),
  };
  work.rank = work.result.rank - 2;
  read_numbers(call, "stride", work.stride);
  read_numbers(call, "padding", work.padding);
  read_numbers(call, "dilation", work.dilation);
  cut(&work, polyxla_threads(call));
  bool has_sums = work.kind == KERNEL_GRADIENT && work.batches > 1;
  if (has_sums) work.sums = malloc((work.batches - 1) * count_of(&work.result) * sizeof *work.sums);
  bool is_computed = (work.sums != NULL || !has_sums) &&
                     polyxla_in_parallel(call, work.batches * work.features, compute, &work);
  if (is_computed && has_sums) add_sums(&work);
  free(work.sums);
  if (!is_computed) return polyxla_ffi_error(call, FFI_RESOURCE_EXHAUSTED, "no memory is left for a convolution");
  if (atomic_load(&work.has_failed))
    return polyxla_ffi_error(call, FFI_INTERNAL, "torch could not compute a convolution, see its error above");
  return NULL;
}
