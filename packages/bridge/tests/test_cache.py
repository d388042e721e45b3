"""The compilation cache with an engine, without torch_xla."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxlib import xla_client
from jaxlib._hlo import hlo_module_from_text  # type: ignore[import-not-found]

from polyxla.plugin import free_ports
from polyxla_bridge.engine.compiler import COMPILER
from polyxla_bridge.engine.jax_engine import JaxEngine
from polyxla_bridge.env import BridgeSettings, from_environ
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.programs import cache, executable
from polyxla_bridge.programs.executable import ArrayType, unpack

TIMEOUT_S = 60


def job_settings(directory: Path, replicas: int = 1, **values: Any) -> BridgeSettings:
    (port,) = free_ports(1)
    return BridgeSettings(replicas, coordinator=f"127.0.0.1:{port}", cache_path=str(directory), **values)


@functools.cache
def program(replicas: int, factor: int) -> bytes:
    # Once each: jaxlib numbers the modules that a process parses, and torch_xla does not.
    text = f"""HloModule sum_of_all, replica_count={replicas}
add {{ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }}
ENTRY main {{ x = f32[4] parameter(0) c = f32[] constant({factor}) d = f32[4] broadcast(c), dimensions={{}}
  y = f32[4] multiply(x, d)
  ROOT r = f32[4] all-reduce(y), replica_groups={{}}, to_apply=add }}"""
    data: bytes = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    return data


def job(bridge: BridgeSettings, factor: int = 2) -> tuple[int, int]:
    """Run a program on all replicas, check its results, and return the numbers of compiles and hits."""
    engine = JaxEngine(bridge)
    try:
        compiled = engine.compile(
            program(bridge.replicas, factor), xla_client.CompileOptions().SerializeAsString()
        )
        host = np.arange(4, dtype=np.float32)
        type_ = ArrayType("float32", (4,))
        inputs = [
            engine.from_host(device, type_, memoryview(host.view(np.uint8).data)) for device in engine.devices
        ]
        results = [engine.execute(compiled, device, [inputs[device.index]])[0] for device in engine.devices]
        for result in results:
            found = np.frombuffer(engine.to_host(result).result(TIMEOUT_S), np.float32)
            assert found.tolist() == (host * factor * bridge.replicas).tolist()
        return engine.compiles, engine.cache.hits
    finally:
        engine.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_second_job_loads_what_the_first_compiled(tmp_path: Path, replicas: int) -> None:
    directory = tmp_path / "made" / "on demand"
    assert job(job_settings(directory, replicas)) == (1, 0)
    assert job(job_settings(directory, replicas)) == (0, 1)
    assert job(job_settings(directory, replicas), factor=3) == (1, 0)
    assert [path.name.startswith("polyxla-") for path in directory.iterdir()] == [True, True]


def test_without_a_directory_nothing_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [job(BridgeSettings()), job(BridgeSettings())] == [(1, 0), (1, 0)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "values", [{"replicas": 2}, {"xla_flags": "--xla_cpu_enable_fast_math=true"}, {"nproc": "1"}], ids=str
)
def test_a_setting_that_changes_the_binary_is_a_miss(tmp_path: Path, values: dict[str, Any]) -> None:
    assert job(job_settings(tmp_path)) == (1, 0)
    assert job(job_settings(tmp_path, **values)) == (1, 0)
    assert job(job_settings(tmp_path)) == (0, 1)


def test_the_context_covers_everything_that_determines_the_binary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = BridgeSettings()
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_enable_fast_math=true")
    from_file = dataclasses.replace(plain, xla_flags=str(flags))
    found = [cache.context(plain, {}), cache.context(plain, {"an": "option"}), cache.context(from_file, {})]
    found.append(cache.context(dataclasses.replace(plain, has_tpu_numerics=True), {}))
    found.append(cache.context(dataclasses.replace(plain, has_torch_kernels=False), {}))
    flags.write_text("--xla_cpu_enable_fast_math=false")
    found.append(cache.context(from_file, {}))
    others: list[tuple[ModuleType, str, Any]] = [
        (cache, "version", lambda _: "0.0.1"),
        (cache, "cpu", lambda: "flags: none"),
        (executable, "code_digest", lambda: "0ld"),
    ]
    for module, name, value in others:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            found.append(cache.context(plain, {}))
    assert len(set(found)) == len(found)
    assert cache.context(BridgeSettings(platform="TPU", stall_timeout_s=1), {}) == found[0]


@pytest.mark.parametrize("text", ["", "flags of old", "x" * 5000, "/proc/self/mem"], ids=len)
def test_unreadable_flags_do_not_fail_a_job(text: str) -> None:
    assert cache.context(BridgeSettings(xla_flags=text), {}) == cache.context(
        BridgeSettings(xla_flags=text), {}
    )


def test_a_processor_is_described_by_model_and_features(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    one = "processor\t: {}\nmodel\t\t: 17\nmodel name\t: EPYC\ncpu MHz\t\t: {}\nflags\t\t: fpu avx2\n\n"
    cpuinfo.write_text(one.format(0, 2400.5) + one.format(1, 3000))
    assert cache.cpu(cpuinfo) == "model\t\t: 17\nflags\t\t: fpu avx2"
    assert cache.cpu(tmp_path / "none") == ""


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign", "another"])
def test_a_file_that_cannot_be_used_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    assert job(job_settings(tmp_path / "another"), factor=3) == (1, 0)
    (another,) = (tmp_path / "another").iterdir()
    directory = tmp_path / "cache"
    assert job(job_settings(directory)) == (1, 0)
    (path,) = directory.iterdir()
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "cut": good[:middle],
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "empty": b"",
            "foreign": b"something else",
            "another": another.read_bytes(),
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "polyxla.bridge"):
        assert job(job_settings(directory)) == (1, 0)
    (record,) = caplog.records
    assert f"cannot use {path}" in record.getMessage()
    assert job(job_settings(directory)) == (0, 1)
    assert list(directory.iterdir()) == [path]


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("cached")
    job(job_settings(directory))
    (path,) = directory.iterdir()
    return path.read_bytes()


@given(data=st.data())
def test_every_damaged_byte_is_detected(cached: bytes, data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(cached) - 1))
    bit = data.draw(st.integers(0, 7))
    flipped = cached[:where] + bytes([cached[where] ^ 1 << bit]) + cached[where + 1 :]
    for damaged in (flipped, cached[:where], cached + cached[:where] + b"\n"):
        with pytest.raises(PjrtError, match="this program cannot be loaded"):
            unpack(damaged, 1, COMPILER)


def test_hits_and_misses_are_counted_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lookups: list[bool] = []
    with caplog.at_level(logging.INFO, "polyxla.bridge"):
        for _ in range(2):
            engine = JaxEngine(job_settings(tmp_path), lookups.append)
            options = xla_client.CompileOptions().SerializeAsString()
            used = [engine.compile(program(1, factor), options) for factor in (2, 3, 2)]
            assert used[0] is used[2]
            del used
            engine.close()
    assert lookups == [False, False, True, True], "a program that the process has already is not looked up"
    assert [record.getMessage() for record in caplog.records] == [
        f"compilation cache: 0 hits, 2 misses ({tmp_path})",
        f"compilation cache: 2 hits, 0 misses ({tmp_path})",
    ]


def test_without_a_directory_nothing_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    lookups: list[bool] = []
    none = cache.for_job(BridgeSettings(), {}, lookups.append)
    none.count(is_hit=False)
    assert (none.hits, none.misses, lookups) == (0, 0, [])


@pytest.mark.parametrize("why", ["no home", "home is a file", "another's home", "unknown processor"])
def test_a_job_without_a_usable_home_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    home = tmp_path / "home"
    environ = {} if why == "no home" else {"HOME": str(home)}
    if why == "home is a file":
        home.touch()
    elif why == "another's home":
        (home / ".cache/polyxla/programs").mkdir(parents=True)
        (home / ".cache/polyxla/programs").chmod(0o777)
    elif why == "unknown processor":
        monkeypatch.setattr(cache, "cpu", lambda: "")
    first = from_environ(environ)
    assert job(first) == (1, 0)
    (record,) = caplog.records
    assert "no compiled programs are cached for later jobs: " in record.getMessage()
    assert "POLYXLA_COMPILE_CACHE=off to turn the cache off" in record.getMessage()
    cache.for_job(dataclasses.replace(first, process=1), {})
    assert len(caplog.records) == 1
    assert [path for path in tmp_path.rglob("polyxla-*") if path.is_file()] == []


def test_the_default_is_the_users_cache_directory(tmp_path: Path) -> None:
    default = from_environ({"HOME": str(tmp_path)})
    assert [job(default), job(default)] == [(1, 0), (0, 1)]
    directory = tmp_path / ".cache/polyxla/programs"
    assert len(list(directory.iterdir())) == 1
    assert job(from_environ({"HOME": str(tmp_path), "POLYXLA_COMPILE_CACHE": "off"})) == (1, 0)


def test_a_job_that_writes_dumps_compiles_its_programs(tmp_path: Path) -> None:
    dumps = job_settings(tmp_path, xla_flags="--xla_dump_to=/tmp/dumps")
    assert str(cache.for_job(dumps, {})) == "compilation cache: 0 hits, 0 misses (none)"


def test_a_read_only_cache_is_not_written(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    assert job(job_settings(directory, cache_is_readonly=True)) == (1, 0)
    assert not directory.exists()
    assert job(job_settings(directory)) == (1, 0)
    assert job(job_settings(directory, cache_is_readonly=True)) == (0, 1)
    assert job(job_settings(directory, cache_is_readonly=True), factor=3) == (1, 0)
    assert len(list(directory.iterdir())) == 1


def test_a_directory_that_cannot_be_made_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert job(job_settings(file / "cache")) == (1, 0)
    (record,) = caplog.records
    assert f"cannot use {file}/cache/polyxla-" in record.getMessage()


def test_an_incomplete_write_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert job(job_settings(tmp_path)) == (1, 0)
    assert list(tmp_path.iterdir()) == []
    (record,) = caplog.records
    assert "No space left on device" in record.getMessage()
