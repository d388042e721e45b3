"""polyxla's runtime for TPU nodes: clients that trace programs, and workers that run them on their cores."""
