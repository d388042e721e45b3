"""Checkpoints in shards: any division reads them, damage is named, and a killed writer leaves nothing."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import typer
from typer.testing import CliRunner

from polyxla import Replica, launch
from polyxla_testing.processes import kill_group_when, wait_until
from polyxla_training import CheckpointError, CheckpointFolder, load, load_into, plugin, save
from polyxla_training.checkpoint import DamagedCheckpointError, fingerprint
from polyxla_training.checkpoint.shard_reader import ShardedCheckpoint
from polyxla_training.resume import load_same
from polyxla_training.sharding.sharded_state import divide_into

shard_states = importlib.import_module("packages.training.tests.programs.shard_states")

TIMEOUT_S = 120.0


# The replicas of all tests are forked from one process, which has imported what they need. torch imports
# _dynamo with the first divided tensor; this takes seconds.
PREPARED = multiprocessing.get_context("forkserver")
PREPARED.set_forkserver_preload(["polyxla_training.checkpoint", "torch.distributed.fsdp", "torch._dynamo"])


class Job:
    """Replicas that run one task of the program, in a process group of their own; killed at the end."""

    def __init__(self, task: str, replicas: int, *arguments: object) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._printed = Path(self._directory.name) / "printed"
        texts = map(str, arguments)
        values = (self._printed, dict(os.environ), task, replicas, *texts)
        self._process = PREPARED.Process(target=shard_states.run, args=values)

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._directory.cleanup()

    def output(self) -> str:
        """Return what the replicas have printed so far."""
        return self._printed.read_text() if self._printed.exists() else ""

    def wait(self) -> int:
        """Return the exit code."""
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode is not None, f"it has not ended in time: {self.output()[-3000:]}"
        return self._process.exitcode

    def kill(self) -> None:
        """End all its processes, without a signal that they could handle."""
        assert self._process.pid
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join(TIMEOUT_S)

    def kill_when(self, condition: Callable[[], bool], what: str) -> None:
        """End all its processes at a moment when the condition holds."""
        assert self._process.pid
        kill_group_when(condition, what, self._process.pid)
        self._process.join(TIMEOUT_S)


def _run(task: str, replicas: int, *arguments: object) -> str:
    with Job(task, replicas, *arguments) as job:
        assert job.wait() == 0, job.output()[-3000:]
        return job.output()


def _errors(printed: str) -> dict[int, str]:
    """Return the errors that a program has printed, by ordinal."""
    found = re.findall(r"^error in (\d): (.*)$", printed, re.MULTILINE)
    return {int(ordinal): text for ordinal, text in found}


@pytest.fixture(scope="module")
def values() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = shard_states.values(1)
    return found


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("four") / "step-00000001.shards"
    _run("save_once", 4, path)
    return path


@pytest.fixture
def copied(saved_by_four: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(saved_by_four, tmp_path / saved_by_four.name))


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.slow
def test_each_replica_writes_a_file_that_safetensors_reads(saved_by_four: Path) -> None:
    from safetensors.torch import load_file

    shards = [f"shard-0000{ordinal}.safetensors" for ordinal in range(4)]
    assert _names(saved_by_four) == [*shards, "state.safetensors"]
    assert load_file(saved_by_four / shards[3])["module.even"].shape == (2, 4)
    assert _names(saved_by_four.parent) == [saved_by_four.name]


def test_hosts_that_share_no_directory_lose_no_shards_in_silence(tmp_path: Path) -> None:
    errors = _errors(_run("save_without_a_shared_directory", 2, tmp_path))
    assert errors.keys() == {0, 1}
    for text in errors.values():
        assert re.match(
            rf"ordinal 1: {re.escape(socket.gethostname())} does not see the directory 'run/\.step-", text
        )
        assert "the hosts do not share it (from save). Save to a file system that all hosts share" in text
    # Neither a checkpoint that lacks shards, nor shards without their checkpoint.
    assert list((tmp_path / "host0" / "run").iterdir()) == []
    assert list((tmp_path / "host1").iterdir()) == []


def test_one_process_loads_the_whole_state(saved_by_four: Path, values: dict[str, torch.Tensor]) -> None:
    found = load(saved_by_four)
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found["module"].items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in values.items()
    }
    assert (found["step"], found["own"].item(), found["list"]) == (1, 0, [1, (2.5, "three")])


@pytest.mark.parametrize(
    ("task", "replicas"),
    [("read_in_shards", 2), ("read_in_shards", 3), ("read_in_shards_on_two_dimensions", 4)],
)
def test_other_divisions_read_it(task: str, replicas: int, saved_by_four: Path) -> None:
    _run(task, replicas, saved_by_four)


def test_a_division_over_two_dimensions_is_read_over_one(
    tmp_path: Path, values: dict[str, torch.Tensor]
) -> None:
    _run("save_once_on_two_dimensions", 4, tmp_path / "state")
    found = load(tmp_path / "state")["module"]
    assert all(torch.equal(found[name], whole) for name, whole in values.items())
    _run("read_in_shards", 2, tmp_path / "state")


def test_a_loop_resumes_its_shards_from_directories_and_files(tmp_path: Path) -> None:
    path = tmp_path / "state"
    _run("save_training", 4, path)
    _run("resume_training", 2, path)
    save(load(path), tmp_path / "file")
    _run("resume_training", 2, tmp_path / "file")
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    assert load_into(path, module, optimizer) == {"epoch": 2}
    assert torch.equal(module.state_dict()["0.weight"], load(path)["module"]["0.weight"])
    with pytest.raises(CheckpointError, match=r"missing: weight, bias; not expected: 0\."):
        load_into(path, module[0], optimizer)
    with pytest.raises(CheckpointError, match="the optimizer does not fit: loaded state dict"):
        load_into(path, module, torch.optim.AdamW(module[0].parameters()))
    save({"module": module.state_dict()}, tmp_path / "half")
    with pytest.raises(CheckpointError, match="does not hold a dict with 'module' and 'optimizer'"):
        load_into(tmp_path / "half", module, optimizer)


@pytest.mark.usefixtures("fake_replicas")
@pytest.mark.parametrize("in_shards", [True, False])
def test_replicas_resume_without_the_values_that_others_need(
    in_shards: bool, copied: Path, values: dict[str, torch.Tensor]
) -> None:
    def load_one(replica: Replica) -> Any:
        _, loaded = load_same(replica, "auto", copied.parent, in_shards=in_shards) or (None, None)
        assert loaded is not None
        assert (loaded.state["step"], loaded.state["own"].item()) == (1, 0)
        assert (loaded.shards is not None) == in_shards
        return {
            name: (tuple(tensor.shape), tensor.is_meta) for name, tensor in loaded.state["module"].items()
        }

    expected = {name: (tuple(tensor.shape), in_shards) for name, tensor in values.items()}
    assert launch(load_one, runtime="fake", devices=4) == [expected] * 4
    (copied / "shard-00003.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"every checkpoint in .* is damaged"):
        launch(load_one, runtime="fake", devices=4)


def test_a_hook_may_rename_tensors_before_they_are_read(tmp_path: Path) -> None:
    _run("save_training", 2, tmp_path)
    shards, expected = ShardedCheckpoint(tmp_path), load(tmp_path)["module"]
    state = shards.state(unread=("module.", "optimizer."))
    module = torch.nn.ModuleDict({"head": torch.nn.Linear(3, 5)})
    optimizer = torch.optim.SGD(module.parameters())
    renamed = {"head.weight": state["module"]["0.weight"], "head.bias": torch.ones(5)}
    divide_into(module, optimizer, renamed, optimizer.state_dict(), True, shards)
    assert torch.equal(module.state_dict()["head.weight"], expected["0.weight"])
    assert torch.equal(module.state_dict()["head.bias"], torch.ones(5))
    computed = renamed | {"head.weight": 2 * state["module"]["0.weight"]}
    with pytest.raises(CheckpointError, match="computed from one of a checkpoint in shards"):
        divide_into(module, optimizer, computed, optimizer.state_dict(), True, shards)


def test_saving_again_replaces_the_directory(tmp_path: Path) -> None:
    _run("save_twice", 2, tmp_path / "state")
    assert load(tmp_path / "state")["step"] == 2
    assert _names(tmp_path) == ["state"]
    assert len(_names(tmp_path / "state")) == 3


def test_the_state_may_change_while_it_is_written(tmp_path: Path, values: dict[str, torch.Tensor]) -> None:
    _run("save_in_background", 2, tmp_path / "state")
    found = load(tmp_path / "state")["module"]
    assert all(torch.equal(found[name], whole) for name, whole in values.items())


def test_a_folder_keeps_the_newest_directories(tmp_path: Path) -> None:
    _run("save_steps", 2, tmp_path, 4)
    folder = CheckpointFolder(tmp_path)
    entries = folder.entries()
    assert _names(tmp_path) == [entry.path.name for entry in entries]
    assert [(entry.step, entry.is_kept) for entry in entries] == [(1, True), (3, False), (4, False)]
    files = list(Path(str(entries[2].path)).iterdir())
    assert entries[2].size_bytes == sum(file.stat().st_size for file in files)
    folder.save(4, {"step": 4})
    newest = folder.latest()
    assert newest is not None
    assert newest.path.name == "step-00000004.safetensors"
    newest.path.unlink()
    folder.save(5, {"step": 5})
    shutil.rmtree(tmp_path / "step-00000004.shards")
    (tmp_path / "step-00000005.safetensors").write_bytes(b"")
    (tmp_path / "step-00000006.shards").mkdir()
    found = folder.load_latest()
    assert found is not None
    assert found[1]["step"] == 3


def _change(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_the_fingerprint_tells_checkpoints_apart(copied: Path, saved_by_four: Path, tmp_path: Path) -> None:
    assert re.fullmatch("[0-9a-f]{8}", fingerprint(copied))
    assert fingerprint(copied) == fingerprint(saved_by_four)
    _run("save_once", 2, tmp_path / "by_two.shards")
    assert fingerprint(tmp_path / "by_two.shards") != fingerprint(copied)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda shard: shard.unlink(),
            r"step-00000001\.shards' is damaged: shard-00002\.safetensors is missing",
        ),
        (
            lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
            r"shard-00002\.safetensors' is damaged, or is not a checkpoint: it is cut short",
        ),
        (
            lambda shard: shutil.copy(shard.with_name("shard-00001.safetensors"), shard),
            r"shard-00002\.safetensors' is damaged.* not the file that was written with this checkpoint",
        ),
        (
            lambda shard: _change(shard, -1),
            r"shard-00002\.safetensors' is damaged.*: tensor 'module\.\w+' was changed after it was written",
        ),
        (
            lambda shard: _change(shard.with_name("state.safetensors"), -9),
            r"state\.safetensors' is damaged.*: tensor 'manifest' was changed",
        ),
    ],
    ids=["missing", "short", "another", "changed", "manifest"],
)
def test_damage_is_named(damage: Any, text: str, copied: Path) -> None:
    damage(copied / "shard-00002.safetensors")
    with pytest.raises(DamagedCheckpointError, match=text):
        load(copied)


def test_a_directory_without_a_manifest_is_not_a_checkpoint(copied: Path) -> None:
    (copied / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"not a checkpoint: state\.safetensors in it cannot be read"):
        load(copied)


def test_a_damaged_newest_directory_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _run("save_steps", 2, tmp_path, 3)
    (tmp_path / "step-00000003.shards" / "shard-00001.safetensors").unlink()
    found = CheckpointFolder(tmp_path).load_latest()
    assert found is not None
    assert found[1]["step"] == 2
    assert "shard-00001.safetensors is missing; loading the checkpoint before it" in capsys.readouterr().err


def test_all_replicas_raise_if_one_cannot_write(tmp_path: Path) -> None:
    errors = _errors(_run("save_on_a_full_disk", 2, tmp_path / "state"))
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert re.match(r"ordinal 1: '.*shard-00001\.safetensors' cannot be written: File too large", error)
    assert _names(tmp_path) == []


def test_a_lost_replica_is_an_error_in_the_others(tmp_path: Path) -> None:
    with Job("lose_a_replica", 2, tmp_path / "state") as job:
        job.wait()
        errors = _errors(job.output())
    assert [*errors] == [0]
    assert re.match(r"'.*state' cannot be written, because another replica was lost: ", errors[0])
    assert _names(tmp_path) == []


def test_torchs_own_format_has_no_shards(tmp_path: Path) -> None:
    errors = _errors(_run("save_with_torch", 2, tmp_path / "state"))
    assert sorted(errors) == [0, 1]
    assert errors[0] == (
        'the state has tensors that are divided among replicas (from save(format="torch")). '
        'Leave format="torch" out; each replica then writes its shards.'
    )


def _save_until_killed(path: Path, first: int, delay_s: float | None) -> int:
    """Kill replicas that save, after a delay or while they write; return the last step that was saved."""
    with Job("save_until_killed", 2, path, first) as job:
        wait_until(lambda: "saved" in job.output(), "the first save")
        if delay_s is None:
            job.kill_when(lambda: any(path.glob(".*/shard-*")), "a checkpoint that is being written")
            assert any(path.glob(".*/shard-*"))
        else:
            time.sleep(delay_s)
            job.kill()
        return int(re.findall(r"^saved (\d+)$", job.output(), re.MULTILINE)[-1])


def test_a_killed_writer_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    first = 0
    for delay_s in (0.0, 0.011, 0.023, None):
        last = _save_until_killed(tmp_path, first, delay_s)
        folder = CheckpointFolder(tmp_path)
        newest = folder.entries()[-1].step
        assert newest >= last
        for entry in folder.entries():
            state = load(entry.path)
            assert state["step"] == entry.step
            assert torch.equal(state["big"], torch.full((2**18,), entry.step))
        first = newest + 1
    _run("save_steps", 2, tmp_path, 1)
    assert not [name for name in _names(tmp_path) if name.startswith(".")]


def _consolidate(*arguments: object) -> Any:
    app = typer.Typer()
    plugin.polyxla_add_commands(app)
    return CliRunner().invoke(app, ["consolidate", *map(str, arguments)])


def test_the_module_is_put_together_in_one_file(copied: Path, values: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file

    done = _consolidate(copied, "--json")
    assert done.exit_code == 0, done.output
    path = copied.with_name("step-00000001-module.safetensors")
    assert json.loads(done.stdout) == {"path": str(path), "tensors": 4, "size_bytes": path.stat().st_size}
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in load(path).items()} == {
        name: (tensor.dtype, tensor.tolist()) for name, tensor in values.items()
    }
    assert torch.equal(load_file(path)["uneven"], values["uneven"])
    assert [entry.path for entry in CheckpointFolder(copied.parent).entries()] == [copied]


def test_it_is_put_together_where_the_user_says(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "own.safetensors"
    done = _consolidate(copied, "-o", out, "--key", "list")
    assert done.exit_code == 0, done.output
    assert re.match(rf"wrote {out}: 0 tensors, \d+ bytes", done.stdout)
    assert load(out) == [1, (2.5, "three")]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["{copied}", "--key", "model"],
            "has no 'model' (from --key). Name one of its keys: step, module",
        ),
        (["{copied}", "-o", "{copied}/state.safetensors"], "state.safetensors' exists already (from -o)"),
        (["{copied}/.."], "is a directory of checkpoints (from polyxla consolidate). Name "),
        (["{copied}/state.safetensors"], "is not a checkpoint in shards"),
        (["{copied}/gone"], "is not a checkpoint in shards"),
    ],
)
def test_what_cannot_be_put_together_is_refused(arguments: list[str], text: str, copied: Path) -> None:
    done = _consolidate(*(argument.format(copied=copied) for argument in arguments))
    assert done.exit_code == 2
    assert text in done.output.replace("\n", " ")


def test_a_checkpoint_without_all_shards_is_not_put_together(copied: Path) -> None:
    (copied / "shard-00000.safetensors").unlink()
    done = _consolidate(copied, "-o", copied.parent / "new" / "own.safetensors")
    assert done.exit_code == 2
    assert "shard-00000.safetensors is missing" in done.output
    assert _names(copied.parent) == [copied.name], "nothing was begun"


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_shards_in_an_object_store() -> None:
    url = "s3://bucket/run"
    _run("save_steps", 2, url, 4)
    folder = CheckpointFolder(url)
    assert [(entry.step, entry.is_kept) for entry in folder.entries()] == [(1, True), (3, False), (4, False)]
    assert str(folder.entries()[-1].path) == f"{url}/step-00000004.shards"
    found = folder.load_latest()
    assert found is not None
    assert found[1]["step"] == 4
    done = _consolidate(f"{url}/step-00000004.shards")
    assert done.exit_code == 0, done.output
    module = load(f"{url}/step-00000004-module.safetensors")
    assert torch.equal(module["even"], found[1]["module"]["even"])
    # A directory without a manifest is not a checkpoint.
    (folder.entries()[-1].path / "state.safetensors").unlink()
    assert folder.entries()[-1].step == 3
    save({"step": 5}, f"{url}/step-00000005.safetensors")
    assert folder.entries()[-1].step == 5
