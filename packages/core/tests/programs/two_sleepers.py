"""Launches two replicas that write their process ids into the directory FOLDER and sleep."""

import os
import time

from polyxla import launch


def train(replica):
    path = os.path.join(os.environ["FOLDER"], str(replica.ordinal))
    with open(path + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".part", path + ".pid")
    time.sleep(600)


launch(train, devices=2)
