"""A plugin of pytest with which PyTorch 2.6's tests for devices run on TorchTPU's, with torch 2.15."""

from __future__ import annotations

from typing import Any

import pytest
from torch.testing._internal import (  # noqa: TID253  (this plugin is for tests of torch)
    common_cuda,
    common_device_type,
    common_methods_invocations,
    common_mkldnn,
    common_nn,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--cuda-too", action="store_true", help="run the tests that are meant for CUDA only")


def pytest_configure(config: pytest.Config) -> None:
    """Let the device run tests that are meant for CUDA, if that is asked for."""
    common_device_type.PrivateUse1TestBase.bypass_device_restrictions = config.option.cuda_too


def _skip_operators(_class: str, _test: str, specs: object) -> Any:
    return common_device_type.skipOps(specs)


# Since PyTorch 2.6, these have moved, or have other names or parameters.
vars(common_methods_invocations).update(
    skip=common_device_type.skip,
    xfail=common_device_type.xfail,
    skipOps=_skip_operators,
    binary_ufuncs_and_refs=common_methods_invocations.binary_ufuncs,
)
vars(common_cuda).update(tf32_is_not_fp32=common_mkldnn.tf32_is_not_fp32)
vars(common_mkldnn).update(bf32_on_and_off=common_mkldnn.reduced_f32_on_and_off)
vars(common_nn).update(new_module_tests=common_nn.get_new_module_tests())
