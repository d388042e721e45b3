"""`polyxla pod manifest`: golden files, the JobSet's schema, and numbers for every type of TPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from polyxla import UsageError
from polyxla.plugin import GENERATIONS, AcceleratorType
from polyxla.tpu.accelerators import sizes
from polyxla_pod.manifest import ACCELERATORS, ManifestOptions, jobset, node_selector

if TYPE_CHECKING:
    from conftest import Pod

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE / "jobset_schema.json").read_text())
GOLDEN = sorted((HERE / "manifests").glob("*.yaml"))
ALL_TYPES = [f"{name}-{size}" for name in GENERATIONS if name in ACCELERATORS for size in sizes(name)[:9]]


def made(kind: str, **options: Any) -> dict[str, Any]:
    accelerator = AcceleratorType.parse(kind, "the test")
    return jobset(accelerator, "an-image", ["python", "train.py"], ManifestOptions(**options))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_manifest_is_that_of_the_golden_file(stand_in: Pod, path: Path) -> None:
    image = "europe-docker.pkg.dev/my-project/my-repository/train:1"
    how = ["--type", path.stem, "--image", image, "--engine", "jobset", "--runtime", "pjrt", "--retry", "3"]
    done = stand_in.call("manifest", *how, "--", "python", "train.py", "--epochs", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == path.read_text()


def test_there_are_golden_files() -> None:
    assert [path.stem for path in GOLDEN] == ["2xv5e-16", "v4-8", "v5e-16", "v5p-128", "v6e-256"]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_golden_files_are_valid(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_every_type_is_valid_and_has_all_chips(kind: str) -> None:
    found = made(kind)
    jsonschema.validate(found, SCHEMA)
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    chips = int(pod["containers"][0]["resources"]["limits"]["google.com/tpu"])
    assert job["completions"] == job["parallelism"]
    sides = [int(side) for side in pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")]
    product = 1
    for side in sides:
        product *= side
    assert job["completions"] * chips == product == AcceleratorType.parse(kind, "the test").chips


def test_each_slice_has_a_job_and_its_number() -> None:
    found = made("v5e-16", name="mine", slices=3)
    jsonschema.validate(found, SCHEMA)
    (jobs,) = found["spec"]["replicatedJobs"]
    assert (jobs["replicas"], jobs["template"]["spec"]["completions"]) == (3, 4)
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    assert container["env"][1:] == [
        {"name": "MEGASCALE_NUM_SLICES", "value": "3"},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": "mine-hosts-0-0.mine:8080"},
        {
            "name": "MEGASCALE_SLICE_ID",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}},
        },
    ]


def test_several_slices_of_one_host_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"no job on several slices of one host, .* \(from --type 2xv4-8\)"):
        made("v4-8", slices=2)


def test_the_schema_refuses_a_field_that_does_not_exist() -> None:
    found = made("v4-8")
    found["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, SCHEMA)


@pytest.mark.parametrize(
    ("kind", "name", "topology"),
    [
        ("v3-8", "tpu-v3-device", "2x2"),
        ("v3-32", "tpu-v3-slice", "4x4"),
        ("v4-16", "tpu-v4-podslice", "2x2x2"),
        ("v5e-8", "tpu-v5-lite-podslice", "2x4"),
        ("v5p-8", "tpu-v5p-slice", "2x2x1"),
        ("v6e-16", "tpu-v6e-slice", "4x4"),
        ("v7x-128", "tpu7x", "4x4x4"),
    ],
)
def test_the_labels_of_the_nodes(kind: str, name: str, topology: str) -> None:
    found = node_selector(AcceleratorType.parse(kind, "the test"))
    assert list(found.values()) == [name, topology]


def test_what_the_user_chooses_is_in_the_manifest() -> None:
    found = made(
        "v4-8", name="mine", namespace="ours", environ={"A": "1"}, runtime="pjrt", grace_s=7, retry=2
    )
    assert found["metadata"]["name"] == "mine"
    assert found["metadata"]["namespace"] == "ours"
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 2}
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 7
    variables = {variable["name"]: variable["value"] for variable in pod["containers"][0]["env"]}
    assert variables == {"PYTHONUNBUFFERED": "1", "POLYXLA_RUNTIME": "pjrt", "A": "1"}


@pytest.mark.parametrize("name", ["", "Upper", "a_b", "-a", "a-", "x" * 48])
def test_a_name_that_kubernetes_refuses_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a JobSet"):
        made("v4-16", name=name)


def test_the_longest_name() -> None:
    name = "x" * 47
    assert made("v4-16", name=name)["metadata"]["name"] == name
    # Of the pods: the JobSet's, the job's and its number, the pod's, and five random characters.
    assert len(f"{name}-hosts-0-1-abcde") == 63


def test_kubernetes_replaces_nothing_in_the_command_and_in_values() -> None:
    options = ManifestOptions(environ={"A": "$(POLYXLA_RUNTIME) $$"}, runtime="pjrt")
    found = jobset(AcceleratorType.parse("v4-8", "test"), "image", ["sh", "-c", "echo $$ $(date)"], options)
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["sh", "-c", "echo $$$$ $$(date)"]
    assert {"name": "A", "value": "$$(POLYXLA_RUNTIME) $$$$"} in container["env"]


def test_a_value_with_the_hosts_number_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"from --env RUN=run-{host}\). Read JOB_COMPLETION_INDEX"):
        made("v4-16", environ={"RUN": "run-{host}"})


def test_a_type_that_gke_does_not_have_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"GKE has no TPU v2 \(from --type v2-8\). Use one of v3, v4"):
        made("v2-8")


def test_another_kind_of_manifest_is_an_error(stand_in: Pod) -> None:
    done = stand_in.call("manifest", "--engine", "helm", "--type", "v4-8", "--image", "i", "--", "true")
    assert done.returncode == 2
    assert "no kind of manifest called 'helm' (from --engine helm). Write jobset." in done.stderr
