"""One idea a file; each runs on the runtime that the environment selects."""
