"""A list of workers is parsed, or refused with the line that fixes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyxla import UsageError
from polyxla_xrt import env
from polyxla_xrt.config.variables import Variable
from polyxla_xrt.config.workers import Worker, WorkerId, read_worker_id, read_workers, write_workers

NODE = "tpu_worker;0;10.39.209.42:8470"

names = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)
hosts = st.one_of(
    st.from_regex(r"[A-Za-z0-9_.-]{1,20}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
places = st.lists(st.tuples(hosts, st.integers(1, 65535)), min_size=1, max_size=9)


def config(text: str) -> tuple[Worker, ...]:
    return read_workers(Variable(env.XRT_TPU_CONFIG, text))


def addresses(text: str) -> tuple[Worker, ...]:
    return read_workers(Variable(env.XRT_WORKERS, text))


def test_one_worker() -> None:
    (worker,) = config(NODE)
    assert worker == Worker("tpu_worker", 0, "10.39.209.42", 8470)
    assert worker.address == "10.39.209.42:8470"
    assert str(worker.id) == "tpu_worker:0"
    assert str(worker) == NODE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localservice;0;localhost:51011", [("localservice", 0, "localhost", 51011)]),
        ("c-w;0;a:1|c-w;1;b:2", [("c-w", 0, "a", 1), ("c-w", 1, "b", 2)]),
        (" w ; 0 ; a:1 | w;1;b:2 ", [("w", 0, "a", 1), ("w", 1, "b", 2)]),
        ("w;0;[::1]:1", [("w", 0, "::1", 1)]),
        ("w;0;grpc://a:1", [("w", 0, "a", 1)]),
    ],
)
def test_valid_lists(text: str, expected: list[tuple[str, int, str, int]]) -> None:
    assert config(text) == tuple(Worker(*fields) for fields in expected)


def test_the_form_of_xrt_workers() -> None:
    assert addresses("w:0;grpc://a:1|w:1;[::1]:2") == (Worker("w", 0, "a", 1), Worker("w", 1, "::1", 2))


SHAPE = "Write name;task;host:port, such as tpu_worker;0;10.0.0.2:8470, several joined by '|'."


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        (f'"{NODE}"', "the value contains quotes", f"Write XRT_TPU_CONFIG={NODE} there"),
        (f"'{NODE}'", "the value contains quotes", f"Write XRT_TPU_CONFIG={NODE} there"),
        ("w;0;a:1,w;1;b:1", "separated by '|', not by a comma", 'Write XRT_TPU_CONFIG="w;0;a:1|w;1;b:1".'),
        (f"{NODE}|", "there is an empty item beside a '|'", f'Write XRT_TPU_CONFIG="{NODE}".'),
        ("|", "there is an empty item beside a '|'", "tpu_worker;0;10.0.0.2:8470"),
        ("10.0.0.2:8470", "'10.0.0.2:8470' is not name;task;host:port", SHAPE),
        ("w;a:1", "'w;a:1' is not name;task;host:port", SHAPE),
        ("w:0;a:1", "'w:0;a:1' is not name;task;host:port", SHAPE),
        ("w;0;a:1;", "'w;0;a:1;' is not name;task;host:port", SHAPE),
        (";0;a:1", "'' in ';0;a:1' is not a valid worker name", SHAPE),
        ("my worker;0;a:1", "'my worker' in 'my worker;0;a:1' is not a valid worker name", SHAPE),
        ("w;x;a:1", "the task 'x' in 'w;x;a:1' is not a non-negative integer", SHAPE),
        ("w;-1;a:1", "the task '-1' in 'w;-1;a:1' is not a non-negative integer", SHAPE),
        ("w;;a:1", "the task '' in 'w;;a:1' is not a non-negative integer", SHAPE),
        ("w;0;:8470", "':8470' has no host", "10.0.0.2:8470"),
        ("w;0;a:1|w;0;b:1", "w:0 is listed more than once", "List each worker once"),
        ("w;0;a:1|v;0;b:1", "must share one name, but these are named v, w", "Name them all w."),
        ("w;1;a:1", "the tasks are 1, but cores are numbered", "so that their tasks are 0."),
        ("w;1;a:1|w;0;b:1", "the tasks are 1, 0, but cores", "so that their tasks are 0, 1."),
        ("w;0;a:1|w;2;b:1", "the tasks are 0, 2, but cores", "so that their tasks are 0, 1."),
    ],
)
def test_invalid_lists(text: str, what: str, fix: str) -> None:
    with pytest.raises(UsageError) as wrong:
        config(text)
    assert what in wrong.value.what
    assert wrong.value.where == f"XRT_TPU_CONFIG={text}"
    assert fix in wrong.value.fix


@pytest.mark.parametrize("text", ["w;0;a:1", "w0;a:1", "w:0", ":0;a:1", "w:x;a:1", "w;0:a:1"])
def test_xrt_workers_joins_name_and_task_by_a_colon(text: str) -> None:
    with pytest.raises(UsageError, match=r"Write name:task;host:port, such as tpu_worker:0;10\.0\.0\.2:8470"):
        addresses(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("w:2", WorkerId("w", 2)), ("w", WorkerId("w", 0)), ("c-w:0", WorkerId("c-w", 0))]
)
def test_valid_worker_ids(text: str, expected: WorkerId) -> None:
    assert read_worker_id(Variable(env.XRT_LOCAL_WORKER, text)) == expected


@pytest.mark.parametrize("text", ["w:", "w:x", "w:-1", ":0", "w;0", "w:0:0", "w 1"])
def test_invalid_worker_ids(text: str) -> None:
    with pytest.raises(UsageError, match="is not name:task") as wrong:
        read_worker_id(Variable(env.XRT_LOCAL_WORKER, text))
    assert wrong.value.fix == "Write it like XRT_LOCAL_WORKER=tpu_worker:0."


@given(name=names, places=places)
def test_formatted_workers_parse_to_the_same_workers(name: str, places: list[tuple[str, int]]) -> None:
    workers = tuple(Worker(name, task, *place) for task, place in enumerate(places))
    assert config(write_workers(workers)) == workers
    colons = "|".join(f"{worker.id};grpc://{worker.address}" for worker in workers)
    assert addresses(colons) == workers


def outcome(variable: Variable) -> tuple[Worker, ...] | UsageError:
    try:
        return read_workers(variable)
    except UsageError as wrong:
        return wrong


@given(
    variable=st.sampled_from([env.XRT_TPU_CONFIG, env.XRT_WORKERS]),
    text=st.one_of(
        st.text(),
        st.text(alphabet="w01;:|,[]./-\"' 98470\n%grpc"),
        st.lists(st.sampled_from(["w", ";", ":", "|", "0", "1", "a", "[::1]", "grpc://", " ", "x" * 9])).map(
            "".join
        ),
    ),
)
def test_any_text_is_parsed_or_is_a_usage_error(variable: str, text: str) -> None:
    found = outcome(Variable(variable, text))
    if isinstance(found, UsageError):
        assert found.fix.endswith(".")
        assert found.where == f"{variable}={text}"
        return
    assert [worker.task for worker in found] == list(range(len(found)))
