"""What polyxla sees while a replica trains: compilations, reads by the host, fallbacks, pace.

`Observer` is a listener, for `polyxla_training.Trainer` and for a loop of one's own.
"""

from polyxla_training.observe.compile_budget import CompileBudgetError
from polyxla_training.observe.logged_values import Readings
from polyxla_training.observe.observer import Observer
from polyxla_training.observe.run_log import RunLog, read_run

__all__ = ["CompileBudgetError", "Observer", "Readings", "RunLog", "read_run"]
