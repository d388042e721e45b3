/* Replacing a function that one library calls. */
#ifndef POLYXLA_LINKAGE_H
#define POLYXLA_LINKAGE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the library whose file name contains `library` call `replacement` in place of `function`, another library's.
 * First puts what it called before into `original`. Returns whether the library calls the replacement now: it may call
 * no such function, or be linked in another way. */
bool polyxla_replace(const char *library, const char *function, void *replacement, void **original);

#ifdef __cplusplus
}
#endif

#endif
