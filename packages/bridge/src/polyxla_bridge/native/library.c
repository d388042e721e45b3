/* The shared library that torch_xla opens: it exports the symbol, Python fills in what it returns. */
#include <stddef.h>

static const void *api;

void polyxla_set_api(const void *value) { api = value; }

/* What stands for a function of Python's once Python is about to end. */
void *polyxla_nothing(void *args) {
  (void)args;
  return NULL;
}

const void *GetPjrtApi(void) { return api; }
