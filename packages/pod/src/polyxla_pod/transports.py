"""Transports: how a program is started on each host, through a program that the user has already set up."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polyxla import UsageError

DESCRIBE_S = 60.0
"""Longest wait for gcloud's description of a TPU, in seconds."""


@dataclass(frozen=True)
class Target:
    """The hosts that the user asked for, as the options of ``polyxla pod run`` give them.

    Attributes:
        hosts: names for ssh, in the order of the hosts' numbers.
        tpu: name of a TPU VM.
        zone: its zone.
        project: its project; None for gcloud's default.
        options: further arguments for the transport's program.
    """

    hosts: tuple[str, ...] = ()
    tpu: str | None = None
    zone: str | None = None
    project: str | None = None
    options: tuple[str, ...] = ()


class Transport(ABC):
    """Starts a program on each host.

    A transport makes a local command for each host. That command's standard input, output and error are those
    of the program on the host; it ends when the program does, and the program's input closes when it ends.

    Attributes:
        hosts: the hosts' names, in the order of their numbers.
    """

    hosts: tuple[str, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The names or addresses under which the hosts reach each other: their names, without a user."""
        return tuple(name.rpartition("@")[2].strip("[]") for name in self.hosts)

    @abstractmethod
    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return the local command that runs `program` on the host with this number."""

    @abstractmethod
    def check_by_hand(self, host: int) -> str:
        """Return a command for error messages that shows the user whether the host can be reached."""


class SshTransport(Transport):
    """The user's own ``ssh``: keys, ProxyJump and ports are in their ``~/.ssh/config``.

    Raises:
        UsageError: a host is missing, is named twice, or has a name that ssh would take for an option.
    """

    def __init__(self, target: Target) -> None:
        self.hosts = target.hosts
        self._options = target.options
        where = f"--hosts {','.join(target.hosts)}"
        if not self.hosts:
            raise UsageError("no hosts are given", where="polyxla pod run", fix="Write --hosts a,b or --tpu.")
        if twice := [name for name, count in Counter(self.hosts).items() if count > 1]:
            raise UsageError(f"host {twice[0]} is named twice", where=where, fix="Name each host once.")
        for name in self.hosts:
            # A name that begins with a dash would be an option, such as -oProxyCommand, which runs a program.
            if not re.fullmatch(r"[\w.:@\[\]%][\w.:@\[\]%-]*", name, re.ASCII):
                raise UsageError(
                    f"{name!r} is not the name of a host",
                    where=where,
                    fix="Write names as for ssh, such as tpu-0 or me@10.0.0.2, with commas between them.",
                )

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return an ssh command that asks no question: it would be asked once for each host."""
        # With -T there is no terminal, which would mix both streams and change line ends.
        options = ["-T", "-o", "BatchMode=yes", *self._options]
        return ["ssh", *options, self._name(host), shlex.join(program)]

    def check_by_hand(self, host: int) -> str:
        """Return ``ssh HOST true``."""
        return shlex.join(["ssh", *self._options, self._name(host), "true"])

    def _name(self, host: int) -> str:
        # ssh would look for a host whose name has the brackets of an IPv6 address.
        return re.sub(r"[\[\]]", "", self.hosts[host])


class GcloudTransport(Transport):
    """``gcloud compute tpus tpu-vm ssh``, with gcloud's keys, IAP and project.

    Making one asks gcloud how many workers the TPU has. Blocks for at most `DESCRIBE_S`.

    Raises:
        UsageError: the TPU or its zone is not given, or gcloud does not know it.
    """

    def __init__(self, target: Target) -> None:
        if not target.tpu or not target.zone:
            raise UsageError(
                "the transport gcloud needs a TPU's name and its zone",
                where="polyxla pod run",
                fix="Write --tpu NAME --zone ZONE.",
            )
        self._target = target
        self._addresses = self._endpoints()
        self.hosts = tuple(f"{target.tpu}:{worker}" for worker in range(len(self._addresses)))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The workers' addresses in the TPU's network."""
        return self._addresses

    def command(self, host: int, program: Sequence[str]) -> list[str]:
        """Return a gcloud command for one worker."""
        how = [f"--worker={host}", f"--command={shlex.join(program)}", *self._target.options]
        # Without --quiet gcloud may ask for a passphrase or a new key, once for each host.
        return [*self._gcloud("ssh"), "--quiet", *how]

    def check_by_hand(self, host: int) -> str:
        """Return a gcloud command that runs ``true``."""
        return shlex.join([*self._gcloud("ssh"), f"--worker={host}", "--command=true", *self._target.options])

    def _gcloud(self, verb: str) -> list[str]:
        assert self._target.tpu
        assert self._target.zone
        project = ["--project", self._target.project] if self._target.project else []
        return [
            "gcloud",
            "compute",
            "tpus",
            "tpu-vm",
            verb,
            self._target.tpu,
            "--zone",
            self._target.zone,
            *project,
        ]

    def _endpoints(self) -> tuple[str, ...]:
        command = [*self._gcloud("describe"), "--format=json"]
        where = f"--tpu {self._target.tpu} --zone {self._target.zone}"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_S, check=False)
        except FileNotFoundError:
            raise UsageError(
                "gcloud is not installed on this machine",
                where=where,
                fix="Install the Google Cloud CLI, or name the hosts: --hosts a,b.",
            ) from None
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"gcloud did not describe the TPU within {DESCRIBE_S:g} s",
                where=where,
                fix=f"Try it by hand: {shlex.join(command)}",
            ) from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
            raise UsageError(
                f"gcloud cannot describe the TPU: {last}",
                where=where,
                fix=f"`gcloud compute tpus tpu-vm list --zone {self._target.zone}` lists those there are.",
            )
        # Source: the message Node of Cloud TPU's API v2: one network endpoint for each worker.
        if not (endpoints := json.loads(done.stdout).get("networkEndpoints")):
            raise UsageError(
                "gcloud describes the TPU without workers", where=where, fix="Wait until its state is READY."
            )
        return tuple(str(endpoint["ipAddress"]) for endpoint in endpoints)
