/* The function that a framework looks up in the library, and the table that it returns. Python fills the table before
 * the library is opened; if the library stands in for libtpu, Python fills it when it is opened. */
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

/* These functions of Python's stable ABI are weak, because a program without Python may open the library, too. They
 * are declared here, because the library is built once for all versions of Python. */
__attribute__((weak)) int PyGILState_Ensure(void);
__attribute__((weak)) void PyGILState_Release(int state);
__attribute__((weak)) void *PyImport_ImportModule(const char *name);
__attribute__((weak)) void *PyObject_CallMethod(void *object, const char *name, const char *format, ...);
__attribute__((weak)) void PyErr_Print(void);
__attribute__((weak)) void Py_DecRef(void *object);

static const void *api;

void polyxla_set_api(const void *value) { api = value; }

/* Python puts this function in the place of its own before it ends. */
void *polyxla_nothing(void *args) {
  (void)args;
  return NULL;
}

/* Let Python fill the table as an emulated libtpu. */
static void emulate_libtpu(void) {
  int state = PyGILState_Ensure();
  void *module = PyImport_ImportModule("polyxla_bridge.libtpu");
  void *answer = module == NULL ? NULL : PyObject_CallMethod(module, "open_library", NULL);
  if (answer == NULL) {
    PyErr_Print();
    /* A framework that got no table would crash. */
    fputs("polyxla: the emulated libtpu could not start, see the error above; the process ends\n", stderr);
    _exit(1);
  }
  Py_DecRef(answer);
  Py_DecRef(module);
  PyGILState_Release(state);
}

const void *GetPjrtApi(void) {
  if (api == NULL && PyGILState_Ensure != NULL) emulate_libtpu();
  return api;
}
