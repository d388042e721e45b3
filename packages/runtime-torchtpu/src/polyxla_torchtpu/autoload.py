"""The name under which environments that were made before the move to `framework` have the entry point."""

from polyxla_torchtpu.framework import load

__all__ = ["load"]
