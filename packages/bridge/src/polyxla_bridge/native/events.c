/* Errors and events. Waiting for an event never needs the GIL. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "objects.h"

struct Error {
  int code;
  size_t size;
  char message[];
};

/* The callers cannot report a lack of memory: an error needs memory, too. */
void *polyxla_allocate(size_t size) {
  void *memory = malloc(size);
  if (memory == NULL) abort();
  return memory;
}

Error *polyxla_error(int code, const char *message, size_t size) {
  Error *error = polyxla_allocate(sizeof(Error) + size);
  error->code = code;
  error->size = size;
  memcpy(error->message, message, size);
  return error;
}

Error *polyxla_error_of(int code, const char *format, ...) {
  char message[256];
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  return polyxla_error(code, message, strlen(message));
}

/* Each receiver of an error destroys it, so each gets a copy. */
static Error *copy(const Error *error) {
  return error == NULL ? NULL : polyxla_error(error->code, error->message, error->size);
}

void PJRT_Error_Destroy(PJRT_Error_Destroy_Args *args) { free(args->error); }

void PJRT_Error_Message(PJRT_Error_Message_Args *args) {
  Error *error = args->error;
  args->message = error->message;
  args->message_size = error->size;
}

Error *PJRT_Error_GetCode(PJRT_Error_GetCode_Args *args) {
  args->code = ((Error *)args->error)->code;
  return NULL;
}

typedef void Callback(Error *error, void *user_arg);

typedef struct Waiting {
  struct Waiting *next;
  Callback *callback;
  void *user_arg;
} Waiting;

struct Event {
  pthread_mutex_t lock;
  pthread_cond_t completed;
  int owners;
  bool is_ready;
  Error *error;
  Waiting *waiting;
};

Event *polyxla_event(void) {
  Event *event = polyxla_allocate(sizeof(Event));
  *event = (Event){.owners = 2};
  pthread_mutex_init(&event->lock, NULL);
  pthread_cond_init(&event->completed, NULL);
  return event;
}

Event *polyxla_event_share(Event *event) {
  pthread_mutex_lock(&event->lock);
  event->owners++;
  pthread_mutex_unlock(&event->lock);
  return event;
}

void polyxla_event_drop(Event *event) {
  pthread_mutex_lock(&event->lock);
  bool is_last = --event->owners == 0;
  pthread_mutex_unlock(&event->lock);
  if (!is_last) return;
  pthread_cond_destroy(&event->completed);
  pthread_mutex_destroy(&event->lock);
  free(event->error);
  free(event);
}

void polyxla_event_complete(Event *event, Error *error) {
  pthread_mutex_lock(&event->lock);
  event->error = error;
  event->is_ready = true;
  Waiting *waiting = event->waiting;
  event->waiting = NULL;
  pthread_cond_broadcast(&event->completed);
  pthread_mutex_unlock(&event->lock);
  /* The lock is released by now, because a callback may destroy the event that it waited for. The completer's
   * reference keeps the event until all callbacks have run. */
  while (waiting != NULL) {
    Waiting *next = waiting->next;
    waiting->callback(copy(event->error), waiting->user_arg);
    free(waiting);
    waiting = next;
  }
  polyxla_event_drop(event);
}

/* Complete several events at once. Takes ownership of `error`, which may be null. */
void polyxla_events_complete(Event **events, size_t count, Error *error) {
  for (size_t i = 0; i < count; i++) polyxla_event_complete(events[i], copy(error));
  free(error);
}

Error *PJRT_Event_Destroy(PJRT_Event_Destroy_Args *args) {
  if (args->event != NULL) polyxla_event_drop(args->event);
  return NULL;
}

Error *PJRT_Event_IsReady(PJRT_Event_IsReady_Args *args) {
  Event *event = args->event;
  pthread_mutex_lock(&event->lock);
  args->is_ready = event->is_ready;
  pthread_mutex_unlock(&event->lock);
  return NULL;
}

static Error *wait_for(Event *event) {
  pthread_mutex_lock(&event->lock);
  while (!event->is_ready) pthread_cond_wait(&event->completed, &event->lock);
  Error *error = copy(event->error);
  pthread_mutex_unlock(&event->lock);
  return error;
}

Error *PJRT_Event_Await(PJRT_Event_Await_Args *args) { return wait_for(args->event); }

Error *PJRT_Event_Error(PJRT_Event_Error_Args *args) { return wait_for(args->event); }

Error *PJRT_Event_OnReady(PJRT_Event_OnReady_Args *args) {
  Event *event = args->event;
  Callback *callback = (Callback *)args->callback;
  pthread_mutex_lock(&event->lock);
  bool is_ready = event->is_ready;
  if (!is_ready) {
    Waiting *waiting = polyxla_allocate(sizeof(Waiting));
    *waiting = (Waiting){.callback = callback, .user_arg = args->user_arg};
    Waiting **last = &event->waiting;
    while (*last != NULL) last = &(*last)->next;
    *last = waiting;
  }
  pthread_mutex_unlock(&event->lock);
  /* The error of a completed event never changes, so this reads it without the lock, which the callback may take. */
  if (is_ready) callback(copy(event->error), args->user_arg);
  return NULL;
}
