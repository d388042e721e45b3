/* Waits of torch_xla and TorchTPU without the GIL. In many places they wait with the GIL held, such as for an array
 * that they read, or for the start of the previous step. The threads that end such a wait need the GIL, so the
 * functions in which the frameworks wait are replaced by functions that release the GIL while they wait.
 *
 * Source: the functions in which torch_xla 2.9.0 and torch's lazy executor, which it extends, wait. absl, which
 * torch_xla and torch_tpu 0.2.0 contain, waits in futex. torch_tpu 0.2.0 makes a process group with the GIL held: it
 * waits for the other replicas' parts in the stores of torch, which wait in nanosleep and poll.
 */
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

#include "linkage.h"

typedef struct _ts PyThreadState;

extern "C" {
/* These functions of Python's C API are weak, because a program without Python may open the library, too. */
__attribute__((weak)) int Py_IsInitialized(void);
__attribute__((weak)) int PyGILState_Check(void);
__attribute__((weak)) PyThreadState *PyEval_SaveThread(void);
__attribute__((weak)) void PyEval_RestoreThread(PyThreadState *);
}

namespace {

constexpr char TORCH[] = "libtorch_cpu.so", TORCH_XLA[] = "_XLAC.", TORCH_TPU[] = "libxla_base.so";

/* While such an object exists, its thread does not have the GIL. */
class WithoutGil {
 public:
  WithoutGil() {
    if (PyEval_SaveThread != nullptr && Py_IsInitialized() && PyGILState_Check()) had_ = PyEval_SaveThread();
  }
  /* A destructor takes the GIL back, because a wait may end by an exception. */
  ~WithoutGil() {
    if (had_ == nullptr) return;
    /* The caller reads the errno of the wait, which Python's functions may change. */
    int kept = errno;
    PyEval_RestoreThread(had_);
    errno = kept;
  }

 private:
  PyThreadState *had_ = nullptr;
};

/* A method that waits, without arguments and without a result. */
typedef void Wait(void *self);

long (*original_syscall)(long, long, long, long, long, long, long);
int (*original_nanosleep)(const timespec *, timespec *);
int (*original_poll)(pollfd *, nfds_t, int);
Wait *wait_for_arrays, *wait_for_own_arrays, *lock_device, *wait_for_device;

template <Wait **wait>
void without_gil(void *self) {
  WithoutGil without_gil;
  (*wait)(self);
}

long syscall_without_gil(long number, long a, long b, long c, long d, long e, long f) {
  if (number != SYS_futex) return syscall(number, a, b, c, d, e, f);
  int operation = b & FUTEX_CMD_MASK;
  if (operation != FUTEX_WAIT && operation != FUTEX_WAIT_BITSET) return syscall(number, a, b, c, d, e, f);
  WithoutGil without_gil;
  return syscall(number, a, b, c, d, e, f);
}

int nanosleep_without_gil(const timespec *duration, timespec *left) {
  WithoutGil without_gil;
  return nanosleep(duration, left);
}

int poll_without_gil(pollfd *files, nfds_t count, int timeout_ms) {
  WithoutGil without_gil;
  return poll(files, count, timeout_ms);
}

template <typename Function>
bool replace(const char *library, const char *name, Function *replacement, Function **original) {
  /* Python loads its modules with all functions resolved, so the original is the function itself and not the
   * linker's search for it. */
  return polyxla_replace(library, name, reinterpret_cast<void *>(replacement), reinterpret_cast<void **>(original));
}

}  // namespace

/* Makes torch_xla wait without the GIL from now on; returns whether all of its functions were replaced. Call this once,
 * after torch_xla is loaded. */
extern "C" bool polyxla_torch_xla_without_gil(void) {
  const char *all_arrays = "_ZN5torch4lazy9MultiWait4WaitEv";
  return replace(TORCH, all_arrays, without_gil<&wait_for_arrays>, &wait_for_arrays) &&
         replace(TORCH_XLA, all_arrays, without_gil<&wait_for_own_arrays>, &wait_for_own_arrays) &&
         replace(TORCH, "_ZN5torch4lazy17LazyGraphExecutor12DeviceLocker4LockEv", without_gil<&lock_device>,
                 &lock_device) &&
         replace(TORCH, "_ZN5torch4lazy17LazyGraphExecutor12DeviceLocker7BarrierEv", without_gil<&wait_for_device>,
                 &wait_for_device) &&
         replace(TORCH_XLA, "syscall", syscall_without_gil, &original_syscall);
}

/* Does the same for TorchTPU. Call this once, after torch_tpu is loaded. */
extern "C" bool polyxla_torch_tpu_without_gil(void) {
  return replace(TORCH_TPU, "syscall", syscall_without_gil, &original_syscall) &&
         replace(TORCH, "nanosleep", nanosleep_without_gil, &original_nanosleep) &&
         replace(TORCH, "poll", poll_without_gil, &original_poll);
}
