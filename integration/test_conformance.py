"""The runtime keeps every promise that polyxla.testing asks of a runtime."""

from __future__ import annotations

from polyxla.testing import RuntimeConformance


class TestRuntime(RuntimeConformance):
    devices = 1
