"""What plain torch_xla programs launch: ``torch_xla.launch`` and ``xmp.spawn`` go by a runtime's plan.

Heavy: imported by what torch_xla imports of a runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch_xla._internal import pjrt

from polyxla.xla import first_device_use
from polyxla.xla.main_module import Call, refuse_while_importing

_LAUNCH = "torch_xla.launch"
_PlanT = TypeVar("_PlanT")


@dataclass(frozen=True)
class Launched:
    """What a plain program has launched.

    Attributes:
        call: what each replica does with its place.
        function: what the program asked for, to be named in errors.
        args: its arguments, to be named in errors.
        method: how the processes are made.
    """

    call: Call
    function: Callable[..., Any]
    args: tuple[Any, ...]
    method: Literal["fork", "forkserver"]


def serve(prepared: Callable[[], _PlanT | None], run: Callable[[_PlanT, Launched], Iterable[Any]]) -> None:
    """Run what plain programs launch, from now on, where a runtime has a plan for it.

    Where it has none, what served before it does; so several runtimes may serve, in any order.

    Args:
        prepared: returns where the replicas of a program in this environment are; None to leave it to others.
        run: runs every replica of such a plan, and returns their results in ordinal order.
    """
    others: Callable[..., dict[int, Any]] = pjrt.run_multiprocess

    def run_multiprocess(
        function: Callable[..., Any], *args: Any, start_method: str = "spawn", **kwargs: Any
    ) -> dict[int, Any]:
        # Whatever the plan: in a replica's process there is none.
        refuse_while_importing(_LAUNCH)
        plan = prepared()
        if plan is None:
            return others(function, *args, start_method=start_method, **kwargs)
        return dict(enumerate(run(plan, _launched(function, args, kwargs, start_method))))

    pjrt.run_multiprocess = run_multiprocess  # type: ignore[assignment]


def _launched(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], start_method: str
) -> Launched:
    """Take a launch over: ``fork`` forks this process, all else imports anew, in forks of a prepared process.

    Raises:
        UsageError: this process has touched a device already.
    """
    first_device_use.refuse(_LAUNCH)
    if start_method == "fork":
        return Launched(Call((function, args, kwargs)), function, args, "fork")
    return Launched(Call.for_new_process(function, args, kwargs), function, args, "forkserver")
