"""What all test suites share: the option ``--long``, and examples of hypothesis without a time limit."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--long", action="store_true", help="also run tests that are marked as long")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and hypothesis' settings where it is installed."""
    config.addinivalue_line(
        "markers", "long: another case of something that is tested anyway; runs with --long only"
    )
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # On a busy machine an example takes many times as long as the test's author saw.
        slow = [HealthCheck.too_slow]
        settings.register_profile("polyxla", settings(), deadline=None, suppress_health_check=slow)
        settings.load_profile("polyxla")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are marked as long, unless ``--long`` is given."""
    if config.getoption("--long"):
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
    items[:] = [item for item in items if not item.get_closest_marker("long")]
