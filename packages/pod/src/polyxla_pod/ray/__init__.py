"""polyxla on Ray: commands and functions on all hosts of a TPU that are nodes of an existing cluster."""
