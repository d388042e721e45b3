/* Memory that all replicas of a job share, and the buffers in which they pass arrays to each other. */
#ifndef POLYXLA_SHARED_MEMORY_H
#define POLYXLA_SHARED_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BUFFERS = 2 };

typedef struct Job Job;

/* The replicas of a collective, and which of them this one is. */
typedef struct {
  Job *job;
  const int64_t *members;
  int count, own;
  const char *what;
  /* The first error; later waits of the collective return at once. */
  int code;
  char error[256];
} Group;

/* Returns this process's job, which stays until `polyxla_end_use`; NULL if it shares no memory. */
Job *polyxla_begin_use(void);
void polyxla_end_use(Job *job);
/* Returns whether the job has such a replica, and this process runs it. */
bool polyxla_is_local(const Job *job, int64_t replica);
size_t polyxla_buffer_size(const Job *job);

/* Returns the buffer that this replica publishes next, when nobody reads its previous content; NULL after an error. */
char *polyxla_next_buffer(Group *group);
/* Lets the group read that buffer. */
void polyxla_publish(Group *group);
/* Waits until all members have published; `buffers` gets theirs in the order of the members. */
bool polyxla_await(Group *group, const char **buffers);
/* Waits until the others have read all that this replica has published. */
bool polyxla_await_reads(Group *group);
/* Says that this replica has read the buffers that `polyxla_await` returned. */
void polyxla_release(Group *group);

#endif
