"""Where a run comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polyxla_training.observe import run_log
from polyxla_training.observe.run_log import git_state, hyper_parameters, provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return done.stdout.strip()


def test_the_releases_are_those_of_this_process() -> None:
    versions = provenance()["versions"]
    assert versions["python"] == sys.version.split()[0]
    assert versions["torch"] == torch.__version__.split("+")[0]
    assert {"polyxla_core", "polyxla_training"} <= set(versions)


def test_git_names_the_commit_and_counts_the_changed_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    (tmp_path / "train.py").write_text("one")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("data")
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "changed_files": 0}
    (tmp_path / "train.py").write_text("two")
    assert git_state(tmp_path) == {"commit": commit, "branch": "trunk", "changed_files": 1}


@pytest.mark.parametrize("has_repository", [False, True])
def test_a_directory_without_a_commit_has_no_git_state(tmp_path: Path, has_repository: bool) -> None:
    if has_repository:
        git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None


def test_a_git_that_hangs_or_is_missing_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
    slow = tmp_path / "git"
    slow.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    slow.chmod(0o755)
    monkeypatch.setattr(run_log, "GIT_TIMEOUT_S", 0.2)
    assert git_state(tmp_path) is None


def test_hyper_parameters_are_what_the_module_saved() -> None:
    assert hyper_parameters(SimpleNamespace(hparams={"lr": 0.1})) == {"lr": 0.1}
    assert hyper_parameters(torch.nn.Linear(1, 1)) == {}
