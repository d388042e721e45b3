"""TPU chips: their device files, who has them open, and libtpu's own files."""

from __future__ import annotations

from polyxla.plugin import Holder
from polyxla_tools.doctor.facts.host import Access, HostFacts
from polyxla_tools.doctor.findings import Finding, counted, note, ok, problem


def check_chips(host: HostFacts) -> list[Finding]:
    """Check that the chips that the kernel lists can be opened."""
    if not host.chips:
        return [ok("chips", "no TPU chip is attached")]
    kinds = ", ".join(sorted({one.generation or "unknown generation" for one in host.chips}))
    found = f"{counted(len(host.chips), 'TPU chip')} attached ({kinds})"
    if not host.device_files:
        fix = "In a container, pass --privileged, or each chip with --device; else install the TPU's driver."
        return [problem("chips", f"{found}, and /dev has no file of one", fix)]
    shut = [one for one in host.device_files if not one.is_usable]
    return [_shut(one, host.user) for one in shut] or [ok("chips", f"{found}, which {host.user} may open")]


def _shut(one: Access, user: str) -> Finding:
    group = one.owner.partition(":")[2]
    found = f"{user} may not open {one.path} (mode {one.mode}, owner {one.owner})"
    fix = f"Add the user to its group (sudo usermod -aG {group} {user}), or run as root."
    return problem("chips", found, fix)


def check_holders(host: HostFacts) -> list[Finding]:
    """Check that no process has the chips: a second one fails, or waits."""
    return [
        problem(
            "holders",
            f"the TPU is in use: {short(one)}",
            f"Wait until it ends, or end it: kill {one.pid}.",
        )
        for one in host.holders
    ]


def short(holder: Holder) -> str:
    """Describe a holder by program and first argument: those after it may be secret."""
    program = " ".join(holder.command.split()[:2])
    return f"process {holder.pid} ({program}) has {', '.join(holder.files)} open"


def check_libtpu_files(host: HostFacts) -> list[Finding]:
    """Check that this user may write libtpu's lock file and logs, which another user may have made."""
    found = []
    make = problem if host.chips else note
    if host.lock_file and not host.lock_file.is_usable:
        text = f"{host.user} may not write {host.lock_file.path} (owner {host.lock_file.owner})"
        fix = f"If no program uses the TPU: sudo rm {host.lock_file.path}."
        found.append(make("libtpu", f"{text}; libtpu takes the TPU for one in use", fix))
    if host.tpu_logs and not host.tpu_logs.is_usable:
        text = f"{host.user} may not write {host.tpu_logs.path} (owner {host.tpu_logs.owner})"
        fix = "Set TPU_LOG_DIR to a directory of yours."
        found.append(note("libtpu", f"{text}; libtpu prints an error for each line of its log", fix))
    return found
