/* Reads of buffers. Python answers them, and must know who asks: torch_xla may wait for the bytes with the GIL
 * held, which the threads that bring them need. */
#include "objects.h"

/* Of Python's C API. Weak, because a program without Python may open the library, too. */
__attribute__((weak)) int PyGILState_Check(void);

typedef Error *Read(PJRT_Buffer_ToHostBuffer_Args *args);

static Read *read_in_python;
static _Thread_local bool has_gil;

/* Called by Python. */

void polyxla_set_read(Read *read) { read_in_python = read; }

/* Whether the thread that asks for bytes held the GIL when it asked. */
bool polyxla_reader_has_gil(void) { return has_gil; }

/* Called by torch_xla, as PJRT_Buffer_ToHostBuffer. */
Error *polyxla_read(PJRT_Buffer_ToHostBuffer_Args *args) {
  has_gil = PyGILState_Check != NULL && PyGILState_Check();
  return read_in_python(args);
}
