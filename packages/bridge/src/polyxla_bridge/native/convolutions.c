/* Convolutions by torch's library, which programs call by XLA's foreign function interface.
 *
 * XLA's own convolutions on a CPU are Eigen's, torch's are oneDNN's. A convolution is cut into pieces, which XLA's
 * threads compute. Each piece is computed by one thread: OpenMP would add a team of threads to each thread of XLA.
 */
#include <stdatomic.h>
#include <stdlib.h>

#include "parallel.h"
#include "torch_library.h"

/* With less work than this, in multiplications, a piece takes longer to pass to another thread than to compute. */
enum { PIECE = 1 << 20 };

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
  Array first = polyxla_part(work->operands[0], 0, batch), second = work->operands[1], result = work->result;
  if (work->kind == KERNEL_GRADIENT) {
    if (batch.index > 0) result.data = work->sums + (batch.index - 1) * polyxla_count(&result);
    second = polyxla_part(polyxla_part(second, 0, batch), 1, feature);
    result = polyxla_part(result, 0, feature);
  } else {
    second = polyxla_part(second, work->kind == FORWARD ? 0 : 1, feature);
    result = polyxla_part(polyxla_part(result, 0, batch), 1, feature);
  }
  static const int64_t zeros[3];
  const int32_t is_wanted[3] = {work->kind == IMAGE_GRADIENT, work->kind == KERNEL_GRADIENT, false};
  Tensor operand = polyxla_tensor(&first), other = polyxla_tensor(&second), into = polyxla_tensor(&result);
  Tensor computed[3] = {NULL, NULL, NULL};
  int64_t rank = work->rank;
  bool has_failed = operand == NULL || other == NULL || into == NULL;
  if (!has_failed && work->kind == FORWARD)
    has_failed = polyxla_torch.convolve(operand, other, NULL, work->stride, rank, work->padding, rank, work->dilation,
                                        rank, false, zeros, rank, work->groups, &computed[0]) != 0;
  else if (!has_failed)
    /* Only the shape is read of the operand whose gradient is computed. */
    has_failed = polyxla_torch.convolve_back(work->kind == IMAGE_GRADIENT ? operand : other,
                                             work->kind == IMAGE_GRADIENT ? into : operand,
                                             work->kind == IMAGE_GRADIENT ? other : into, NULL, 0, work->stride, rank,
                                             work->padding, rank, work->dilation, rank, false, zeros, rank,
                                             work->groups, is_wanted, 3, &computed[0], &computed[1], &computed[2]) != 0;
  has_failed = has_failed || polyxla_torch.copy(into, computed[work->kind == KERNEL_GRADIENT], false) != 0;
  Tensor all[] = {operand, other, into, computed[0], computed[1], computed[2]};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    if (all[i] != NULL) polyxla_torch.drop(all[i]);
  return !has_failed;
}

static void compute(void *data, int64_t piece) {
  Convolution *work = data;
  Part batch = {piece / work->features, work->batches}, feature = {piece % work->features, work->features};
  int threads = polyxla_use_one_thread();
  if (!compute_part(work, batch, feature)) atomic_store(&work->has_failed, true);
  polyxla_torch.set_threads(threads);
}

/* Cuts the work along the batch, and along features if the batch is too small. */
static void cut(Convolution *work, int64_t threads) {
  const Array *kernel = work->kind == KERNEL_GRADIENT ? &work->result : &work->operands[1];
  const Array *image = work->kind == FORWARD ? &work->result : &work->operands[work->kind == KERNEL_GRADIENT];
  /* Each number of the kernel meets each place of the convolution's result. */
  int64_t places = polyxla_count(image) / image->sizes[1];
  int64_t pieces = least(threads, 1 + places * polyxla_count(kernel) / PIECE);
  int64_t features = work->kind == KERNEL_GRADIENT ? kernel->sizes[0] : work->result.sizes[1];
  work->batches = least(pieces, work->operands[0].sizes[0]);
  work->features = work->groups > 1 ? 1 : least(pieces / work->batches, features);
}

/* Adds the sums of the parts of the batch, always in the same order. */
static void add_sums(Convolution *work) {
  int64_t count = polyxla_count(&work->result);
  for (int64_t batch = 1; batch < work->batches; batch++) {
    const float *sum = work->sums + (batch - 1) * count;
    for (int64_t i = 0; i < count; i++) work->result.data[i] += sum[i];
  }
}

void *polyxla_convolution(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  if (polyxla_torch.set_threads == NULL)
    return polyxla_ffi_error(call, FFI_FAILED_PRECONDITION, "this process has not opened torch's library");
  Convolution work = {
      .kind = polyxla_ffi_number(call, "kind"),
      .groups = polyxla_ffi_number(call, "groups"),
      .operands = {polyxla_array(call->arguments.buffers[0]), polyxla_array(call->arguments.buffers[1])},
      .result = polyxla_array(call->results.buffers[0]),
  };
  work.rank = work.result.rank - 2;
  polyxla_ffi_numbers(call, "stride", work.stride);
  polyxla_ffi_numbers(call, "padding", work.padding);
  polyxla_ffi_numbers(call, "dilation", work.dilation);
  cut(&work, polyxla_threads(call));
  bool has_sums = work.kind == KERNEL_GRADIENT && work.batches > 1;
  if (has_sums) work.sums = malloc((work.batches - 1) * polyxla_count(&work.result) * sizeof *work.sums);
  bool is_computed =
      (work.sums != NULL || !has_sums) && polyxla_in_parallel(call, work.batches * work.features, compute, &work);
  if (is_computed && has_sums) add_sums(&work);
  free(work.sums);
  if (!is_computed) return polyxla_ffi_error(call, FFI_RESOURCE_EXHAUSTED, "no memory is left for a convolution");
  if (atomic_load(&work.has_failed))
    return polyxla_ffi_error(call, FFI_INTERNAL, "torch could not compute a convolution, see its error above");
  return NULL;
}
