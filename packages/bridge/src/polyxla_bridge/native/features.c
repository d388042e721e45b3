/* Batch norms, and sums over all dimensions of an array but those of its features. Programs call these by XLA's
 * foreign function interface: XLA:CPU computes each feature number by number, and on one thread.
 *
 * An array is [batch, feature, place]. Its features are divided among XLA's threads.
 */
#include <math.h>

#include "parallel.h"

/* Numbers that are added as one vector, and numbers whose sum is a float: such sums are added in double precision. With
 * fewer numbers than in a piece, passing it to another thread takes longer than adding them. */
enum { LANES = 16, CHUNK = 1 << 10, PIECE = 1 << 14 };

typedef struct Features Features;
struct Features {
  int64_t batches, features, places, pieces;
  const float *numbers, *gradients;
  const float *scale, *offset, *known_mean, *known_variance;
  float *result, *mean, *variance, *of_scale, *of_offset;
  /* The epsilon of a batch norm, and the number that a sum begins with. */
  float epsilon, initial;
  void (*compute)(const Features *work, int64_t feature);
};

/* Adds some numbers to sums, whose total is the sum. The compiler makes vector instructions of this. */
VECTORS static void add(double *sums, const float *numbers, int64_t count) {
  for (int64_t start = 0; start < count; start += CHUNK) {
    int64_t stop = least(start + CHUNK, count), i = start;
    float some[LANES] = {0};
    for (; i + LANES <= stop; i += LANES)
      for (int lane = 0; lane < LANES; lane++) some[lane] += numbers[i + lane];
    for (int lane = 0; i < stop; i++, lane++) some[lane] += numbers[i];
    for (int lane = 0; lane < LANES; lane++) sums[lane] += some[lane];
  }
}

/* Adds the products of a factor, less a number, and the deviation of another number from its mean. */
VECTORS static void add_products(double *sums, const float *factors, float less, const float *numbers, float mean,
                                 int64_t count) {
  for (int64_t start = 0; start < count; start += CHUNK) {
    int64_t stop = least(start + CHUNK, count), i = start;
    float some[LANES] = {0};
    for (; i + LANES <= stop; i += LANES)
      for (int lane = 0; lane < LANES; lane++)
        some[lane] += (factors[i + lane] - less) * (numbers[i + lane] - mean);
    for (int lane = 0; i < stop; i++, lane++) some[lane] += (factors[i] - less) * (numbers[i] - mean);
    for (int lane = 0; lane < LANES; lane++) sums[lane] += some[lane];
  }
}

static double total(const double *sums) {
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  return sum;
}

/* Returns where the places of a feature begin. */
static int64_t place_of(const Features *work, int64_t batch, int64_t feature) {
  return (batch * work->features + feature) * work->places;
}

static double sum_of(const Features *work, int64_t feature, const float *numbers) {
  double sums[LANES] = {0};
  for (int64_t batch = 0; batch < work->batches; batch++)
    add(sums, numbers + place_of(work, batch, feature), work->places);
  return total(sums);
}

static double sum_of_products(const Features *work, int64_t feature, const float *factors, float less, float mean) {
  double sums[LANES] = {0};
  for (int64_t batch = 0; batch < work->batches; batch++) {
    int64_t first = place_of(work, batch, feature);
    add_products(sums, factors + first, less, work->numbers + first, mean, work->places);
  }
  return total(sums);
}

static void add_up(const Features *work, int64_t feature) {
  work->result[feature] = (float)(work->initial + sum_of(work, feature, work->numbers));
}

VECTORS static void normalise(const Features *work, int64_t feature) {
  double count = work->batches * work->places;
  float mean = (float)(sum_of(work, feature, work->numbers) / count);
  float variance = (float)(sum_of_products(work, feature, work->numbers, mean, mean) / count);
  float factor = work->scale[feature] / sqrtf(variance + work->epsilon), offset = work->offset[feature];
  for (int64_t batch = 0; batch < work->batches; batch++) {
    int64_t first = place_of(work, batch, feature);
    for (int64_t i = first; i < first + work->places; i++)
      work->result[i] = (work->numbers[i] - mean) * factor + offset;
  }
  work->mean[feature] = mean;
  work->variance[feature] = variance;
}

VECTORS static void differentiate(const Features *work, int64_t feature) {
  float mean = work->known_mean[feature], deviation = 1 / sqrtf(work->known_variance[feature] + work->epsilon);
  double count = work->batches * work->places, sum = sum_of(work, feature, work->gradients);
  double products = sum_of_products(work, feature, work->gradients, 0, mean);
  float factor = work->scale[feature] * deviation;
  float through_mean = (float)(sum / count), through_variance = (float)(products / count * deviation * deviation);
  for (int64_t batch = 0; batch < work->batches; batch++) {
    int64_t first = place_of(work, batch, feature);
    for (int64_t i = first; i < first + work->places; i++)
      work->result[i] =
          factor * (work->gradients[i] - through_mean - (work->numbers[i] - mean) * through_variance);
  }
  work->of_scale[feature] = (float)(products * deviation);
  work->of_offset[feature] = (float)sum;
}

static void compute(void *data, int64_t piece) {
  const Features *work = data;
  int64_t end = work->features * (piece + 1) / work->pieces;
  for (int64_t feature = work->features * piece / work->pieces; feature < end; feature++)
    work->compute(work, feature);
}

static const float *argument(const FfiCall *call, int number) { return call->arguments.buffers[number]->data; }

static float *result(const FfiCall *call, int number) { return call->results.buffers[number]->data; }

/* Computes each feature of the first argument. */
static void *compute_all(const FfiCall *call, Features *work) {
  const int64_t *dims = call->arguments.buffers[0]->dims;
  work->batches = dims[0], work->features = dims[1], work->places = dims[2];
  work->numbers = argument(call, 0);
  work->result = result(call, 0);
  int64_t pieces = 1 + work->batches * work->features * work->places / PIECE;
  work->pieces = least(polyxla_threads(call), least(work->features, pieces));
  if (polyxla_in_parallel(call, work->pieces, compute, work)) return NULL;
  return polyxla_ffi_error(call, FFI_RESOURCE_EXHAUSTED, "no memory is left for a batch norm, or a sum of features");
}

/* Arguments: the array, and the number that every sum begins with. */
void *polyxla_feature_sums(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  Features work = {.initial = *argument(call, 1), .compute = add_up};
  return compute_all(call, &work);
}

/* Arguments: the array, scale, offset, epsilon. Results: the normalised array, mean, variance. */
void *polyxla_batch_norm(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  Features work = {
      .scale = argument(call, 1),
      .offset = argument(call, 2),
      .epsilon = *argument(call, 3),
      .mean = result(call, 1),
      .variance = result(call, 2),
      .compute = normalise,
  };
  return compute_all(call, &work);
}

/* Arguments: the array, scale, mean, variance, the gradients of the normalised array, epsilon. Results: the gradients of
 * the array, the scale and the offset. */
void *polyxla_batch_norm_gradient(FfiCall *call) {
  if (polyxla_ffi_prepares(call)) return NULL;
  Features work = {
      .scale = argument(call, 1),
      .known_mean = argument(call, 2),
      .known_variance = argument(call, 3),
      .gradients = argument(call, 4),
      .epsilon = *argument(call, 5),
      .of_scale = result(call, 1),
      .of_offset = result(call, 2),
      .compute = differentiate,
  };
  return compute_all(call, &work);
}
