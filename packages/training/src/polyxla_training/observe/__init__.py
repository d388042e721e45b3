"""Observation of training: compilations, host reads, fallbacks and throughput.

`Observer` is a listener, for `polyxla_training.Trainer` and for your own loop.
"""

from polyxla_training.observe.compile_budget import CompileBudgetError
from polyxla_training.observe.logged_values import LoggedValues
from polyxla_training.observe.observer import Observer
from polyxla_training.observe.run_log import RunLog, read_run

__all__ = ["CompileBudgetError", "LoggedValues", "Observer", "RunLog", "read_run"]
