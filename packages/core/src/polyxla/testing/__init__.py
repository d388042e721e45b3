"""What plugin authors test with, and what polyxla's own tests use.

In a conftest: ``pytest_plugins = ["polyxla.testing.fixtures"]``. A runtime proves itself with
``class TestMine(polyxla.testing.RuntimeConformance)`` and ``pytest --polyxla-runtime mine``.
"""

from polyxla.testing.conformance import RuntimeConformance as RuntimeConformance
from polyxla.testing.fake import FakeRuntime as FakeRuntime
from polyxla.testing.fixtures import PluginInstaller as PluginInstaller
from polyxla.testing.fixtures import RuntimeUnderTest as RuntimeUnderTest

__all__ = ["FakeRuntime", "PluginInstaller", "RuntimeConformance", "RuntimeUnderTest"]
