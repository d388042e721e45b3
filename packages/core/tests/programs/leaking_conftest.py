"""The conftest of `leaking_tests.py`."""

import os

from polyxla_testing import fixtures

pytest_plugins = ["polyxla_testing.fixtures"]
os.environ["CHANGED"] = "before"
# Threads have five seconds to end.
fixtures._still_running.__defaults__ = (0.2,)
