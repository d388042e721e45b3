"""The device on which PyTorch's tests for devices run with torch_xla; PyTorch executes this file.

Source: ``TORCH_TEST_DEVICES`` in ``torch/testing/_internal/common_device_type.py`` of PyTorch 2.9.
"""

from __future__ import annotations

import torch_xla  # noqa: TID253  (this file is for tests of torch)
from torch.testing._internal.common_device_type import DeviceTypeTestBase  # noqa: TID253


class XlaTestBase(DeviceTypeTestBase):
    """torch_xla's first device."""

    device_type = "xla"

    @classmethod
    def get_primary_device(cls) -> str:
        """Return the device's name."""
        return str(torch_xla.device())


TEST_CLASS = XlaTestBase
