import os

pytest_plugins = ["polyxla_testing.fixtures"]

# Tests count compilations, so they must not load programs from the user's cache.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"
