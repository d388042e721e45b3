"""Precision policies. Importing this package does not import torch."""

from polyxla_precision.policies import BF16Mixed as BF16Mixed
from polyxla_precision.policies import BF16True as BF16True
from polyxla_precision.policies import Full32 as Full32

__all__ = ["BF16Mixed", "BF16True", "Full32"]
