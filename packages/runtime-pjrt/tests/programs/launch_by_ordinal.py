"""Launches on processes with the ordinals 2, 0, 3 and 1, and prints the results by ordinal."""

from typing import Any

from torch_xla._internal import pjrt

from polyxla.plugin import TorchXlaLaunch, handle_launches


def run(plan: list[int], launched: TorchXlaLaunch) -> list[tuple[int, Any]]:
    # As on a TPU host whose processes libtpu numbers by the coordinates of their chips.
    return [(ordinal, launched.function(ordinal)) for ordinal in plan]


if __name__ == "__main__":
    handle_launches(lambda _: [2, 0, 3, 1], run)
    print(pjrt.run_multiprocess(str))
