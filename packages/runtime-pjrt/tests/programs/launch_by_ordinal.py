"""Launches on processes with the ordinals 2, 0, 3 and 1, and prints the results by ordinal."""

from torch_xla._internal import pjrt

from polyxla.plugin import Job, ReplicaResult, handle_launches


def run(_: Job, plan: list[int]) -> list[ReplicaResult]:
    # As on a TPU host whose processes libtpu numbers by the coordinates of their chips.
    return [ReplicaResult(ordinal, str(ordinal)) for ordinal in plan]


if __name__ == "__main__":
    handle_launches("pjrt", lambda _: [2, 0, 3, 1], run)
    print(pjrt.run_multiprocess(str))
