"""Launches two replicas that write their process ids into the directory FOLDER and sleep."""

import os
import time
from pathlib import Path

from polyxla import Replica, launch


def train(replica: Replica) -> None:
    path = Path(os.environ["FOLDER"]) / f"{replica.ordinal}.part"
    path.write_text(str(os.getpid()))
    path.rename(path.with_suffix(".pid"))
    time.sleep(600)


launch(train, devices=2)
