"""The compile options of a remote program, without those by which XLA reads or writes the worker's files."""

from __future__ import annotations

import pytest
from jaxlib import xla_client

from polyxla_bridge.programs.compile_request import without_texts


def test_options_that_name_files_are_cleared_and_others_stay() -> None:
    asked = xla_client.CompileOptions()
    asked.num_replicas = 3
    build = asked.executable_build_options
    for name in ("xla_dump_to", "xla_gpu_kernel_cache_file", "xla_gpu_load_autotune_results_from"):
        setattr(build.debug_options, name, "/tmp/elsewhere")
    build.debug_options.xla_cpu_enable_fast_math = True
    build.debug_options.xla_dump_max_hlo_modules = 7
    numbers = {"a_number": 3, "a_switch": True, "a_fraction": 1.5}
    asked.env_option_overrides = [("xla_dump_to", "/tmp/elsewhere"), *numbers.items()]
    data = asked.SerializeAsString()
    assert data.count(b"/tmp/elsewhere") == 4
    found = without_texts(data)
    assert b"/tmp/elsewhere" not in found
    options = xla_client.CompileOptions.ParseFromString(found)
    debug = options.executable_build_options.debug_options
    assert (debug.xla_dump_to, debug.xla_cpu_enable_fast_math, debug.xla_dump_max_hlo_modules) == (
        "",
        True,
        7,
    )
    assert (options.num_replicas, dict(options.env_option_overrides)) == (3, numbers)
    assert without_texts(found) == found


@pytest.mark.parametrize("debug", [b"\x08", b"\x12\x05a", b"\x0b", b"\x09\x01", b"\xff" * 20])
def test_damaged_options_are_an_error(debug: bytes) -> None:
    build = b"\x1a" + bytes([len(debug)]) + debug
    with pytest.raises(ValueError, match="the options"):
        without_texts(b"\x1a" + bytes([len(build)]) + build)
