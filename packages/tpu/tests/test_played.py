"""Reading which TPU to play."""

from __future__ import annotations

import pytest

from polyxla import UsageError
from polyxla_tpu import env
from polyxla_tpu.played import PlayedTpu


@pytest.mark.parametrize("text", ["2", "-1", "one"])
def test_a_host_that_the_emulated_tpu_lacks_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        PlayedTpu.read({env.POLYXLA_EMULATE: "v4-16", env.POLYXLA_EMULATE_HOST: text})
    assert str(caught.value) == (
        f"the hosts of a v4-16 have the numbers 0 to 1 (from POLYXLA_EMULATE_HOST={text}). Write one of them"
        ", or unset POLYXLA_EMULATE_HOST to play all hosts in one launch."
    )
