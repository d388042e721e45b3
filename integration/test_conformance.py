"""The runtime passes the conformance suite of polyxla.testing."""

from __future__ import annotations

from polyxla.testing import RuntimeConformance


class TestRuntime(RuntimeConformance):
    devices = 1
