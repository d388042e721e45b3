"""What polyxla sees while a replica trains: compilations, reads by the host, fallbacks, pace.

`Observer` is a listener, for `polyxla.Trainer` and for a loop of one's own.
"""

from polyxla.observe.budget import CompileBudgetError
from polyxla.observe.observer import Observer
from polyxla.observe.readings import Readings
from polyxla.observe.runlog import RunLog, read_run

__all__ = ["CompileBudgetError", "Observer", "Readings", "RunLog", "read_run"]
