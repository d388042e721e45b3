"""The environment variable that polyxla-training reads."""

POLYXLA_OBSERVE = "POLYXLA_OBSERVE"
"""``off`` does not watch the loops of `polyxla.launch`.
Default: on.
"""
