/* Replacing a function that one library calls. */
#ifndef POLYXLA_LINKAGE_H
#define POLYXLA_LINKAGE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the library whose file name contains `library` call `replacement` in place of `function` of another library,
 * and puts the function that it called before into `original`. Returns false if the library does not call the function,
 * or is linked in another way. */
bool polyxla_replace(const char *library, const char *function, void *replacement, void **original);

#ifdef __cplusplus
}
#endif

#endif
