"""`Journal` brings another worker to the same state, whatever was sent and whenever the last one was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla_bridge.programs.executable import ArrayType
from polyxla_xrt.client.journal import Journal, LiveArray, Sized, Snapshot
from polyxla_xrt.proto import worker_pb2 as pb

SCALAR = ArrayType("uint8", ())
EVERY = 3


@dataclass
class Machine:
    """A worker in a few lines: arrays are texts that say how they were made."""

    arrays: dict[int, str] = field(default_factory=dict)
    programs: set[int] = field(default_factory=set)
    answers: list[int] = field(default_factory=list)

    def run(self, command: Any) -> None:
        match command.WhichOneof("kind"):
            case "compile":
                self.programs.add(command.compile.request)
            case "upload":
                self.arrays[command.upload.array] = command.upload.data.decode()
            case "execute":
                assert command.execute.program in self.programs
                (argument,) = command.execute.arguments
                self.arrays[command.execute.first_result] = f"f({self.arrays[argument]})"
                if not command.execute.keep:
                    del self.arrays[argument]
            case "release":
                for number in command.release.arrays:
                    self.arrays.pop(number, None)
                self.programs -= {*command.release.programs}
            case "download":
                assert self.arrays[command.download.array]
                self.answers.append(command.download.request)


class Client:
    """A client that sends commands to a machine, and records them."""

    def __init__(self, *, is_alone: bool) -> None:
        self.journal = Journal(EVERY, is_alone=is_alone)
        self.machine = Machine()
        self.numbers = iter(range(1, 10_000))
        self.live: list[int] = []
        self.programs: list[int] = []
        self.open: set[int] = set()
        self.pending: tuple[Snapshot, dict[int, str]] | None = None

    def send(self, command: pb.Command, makes: Any = (), takes: Any = ()) -> None:
        self.journal.add(command, 1, {number: LiveArray(SCALAR, 0) for number in makes}, takes)
        self.machine.run(command)

    def act(self, choice: int) -> None:
        number, kind = next(self.numbers), choice % 7
        if kind == 0 or not self.live:
            self.send(pb.Command(upload=pb.Upload(array=number, data=f"{number}".encode())), [number])
            self.live.append(number)
        elif kind == 1 or not self.programs:
            self.send(pb.Command(compile=pb.Compile(request=number)))
            self.programs.append(number)
        elif kind in (2, 3):
            self.execute(number, choice, keeps=kind == 2)
        elif kind == 4:
            gone = self.live.pop(choice % len(self.live))
            self.send(pb.Command(release=pb.Release(arrays=[gone])), takes=[gone])
        elif kind == 5:
            array = self.live[choice % len(self.live)]
            self.send(pb.Command(download=pb.Download(request=number, array=array)))
            self.open.add(number)
        else:
            dropped = self.programs.pop(choice % len(self.programs))
            self.send(pb.Command(release=pb.Release(programs=[dropped])))

    def execute(self, number: int, choice: int, *, keeps: bool) -> None:
        argument = self.live[choice % len(self.live)]
        request = pb.Execute(
            program=self.programs[choice % len(self.programs)],
            arguments=[argument],
            first_result=number,
            keep=[0] if keeps else [],
        )
        self.send(pb.Command(execute=request), [number], [] if keeps else [argument])
        self.live = [each for each in self.live if keeps or each != argument] + [number]
        self.journal.meet()
        if self.journal.is_due(has_met=True):
            snapshot, missing = self.journal.begin()
            # The worker carries out commands in order, so it reads the arrays as they are here.
            self.pending = snapshot, {array: self.machine.arrays[array] for array in missing}
            self.answer()

    def answer(self) -> None:
        """Answer what waits; a snapshot is finished only after what was asked before it."""
        self.machine.answers.clear()
        self.open.clear()

    def finish(self) -> None:
        if self.pending:
            snapshot, values = self.pending
            for array, text in values.items():
                upload = pb.Command(upload=pb.Upload(array=array, data=text.encode()))
                snapshot.arrays[array] = [(upload, 1)]
            self.journal.finish(snapshot)
            self.pending = None

    def lose(self) -> None:
        """Replace the machine, and bring the next one to the same state."""
        before, self.machine = self.machine, Machine()
        self.journal.give_up()
        self.pending = None
        newest = self.journal.newest
        compilations: list[Sized] = [
            sized for commands in self.journal.compilations(newest).values() for sized in commands
        ]
        _, commands = self.journal.replay(newest, self.open.__contains__)
        for command, _ in (*compilations, *commands):
            self.machine.run(command)
        assert self.machine.arrays == before.arrays
        assert self.machine.programs == before.programs
        assert {*self.machine.answers} == self.open


@given(st.lists(st.integers(0, 1000), max_size=120), st.booleans())
def test_another_worker_gets_the_same_arrays(choices: list[int], is_alone: bool) -> None:
    client = Client(is_alone=is_alone)
    for choice in choices:
        match choice % 11:
            case 9:
                client.finish()
            case 10:
                client.lose()
            case _:
                client.act(choice)
    client.lose()


def test_what_a_snapshot_replaces_is_forgotten() -> None:
    client = Client(is_alone=True)
    client.act(0)
    client.act(1)
    for _ in range(10 * EVERY):
        client.act(3)
        client.finish()
    _, commands = client.journal.replay(client.journal.newest, lambda _: True)
    # One upload of the one array that is left; all executions are before the snapshot.
    assert len(commands) == 1


def test_a_program_is_forgotten_with_the_last_command_that_uses_it() -> None:
    client = Client(is_alone=True)
    for choice in (0, 1, 3, 6):
        client.act(choice)
    # The execution that used the program would be sent again.
    assert client.journal.compilations(0)
    client.lose()
    client.act(1)
    for _ in range(EVERY):
        client.act(3)
        client.finish()
    assert len(client.journal.compilations(client.journal.newest)) == 1


def test_replicas_go_back_to_a_snapshot_that_both_have() -> None:
    fast, slow = Client(is_alone=False), Client(is_alone=False)
    for client in (fast, slow):
        for choice in (0, 1, *[3] * EVERY):
            client.act(choice)
        client.finish()
    for _ in range(EVERY):
        fast.act(3)
    fast.finish()
    assert (fast.journal.newest, slow.journal.newest) == (2 * EVERY, EVERY)
    arrays, commands = fast.journal.replay(slow.journal.newest, lambda _: True)
    assert (arrays, len(commands)) == (1, 1 + EVERY)
    # The newer one is gone: the other replica can not go back to it.
    assert fast.journal.newest == EVERY
    with pytest.raises(LookupError, match=r"goes back to 6 programs, this one has .*3"):
        fast.journal.replay(2 * EVERY, lambda _: True)


def test_a_replica_waits_for_its_snapshot_before_the_next_place() -> None:
    client = Client(is_alone=False)
    for choice in (0, 1, *[3] * EVERY, *[3] * (EVERY - 1)):
        client.act(choice)
    assert client.pending
    pending = client.pending[0]
    assert not pending.done.done()
    client.finish()
    client.journal.wait_before_meeting()
    assert pending.done.done()
