"""The name under which environments that were made before the move to `framework` have the entry point."""

from polyxla_pjrt.framework import NoDevice

__all__ = ["NoDevice"]
