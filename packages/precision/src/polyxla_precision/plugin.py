"""The hooks of polyxla-precision."""

from __future__ import annotations

import pluggy

from polyxla_precision.policies import BF16Mixed, BF16True, Full32, Policy, Precision16

# Made from the project's name, so that this package depends on pluggy and not on polyxla.
hookimpl = pluggy.HookimplMarker("polyxla")

_POLICIES: dict[str, type[Policy]] = {
    "32-true": Full32,
    "32": Full32,
    "bf16-mixed": BF16Mixed,
    "bf16": BF16Mixed,
    "16": Precision16,
    "bf16-true": BF16True,
}
_FLOAT16 = ("16-mixed", "16-true", "fp16", "float16")


@hookimpl
def polyxla_precision(name: str) -> Policy | None:
    """Return the policy called `name`, or None if this package has no such policy.

    Raises:
        ValueError: the name means float16; the text says why it is refused, and what to write instead.
    """
    if name in _FLOAT16:
        raise ValueError(
            f"{name!r} is float16, which polyxla does not train in: small gradients become 0 unless the loss "
            "is scaled, and torch_xla has no gradient scaler; write precision='bf16-mixed'"
        )
    policy = _POLICIES.get(name)
    return policy() if policy else None
