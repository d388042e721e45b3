"""Real OpenSSH servers for tests, each with keys and configurations of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from polyxla_testing.processes import wait_until

WAIT_S = 60.0
"""Longest wait for ssh-keygen, and for a server's end, in seconds."""
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
HAS_SSH = bool(SSHD and shutil.which("ssh"))
MISSING = "there is no OpenSSH server here: apt-get install openssh-server"


def ssh_files(directory: Path, address: str, port: int) -> None:
    """Write the keys and the configurations of an sshd and of ssh."""
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True, timeout=WAIT_S)
    (directory / "sshd_config").write_text(
        f"ListenAddress {address}\nPort {port}\nHostKey {directory}/host_key\nPidFile none\n"
        f"AuthorizedKeysFile {directory}/user_key.pub\nPasswordAuthentication no\n"
        # StrictModes would refuse keys in a directory that others may write to. By default, sshd drops
        # connections once ten are being made at the same time.
        "StrictModes no\nUsePAM no\nMaxStartups 200\nPermitRootLogin prohibit-password\n"
    )
    (directory / "ssh_config").write_text(
        f"Host *\n  IdentityFile {directory}/user_key\n  IdentitiesOnly yes\n"
        "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
    )


def start_sshd(directory: Path, *prefix: str) -> subprocess.Popen[bytes]:
    """Start an sshd in the foreground, and wait until it listens.

    Args:
        directory: where `ssh_files` wrote its configuration.
        prefix: what runs the command, such as in a network namespace.
    """
    assert SSHD
    if os.geteuid() == 0:
        # Debian's init script makes it; sshd refuses to start without it.
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    file = directory / "sshd.log"
    with file.open("wb") as log:
        # In the foreground, so that it can be ended by its process id, and with its log on standard error.
        command = [*prefix, SSHD, "-D", "-e", "-f", str(directory / "sshd_config")]
        server = subprocess.Popen(command, stderr=log)

    def listens() -> bool:
        assert server.poll() is None, file.read_text()
        return "Server listening" in file.read_text()

    wait_until(listens, "sshd")
    return server


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
