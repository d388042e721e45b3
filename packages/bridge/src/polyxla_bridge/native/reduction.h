/* Combines the numbers of several replicas. */
#ifndef POLYXLA_REDUCTION_H
#define POLYXLA_REDUCTION_H

#include <stdbool.h>
#include <stddef.h>

#include "ffi.h"

typedef enum { SUM, PRODUCT, MINIMUM, MAXIMUM, AND, OR, XOR } Reduction;

/* Returns the bytes of a number; 0 of a type that is not known. */
size_t polyxla_width(int type);
/* Combines `size` bytes of each row, always in the order of the rows. Returns false if it cannot combine this type. */
bool polyxla_reduce(void *result, const char *const *rows, int count, size_t size, int type, Reduction how);

#endif
