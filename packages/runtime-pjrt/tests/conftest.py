import os

pytest_plugins = ["polyxla.testing.fixtures"]

# Tests count compilations, and a person's programs are not theirs.
os.environ["POLYXLA_COMPILE_CACHE"] = "off"
