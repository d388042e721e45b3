/* Pieces of a call that XLA's threads compute.
 *
 * XLA's threads may all be in calls that wait, so no piece is given to a thread: those that are free take one after
 * the other, the caller among them.
 */
#include "parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* The last to leave frees it. */
typedef struct {
  void (*compute)(void *data, int64_t piece);
  void *data;
  int64_t count;
  atomic_int_fast64_t next;
  atomic_int users;
  pthread_mutex_t lock;
  pthread_cond_t done;
  int64_t missing;
} Pieces;

static void leave(Pieces *pieces) {
  if (atomic_fetch_sub(&pieces->users, 1) > 1) return;
  pthread_mutex_destroy(&pieces->lock);
  pthread_cond_destroy(&pieces->done);
  free(pieces);
}

static void compute_some(Pieces *pieces) {
  int64_t done = 0;
  for (int64_t piece; (piece = atomic_fetch_add(&pieces->next, 1)) < pieces->count; done++)
    pieces->compute(pieces->data, piece);
  pthread_mutex_lock(&pieces->lock);
  pieces->missing -= done;
  if (pieces->missing == 0) pthread_cond_signal(&pieces->done);
  pthread_mutex_unlock(&pieces->lock);
}

static void help(void *data) {
  compute_some(data);
  leave(data);
}

static void drop_error(const FfiCall *call, void *error) {
  FfiDestroyArgs args = {.size = sizeof args, .error = error};
  if (error != NULL) call->api->destroy_error(&args);
}

int64_t polyxla_threads(const FfiCall *call) {
  int64_t count = 1;
  FfiThreadsArgs args = {.size = sizeof args, .context = call->context, .count = &count};
  drop_error(call, call->api->count_threads(&args));
  return count;
}

bool polyxla_in_parallel(const FfiCall *call, int64_t count, void (*compute)(void *data, int64_t piece), void *data) {
  Pieces *pieces = malloc(sizeof *pieces);
  if (pieces == NULL) return false;
  *pieces = (Pieces){.compute = compute, .data = data, .count = count, .users = 1, .missing = count};
  pthread_mutex_init(&pieces->lock, NULL);
  pthread_cond_init(&pieces->done, NULL);
  for (int64_t i = 1; i < count; i++) {
    FfiScheduleArgs args = {.size = sizeof args, .context = call->context, .task = help, .data = pieces};
    atomic_fetch_add(&pieces->users, 1);
    void *error = call->api->schedule(&args);
    if (error != NULL) leave(pieces);
    drop_error(call, error);
  }
  compute_some(pieces);
  pthread_mutex_lock(&pieces->lock);
  /* What is missing is being computed. */
  while (pieces->missing > 0) pthread_cond_wait(&pieces->done, &pieces->lock);
  pthread_mutex_unlock(&pieces->lock);
  leave(pieces);
  return true;
}
