"""Reading which TPU to emulate."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla.tpu import env
from polyxla.tpu.emulated import EmulatedTpu


@pytest.mark.parametrize("text", ["2", "-1", "one"])
def test_a_host_that_the_emulated_tpu_lacks_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        EmulatedTpu.read({env.POLYXLA_EMULATE: "v4-16", env.POLYXLA_EMULATE_HOST: text})
    assert str(caught.value) == (
        f"the hosts of a v4-16 have the numbers 0 to 1 (from POLYXLA_EMULATE_HOST={text}). Write one of them"
        ", or unset POLYXLA_EMULATE_HOST to emulate all hosts in one launch."
    )


def test_several_slices_are_emulated() -> None:
    found = EmulatedTpu.read({env.POLYXLA_EMULATE: "2xv5e-16", env.POLYXLA_EMULATE_HOST: "5"})
    assert found is not None
    assert (found.name, found.slices, found.hosts, found.device_count) == ("2xv5litepod-16", 2, 8, 32)
    described = found.describe({})
    assert described[env.TPU_WORKER_ID] == described[env.MEGASCALE_SLICE_ID] == "1"
    assert described[env.TPU_WORKER_HOSTNAMES] == "127.0.0.5,127.0.0.6,127.0.0.7,127.0.0.8"
    assert described[env.MEGASCALE_COORDINATOR_ADDRESS] == "127.0.0.1:8080"
    assert EmulatedTpu.read({env.POLYXLA_EMULATE: "1xv4-8"}) == EmulatedTpu.read(
        {env.POLYXLA_EMULATE: "v4-8"}
    )


@pytest.mark.parametrize("text", ["0xv4-8", "2xv9-8", "2x", "x v4-8", "2*v4-8", "-2xv4-8", "1000xv4-8"])
def test_slices_that_cannot_be_emulated_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="there is no TPU type") as caught:
        EmulatedTpu.read({env.POLYXLA_EMULATE: text})
    assert caught.value.where == f"POLYXLA_EMULATE={text}"


@pytest.mark.parametrize(("tpu", "given"), [("v4-8", "2"), ("2xv4-8", "3")])
def test_another_number_of_slices_in_the_environment_is_refused(tpu: str, given: str) -> None:
    with pytest.raises(UsageError, match=f"MEGASCALE_NUM_SLICES={given} contradicts a TPU of"):
        EmulatedTpu.read({env.POLYXLA_EMULATE: tpu, env.MEGASCALE_NUM_SLICES: given})
