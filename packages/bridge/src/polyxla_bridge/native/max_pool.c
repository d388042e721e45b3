/* The gradient of max-pooling, which programs call by XLA's foreign function interface. */
#include "parallel.h"

/* With fewer elements than in a piece, passing it to another thread takes longer than pooling it. */
enum { DIMENSIONS = 3, PIECE = 1 << 14, BLOCK = 64 };

/* The last dimensions of an array are pooled, three or, with sizes of 1 before, fewer. The others are planes. */
typedef struct {
  const float *operand, *source;
  float *result, initial;
  int64_t planes, pieces, size[DIMENSIONS], pooled[DIMENSIONS];
  int64_t window[DIMENSIONS], stride[DIMENSIONS], low[DIMENSIONS];
  bool is_last;
} Pool;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* A range of indices. */
typedef struct {
  int64_t start, end;
} Range;

/* The places of a window that are in the array, in one dimension. */
static Range places_of(const Pool *pool, int dimension, int64_t index) {
  int64_t start = index * pool->stride[dimension] - pool->low[dimension];
  return (Range){start < 0 ? 0 : start, least(start + pool->window[dimension], pool->size[dimension])};
}

/* Those windows in a row that have an element of the array at one of their places. */
static Range windows_with(const Pool *pool, int64_t place) {
  int64_t missing = pool->low[2] - place, stride = pool->stride[2];
  return (Range){missing > 0 ? (missing + stride - 1) / stride : 0,
                 pool->size[2] + missing > 0 ? (pool->size[2] + missing - 1) / stride + 1 : 0};
}

/* Some windows in a row, and the greatest element of each. */
typedef struct {
  Range windows;
  float greatest[BLOCK];
  int32_t chosen[BLOCK];
} Choice;

/* Lets windows choose between elements. Of equal elements the first or the last wins, and always the last that is not
 * a number, as in torch. The compiler makes vector instructions of it. */
static inline void choose(int64_t count, float *greatest, int32_t *chosen, const float *values, int32_t place,
                          int32_t stride, bool is_last) {
  for (int64_t i = 0; i < count; i++) {
    float value = values[i], most = greatest[i];
    int32_t at = place + (int32_t)i * stride;
    int is_greater = (value > most) | (is_last & (value == most));
    int wins = (chosen[i] < 0) | (value != value) | ((most == most) & is_greater);
    greatest[i] = wins ? value : most;
    chosen[i] = wins ? at : chosen[i];
  }
}

/* Lets the windows choose among the elements at one of their places in a row of the array. */
static void choose_at(const Pool *pool, Choice *choice, const float *plane, int64_t row, int64_t place) {
  Range has_place = windows_with(pool, place);
  int64_t first = choice->windows.start, stride = pool->stride[2];
  int64_t start = has_place.start > first ? has_place.start : first;
  int64_t count = least(has_place.end, choice->windows.end) - start, at = row + place - pool->low[2] + start * stride;
  float values[BLOCK];
  for (int64_t i = 0; i < count; i++) values[i] = plane[at + i * stride];
  choose(count, choice->greatest + (start - first), choice->chosen + (start - first), values, at, stride,
         pool->is_last);
}

static void pool_plane(const Pool *pool, int64_t plane) {
  int64_t count = pool->size[0] * pool->size[1] * pool->size[2];
  int64_t windows = pool->pooled[0] * pool->pooled[1] * pool->pooled[2];
  const float *operand = pool->operand + plane * count, *source = pool->source + plane * windows;
  float *result = pool->result + plane * count;
  for (int64_t i = 0; i < count; i++) result[i] = pool->initial;
  for (int64_t row = 0; row < pool->pooled[0] * pool->pooled[1]; row++)
    for (int64_t start = 0; start < pool->pooled[2]; start += BLOCK) {
      Choice choice;
      choice.windows = (Range){start, least(start + BLOCK, pool->pooled[2])};
      for (int64_t i = 0; i < choice.windows.end - start; i++) choice.greatest[i] = 0, choice.chosen[i] = -1;
      Range depth = places_of(pool, 0, row / pool->pooled[1]), height = places_of(pool, 1, row % pool->pooled[1]);
      for (int64_t d = depth.start; d < depth.end; d++)
        for (int64_t h = height.start; h < height.end; h++)
          for (int64_t place = 0; place < pool->window[2]; place++)
            choose_at(pool, &choice, operand, (d * pool->size[1] + h) * pool->size[2], place);
      for (int64_t w = start; w < choice.windows.end; w++, source++)
        if (choice.chosen[w - start] >= 0) result[choice.chosen[w - start]] += *source;
    }
}

static void compute(void *data, int64_t piece) {
  const Pool *pool = data;
  int64_t end = pool->planes * (piece + 1) / pool->pieces;
  for (int64_t plane = pool->planes * piece / pool->pieces; plane < end; plane++) pool_plane(pool, plane);
}

/* Arguments: the pooled array, the gradients of its windows, and what they are added to. */
void *polyxla_max_pool_gradient(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  FfiBuffer **arrays = call->arguments.buffers;
  Pool pool = {
      .operand = arrays[0]->data,
      .source = arrays[1]->data,
      .initial = *(const float *)arrays[2]->data,
      .result = call->results.buffers[0]->data,
      .planes = arrays[0]->dims[0],
      .is_last = polyxla_ffi_number(call, "is_last"),
  };
  for (int i = 0; i < DIMENSIONS; i++) pool.size[i] = arrays[0]->dims[i + 1], pool.pooled[i] = arrays[1]->dims[i + 1];
  polyxla_ffi_numbers(call, "window", pool.window);
  polyxla_ffi_numbers(call, "stride", pool.stride);
  polyxla_ffi_numbers(call, "low", pool.low);
  int64_t work = pool.planes * pool.size[0] * pool.size[1] * pool.size[2];
  pool.pieces = least(polyxla_threads(call), 1 + work / PIECE);
  if (polyxla_in_parallel(call, pool.pieces, compute, &pool)) return NULL;
  return polyxla_ffi_error(call, FFI_RESOURCE_EXHAUSTED, "no memory is left for the gradient of a max-pooling");
}
