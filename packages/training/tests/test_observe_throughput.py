"""Windows of steps, records and waits."""

from __future__ import annotations

from types import SimpleNamespace

from polyxla_training.observe.performance import ThroughputMeter


def test_a_window_holds_the_steps_time_without_evaluations() -> None:
    now = [100.0]
    meter = ThroughputMeter(clock=lambda: now[0])
    loader = SimpleNamespace(records=0, waited_s=0.0)
    for _ in range(4):
        now[0] += 2.0
        loader.records += 10
        loader.waited_s += 0.5
        meter.step()
    now[0] += 50.0
    meter.exclude()
    now[0] += 2.0
    loader.records += 10
    meter.step()
    window = meter.next_window(loader)
    assert (window.steps, window.seconds, window.records) == (5, 10.0, 50)
    assert window.step_s == 2.0
    assert window.wait_share == 0.2
    assert window.records_per_s(world_size=4) == 20.0


def test_the_next_window_begins_where_the_last_ended() -> None:
    now = [0.0]
    meter = ThroughputMeter(clock=lambda: now[0])
    for seconds in (3.0, 1.0):
        now[0] += seconds
        meter.step()
        window = meter.next_window(None)
        assert window.seconds == seconds
        assert window.records_per_s(1) is window.wait_share is None


def test_another_loaders_records_are_counted_from_its_beginning() -> None:
    meter = ThroughputMeter()
    meter.step()
    meter.next_window(SimpleNamespace(records=100, waited_s=9.0))
    meter.step()
    assert meter.next_window(SimpleNamespace(records=30, waited_s=1.0)).records == 30
