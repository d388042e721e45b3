/* Products of matrices by torch's library, which programs call by XLA's foreign function interface. */
#include <stdatomic.h>

#include "parallel.h"
#include "torch_library.h"

/* With less work than this, in multiplications, a piece takes longer to pass to another thread than to compute. */
enum { PIECE = 1 << 22 };

/* The left matrix is transposed: [inner, rows] times [inner, columns]. */
typedef struct {
  Array left, right, result;
  int64_t pieces;
  atomic_bool has_failed;
} Product;

static void compute(void *data, int64_t piece) {
  Product *product = data;
  Part part = {piece, product->pieces};
  Array left = polyxla_part(product->left, 1, part), result = polyxla_part(product->result, 0, part);
  Array transposed = left;
  transposed.sizes[0] = left.sizes[1], transposed.sizes[1] = left.sizes[0];
  transposed.strides[0] = left.strides[1], transposed.strides[1] = left.strides[0];
  Tensor tensors[] = {polyxla_tensor(&result), polyxla_tensor(&transposed), polyxla_tensor(&product->right)};
  int threads = polyxla_use_one_thread();
  if (tensors[0] == NULL || tensors[1] == NULL || tensors[2] == NULL ||
      polyxla_torch.multiply(tensors[0], tensors[1], tensors[2]) != 0)
    atomic_store(&product->has_failed, true);
  polyxla_torch.set_threads(threads);
  for (int i = 0; i < 3; i++)
    if (tensors[i] != NULL) polyxla_torch.drop(tensors[i]);
}

void *polyxla_product(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  if (polyxla_torch.set_threads == NULL)
    return polyxla_ffi_error(call, FFI_FAILED_PRECONDITION, "this process has not opened torch's library");
  Product product = {
      .left = polyxla_array(call->arguments.buffers[0]),
      .right = polyxla_array(call->arguments.buffers[1]),
      .result = polyxla_array(call->results.buffers[0]),
  };
  int64_t rows = product.left.sizes[1], work = rows * polyxla_count(&product.right), threads = polyxla_threads(call);
  product.pieces = 1 + work / PIECE;
  if (product.pieces > threads) product.pieces = threads;
  if (product.pieces > rows) product.pieces = rows;
  if (!polyxla_in_parallel(call, product.pieces, compute, &product))
    return polyxla_ffi_error(call, FFI_RESOURCE_EXHAUSTED, "no memory is left for a product of matrices");
  if (atomic_load(&product.has_failed))
    return polyxla_ffi_error(call, FFI_INTERNAL, "torch could not multiply two matrices, see its error above");
  return NULL;
}
