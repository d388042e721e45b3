"""Lightning's interface, as far as users rely on it: hooks, data, callbacks. Imports no Lightning."""
