"""Number formats as policies."""

from polyxla_precision.full import Full32 as Full32

__all__ = ["Full32"]
