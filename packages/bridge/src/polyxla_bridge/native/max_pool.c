/* The gradient of max-pooling, which programs call by XLA's foreign function interface. */
#include "parallel.h"

/* With fewer elements than in a piece, passing it to another thread takes longer than pooling it. */
enum { DIMENSIONS = 3, PIECE = 1 << 14, BLOCK = 256 };

/* The last dimensions of an array are pooled, three or, with sizes of 1 before, fewer. The others are planes. */
typedef struct {
  const float *operand, *source;
  float *result, initial;
  int64_t planes, pieces, size[DIMENSIONS], pooled[DIMENSIONS];
  int64_t window[DIMENSIONS], stride[DIMENSIONS], low[DIMENSIONS];
  bool is_last;
} Pool;

/* A range of indices. */
typedef struct {
  int64_t start, end;
} Range;

/* Those windows in a row that have an element of the array at one of their places. */
static Range windows_with(const Pool *pool, int64_t place) {
  int64_t missing = pool->low[2] - place, stride = pool->stride[2];
  return (Range){missing > 0 ? (missing + stride - 1) / stride : 0,
                 pool->size[2] + missing > 0 ? (pool->size[2] + missing - 1) / stride + 1 : 0};
}

/* Some windows, and the greatest element of each. */
typedef struct {
  int64_t first, count;
  float greatest[BLOCK];
  int32_t chosen[BLOCK];
} Choice;

/* Lets windows choose between elements, of which each has a place, or -1 if it is outside of the array. Of equal
 * elements the first or the last wins, and always the last that is not a number, as in torch. The compiler makes vector
 * instructions of it. */
VECTORS static void choose(Choice *choice, const float *values, const int32_t *places, bool is_last) {
  float *greatest = choice->greatest;
  int32_t *chosen = choice->chosen;
  for (int64_t i = 0; i < choice->count; i++) {
    float value = values[i], best = greatest[i];
    int is_greater = (value > best) | (is_last & (value == best));
    int wins = (places[i] >= 0) & ((chosen[i] < 0) | (value != value) | ((best == best) & is_greater));
    greatest[i] = wins ? value : best;
    chosen[i] = wins ? places[i] : chosen[i];
  }
}

/* Gathers each `stride`-th element from a place on. */
static inline void gather(const float *plane, int64_t place, int64_t stride, int64_t count, float *values,
                          int32_t *places) {
  for (int64_t i = 0; i < count; i++) values[i] = plane[place + i * stride];
  for (int64_t i = 0; i < count; i++) places[i] = (int32_t)(place + i * stride);
}

/* Lets windows choose among the elements at one of their places. */
static void choose_at(const Pool *pool, Choice *choice, const float *plane, const int64_t *place) {
  float values[BLOCK];
  int32_t places[BLOCK];
  Range inside = windows_with(pool, place[2]);
  int64_t width = pool->pooled[2], stride = pool->stride[2];
  for (int64_t done = 0, in_row; done < choice->count; done += in_row) {
    int64_t row = (choice->first + done) / width, start = (choice->first + done) % width;
    int64_t depth = row / pool->pooled[1] * pool->stride[0] - pool->low[0] + place[0];
    int64_t height = row % pool->pooled[1] * pool->stride[1] - pool->low[1] + place[1];
    in_row = least(width - start, choice->count - done);
    bool has_row = depth >= 0 && depth < pool->size[0] && height >= 0 && height < pool->size[1];
    int64_t from = has_row ? most(start, inside.start) : start + in_row;
    int64_t count = most(0, least(start + in_row, inside.end) - from);
    if (count < in_row)
      for (int64_t i = done; i < done + in_row; i++) values[i] = 0, places[i] = -1;
    if (count == 0) continue;
    int64_t at = (depth * pool->size[1] + height) * pool->size[2] + from * stride - pool->low[2] + place[2];
    float *some = values + done + (from - start);
    int32_t *some_places = places + done + (from - start);
    /* The compiler makes vector instructions of a stride that it knows. */
    if (stride == 2)
      gather(plane, at, 2, count, some, some_places);
    else if (stride == 1)
      gather(plane, at, 1, count, some, some_places);
    else
      gather(plane, at, stride, count, some, some_places);
  }
  choose(choice, values, places, pool->is_last);
}

static void pool_plane(const Pool *pool, int64_t plane) {
  int64_t count = pool->size[0] * pool->size[1] * pool->size[2];
  int64_t windows = pool->pooled[0] * pool->pooled[1] * pool->pooled[2];
  const float *operand = pool->operand + plane * count, *source = pool->source + plane * windows;
  float *result = pool->result + plane * count;
  for (int64_t i = 0; i < count; i++) result[i] = pool->initial;
  Choice choice;
  for (choice.first = 0; choice.first < windows; choice.first += BLOCK) {
    choice.count = least(BLOCK, windows - choice.first);
    for (int64_t i = 0; i < choice.count; i++) choice.greatest[i] = 0, choice.chosen[i] = -1;
    int64_t place[DIMENSIONS];
    for (place[0] = 0; place[0] < pool->window[0]; place[0]++)
      for (place[1] = 0; place[1] < pool->window[1]; place[1]++)
        for (place[2] = 0; place[2] < pool->window[2]; place[2]++) choose_at(pool, &choice, operand, place);
    for (int64_t i = 0; i < choice.count; i++)
      if (choice.chosen[i] >= 0) result[choice.chosen[i]] += source[choice.first + i];
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
