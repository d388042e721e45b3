"""Calls `polyxla_torchtpu.early.show_library` when torch or torch_tpu is about to be imported.

``polyxla_torchtpu.pth`` imports this module whenever Python starts, so it imports almost nothing itself.
"""

import sys


class BeforeTorch:
    """A finder of modules that finds none."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        """Look at the name of a module that is about to be imported."""
        if name in ("torch", "torch_tpu"):
            from polyxla_torchtpu.early import show_library

            show_library()


sys.meta_path.insert(0, BeforeTorch)
