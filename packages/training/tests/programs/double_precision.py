"""A plugin with a precision policy named 64."""

from __future__ import annotations

import torch

from polyxla import hookimpl
from polyxla.contracts.precision import UnchangedPrecision
from polyxla.plugin import Precision


class Double(UnchangedPrecision):
    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.double()


@hookimpl
def polyxla_precision(name: str) -> Precision | None:
    return Double() if name == "64" else None
