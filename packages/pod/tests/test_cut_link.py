"""A host whose link is cut, in network namespaces: both sides of the cut end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from polyxla_testing.processes import wait_for_end_of

if TYPE_CHECKING:
    from conftest import Networks, Pod

LOST_AFTER_S = 3.0
SOON_S = 20.0


@pytest.mark.timeout(120)
def test_a_host_whose_link_is_cut_is_named_and_all_hosts_end_the_command(
    linked: Pod, networks: Networks
) -> None:
    process = linked.start_run("one,two", "--lost-after", str(LOST_AFTER_S), *linked.program("sleeper.py"))
    pids = linked.pids(4)
    begin = time.monotonic()
    networks.cut("two")
    done = linked.finish(process)
    # The silence, one more heartbeat, and the grace.
    assert time.monotonic() - begin < LOST_AFTER_S + SOON_S
    assert done.returncode == 255
    assert f"w1 (two): did not answer for {LOST_AFTER_S:g} s: its link is cut" in done.stderr
    wait_for_end_of(pids)
    assert time.monotonic() - begin < LOST_AFTER_S + SOON_S
