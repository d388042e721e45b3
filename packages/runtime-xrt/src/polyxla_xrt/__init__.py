"""polyxla's runtime for TPU nodes. It is found and named, but cannot run anything yet."""
