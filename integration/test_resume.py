"""Resuming where hosts do not share a file system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polyxla.plugin import free_ports

PROGRAM = Path(__file__).parent / "programs" / "train_in_own_directory.py"
TIMEOUT_S = 300


def _run(environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    (port,) = free_ports(1)
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(PROGRAM), *arguments]
    return subprocess.run(
        command,
        env=environ | {"PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_hosts_without_a_shared_file_system_do_not_resume(
    clean_environ: dict[str, str], tmp_path: Path
) -> None:
    first = _run(clean_environ, str(tmp_path), "1")
    assert first.stdout.count("STEPS 2\n") == 2, first.stderr
    # Ordinal 0 wrote the checkpoint, to a directory that only it has.
    assert [path.parent.parent.name for path in tmp_path.rglob("*.safetensors")] == ["host0"]
    second = _run(clean_environ, str(tmp_path), "2")
    assert second.returncode != 0
    assert (
        "replicas cannot resume from the same 'saved/step-00000002.safetensors': ordinal 0 on "
        in second.stderr
    )
    assert "; ordinal 1 on " in second.stderr
    assert "cannot be read: No such file or directory" in second.stderr
