"""Two replicas on the runtime `bare`, of which one fails."""

from polyxla import Replica, launch


def look_up(table: dict[str, int], key: str) -> int:
    return table[key]


def train(replica: Replica) -> int:
    return look_up({"present": 0}, "missing" if replica.ordinal else "present")


if __name__ == "__main__":
    launch(train, runtime="bare", devices=2)
