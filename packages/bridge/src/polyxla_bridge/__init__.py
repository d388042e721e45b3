"""A PJRT plugin written in Python: any `Engine` becomes a torch_xla device.

It is not used by any runtime yet: a program on it can still hang, seldom, where torch_xla's locks meet
Python's.

Importing this, or `polyxla_bridge.plugin`, starts nothing and imports neither jax nor numpy.
"""
