"""Hosts that do not share the directory of the checkpoints are found at the start, in every replica."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import polyxla
from polyxla import UsageError
from polyxla_training import Trainer, shared_directory
from polyxla_training.shared_directory import check_shared
from polyxla_training.storage import locate

HOST = re.escape(socket.gethostname())
TWO_HOSTS = "0,1;2,3"


@pytest.fixture(autouse=True)
def _hosts(fake_replicas: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four replicas on two hosts. They share this process: hosts differ in the paths that they are given."""
    monkeypatch.setenv("FAKE_NUMBERING", TWO_HOSTS)
    monkeypatch.setattr(shared_directory, "SEEN_S", 0.3)


def _check(directories: Sequence[str]) -> list[Any]:
    """Let each replica check its own directory; return the error of each, or None."""

    def check_one(replica: polyxla.Replica) -> UsageError | None:
        try:
            check_shared(replica, directories[replica.ordinal], "checkpoint_dir")
        except UsageError as error:
            return error
        return None

    results = polyxla.launch(check_one, runtime="fake", devices=4)
    assert len(results) == 2
    return results


def test_a_shared_directory_is_made_and_left_empty() -> None:
    assert _check(["run/shared"] * 4) == [None] * 2
    assert list(Path("run/shared").iterdir()) == []


def test_a_host_with_another_directory_is_an_error_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0", "1"):
        monkeypatch.setenv("FAKE_HOST", host)
        for error in _check(["host0"] * 2 + ["host1"] * 2):
            name = f"host{host}"
            assert re.fullmatch(
                rf"host 1 \({HOST}\) did not see within 0\.3 s the file that host 0 \({HOST}\) has written "
                rf"to '{name}': the hosts do not share the directory \(from checkpoint_dir\)\. Write "
                r"checkpoints to a file system that all hosts share, or to a URL such as gs://bucket/run, "
                r"and give all hosts the same path\.",
                str(error),
            )
    assert list(Path("host0").iterdir()) == []
    # The other host's disk is empty: not even a directory was made.
    assert not Path("host1").exists()


def test_the_host_of_ordinal_0_need_not_be_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NUMBERING", "2,3;0,1")
    assert _check(["shared"] * 4) == [None] * 2
    assert f"host 0 ({socket.gethostname()}) did not see" in str(_check(["a"] * 2 + ["b"] * 2)[0])


def test_a_directory_that_cannot_be_written_to_is_an_error_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").touch()
    for host in ("0", "1"):
        monkeypatch.setenv("FAKE_HOST", host)
        for error in _check(["file/below"] * 4):
            assert f"'file/below' cannot be written to on host 0 ({socket.gethostname()}): " in str(error)


def test_one_host_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKE_NUMBERING")

    def check(replica: polyxla.Replica) -> None:
        check_shared(replica, f"own{replica.ordinal}", "checkpoint_dir")

    polyxla.launch(check, runtime="fake", devices=4)
    assert list(Path().glob("own*")) == []


def test_a_store_that_all_hosts_reach_is_shared_and_one_within_a_process_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fsspec

    assert _check(["memory://shared/run"] * 4) == [None] * 2
    assert fsspec.filesystem("memory").find("/shared") == []
    # Each process has a memory file system of its own, so another one would find nothing.
    numbers = itertools.count()
    monkeypatch.setattr(shared_directory, "locate", lambda url: locate(f"{url}/{next(numbers)}"))
    assert " has written to 'memory://shared/run': the hosts" in str(_check(["memory://shared/run"] * 4)[0])


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(batch)
        return outputs.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_checks_before_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def check(replica: polyxla.Replica, directory: str, where: str) -> None:
        asked.append(replica.ordinal)
        check_shared(replica, f"{directory}{replica.world.host_index}", where)

    monkeypatch.setattr("polyxla_training.loop.workspace.check_shared", check)
    data = [torch.ones(2, 3)] * 8
    options: dict[str, Any] = {"runtime": "fake", "devices": 4, "progress": False, "log_dir": None}
    with pytest.raises(UsageError, match=r"share the directory \(from checkpoint_dir='saved'\)"):
        Trainer(max_epochs=1, checkpoint_dir="saved", **options).fit(_Net(), data)
    assert sorted(asked) == [0, 1, 2, 3]
    Trainer(max_epochs=1, **options).fit(_Net(), data)
    assert len(asked) == 4
