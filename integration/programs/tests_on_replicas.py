"""A user's tests on replicas, each with the outcome that its name begins with."""

import os
import unittest
import warnings
from pathlib import Path

import pytest
import torch

from polyxla import Replica


@pytest.fixture
def own_file(tmp_path: Path, replica: Replica) -> Path:
    (tmp_path / "ordinal").write_text(str(replica.ordinal))
    return tmp_path / "ordinal"


@pytest.mark.replicas(2)
def test_passes_with_its_fixtures(replica: Replica, own_file: Path, shared_path: Path) -> None:
    (shared_path / f"{replica.ordinal}").touch()
    assert replica.all_reduce(torch.ones(2, device=replica.device)).cpu().tolist() == [2.0, 2.0]
    assert own_file.read_text() == str(replica.ordinal)
    assert {path.name for path in shared_path.iterdir()} == {"0", "1"}


@pytest.mark.replicas(count=2)
def test_passes_with_a_warning(replica: Replica) -> None:
    warnings.warn("be careful", FutureWarning, stacklevel=1)


@pytest.mark.replicas(2)
@pytest.mark.parametrize("url", ["https://host/./file"])
def test_passes_with_a_url(replica: Replica, url: str) -> None:
    assert url == "https://host/./file"


class TestMethods(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _take(self, replica: Replica) -> None:
        self.replica = replica

    @pytest.mark.replicas(2)
    def test_passes_as_a_method(self) -> None:
        assert self.replica.world_size == 2

    @pytest.mark.replicas(2)
    def test_fails_as_a_method(self) -> None:
        assert self.replica.ordinal == 1


@pytest.mark.replicas(2, count=2)
def test_fails_by_its_mark(replica: Replica) -> None:
    pass


@pytest.mark.replicas(2)
def test_fails_on_both(replica: Replica) -> None:
    assert [1, replica.world_size] == [1, 3]


@pytest.mark.replicas(2)
@pytest.mark.parametrize("word", ["one", "two words"])
def test_fails_on_one(replica: Replica, word: str) -> None:
    print(f"{word} of {replica.ordinal}")
    assert replica.ordinal == 0, "not here"
    replica.all_reduce(torch.ones(2, device=replica.device)).cpu()


@pytest.mark.replicas(2)
def test_fails_because_one_dies(replica: Replica) -> None:
    if replica.ordinal == 1:
        os._exit(3)
    replica.all_reduce(torch.ones(2, device=replica.device)).cpu()


@pytest.mark.xfail(reason="known")
@pytest.mark.replicas(2)
def test_xfails(replica: Replica) -> None:
    assert replica.world_size == 3


@pytest.mark.replicas(2)
def test_skips(replica: Replica) -> None:
    pytest.skip(f"not on {replica.world_size}")


def test_errs_without_the_mark(replica: Replica) -> None:
    pass
