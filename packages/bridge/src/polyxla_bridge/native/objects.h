/* What torch_xla holds as PJRT_Error, PJRT_Event and PJRT_Buffer.
 *
 * torch_xla makes and destroys buffers while it holds a lock of its own, which a Python thread that lets go of
 * a tensor waits for with Python's lock held. So nothing here may ever wait for Python.
 *
 * abi.h is generated from abi.py when the library is built: hatch_build.py.
 */
#ifndef POLYXLA_OBJECTS_H
#define POLYXLA_OBJECTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

typedef struct Error Error;
typedef struct Event Event;
typedef struct Buffer Buffer;

/* Like malloc, but ends the process when there is no memory: for what is too small to be refused. */
void *polyxla_allocate(size_t size);

Error *polyxla_error(int code, const char *message, size_t size);

/* A printf-like message, cut at 256 bytes. */
Error *polyxla_error_of(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* An event with two owners: who waits for it, and who completes it. */
Event *polyxla_event(void);

/* Gives up the completer's share. `error` may be null, and is taken. Runs the callbacks of those who wait. */
void polyxla_event_complete(Event *event, Error *error);

Event *polyxla_event_share(Event *event);
void polyxla_event_drop(Event *event);

#endif
