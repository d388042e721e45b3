"""States come back from a checkpoint unchanged: types, bits, and shared memory."""

from __future__ import annotations

import math
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import torch._lazy.ts_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from polyxla_training.checkpoint import CheckpointError, Format, load, save
from polyxla_training.checkpoint.state_codec import encode_state, snapshot

# torch says so once, of all of it.
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support:UserWarning")
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
STORABLE = sorted(
    {
        dtype
        for dtype in DTYPES
        if not str(dtype).startswith(("torch.q", "torch.int", "torch.uint", "torch.bits"))
    }
    # torch itself can neither copy nor print these.
    - {torch.float4_e2m1fn_x2}
    | {
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    },
    key=str,
)
Again = Callable[[Any], Any]


def _bits(tensor: torch.Tensor) -> bytes:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return bytes(whole.flatten().view(torch.uint8).tolist())


def _is_same(one: Any, other: Any) -> bool:
    """Compare with types, bits, order and what shares memory left out."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and (not one.numel() or _bits(one) == _bits(other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return _is_same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


@pytest.fixture(params=["safetensors", "torch"])
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Again:
    """Save a state in either format and load it."""
    path = tmp_path / "state"

    def save_and_load(state: Any) -> Any:
        save(state, path, format=request.param)
        return load(path, format=request.param)

    return save_and_load


def _of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    raw = torch.arange(size, dtype=torch.int32).to(torch.uint8) * 37 % 251
    raw = raw % 2 if dtype is torch.bool else raw
    return raw.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)], ids=["matrix", "scalar", "empty"])
def test_every_dtype_comes_back_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    # A uint8 comes before it, so a file in another order would not be aligned.
    state = {"odd": torch.zeros(1, dtype=torch.uint8), "it": _of(dtype, *shape)}
    save(state, tmp_path / "state")
    assert _is_same(load(tmp_path / "state"), state)


@pytest.mark.parametrize(
    "number", [np.float64(0.1), np.float32(0.1), np.int64(-3), np.uint8(255), np.float64("inf")], ids=repr
)
def test_numpys_numbers_come_back_as_pythons(again: Again, number: Any) -> None:
    found = again({"lr": number})["lr"]
    assert type(found) in (int, float)
    assert found == number


@pytest.mark.parametrize("odd", [np.zeros(2), np.longdouble(1), np.complex64(1)], ids=repr)
def test_other_values_of_numpy_are_refused_by_name(odd: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^state\['a'\] is a numpy\."):
        encode_state({"a": odd})


def test_all_of_torchs_other_dtypes_are_refused_by_name() -> None:
    for dtype in set(DTYPES) - set(STORABLE) - {torch.quint4x2, torch.quint2x4}:
        try:
            tensor = torch.empty(2, dtype=dtype)
        except (RuntimeError, NotImplementedError):
            continue
        with pytest.raises(CheckpointError, match=r"state\['a'\] is a (tensor of torch\.|quantized)"):
            encode_state({"a": tensor})


TENSORS = st.builds(
    lambda dtype, shape: _of(dtype, *shape),
    st.sampled_from(STORABLE),
    st.lists(st.integers(0, 3), max_size=3),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**4096, 2**4100),
    st.floats(),
    st.text() | st.text(st.characters(categories=["Cs"])),
    st.binary(max_size=20),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 0]), torch.Size([])]),
    TENSORS,
)
KEYS = st.text() | st.integers()
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        st.dictionaries(KEYS, st.integers(0, 9), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(state=NESTS)
def test_any_pytree_comes_back_with_its_types(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    save(state, path)
    assert _is_same(load(path), state)


def test_a_nan_keeps_its_bits_and_a_number_all_its_digits(tmp_path: Path) -> None:
    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    save([odd, math.inf, -math.inf, -0.0, -(2**100_000)], tmp_path / "state")
    loaded = load(tmp_path / "state")
    assert struct.pack(">d", loaded[0]).hex() == "fff8000000000123"
    assert loaded[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, loaded[3]) == -1
    assert loaded[4] == -(2**100_000), "longer than Python reads in decimal"


def test_tied_weights_are_written_once_and_tied_again(again: Again, tmp_path: Path) -> None:
    first, second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    state = again({"model": model.state_dict()})["model"]
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    assert _is_same(dict(state), {name: value.detach() for name, value in model.state_dict().items()})
    assert (tmp_path / "state").stat().st_size < 2 * first.weight.nbytes


def test_views_share_memory_again(again: Again) -> None:
    whole = torch.arange(24.0).view(4, 6)
    buffer = torch.arange(20.0)
    state = {
        "rows": whole[1:3],
        "whole": whole,
        "turned": whole.t(),
        "apart": [buffer[:5], buffer[15:]],
        "overlap": [buffer[6:9], buffer[8:12]],
        "steps": [buffer[6::2]],
    }
    loaded = again(state)
    assert _is_same(loaded, state)
    loaded["whole"][1, 0] = -1
    assert loaded["rows"][0, 0] == loaded["turned"][0, 1] == -1
    loaded["overlap"][0][2] = -2
    assert loaded["overlap"][1][0] == loaded["steps"][0][1] == -2


@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3)), min_size=1, max_size=6
    )
)
@settings(max_examples=60)
def test_any_slices_of_a_buffer_keep_values_and_sharing(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[tuple[int, int, int]]
) -> None:
    buffer = torch.arange(12, dtype=torch.float32)
    state = [buffer[start:stop:step] for start, stop, step in cuts]
    path = tmp_path_factory.getbasetemp() / "slices.safetensors"
    save(state, path)
    loaded = load(path)
    assert _is_same(loaded, state)
    buffer.add_(100)
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in loaded}.values():
        tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0).add_(100)
    assert _is_same(loaded, state), "exactly those that shared memory share it"


def test_strided_conjugated_and_expanded_tensors_come_back(again: Again) -> None:
    number = torch.arange(6.0).view(2, 3) * (1 + 2j)
    state = [
        torch.arange(12.0).view(3, 4).t(),
        torch.zeros(1).expand(5, 2),
        number.conj().t(),
        number.conj().imag,
        torch.nn.Parameter(torch.ones(2)).detach(),
    ]
    assert _is_same(again(state), state)


def test_a_parameter_comes_back_as_a_tensor_without_gradients(again: Again) -> None:
    loaded = again([torch.nn.Parameter(torch.ones(2)), torch.ones(1, requires_grad=True)])
    assert [type(tensor) for tensor in loaded] == [torch.Tensor, torch.Tensor]
    assert not any(tensor.requires_grad for tensor in loaded)


def test_state_dicts_of_torch_come_back(again: Again) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 4])
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    schedule.step()
    state = [model.state_dict(), optimizer.state_dict(), schedule.state_dict(), torch.get_rng_state()]
    loaded = again(state)
    assert _is_same(loaded, state)
    assert loaded[0]._metadata == getattr(model.state_dict(), "_metadata")  # noqa: B009
    optimizer.load_state_dict(loaded[1])
    model.load_state_dict(loaded[0])


def test_other_readers_find_the_tensors_under_their_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2).to(torch.bfloat16)
    path = tmp_path / "state.safetensors"
    save(model.state_dict(), path)
    assert _is_same(load_file(path), dict(model.state_dict()))
    save({"model": model.state_dict(), "step": 3, "more": [torch.ones(0), torch.tensor(1 + 2j)]}, path)
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"model.weight", "model.bias", "more.0", "more.1"}
        assert torch.equal(file.get_tensor("model.weight"), model.weight.detach())
        assert file.get_tensor("more.1").tolist() == [1.0, 2.0]


def test_other_readers_open_a_file_with_every_dtype(tmp_path: Path) -> None:
    state = {str(dtype): _of(dtype, 3) for dtype in STORABLE}
    save(state, tmp_path / "state")
    with safetensors.safe_open(tmp_path / "state", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == state.keys()
    assert all(_bits(found[name]) == _bits(value) for name, value in state.items())
    # A reader of the format's first versions knows neither.
    assert found["torch.float8_e8m0fnu"].dtype is torch.uint8
    assert found["torch.complex64"].shape == (3, 2)


def test_a_file_that_others_wrote_is_a_flat_dict(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(3, dtype=torch.uint8), "a": torch.randn(2, 2), "c": torch.tensor([1 + 2j])}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    loaded = load(tmp_path / "theirs")
    assert _is_same(dict(sorted(loaded.items())), dict(sorted(tensors.items())))


def test_clashing_names_are_made_unique(again: Again) -> None:
    state = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "a.b~2": torch.ones(2),
        "__metadata__": torch.ones(3),
        "\ud800": torch.ones(4),
        1: torch.ones(5),
        "1": torch.ones(6),
    }
    assert _is_same(again(state), state)


def test_a_single_tensor_is_a_state(again: Again) -> None:
    assert _is_same(again(torch.ones(2)), torch.ones(2))
    assert again(None) is None


Point = namedtuple("Point", "x y")  # noqa: PYI024


class _Subclass(torch.Tensor):
    pass


def _quantized() -> torch.Tensor:
    # Newer releases of torch warn that they will remove these.
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"optimizer": {"hook": print}}, r"state['optimizer']['hook'] is a builtin_function_or_method"),
        ({"optimizer": [1, {"hook": lambda: 1}]}, r"state['optimizer'][1]['hook'] is a function"),
        ({"a": {1, 2}}, "state['a'] is a set"),
        ((Point(1, 2),), "state[0] is a "),
        ({(1, 2): 3}, "state has a key that is a tuple: (1, 2)"),
        (defaultdict(list), "state is a collections.defaultdict"),
        ([object()], "state[0] is an object"),
        ([torch.ones(1).as_subclass(_Subclass)], "_Subclass"),
        ([torch.ones(2).to_sparse()], "state[0] is a sparse tensor"),
        ([torch.ones(2, device="meta")], "state[0] is a meta tensor"),
        ([_quantized()], "state[0] is a quantized tensor"),
        (ENDLESS, "nested more than 100 deep, or contains itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_an_unsupported_value_is_named_before_anything_is_written(
    tmp_path: Path, state: Any, said: str, format: Any
) -> None:
    path = tmp_path / "new" / "state"
    with pytest.raises(CheckpointError) as caught:
        save(state, path, format=format)
    assert said in str(caught.value)
    assert not path.parent.exists()


@pytest.fixture(scope="module")
def device() -> str:
    """Torch's own lazy device: its tensors are functional as XLA's are, and say as little about views."""
    torch._lazy.ts_backend.init()
    return "lazy"


def test_tensors_on_a_device_are_tied_only_if_they_are_equal(tmp_path: Path, device: str) -> None:
    weight = torch.arange(16.0).view(4, 4).to(device)
    rows = weight[1:3]
    state = {
        "weight": weight,
        "tied": weight.detach(),
        "turned": weight.t().detach(),
        "first": weight[:2].detach(),
        "last": weight[2:].detach(),
        "rows": rows,
        "rows again": rows,
    }
    save(state, tmp_path / "state")
    loaded = load(tmp_path / "state")
    assert _is_same(loaded, {name: value.cpu() for name, value in state.items()})
    assert loaded["weight"] is loaded["tied"]
    assert loaded["rows"] is loaded["rows again"]
    assert len({value.data_ptr() for value in loaded.values()}) == 5


def test_tensors_are_loaded_onto_a_device_views_too(tmp_path: Path, device: str) -> None:
    whole = torch.arange(24.0).view(4, 6)
    state = {"whole": whole, "turned": whole.t(), "rows": whole[1:3], "number": torch.tensor([1 + 2j])}
    save(state, tmp_path / "state")
    loaded = load(tmp_path / "state", device=device)
    assert {value.device.type for value in loaded.values()} == {device}
    assert _is_same({name: value.cpu() for name, value in loaded.items()}, state)


def test_a_snapshot_is_a_copy_that_can_be_saved(tmp_path: Path, device: str) -> None:
    tensors = {"host": torch.ones(3), "gaps": torch.ones(2, 2).t(), "device": torch.ones(2).to(device)}
    taken = snapshot(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    formats: tuple[Format, ...] = ("safetensors", "torch")
    for format in formats:
        save(taken, tmp_path / format, format=format)
        loaded = load(tmp_path / format, format=format)
        assert {name: value.sum().item() for name, value in loaded.items()} == {
            "host": 3,
            "gaps": 4,
            "device": 2,
        }
