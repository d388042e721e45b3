"""Launch on the cluster, as a user's script does; the first argument says what the function does."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import polyxla


@dataclass
class Result:
    """Of the script: nobody could import it on a host."""

    ordinal: int
    host: str


class OwnError(Exception):
    pass


def work(replica: polyxla.Replica, how: str) -> Result:
    if how == "raise" and replica.ordinal == 5:
        raise OwnError("boom on 5")
    return Result(replica.ordinal, os.environ["POLYXLA_EMULATE_HOST"])


def sleep(replica: polyxla.Replica, directory: str) -> None:
    path = Path(directory, f"{os.getpid()}.tmp")
    path.write_text(str(os.getpid()))
    path.rename(path.with_suffix(".pid"))
    time.sleep(600)


def main(how: str, directory: str) -> None:
    if how == "sleep":
        polyxla.launch(sleep, (directory,), pod="ray", accelerator="cpu", devices=1)
        return
    try:
        results = polyxla.launch(work, (how,), pod="ray")
    except OwnError as error:
        print("caught", error)
        raise
    assert all(isinstance(result, Result) for result in results)
    print([(result.ordinal, result.host) for result in results], "torch" in sys.modules)


if __name__ == "__main__":
    main(*sys.argv[1:])
