/* The shared library that torch_xla opens: it exports the symbol, Python fills in what it returns. */
static const void *api;

void polyxla_set_api(const void *value) { api = value; }

/* What the table holds once Python is about to end. */
void *polyxla_nothing(void *args) {
  (void)args;
  return 0;
}

const void *GetPjrtApi(void) { return api; }
