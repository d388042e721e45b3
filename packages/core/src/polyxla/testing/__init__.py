"""The test kit for plugin authors, which polyxla's own tests use, too.

Write ``pytest_plugins = ["polyxla.testing.fixtures"]`` in a conftest. To test a runtime, derive
``class TestMine(polyxla.testing.RuntimeConformance)`` and run ``pytest --polyxla-runtime mine``.
"""

from polyxla.testing.conformance import RuntimeConformance
from polyxla.testing.fake import FakeRuntime
from polyxla.testing.fixtures import PluginInstaller, RuntimeUnderTest

__all__ = ["FakeRuntime", "PluginInstaller", "RuntimeConformance", "RuntimeUnderTest"]
