"""A plugin that sends a summary of each replica but the first, and prints what arrives."""

from __future__ import annotations

from typing import Any

from polyxla import Replica, hookimpl


@hookimpl
def polyxla_replica_summary(replica: Replica) -> Any:
    return {"from": replica.ordinal} if replica.ordinal else None


@hookimpl
def polyxla_launch_finished(summaries: Any) -> None:
    print("summaries", dict(summaries))
