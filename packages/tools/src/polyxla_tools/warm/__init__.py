"""A prepared process from which launches of polyxla start at once."""
