"""Launches four replicas after one that ran in this process and holds its chip; prints the error."""

import polyxla
from polyxla import Replica


def train(replica: Replica) -> int:
    return replica.world.world_size


if __name__ == "__main__":
    assert polyxla.launch(train, devices=1) == [1]
    try:
        polyxla.launch(train, devices=4)
    except polyxla.UsageError as error:
        print(error)
