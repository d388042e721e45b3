/* The function that torch_xla looks up in the library, and the table that it returns. Python fills the table. */
#include <stddef.h>

static const void *api;

void polyxla_set_api(const void *value) { api = value; }

/* Replaces the functions in Python when Python ends. */
void *polyxla_nothing(void *args) {
  (void)args;
  return NULL;
}

const void *GetPjrtApi(void) { return api; }
