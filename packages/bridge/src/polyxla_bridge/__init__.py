"""A PJRT plugin written in Python: any `polyxla_bridge.engine.engine.Engine` becomes a torch_xla device.

Importing this package or `polyxla_bridge.torch_xla_plugin` starts nothing and imports neither jax nor numpy.
"""
