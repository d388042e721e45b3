"""Observation of training: compilations, host reads, fallbacks and throughput.

`Observer` is a listener, for `polyxla_training.Trainer` and for your own loop.
"""

from polyxla_training.observe.compilations import CompileBudgetError
from polyxla_training.observe.observer import Observer
from polyxla_training.observe.run_log import RunLog, read_run
from polyxla_training.observe.step_counters import LoggedValues

__all__ = ["CompileBudgetError", "LoggedValues", "Observer", "RunLog", "read_run"]
