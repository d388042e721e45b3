/* PJRT_Error, PJRT_Event and PJRT_Buffer as torch_xla holds them.
 *
 * torch_xla makes and destroys buffers with one of its locks held. A Python thread that frees a tensor waits for
 * that lock with the GIL held. So no function here may ever wait for the GIL.
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

/* Like malloc, but ends the process if there is no memory. For small objects. */
void *polyxla_allocate(size_t size);

/* Memory for data, which XLA's CPU client can use without a copy; null if there is none. `free` frees it. */
void *polyxla_allocate_data(size_t size);

Error *polyxla_error(int code, const char *message, size_t size);

/* Takes a format like printf; the message is cut at 256 bytes. */
Error *polyxla_error_of(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Makes an event with two references: the waiter's and the completer's. */
Event *polyxla_event(void);

/* Completes the event, runs its callbacks, and releases the completer's reference. Takes ownership of `error`,
 * which may be null. */
void polyxla_event_complete(Event *event, Error *error);

Event *polyxla_event_share(Event *event);
void polyxla_event_drop(Event *event);

#endif
