/* Sums of the columns of a matrix, which programs call by XLA's foreign function interface. */
#include "parallel.h"

/* Columns that are added together, and rows whose sum is a float: their sums are added in double precision. With fewer
 * numbers than in a piece, passing it to another thread takes longer than adding them. */
enum { COLUMNS = 256, ROWS = 32, PIECE = 1 << 16 };

typedef struct {
  const float *matrix;
  float *result, initial;
  int64_t rows, columns, pieces;
} Sums;

static void add_columns(const Sums *sums, int64_t first, int64_t count) {
  double total[COLUMNS];
  for (int64_t i = 0; i < count; i++) total[i] = sums->initial;
  for (int64_t start = 0; start < sums->rows; start += ROWS) {
    float some[COLUMNS] = {0};
    for (int64_t row = start; row < least(start + ROWS, sums->rows); row++) {
      const float *numbers = sums->matrix + row * sums->columns + first;
      for (int64_t i = 0; i < count; i++) some[i] += numbers[i];
    }
    for (int64_t i = 0; i < count; i++) total[i] += some[i];
  }
  for (int64_t i = 0; i < count; i++) sums->result[first + i] = (float)total[i];
}

static void compute(void *data, int64_t piece) {
  const Sums *sums = data;
  int64_t end = sums->columns * (piece + 1) / sums->pieces;
  for (int64_t first = sums->columns * piece / sums->pieces; first < end; first += COLUMNS)
    add_columns(sums, first, least(COLUMNS, end - first));
}

/* Arguments: the matrix, and the number that every sum begins with. */
void *polyxla_column_sums(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  const FfiBuffer *matrix = call->arguments.buffers[0];
  Sums sums = {
      .matrix = matrix->data,
      .initial = *(const float *)call->arguments.buffers[1]->data,
      .result = call->results.buffers[0]->data,
      .rows = matrix->dims[0],
      .columns = matrix->dims[1],
  };
  sums.pieces = least(polyxla_threads(call), least(sums.columns, 1 + sums.rows * sums.columns / PIECE));
  if (polyxla_in_parallel(call, sums.pieces, compute, &sums)) return NULL;
  return polyxla_ffi_error(call, FFI_RESOURCE_EXHAUSTED, "no memory is left for the sums of a matrix's columns");
}
