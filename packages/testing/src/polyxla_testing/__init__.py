"""The test kit for plugin authors, which polyxla's own tests use, too.

Write ``pytest_plugins = ["polyxla_testing.fixtures"]`` in a conftest. To test a runtime, derive
``class TestMine(polyxla_testing.RuntimeConformance)`` and run ``pytest --polyxla-runtime mine``.
"""

from polyxla_testing.conformance import RuntimeConformance
from polyxla_testing.fake import FakeRuntime
from polyxla_testing.fixtures import PluginInstaller, RuntimeUnderTest

__all__ = ["FakeRuntime", "PluginInstaller", "RuntimeConformance", "RuntimeUnderTest"]
