"""Which slice this is. Expected values were written by hand; no server is asked."""

from __future__ import annotations

import pytest

from polyxla.errors import UsageError
from polyxla.tpu.accelerators import Bounds, Shape
from polyxla.tpu.megascale import Megascale
from polyxla.tpu.metadata import (
    MetadataClient,
    MetadataError,
    MetadataKeyError,
    MetadataUnreachableError,
)
from polyxla.tpu.slices import TpuSlice, read_slice

V3_8 = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v3-8"}
V4_16 = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-16",
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "a,b",
}


BOARD: Shape = (2, 2, 1)
EIGHT: Shape = (2, 4, 1)
ORDER = [
    "TPU_PROCESS_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_CHIPS_PER_HOST_BOUNDS",
]


class Metadata(MetadataClient):
    """Knows some attributes, and has no server."""

    def __init__(self, /, **attributes: str) -> None:
        super().__init__()
        self.known = {key.replace("_", "-"): text for key, text in attributes.items()}

    def attribute(self, key: str) -> str:
        if key not in self.known:
            raise MetadataKeyError(f"no attribute {key}", fix="Add it.")
        return self.known[key]


class Failing(MetadataClient):
    """Answers everything with the same error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def attribute(self, key: str) -> str:
        raise self.error


NOWHERE = Failing(MetadataUnreachableError("no server", fix="Start one."))
SILENT = Failing(AssertionError("the metadata server was asked"))


def from_environ(environ: dict[str, str]) -> TpuSlice:
    found = read_slice(environ, SILENT)
    assert found is not None
    assert found.origin == "environment"
    return found


def from_metadata(
    tpu_env: dict[str, str], endpoints: str | None = None, environ: dict[str, str] | None = None
) -> TpuSlice:
    attributes = {"tpu_env": "\n".join(f"{key}: '{value}'" for key, value in tpu_env.items())}
    if endpoints is not None:
        attributes["worker_network_endpoints"] = endpoints
    found = read_slice(environ or {}, Metadata(**attributes))
    assert found is not None
    assert found.origin == "metadata server"
    return found


def test_a_type_alone_describes_one_host() -> None:
    found = from_environ(V3_8)
    assert found.accelerator.name == "v3-8"
    assert (found.worker_id, found.hostnames) == (0, ("localhost",))
    assert found.bounds == found.accelerator.bounds == Bounds((1, 1, 1), (2, 2, 1))
    assert found.visible_chips is None


def test_variables_describe_a_pod_slice() -> None:
    found = from_environ(V4_16)
    assert (found.accelerator.name, found.worker_id, found.hostnames) == ("v4-16", 1, ("a", "b"))
    assert found.bounds == Bounds((1, 1, 2), (2, 2, 1))


# Eight v5e chips come as one host, with what Kaggle sets there, or as two hosts of four.
@pytest.mark.parametrize(
    ("variables", "bounds"),
    [
        (
            {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_WORKER_ID": "0"},
            Bounds((1, 1, 1), (2, 4, 1)),
        ),
        (
            {
                "TPU_HOST_BOUNDS": "1,2,1",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
                "TPU_WORKER_ID": "1",
                "TPU_WORKER_HOSTNAMES": "a, b",
            },
            Bounds((1, 2, 1), (2, 2, 1)),
        ),
    ],
)
def test_given_bounds_override_the_default_ones(variables: dict[str, str], bounds: Bounds) -> None:
    named = {"TPU_SKIP_MDS_QUERY": "true", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
    found = from_environ(named | variables)
    assert found.bounds == found.accelerator.bounds == bounds
    assert found.accelerator.devices == 8


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("TPU_HOST_BOUNDS", "TPU_PROCESS_BOUNDS", "1,1,1"),
        ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "2,2,1"),
        ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID", "0"),
    ],
)
def test_the_newer_name_overrides_the_older(old: str, new: str, value: str) -> None:
    assert from_environ(V3_8 | {old: "nonsense", new: value}) == from_environ(V3_8)
    with pytest.raises(UsageError, match=f"{old}=nonsense"):
        read_slice(V3_8 | {old: "nonsense", new: ""}, SILENT)


def test_bounds_select_a_part_of_one_host() -> None:
    found = from_environ(
        V4_16 | {"TPU_HOST_BOUNDS": "1,1,1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": ""}
    )
    assert found.bounds == Bounds((1, 1, 1), (2, 2, 1))
    assert found.accelerator.devices == 4


def test_the_metadata_of_a_tpu_vm_describes_its_slice() -> None:
    found = from_metadata(
        {
            "ACCELERATOR_TYPE": "v4-256",
            "CHIPS_PER_HOST_BOUNDS": "2,2,1",
            "HOST_BOUNDS": "1,1,32",
            "TPU_PROCESS_BOUNDS": "2,2,8",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
            "TOPOLOGY": "4x4x8",
            "WORKER_ID": "31",
        },
        ",".join(f"w{i}:{i}:10.0.0.{i}" for i in range(32)),
    )
    assert (found.worker_id, found.hostnames[31]) == (31, "10.0.0.31")
    assert found.bounds == Bounds((2, 2, 8), (2, 2, 1))


def test_metadata_gives_another_shape_of_v4() -> None:
    said = {"ACCELERATOR_TYPE": "v4-64", "HOST_BOUNDS": "1,1,8", "WORKER_ID": "0"}
    found = from_metadata(said, ",".join(f"w:{i}:10.0.0.{i}" for i in range(8)))
    assert found.bounds.chips == (2, 2, 8)


def test_v3_uses_the_table_and_not_its_metadata() -> None:
    said = {"ACCELERATOR_TYPE": "v3-32", "HOST_BOUNDS": "1,1,1", "WORKER_ID": "2"}
    found = from_metadata(said, "a:1:10.0.0.1,b:2:10.0.0.2,c:3:10.0.0.3,d:4:10.0.0.4")
    assert found.bounds == Bounds((2, 2, 1), (2, 2, 1))


def test_one_host_needs_no_endpoints() -> None:
    assert from_metadata({"ACCELERATOR_TYPE": "v6e-8"}).hostnames == ("localhost",)


def test_the_type_may_be_a_separate_attribute() -> None:
    found = read_slice({}, Metadata(tpu_env="WORKER_ID: 0", accelerator_type="v5litepod-4"))
    assert found is not None
    assert found.accelerator.name == "v5litepod-4"


def test_the_metadata_server_overrides_variables_and_lists_them_as_ignored() -> None:
    environ = {"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_PROCESS_BOUNDS": "1,1,2", "TPU_WORKER_ID": ""}
    found = read_slice(environ, Metadata(tpu_env="ACCELERATOR_TYPE: v3-8"))
    assert found is not None
    assert found.accelerator.name == "v3-8"
    assert found.ignored == ("TPU_ACCELERATOR_TYPE", "TPU_PROCESS_BOUNDS")
    assert from_environ(V4_16).ignored == ()


@pytest.mark.parametrize("metadata", [NOWHERE, Metadata()], ids=["laptop", "VM without a TPU"])
def test_without_any_description_there_is_no_slice(metadata: MetadataClient) -> None:
    assert read_slice({}, metadata) is None
    assert read_slice({"TPU_SKIP_MDS_QUERY": "", "TPU_WORKER_ID": "0"}, metadata) is None


@pytest.mark.parametrize("metadata", [NOWHERE, Metadata()], ids=["laptop", "VM without a TPU"])
def test_without_a_metadata_server_the_variables_describe_the_slice(metadata: MetadataClient) -> None:
    found = read_slice({"TPU_ACCELERATOR_TYPE": "v5e-8"}, metadata)
    assert found is not None
    assert (found.accelerator.name, found.origin) == ("v5litepod-8", "environment")


def test_an_error_of_the_metadata_server_is_raised() -> None:
    with pytest.raises(MetadataError, match="HTTP status 503"):
        read_slice({}, Failing(MetadataError("HTTP status 503", fix="Wait.")))


@pytest.mark.parametrize("text", ["0", "false", "False", "no", "OFF", " 0 "])
def test_skipping_the_metadata_server_with_a_negative_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="counts as set") as caught:
        read_slice({"TPU_SKIP_MDS_QUERY": text}, SILENT)
    assert caught.value.where == f"TPU_SKIP_MDS_QUERY={text}"
    assert "Unset it" in caught.value.fix


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"TPU_ACCELERATOR_TYPE": ""}, "type is not given", "TPU_SKIP_MDS_QUERY=1"),
        ({"TPU_ACCELERATOR_TYPE": "v4-17"}, "does not come with 17 cores", "TPU_ACCELERATOR_TYPE=v4-17"),
        ({"TPU_ACCELERATOR_TYPE": "a100"}, "no TPU type 'a100'", "TPU_ACCELERATOR_TYPE=a100"),
        ({"TPU_PROCESS_BOUNDS": "1,2"}, "three positive integers", "TPU_PROCESS_BOUNDS=1,2"),
        ({"TPU_HOST_BOUNDS": "1,2,1,1"}, "three positive integers", "TPU_HOST_BOUNDS=1,2,1,1"),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,2"}, "three positive integers", "TPU_CHIPS_PER_HOST_BOUNDS=2,2"),
        ({"TPU_PROCESS_BOUNDS": "2,2,2"}, "make 32 chips, but v4-16 has 8", "TPU_PROCESS_BOUNDS=2,2,2"),
        ({"TPU_WORKER_ID": "x"}, "worker id 'x' does not fit", "TPU_WORKER_ID=x"),
        ({"TPU_WORKER_ID": "-1"}, "worker id '-1' does not fit", "TPU_WORKER_ID=-1"),
        ({"TPU_WORKER_ID": "1.0"}, "worker id '1.0' does not fit", "TPU_WORKER_ID=1.0"),
        ({"TPU_WORKER_ID": "2"}, "slice of 2 hosts", "TPU_WORKER_ID=2"),
        ({"TPU_WORKER_ID": "9" * 5000}, "slice of 2 hosts", f"TPU_WORKER_ID={'9' * 5000}"),
        ({"CLOUD_TPU_TASK_ID": "7"}, "worker id '7' does not fit", "CLOUD_TPU_TASK_ID=7"),
        ({"TPU_WORKER_ID": ""}, "worker id '' does not fit", "TPU_WORKER_ID is unset"),
        ({"TPU_WORKER_HOSTNAMES": "a"}, "2 hosts .1,1,2., but 1 name", "TPU_WORKER_HOSTNAMES=a"),
        ({"TPU_WORKER_HOSTNAMES": "a,b,c"}, "but 3 names", "TPU_WORKER_HOSTNAMES=a,b,c"),
        ({"TPU_WORKER_HOSTNAMES": "a,,"}, "but 1 name", "TPU_WORKER_HOSTNAMES=a,,"),
        ({"TPU_WORKER_HOSTNAMES": "a,a"}, "has the name a", "TPU_WORKER_HOSTNAMES=a,a"),
        ({"TPU_WORKER_HOSTNAMES": ""}, "but 0 names", "TPU_WORKER_HOSTNAMES is unset"),
        ({"TPU_VISIBLE_CHIPS": "0,4"}, "0 to 3", "TPU_VISIBLE_CHIPS=0,4"),
        ({"TPU_VISIBLE_CHIPS": "0,1"}, "2 of this host's chips", "TPU_VISIBLE_CHIPS=0,1"),
    ],
)
def test_an_invalid_variable_is_named(changes: dict[str, str], what: str, where: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        read_slice(V4_16 | changes, SILENT)
    assert caught.value.where == where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("tpu_env", "endpoints", "what", "where"),
    [
        ({"ACCELERATOR_TYPE": "v9-8"}, None, "no TPU type", "ACCELERATOR_TYPE in the metadata"),
        ({"ACCELERATOR_TYPE": "v4-8", "HOST_BOUNDS": "1"}, None, "three positive", "HOST_BOUNDS in the"),
        ({"ACCELERATOR_TYPE": "v4-16", "WORKER_ID": "5"}, "a:1:b,c:2:d", "'5'", "WORKER_ID in the"),
        ({"ACCELERATOR_TYPE": "v4-16", "WORKER_ID": "0"}, "a:1:b", "1 name", "worker-network-endpoints"),
    ],
)
def test_invalid_metadata_is_named(
    tpu_env: dict[str, str], endpoints: str | None, what: str, where: str
) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        from_metadata(tpu_env, endpoints)
    assert where in str(caught.value.where)


def test_visible_chips_go_with_bounds_of_the_same_number() -> None:
    two = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1", "TPU_VISIBLE_CHIPS": "2,3"}
    found = from_environ({"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8"} | two)
    assert found.visible_chips == (2, 3)
    assert found.bounds == Bounds((1, 1, 1), (1, 2, 1))


GOOGLE = {
    "TPU_VISIBLE_CHIPS": "0",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
}
RAY = {"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"}
KAGGLE = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_WORKER_ID": "0"}
V4_8 = {"ACCELERATOR_TYPE": "v4-8", "HOST_BOUNDS": "1,1,1", "CHIPS_PER_HOST_BOUNDS": "2,2,1"}
V5E_8 = {"ACCELERATOR_TYPE": "v5litepod-8", "HOST_BOUNDS": "1,1,1", "CHIPS_PER_HOST_BOUNDS": "2,4,1"}


# variables, metadata, the part's chips in each direction, the chips, what is ignored
@pytest.mark.parametrize(
    ("variables", "tpu_env", "shape", "chips", "ignored"),
    [
        (GOOGLE, V4_8, (1, 1, 1), (0,), ()),
        (RAY, V4_8, (1, 2, 1), (0, 1), ()),
        (KAGGLE, V5E_8, (2, 4, 1), None, ("TPU_WORKER_ID",)),
        ({"TPU_VISIBLE_CHIPS": "3"}, V4_8, (1, 1, 1), (3,), ()),
        ({"TPU_VISIBLE_DEVICES": "2,3"}, V4_8, (1, 2, 1), (2, 3), ()),
        ({"TPU_VISIBLE_CHIPS": "4,5,6,7"}, V5E_8, (2, 2, 1), (4, 5, 6, 7), ()),
        ({"TPU_CHIPS_PER_HOST_BOUNDS": "2,1,1"}, V4_8, (2, 1, 1), (0, 2), ()),
        (
            {**GOOGLE, "TPU_HOST_BOUNDS": "1,1,1", "TPU_ACCELERATOR_TYPE": "v4-8"},
            {"ACCELERATOR_TYPE": "v3-8"},
            (1, 1, 1),
            (0,),
            ("TPU_ACCELERATOR_TYPE", "TPU_HOST_BOUNDS"),
        ),
    ],
    ids=["Google", "Ray", "Kaggle", "chip", "devices", "v5e", "bounds alone", "ignored"],
)
def test_variables_select_a_part_of_the_host_that_metadata_describes(
    variables: dict[str, str],
    tpu_env: dict[str, str],
    shape: Shape,
    chips: tuple[int, ...] | None,
    ignored: tuple[str, ...],
) -> None:
    found = from_metadata(tpu_env, environ=variables)
    assert found.accelerator.name == tpu_env["ACCELERATOR_TYPE"]
    assert found.bounds == found.accelerator.bounds == Bounds((1, 1, 1), shape)
    assert (found.visible_chips, found.ignored) == (chips, ignored)
    assert found.host == (EIGHT if tpu_env is V5E_8 else BOARD)
    assert (found.worker_id, found.hostnames) == (0, ("localhost",))


V4_16_WORKER_1 = {"ACCELERATOR_TYPE": "v4-16", "HOST_BOUNDS": "1,1,2", "WORKER_ID": "1"}
TWO_HOSTS = "a:1:10.0.0.1,b:2:10.0.0.2"


@pytest.mark.parametrize("variables", [GOOGLE, {"TPU_PROCESS_BOUNDS": "1,1,1"}], ids=["chip", "host"])
def test_one_host_of_a_slice_can_be_used_alone(variables: dict[str, str]) -> None:
    found = from_metadata(V4_16_WORKER_1, TWO_HOSTS, environ=variables)
    assert (found.worker_id, found.hostnames, found.bounds.host_count) == (0, ("localhost",), 1)
    assert found.accelerator.devices == (1 if variables is GOOGLE else 4)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TPU_HOST_BOUNDS": "1,1,2", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"},
        {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"},
        {"TPU_PROCESS_BOUNDS": "2,2,2", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"},
    ],
    ids=["none", "GKE", "chips only", "torch_xla"],
)
def test_a_slice_of_several_hosts_stays_as_metadata_describes_it(variables: dict[str, str]) -> None:
    found = from_metadata(V4_16_WORKER_1, TWO_HOSTS, environ=variables)
    assert (found.worker_id, found.hostnames) == (1, ("10.0.0.1", "10.0.0.2"))
    assert found.bounds == Bounds((1, 1, 2), (2, 2, 1))
    assert (found.visible_chips, found.ignored) == (None, tuple(sorted(variables, key=ORDER.index)))


def test_some_chips_of_a_slice_of_several_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match="2 of this host's chips are selected, but the bounds contain 4"):
        from_metadata(V4_16_WORKER_1, TWO_HOSTS, environ={"TPU_VISIBLE_CHIPS": "0,1"})


SECOND_OF_TWO = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "job-0-0.job",
}


def test_a_slice_has_its_place_among_several() -> None:
    place = Megascale(2, 1, "job-0-0.job:8080")
    for found in (from_environ(V3_8 | SECOND_OF_TWO), from_metadata(V4_8 | SECOND_OF_TWO)):
        assert found.megascale == place
        assert (found.slices, found.host_count, found.host_index, found.worker_id) == (2, 2, 1, 0)
    # GKE sets the variables also where the metadata server describes the slice.
    assert from_metadata(V4_8, environ=SECOND_OF_TWO).megascale == place
    worker = from_metadata(V4_16_WORKER_1 | SECOND_OF_TWO, TWO_HOSTS)
    assert (worker.topology, worker.host_count, worker.host_index) == ("2xv4-16", 4, 3)


@pytest.mark.parametrize("variables", [GOOGLE, {"TPU_VISIBLE_CHIPS": "0"}], ids=["bounds", "chip"])
def test_a_part_of_a_host_belongs_to_no_other_slice(variables: dict[str, str]) -> None:
    assert from_metadata(V4_8 | SECOND_OF_TWO, environ=variables).megascale is None


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"MEGASCALE_NUM_SLICES": ""}, "MEGASCALE_NUM_SLICES="),
        ({"MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES=two"),
        ({"MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID="),
        ({"MEGASCALE_SLICE_ID": "2"}, "MEGASCALE_SLICE_ID=2"),
        ({"MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR_ADDRESS="),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "a:x"}, "MEGASCALE_COORDINATOR_ADDRESS=a:x"),
    ],
)
def test_a_place_among_slices_that_is_incomplete_is_refused(variables: dict[str, str], where: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_slice(V3_8 | SECOND_OF_TWO | variables, SILENT)
    assert caught.value.where == where
    with pytest.raises(UsageError) as caught:
        from_metadata(V4_8 | SECOND_OF_TWO | variables)
    assert caught.value.where == f"{where} in the metadata server's tpu-env"


def test_a_single_slice_may_have_the_variables_of_several() -> None:
    single = {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_COORDINATOR_ADDRESS": "a:8080"}
    assert from_environ(V3_8 | single) == from_environ(V3_8)
    assert from_metadata(V4_8 | single) == from_metadata(V4_8)
