"""Three tests that leave something behind, and one that may."""

import os
import threading
import time


def test_changes_a_variable() -> None:
    os.environ["CHANGED"] = "after"


def test_leaves_a_variable_of_polyxlas() -> None:
    os.environ["POLYXLA_LEFT"] = "1"


def test_leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1,)).start()


def test_leaves_another_variable() -> None:
    os.environ["ANOTHER"] = "1"
