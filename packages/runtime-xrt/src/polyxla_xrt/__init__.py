"""polyxla's runtime for TPU nodes. It reads what it is told, but cannot run anything yet."""
