"""Launches functions and a lambda, without a main guard, and catches an exception class of its own."""

from polyxla import Replica, launch


class ScriptError(Exception):
    pass


def helper(n: int) -> int:
    return n + 1


def train(replica: Replica, fails: bool) -> int:
    if fails:
        raise ScriptError("from a replica")
    return helper(replica.ordinal)


assert launch(train, (False,), devices=2) == [1, 2]
assert launch(lambda replica: helper(replica.ordinal), devices=2) == [1, 2]
try:
    launch(train, (True,), devices=1)
except ScriptError as error:
    print("caught", error)
