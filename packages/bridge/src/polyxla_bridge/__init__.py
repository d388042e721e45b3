"""A PJRT plugin written in Python: any `Engine` becomes a torch_xla device.

Importing this, or `polyxla_bridge.torch_xla_plugin`, starts nothing and imports neither jax nor numpy.
"""
