/* Naps for the threads in which gloo, which jaxlib contains, waits for its sockets.
 *
 * Such a thread leaves a message in its socket while another thread uses the connection. Until that other thread is
 * done, epoll reports the same socket again at once. If there are more replicas than cores, the other thread is often
 * not even running: four replicas on two cores spent a third of their CPU time on these calls. So a thread that gets
 * the same answer again and again takes a nap.
 *
 * Source: gloo/transport/tcp, Loop::run and Pair::handleEvents, which only tries to lock the pair.
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <time.h>

#include "linkage.h"

static const char LIBRARY[] = "libjax_common.so";
static const char FUNCTION[] = "epoll_wait";

/* A thread that makes progress takes longer than IDLE_NS until it calls again, waits longer than that for the answer,
 * or gets other sockets. */
enum { IDLE_NS = 20000, ANSWERS = 4, NAP_NS = 100000 };

static atomic_long waits, naps;

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Waits like epoll_wait, but returns only after a nap if the same answer comes at once for the fifth time. */
int polyxla_epoll_wait(int epoll, struct epoll_event *events, int size, int timeout_ms) {
  static _Thread_local struct epoll_event last;
  static _Thread_local int last_count, repeated;
  static _Thread_local int64_t returned_ns;

  atomic_fetch_add(&waits, 1);
  int64_t asked_ns = now_ns();
  int count = epoll_wait(epoll, events, size, timeout_ms);
  if (count <= 0) {
    repeated = 0;
    return count;
  }
  bool is_idle = asked_ns - returned_ns < IDLE_NS && now_ns() - asked_ns < IDLE_NS;
  bool is_same = count == last_count && events[0].events == last.events && events[0].data.u64 == last.data.u64;
  repeated = is_idle && is_same ? repeated + 1 : 0;
  last = events[0];
  last_count = count;
  if (repeated >= ANSWERS) {
    nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    atomic_fetch_add(&naps, 1);
  }
  returned_ns = now_ns();
  return count;
}

/* Lets gloo's threads nap. A second call changes nothing. If jaxlib is linked in another way, nothing changes at
 * all: the naps only save CPU time. */
void polyxla_let_gloo_nap(void) {
  void *original;
  polyxla_replace(LIBRARY, FUNCTION, (void *)polyxla_epoll_wait, &original);
}

/* The numbers of waits and of naps so far. */
long polyxla_waits(void) { return atomic_load(&waits); }
long polyxla_naps(void) { return atomic_load(&naps); }
