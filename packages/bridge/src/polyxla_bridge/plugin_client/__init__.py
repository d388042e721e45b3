"""A client of any PJRT plugin: the calls of its function table, with Python's objects and exceptions.

Importing this package loads no library and imports neither jax nor numpy.
"""
