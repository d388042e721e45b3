"""What all test suites share: the options ``--slow`` and ``--long``, and hypothesis without a time limit."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--slow", action="store_true", help="also run tests that are marked as slow")
    parser.addoption("--long", action="store_true", help="also run tests that are marked as slow or long")


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and hypothesis' settings where it is installed; refuse to test all at once."""
    if config.args == [str(config.rootpath)]:
        raise pytest.UsageError(
            "pytest tests one package at a time, such as `pytest packages/core/tests`; `nox` tests them all"
        )
    config.addinivalue_line("markers", "slow: takes over 5 s; runs with --slow, with --long, or if named")
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
    """Deselect tests marked long or slow, unless an option asks for them, or for slow ones a name."""
    if config.getoption("--long"):
        return
    is_named = config.option.keyword or any("::" in argument for argument in config.args)
    marks = ["long"] if is_named or config.getoption("--slow") else ["long", "slow"]
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in marks)}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
