/* Combines the numbers of several replicas. */
#ifndef POLYXLA_REDUCTION_H
#define POLYXLA_REDUCTION_H

#include <stdbool.h>
#include <stddef.h>

#include "ffi.h"

typedef enum { SUM, PRODUCT, MINIMUM, MAXIMUM, AND, OR, XOR } Reduction;

/* Returns the bytes of a number; 0 of a type that is not known. */
size_t polyxla_width(int type);
/* Returns whether numbers of a type can be combined. */
bool polyxla_reduces(int type, Reduction how);
/* Combines `size` bytes of each row, always in the order of the rows. */
void polyxla_reduce(void *result, const char *const *rows, int count, size_t size, int type, Reduction how);

#endif
