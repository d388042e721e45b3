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
