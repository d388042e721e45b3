/* Buffers that replicas of one machine pass to each other, and the waits for them.
 *
 * Each replica has two buffers, which it publishes in turn. For each other replica, it has a cell: how many buffers it
 * has published to that one, and how many of that one's it has read. Only one replica writes a number, and another
 * waits until it is as large as its own count, so no replica needs a lock, and a replica that has moved on to another
 * group confuses nobody.
 *
 * A replica sleeps on its own bell, which the others ring. It wakes up ten times a second to look whether those that it
 * waits for still live.
 */
#define _GNU_SOURCE
#include "shared_memory.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ffi.h"

/* All buffers of a job, unless it has very few or very many replicas. Beyond the largest size, a buffer is no faster;
 * below the smallest, replicas mostly wait. */
enum { ALL_BYTES = 64 << 20, MOST_BYTES = 1 << 20, LEAST_BYTES = 1 << 16, LINE = 64, CHECK_NS = 100000000 };

/* What one replica tells another. A buffer's number is at the place of the count's last bit: at most two buffers are
 * published and not yet read. */
typedef struct {
  atomic_uint published, read;
  unsigned char buffer[BUFFERS];
} Cell;

typedef struct {
  _Alignas(LINE) atomic_uint bell;
  atomic_bool sleeps, has_left;
  atomic_int process;
  /* When the process was started, because another one may get its number. */
  atomic_ullong started;
} Replica;

/* What a replica remembers about its cells; only its own thread uses it. */
typedef struct {
  unsigned *published, *read;
  int next;
  struct {
    int count;
    int64_t *members;
    unsigned *reads;
  } uses[BUFFERS];
} Memory;

struct Job {
  int replicas;
  size_t size, buffer_size;
  char *base;
  Replica *states;
  Cell *cells;
  char *buffers;
  bool *is_local;
  Memory *memories;
  atomic_bool is_over;
  /* Threads that are in a collective; guarded by the lock. */
  int uses;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Job *current;

static size_t round_up(size_t size) { return (size + LINE - 1) / LINE * LINE; }

static size_t buffer_size_of(int replicas) {
  size_t size = ALL_BYTES / (BUFFERS * replicas) / LINE * LINE;
  return size > MOST_BYTES ? MOST_BYTES : size < LEAST_BYTES ? LEAST_BYTES : size;
}

/* Returns the bytes that a job's memory needs. */
size_t polyxla_shared_size(int replicas) {
  size_t cells = round_up(sizeof(Cell) * replicas * replicas);
  return sizeof(Replica) * replicas + cells + buffer_size_of(replicas) * BUFFERS * replicas;
}

/* Returns when a process was started, in ticks since the machine was; 0 if it has ended. */
static unsigned long long start_of(int process) {
  char path[32], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE *file = fopen(path, "r");
  if (file == NULL) return 0;
  size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  /* The program's name may contain anything; the last parenthesis ends it. The state comes next.
   * Source: proc_pid_stat(5). */
  char state = 0;
  unsigned long long started = 0;
  const char *rest = strrchr(text, ')');
  const char *format = ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu";
  if (rest == NULL || sscanf(rest, format, &state, &started) != 2) return 0;
  return state == 'Z' || state == 'X' ? 0 : started;
}

static void discard(Job *job) {
  for (int i = 0; i < job->replicas; i++) {
    Memory *memory = &job->memories[i];
    free(memory->published);
    free(memory->read);
    for (int b = 0; b < BUFFERS; b++) {
      free(memory->uses[b].members);
      free(memory->uses[b].reads);
    }
  }
  free(job->memories);
  free(job->is_local);
  if (job->base != NULL) munmap(job->base, job->size);
  free(job);
}

static bool remember(Memory *memory, int replicas) {
  memory->published = calloc(replicas, sizeof *memory->published);
  memory->read = calloc(replicas, sizeof *memory->read);
  bool is_there = memory->published != NULL && memory->read != NULL;
  for (int b = 0; b < BUFFERS; b++) {
    memory->uses[b].members = calloc(replicas, sizeof *memory->uses[b].members);
    memory->uses[b].reads = calloc(replicas, sizeof *memory->uses[b].reads);
    is_there = is_there && memory->uses[b].members != NULL && memory->uses[b].reads != NULL;
  }
  return is_there;
}

/* Makes a file of `polyxla_shared_size` bytes the memory of this process's job; `local` are the replicas in this
 * process. Returns whether it could: a process has at most one such job at a time. */
bool polyxla_join(int file, int replicas, const int64_t *local, int count) {
  Job *job = calloc(1, sizeof *job);
  if (job == NULL) return false;
  *job = (Job){.replicas = replicas, .size = polyxla_shared_size(replicas), .buffer_size = buffer_size_of(replicas)};
  void *base = mmap(NULL, job->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  job->base = base == MAP_FAILED ? NULL : base;
  job->is_local = calloc(replicas, sizeof *job->is_local);
  job->memories = calloc(replicas, sizeof *job->memories);
  bool is_there = job->base != NULL && job->is_local != NULL && job->memories != NULL;
  for (int i = 0; is_there && i < count; i++) is_there = remember(&job->memories[local[i]], replicas);
  pthread_mutex_lock(&lock);
  bool joins = is_there && current == NULL;
  if (joins) current = job;
  pthread_mutex_unlock(&lock);
  if (!joins) {
    if (job->memories == NULL) job->replicas = 0;
    discard(job);
    return false;
  }
  job->states = (Replica *)job->base;
  job->cells = (Cell *)(job->states + replicas);
  job->buffers = (char *)job->cells + round_up(sizeof(Cell) * replicas * replicas);
  for (int i = 0; i < count; i++) {
    Replica *state = &job->states[local[i]];
    job->is_local[local[i]] = true;
    atomic_store(&state->started, start_of(getpid()));
    atomic_store(&state->process, getpid());
  }
  return true;
}

static void ring(Replica *state) {
  if (!atomic_exchange(&state->sleeps, false)) return;
  atomic_fetch_add(&state->bell, 1);
  syscall(SYS_futex, &state->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Ends the waits of this process's replicas, and of those that wait for them. */
void polyxla_leave(void) {
  pthread_mutex_lock(&lock);
  Job *job = current;
  current = NULL;
  if (job != NULL) job->uses++;
  pthread_mutex_unlock(&lock);
  if (job == NULL) return;
  /* A process that was forked from one of the job has a copy of all this, and no replica. */
  for (int i = 0; i < job->replicas; i++)
    if (job->is_local[i] && atomic_load(&job->states[i].process) == getpid())
      atomic_store(&job->states[i].has_left, true);
  atomic_store(&job->is_over, true);
  for (int i = 0; i < job->replicas; i++) ring(&job->states[i]);
  polyxla_end_use(job);
}

/* Returns whether this process has such a job. */
bool polyxla_is_joined(void) {
  pthread_mutex_lock(&lock);
  bool is_joined = current != NULL;
  pthread_mutex_unlock(&lock);
  return is_joined;
}

Job *polyxla_begin_use(void) {
  pthread_mutex_lock(&lock);
  Job *job = current;
  if (job != NULL) job->uses++;
  pthread_mutex_unlock(&lock);
  return job;
}

void polyxla_end_use(Job *job) {
  pthread_mutex_lock(&lock);
  bool is_last = --job->uses == 0 && job != current;
  pthread_mutex_unlock(&lock);
  if (is_last) discard(job);
}

bool polyxla_is_local(const Job *job, int64_t replica) {
  return replica >= 0 && replica < job->replicas && job->is_local[replica];
}

size_t polyxla_buffer_size(const Job *job) { return job->buffer_size; }

static Cell *cell(const Job *job, int64_t from, int64_t to) { return &job->cells[from * job->replicas + to]; }

static bool fail(Group *group, int code, int64_t other) {
  group->code = code;
  const char *text = "replica %lld (process %d) ended while replica %lld waited for it in %s";
  if (code == FFI_CANCELLED) text = "the engine was closed";
  snprintf(group->error, sizeof group->error, text, (long long)other,
           atomic_load(&group->job->states[other].process), (long long)group->members[group->own], group->what);
  return false;
}

/* Returns whether a replica has left, or its process has ended. One that has not come yet has no process. */
static bool is_gone(Replica *state) {
  int process = atomic_load(&state->process);
  return atomic_load(&state->has_left) || (process != 0 && start_of(process) != atomic_load(&state->started));
}

/* Waits until a number that another replica counts up is at least `wanted`. */
static bool wait_for(Group *group, atomic_uint *number, unsigned wanted, int64_t other) {
  Job *job = group->job;
  Replica *own = &job->states[group->members[group->own]];
  /* Numbers may overflow, so only their difference counts. */
  while ((int)(atomic_load_explicit(number, memory_order_acquire) - wanted) < 0) {
    unsigned heard = atomic_load(&own->bell);
    atomic_store(&own->sleeps, true);
    /* The other may have counted before it could see that this one sleeps. */
    if ((int)(atomic_load(number) - wanted) >= 0) break;
    if (atomic_load(&job->is_over)) return fail(group, FFI_CANCELLED, other);
    struct timespec limit = {.tv_nsec = CHECK_NS};
    if (syscall(SYS_futex, &own->bell, FUTEX_WAIT, heard, &limit, NULL, 0) == 0) continue;
    /* What the other did before its end still counts. */
    if (is_gone(&job->states[other]) && (int)(atomic_load(number) - wanted) < 0)
      return fail(group, FFI_UNAVAILABLE, other);
  }
  atomic_store(&own->sleeps, false);
  return true;
}

static Memory *memory_of(Group *group) { return &group->job->memories[group->members[group->own]]; }

static char *buffer_of(const Job *job, int64_t replica, int number) {
  return job->buffers + (replica * BUFFERS + number) * job->buffer_size;
}

static bool await_reads_of(Group *group, int number) {
  int64_t own = group->members[group->own];
  Memory *memory = memory_of(group);
  for (int i = 0; i < memory->uses[number].count; i++) {
    int64_t other = memory->uses[number].members[i];
    if (!wait_for(group, &cell(group->job, other, own)->read, memory->uses[number].reads[i], other)) return false;
  }
  return true;
}

char *polyxla_next_buffer(Group *group) {
  int next = memory_of(group)->next;
  return await_reads_of(group, next) ? buffer_of(group->job, group->members[group->own], next) : NULL;
}

bool polyxla_await_reads(Group *group) {
  for (int number = 0; number < BUFFERS; number++)
    if (!await_reads_of(group, number)) return false;
  return true;
}

void polyxla_publish(Group *group) {
  int64_t own = group->members[group->own];
  Memory *memory = memory_of(group);
  int number = memory->next, count = 0;
  for (int i = 0; i < group->count; i++) {
    int64_t other = group->members[i];
    if (i == group->own) continue;
    Cell *mine = cell(group->job, own, other);
    mine->buffer[memory->published[other] % BUFFERS] = number;
    memory->uses[number].members[count] = other;
    memory->uses[number].reads[count++] = ++memory->published[other];
    atomic_store(&mine->published, memory->published[other]);
    ring(&group->job->states[other]);
  }
  memory->uses[number].count = count;
  memory->next = (number + 1) % BUFFERS;
}

bool polyxla_await(Group *group, const char **buffers) {
  int64_t own = group->members[group->own];
  Memory *memory = memory_of(group);
  for (int i = 0; i < group->count; i++) {
    int64_t other = group->members[i];
    if (i == group->own) {
      /* It was published before this call. */
      buffers[i] = buffer_of(group->job, own, (memory->next + BUFFERS - 1) % BUFFERS);
      continue;
    }
    Cell *theirs = cell(group->job, other, own);
    if (!wait_for(group, &theirs->published, memory->read[other] + 1, other)) return false;
    int number = theirs->buffer[memory->read[other] % BUFFERS];
    buffers[i] = buffer_of(group->job, other, number < BUFFERS ? number : 0);
  }
  return true;
}

void polyxla_release(Group *group) {
  int64_t own = group->members[group->own];
  Memory *memory = memory_of(group);
  for (int i = 0; i < group->count; i++) {
    int64_t other = group->members[i];
    if (i == group->own) continue;
    atomic_store(&cell(group->job, own, other)->read, ++memory->read[other]);
    ring(&group->job->states[other]);
  }
}
