"""A plugin that writes down the start and the end of each replica."""

from polyxla import Replica, hookimpl

diary: list[str] = []


@hookimpl
def polyxla_replica_started(replica: Replica) -> None:
    diary.append(f"started {replica.ordinal}")


@hookimpl
def polyxla_replica_stopped(replica: Replica, error: BaseException | None) -> None:
    diary.append(f"stopped {replica.ordinal} {error!r}")
