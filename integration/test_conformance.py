"""The runtime passes the conformance suite of polyxla_testing."""

from __future__ import annotations

from polyxla_testing import RuntimeConformance


class TestRuntime(RuntimeConformance):
    devices = 1
