/* Collectives of replicas of one machine, which programs call by XLA's foreign function interface.
 *
 * The arrays go through the buffers of the replicas in pieces. Every replica adds in the order of the replicas, so all
 * get the same bits, in every run.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "ffi.h"
#include "reduction.h"
#include "shared_memory.h"

/* Each replica reduces all of a small piece itself: a second wait would take longer. A large result, for which the
 * caches have no room, is written past them, unless a part of it is very short. */
enum { SMALL_BYTES = 1 << 15, LARGE_BYTES = 8 << 20, SHORT_BYTES = 1 << 12, MOST_MEMBERS = 512 };

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

static size_t bytes_of(const FfiBuffer *buffer) {
  size_t size = polyxla_width(buffer->type);
  for (int64_t i = 0; i < buffer->rank; i++) size *= buffer->dims[i];
  return size;
}

/* Returns the number in the job of one of the program's replicas. */
static int64_t in_job(const FfiCall *call, int64_t replica) {
  const FfiArray *devices = polyxla_ffi_attribute(call, "devices");
  return devices->count > 0 ? ((const int64_t *)devices->data)[replica] : replica;
}

/* Several arrays, of which each operation takes a part as if they were one. */
typedef struct {
  FfiBuffer **arrays;
  int64_t count;
} Arrays;

/* Writes a part of a result. The caches would first read what is overwritten. */
static void put(char *into, const char *from, size_t size, bool is_large) {
#ifdef __SSE2__
  if (is_large && size >= SHORT_BYTES) {
    enum { WIDTH = sizeof(__m128i) };
    size_t some = -(uintptr_t)into % WIDTH;
    memcpy(into, from, some);
    for (; some + WIDTH <= size; some += WIDTH)
      _mm_stream_si128((__m128i *)(into + some), _mm_loadu_si128((const __m128i *)(from + some)));
    _mm_sfence();
    into += some, from += some, size -= some;
  }
#else
  (void)is_large;
#endif
  memcpy(into, from, size);
}

static size_t size_of(const Arrays *all) {
  size_t size = 0;
  for (int64_t i = 0; i < all->count; i++) size += bytes_of(all->arrays[i]);
  return size;
}

/* Returns where bytes of the arrays are; NULL if not all are in one array. */
static const char *place_of(const Arrays *all, size_t offset, size_t size) {
  for (int64_t i = 0; i < all->count; i++) {
    size_t whole = bytes_of(all->arrays[i]);
    if (offset < whole) return size <= whole - offset ? (const char *)all->arrays[i]->data + offset : NULL;
    offset -= whole;
  }
  return NULL;
}

static void copy(const Arrays *all, size_t offset, char *buffer, size_t size, bool is_read) {
  bool is_large = size_of(all) >= LARGE_BYTES;
  for (int64_t i = 0; i < all->count && size > 0; i++) {
    size_t whole = bytes_of(all->arrays[i]);
    if (offset >= whole) {
      offset -= whole;
      continue;
    }
    size_t some = least(whole - offset, size);
    char *array = (char *)all->arrays[i]->data + offset;
    if (is_read)
      memcpy(buffer, array, some);
    else
      put(array, buffer, some, is_large);
    buffer += some;
    size -= some;
    offset = 0;
  }
}

/* Publishes a piece of the operands without the bytes from `start` to `end`, and waits for those of the others. */
static bool exchange_without(Group *group, const Arrays *in, size_t offset, size_t size, size_t start, size_t end,
                             const char **pieces) {
  char *buffer = polyxla_next_buffer(group);
  if (buffer == NULL) return false;
  copy(in, offset, buffer, start, true);
  copy(in, offset + end, buffer + end, size - end, true);
  polyxla_publish(group);
  return polyxla_await(group, pieces);
}

static bool exchange(Group *group, const Arrays *in, size_t offset, size_t size, const char **pieces) {
  return exchange_without(group, in, offset, size, 0, 0, pieces);
}

/* Where a member's part of a piece begins: each reduces one part, of whole numbers. */
static size_t part(size_t size, int count, int member, size_t width) {
  return size / width * member / count * width;
}

/* All replicas find this before they exchange anything, so none waits for another. */
static bool reduces(Group *group, int type, Reduction how) {
  if (polyxla_reduces(type, how)) return true;
  group->code = FFI_UNIMPLEMENTED;
  snprintf(group->error, sizeof group->error, "reduction %d of numbers of type %d is not known", how, type);
  return false;
}

static bool all_reduce(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces) {
  Reduction how = polyxla_ffi_number(call, "reduction");
  int type = in.arrays[0]->type;
  if (!reduces(group, type, how)) return false;
  size_t total = size_of(&in), step = polyxla_buffer_size(group->job), width = polyxla_width(type);
  for (size_t offset = 0; offset < total; offset += step) {
    size_t size = least(step, total - offset);
    if (size <= SMALL_BYTES) {
      if (!exchange(group, &in, offset, size, pieces)) return false;
      char sum[SMALL_BYTES];
      polyxla_reduce(sum, pieces, group->count, size, type, how);
      polyxla_release(group);
      copy(&out, offset, sum, size, false);
      continue;
    }
    size_t start = part(size, group->count, group->own, width), end = part(size, group->count, group->own + 1, width);
    /* No other reads the part that this replica reduces. */
    const char *own = place_of(&in, offset + start, end - start);
    if (!exchange_without(group, &in, offset, size, own == NULL ? end : start, end, pieces)) return false;
    char *buffer = polyxla_next_buffer(group);
    if (buffer == NULL) return false;
    for (int i = 0; i < group->count; i++) pieces[i] += start;
    if (own != NULL) pieces[group->own] = own;
    polyxla_reduce(buffer, pieces, group->count, end - start, type, how);
    polyxla_release(group);
    polyxla_publish(group);
    if (!polyxla_await(group, pieces)) return false;
    for (int i = 0; i < group->count; i++) {
      start = part(size, group->count, i, width), end = part(size, group->count, i + 1, width);
      copy(&out, offset + start, (char *)pieces[i], end - start, false);
    }
    polyxla_release(group);
  }
  return true;
}

/* Returns the bytes of an array's part that has the dimensions from this one on. */
static size_t behind(const FfiBuffer *array, int64_t dimension) {
  size_t size = polyxla_width(array->type);
  for (int64_t i = dimension; i < array->rank; i++) size *= array->dims[i];
  return size;
}

/* The part of an array's bytes that is in one row, and also in the current piece. */
typedef struct {
  size_t start, size;
} Span;

static bool next_span(Span *span, size_t row, size_t end) {
  span->start += span->size;
  span->size = least(row - span->start % row, end - span->start);
  return span->size > 0;
}

static bool all_gather(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces) {
  size_t total = bytes_of(in.arrays[0]), step = polyxla_buffer_size(group->job);
  /* Each member's rows alternate with those of the others. */
  size_t row = behind(in.arrays[0], polyxla_ffi_number(call, "dimension"));
  bool is_large = total * group->count >= LARGE_BYTES;
  for (size_t offset = 0; offset < total; offset += step) {
    size_t size = least(step, total - offset);
    if (!exchange(group, &in, offset, size, pieces)) return false;
    for (Span span = {.start = offset}; next_span(&span, row, offset + size);)
      for (int i = 0; i < group->count; i++) {
        size_t place = (span.start / row * group->count + i) * row + span.start % row;
        put((char *)out.arrays[0]->data + place, pieces[i] + (span.start - offset), span.size, is_large);
      }
    polyxla_release(group);
  }
  return true;
}

/* Finds the next one whose row belongs to this replica: the members' rows alternate. */
static bool next_own_span(Span *span, size_t row, size_t end, const Group *group) {
  while (next_span(span, row, end))
    if (span->start / row % group->count == (size_t)group->own) return true;
  return false;
}

static bool reduce_scatter(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces) {
  Reduction how = polyxla_ffi_number(call, "reduction");
  int type = in.arrays[0]->type;
  if (!reduces(group, type, how)) return false;
  size_t total = bytes_of(in.arrays[0]), step = polyxla_buffer_size(group->job);
  size_t row = behind(out.arrays[0], polyxla_ffi_number(call, "dimension"));
  for (size_t offset = 0; offset < total; offset += step) {
    size_t size = least(step, total - offset);
    if (!exchange(group, &in, offset, size, pieces)) return false;
    for (Span span = {.start = offset}; next_own_span(&span, row, offset + size, group);) {
      const char *rows[MOST_MEMBERS];
      for (int i = 0; i < group->count; i++) rows[i] = pieces[i] + (span.start - offset);
      char *result = (char *)out.arrays[0]->data + span.start / row / group->count * row + span.start % row;
      polyxla_reduce(result, rows, group->count, span.size, type, how);
    }
    polyxla_release(group);
  }
  return true;
}

static bool all_to_all(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces) {
  size_t total = size_of(&in), step = polyxla_buffer_size(group->job);
  /* The operands are the members' parts, or one operand has them in one dimension. */
  int64_t dimension = polyxla_ffi_number(call, "dimension");
  size_t row = dimension < 0 ? bytes_of(in.arrays[0]) : behind(in.arrays[0], dimension) / group->count;
  for (size_t offset = 0; offset < total; offset += step) {
    size_t size = least(step, total - offset);
    if (!exchange(group, &in, offset, size, pieces)) return false;
    for (Span span = {.start = offset}; next_own_span(&span, row, offset + size, group);) {
      for (int i = 0; i < group->count; i++) {
        size_t place = (span.start / row / group->count * group->count + i) * row + span.start % row;
        copy(&out, place, (char *)pieces[i] + (span.start - offset), span.size, false);
      }
    }
    polyxla_release(group);
  }
  return true;
}

/* Passes the operand from one replica to others, which have read it when this returns. */
static bool pass(Group *group, Arrays in, Arrays out, const int64_t *targets, int target_count, const int64_t *source) {
  size_t total = bytes_of(out.arrays[0]), step = polyxla_buffer_size(group->job);
  int64_t own = group->members[group->own], members[MOST_MEMBERS + 1], pair[2] = {own, source ? *source : own};
  members[0] = own;
  if (target_count > 0) memcpy(members + 1, targets, sizeof *targets * target_count);
  group->own = 0;
  for (size_t offset = 0; offset < total; offset += step) {
    size_t size = least(step, total - offset);
    if (target_count > 0) {
      group->members = members, group->count = target_count + 1;
      char *buffer = polyxla_next_buffer(group);
      if (buffer == NULL) return false;
      copy(&in, offset, buffer, size, true);
      polyxla_publish(group);
    }
    if (source != NULL) {
      const char *pieces[2];
      group->members = pair, group->count = 2;
      if (!polyxla_await(group, pieces)) return false;
      copy(&out, offset, (char *)pieces[1], size, false);
      polyxla_release(group);
    }
  }
  /* A replica that went on at once would leave its array to the next job of these replicas if this one ends here. */
  return polyxla_await_reads(group);
}

static bool broadcast(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces) {
  (void)call, (void)pieces;
  if (group->count == 0) {
    memset(out.arrays[0]->data, 0, bytes_of(out.arrays[0]));
    return true;
  }
  if (group->own != 0) return pass(group, in, out, NULL, 0, group->members);
  memcpy(out.arrays[0]->data, in.arrays[0]->data, bytes_of(in.arrays[0]));
  return pass(group, in, out, group->members + 1, group->count - 1, NULL);
}

/* Its group has two members each: a source and the target. A replica may be in two of them, or in none. */
static bool permute(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces) {
  (void)pieces;
  const FfiArray *pairs = polyxla_ffi_attribute(call, "groups");
  const int64_t *numbers = pairs->data;
  int64_t own = group->members[group->own], target, source;
  bool has_target = false, has_source = false;
  for (size_t i = 0; i + 1 < pairs->count; i += 2) {
    int64_t from = in_job(call, numbers[i]), to = in_job(call, numbers[i + 1]);
    if (from == own) has_target = true, target = to;
    if (to == own) has_source = true, source = from;
  }
  if (has_source && source == own) {
    memcpy(out.arrays[0]->data, in.arrays[0]->data, bytes_of(in.arrays[0]));
    return true;
  }
  if (!has_source) memset(out.arrays[0]->data, 0, bytes_of(out.arrays[0]));
  return pass(group, in, out, &target, has_target, has_source ? &source : NULL);
}

typedef bool Collective(Group *group, const FfiCall *call, Arrays in, Arrays out, const char **pieces);

/* Finds this replica's group, and carries out the collective. The last two arguments are the replica's number in the
 * program and the ticket of the collective before, the last result is the ticket: collectives that do not depend on
 * each other must run in the same order on all replicas. */
static void *run(FfiCall *call, Collective *collective, const char *what) {
  if (polyxla_ffi_prepares(call)) return NULL;
  int64_t operands = call->arguments.count - 2;
  int64_t replica = *(const uint32_t *)call->arguments.buffers[operands]->data;
  const FfiArray *groups = polyxla_ffi_attribute(call, "groups");
  const int64_t *numbers = groups->data;
  int64_t count = polyxla_ffi_number(call, "group_size"), members[MOST_MEMBERS] = {in_job(call, replica)};
  /* A group without members, if none names this replica. */
  Group group = {.members = members, .what = what};
  for (size_t i = 0; i < groups->count; i++)
    if (numbers[i] == replica) {
      size_t first = i - i % count;
      group.own = i - first, group.count = count;
      for (int64_t member = 0; member < count; member++) members[member] = in_job(call, numbers[first + member]);
      break;
    }
  group.job = polyxla_begin_use();
  if (group.job == NULL)
    return polyxla_ffi_error(call, FFI_FAILED_PRECONDITION, "the replicas of this job share no memory");
  const char *pieces[MOST_MEMBERS];
  Arrays in = {call->arguments.buffers, operands}, out = {call->results.buffers, operands};
  bool is_done = polyxla_is_local(group.job, members[group.own]) && collective(&group, call, in, out, pieces);
  *(uint32_t *)call->results.buffers[operands]->data = 0;
  polyxla_end_use(group.job);
  if (is_done) return NULL;
  if (group.code == 0) return polyxla_ffi_error(call, FFI_FAILED_PRECONDITION, "this process does not run the replica");
  return polyxla_ffi_error(call, group.code, group.error);
}

void *polyxla_all_reduce(FfiCall *call) { return run(call, all_reduce, "an all-reduce"); }
void *polyxla_all_gather(FfiCall *call) { return run(call, all_gather, "an all-gather"); }
void *polyxla_reduce_scatter(FfiCall *call) { return run(call, reduce_scatter, "a reduce-scatter"); }
void *polyxla_all_to_all(FfiCall *call) { return run(call, all_to_all, "an all-to-all"); }
void *polyxla_collective_broadcast(FfiCall *call) { return run(call, broadcast, "a broadcast"); }
void *polyxla_collective_permute(FfiCall *call) { return run(call, permute, "a permute"); }
