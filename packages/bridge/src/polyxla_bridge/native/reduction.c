/* Combines the numbers of several replicas.
 *
 * bfloat16 is added in float32 and rounded once, as XLA's all-reduce of it is.
 */
#include "reduction.h"

#include <stdint.h>
#include <string.h>

enum { BLOCK_BYTES = 4096, BLOCK_NUMBERS = BLOCK_BYTES / 2 };

size_t polyxla_width(int type) {
  switch (type) {
    case FFI_PRED: case FFI_S8: case FFI_U8: return 1;
    case FFI_S16: case FFI_U16: case FFI_F16: case FFI_BF16: return 2;
    case FFI_S32: case FFI_U32: case FFI_F32: return 4;
    case FFI_S64: case FFI_U64: case FFI_F64: case FFI_C64: return 8;
    case FFI_C128: return 16;
    default: return 0;
  }
}

#define EACH(TYPE, VALUE)                    \
  for (size_t i = 0; i < count; i++) {       \
    TYPE a = into[i], b = from[i];           \
    into[i] = (TYPE)(VALUE);                 \
  }                                          \
  return true

/* The sum of two signed numbers may overflow, which C leaves undefined, so integers are computed as unsigned ones. */
#define INTEGERS(NAME, TYPE, UNSIGNED)                                                            \
  static bool NAME(TYPE *restrict into, const TYPE *restrict from, size_t count, Reduction how) { \
    switch (how) {                                                                                \
      case SUM: EACH(TYPE, (UNSIGNED)a + (UNSIGNED)b);                                            \
      case PRODUCT: EACH(TYPE, (uint64_t)a *(uint64_t)b);                                         \
      case MINIMUM: EACH(TYPE, b < a ? b : a);                                                    \
      case MAXIMUM: EACH(TYPE, b > a ? b : a);                                                    \
      case AND: EACH(TYPE, a & b);                                                                \
      case OR: EACH(TYPE, a | b);                                                                 \
      case XOR: EACH(TYPE, a ^ b);                                                                \
      default: return false;                                                                      \
    }                                                                                             \
  }

/* A minimum or maximum keeps NaN, as torch's does. */
#define FLOATS(NAME, TYPE)                                                                        \
  static bool NAME(TYPE *restrict into, const TYPE *restrict from, size_t count, Reduction how) { \
    switch (how) {                                                                                \
      case SUM: EACH(TYPE, a + b);                                                                \
      case PRODUCT: EACH(TYPE, a *b);                                                             \
      case MINIMUM: EACH(TYPE, b < a || b != b ? b : a);                                          \
      case MAXIMUM: EACH(TYPE, b > a || b != b ? b : a);                                          \
      default: return false;                                                                      \
    }                                                                                             \
  }

INTEGERS(s8, int8_t, uint8_t)
INTEGERS(u8, uint8_t, uint8_t)
INTEGERS(s16, int16_t, uint16_t)
INTEGERS(u16, uint16_t, uint16_t)
INTEGERS(s32, int32_t, uint32_t)
INTEGERS(u32, uint32_t, uint32_t)
INTEGERS(s64, int64_t, uint64_t)
INTEGERS(u64, uint64_t, uint64_t)
FLOATS(f32, float)
FLOATS(f64, double)

static bool add(void *into, const void *from, size_t count, int type, Reduction how) {
  switch (type) {
    case FFI_PRED: return (how == AND || how == OR || how == XOR) && u8(into, from, count, how);
    case FFI_S8: return s8(into, from, count, how);
    case FFI_U8: return u8(into, from, count, how);
    case FFI_S16: return s16(into, from, count, how);
    case FFI_U16: return u16(into, from, count, how);
    case FFI_S32: return s32(into, from, count, how);
    case FFI_U32: return u32(into, from, count, how);
    case FFI_S64: return s64(into, from, count, how);
    case FFI_U64: return u64(into, from, count, how);
    case FFI_F32: return f32(into, from, count, how);
    case FFI_F64: return f64(into, from, count, how);
    default: return false;
  }
}

static void widen(float *into, const uint16_t *from, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint32_t bits = (uint32_t)from[i] << 16;
    memcpy(&into[i], &bits, sizeof bits);
  }
}

/* Rounds to the nearest, and of two to the even one. */
static void narrow(uint16_t *into, const float *from, size_t count) {
  for (size_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, &from[i], sizeof bits);
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    into[i] = is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

static void reduce_narrow(uint16_t *result, const char *const *rows, int count, size_t numbers, Reduction how) {
  float sums[BLOCK_NUMBERS], numbers_of_row[BLOCK_NUMBERS];
  for (size_t start = 0; start < numbers; start += BLOCK_NUMBERS) {
    size_t some = numbers - start < BLOCK_NUMBERS ? numbers - start : BLOCK_NUMBERS;
    widen(sums, (const uint16_t *)rows[0] + start, some);
    for (int row = 1; row < count; row++) {
      widen(numbers_of_row, (const uint16_t *)rows[row] + start, some);
      f32(sums, numbers_of_row, some, how);
    }
    narrow(result + start, sums, some);
  }
}

bool polyxla_reduces(int type, Reduction how) { return add(NULL, NULL, 0, type == FFI_BF16 ? FFI_F32 : type, how); }

void polyxla_reduce(void *result, const char *const *rows, int count, size_t size, int type, Reduction how) {
  size_t width = polyxla_width(type);
  if (type == FFI_BF16) {
    reduce_narrow(result, rows, count, size / width, how);
    return;
  }
  /* A block stays in the processor's first cache. */
  for (size_t start = 0; start < size; start += BLOCK_BYTES) {
    size_t some = size - start < BLOCK_BYTES ? size - start : BLOCK_BYTES;
    memcpy((char *)result + start, rows[0] + start, some);
    for (int row = 1; row < count; row++) add((char *)result + start, rows[row] + start, some / width, type, how);
  }
}
