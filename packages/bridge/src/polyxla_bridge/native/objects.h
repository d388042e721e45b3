/* PJRT_Error, PJRT_Event and PJRT_Buffer as torch_xla holds them.
 *
 * torch_xla makes and destroys buffers with one of its locks held. A Python thread that frees a tensor waits for
 * that lock with the GIL held. So no function here may ever wait for the GIL.
 *
 * hatch_build.py generates abi.h from abi.py when the library is built.
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

/* Allocates memory for a small object; ends the process if there is none. */
void *polyxla_allocate(size_t size);

/* Allocates memory for data, which XLA's CPU client can use without a copy; returns null if there is none. `free`
 * frees it. */
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
