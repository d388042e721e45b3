"""``polyxla pod manifest``: a JobSet that runs a command on every host of one or several TPU slices of GKE.

Source: "TPUs in GKE" and "Deploy TPU Multislices in GKE", Google Kubernetes Engine documentation, for labels
    and resources; the type JobSetSpec of kubernetes-sigs/jobset, API v1alpha2, for the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyxla import UsageError
from polyxla.plugin import GENERATIONS, POLYXLA_RUNTIME, AcceleratorType, tpu_env

ACCELERATORS = {
    "v3": "tpu-v3-slice",
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "v7x": "tpu7x",
}
"""The label ``cloud.google.com/gke-tpu-accelerator`` by generation. GKE has no v2.

Source: the table of machine types in "Plan TPUs in GKE", Google Kubernetes Engine documentation. A v3 slice
of one host is ``tpu-v3-device`` there.
"""
_FLAT = {"v3", "v5e", "v6e"}
"""Generations with two numbers in their topology."""
MEGASCALE_PORT = 8080
"""The port of slice 0's first host, where the slices meet."""
JOB = "hosts"
"""Name of the JobSet's only replicated job."""


@dataclass(frozen=True)
class ManifestOptions:
    """What the user chooses beside the type, the image and the command.

    Attributes:
        name: the JobSet's name.
        namespace: its namespace; None for kubectl's default.
        environ: variables of the command.
        runtime: the runtime to use; None leaves the choice to polyxla.
        grace_s: time for checkpoints between SIGTERM and SIGKILL, in seconds.
        retry: how many times the JobSet is started again after a failure.
        slices: number of slices.
    """

    name: str = "polyxla"
    namespace: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    grace_s: int = 120
    retry: int = 0
    slices: int = 1


def node_selector(accelerator: AcceleratorType) -> dict[str, str]:
    """Return the labels of the nodes of a slice.

    Raises:
        UsageError: GKE does not have the type.
    """
    name = ACCELERATORS.get(accelerator.generation)
    if name is None:
        raise UsageError(
            f"GKE has no TPU {accelerator.generation}",
            where=f"--type {accelerator.name}",
            fix=f"Use one of {', '.join(filter(ACCELERATORS.get, GENERATIONS))}.",
        )
    if accelerator.generation == "v3" and accelerator.hosts == 1:
        name = "tpu-v3-device"
    x, y, z = accelerator.bounds.chips
    sides = (x, y) if accelerator.generation in _FLAT else (x, y, z)
    return {
        "cloud.google.com/gke-tpu-accelerator": name,
        "cloud.google.com/gke-tpu-topology": "x".join(map(str, sides)),
    }


def jobset(
    accelerator: AcceleratorType, image: str, command: Sequence[str], options: ManifestOptions
) -> dict[str, Any]:
    """Return a JobSet with a job for each slice, and in it a pod for each host.

    The JobSet's controller makes the headless service; GKE gives each pod its TPU's variables.

    Raises:
        UsageError: GKE does not have the type, or not several slices of it, or the name is not one of
            Kubernetes's, or a variable asks for the host's number.
    """
    _check_name(options.name, options.slices, accelerator.hosts)
    for name, value in options.environ.items():
        if "{host}" in value:
            raise UsageError(
                "a manifest gives all hosts the same values",
                where=f"--env {name}={value}",
                fix="Read JOB_COMPLETION_INDEX in the command: Kubernetes sets it to the number of the host.",
            )
    if options.slices > 1 and accelerator.hosts == 1:
        raise UsageError(
            f"GKE has no job on several slices of one host, such as {accelerator.name}",
            where=f"--type {accelerator.name_of(options.slices)}",
            fix="Choose a type of several hosts, such as v5litepod-16.",
        )
    metadata: dict[str, Any] = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    # This puts all pods of a job on the nodes of one slice, and keeps other jobs away from it.
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    runtime = {POLYXLA_RUNTIME: options.runtime} if options.runtime else {}
    environ = {"PYTHONUNBUFFERED": "1", **runtime, **options.environ}
    # A pod takes all chips of its host: GKE does not share a slice's hosts.
    chips = str(accelerator.chips_per_host)
    container = {
        "name": "polyxla",
        "image": image,
        "command": list(map(_literal, command)),
        "env": [
            *({"name": name, "value": _literal(value)} for name, value in environ.items()),
            *_megascale(options),
        ],
        "resources": {"requests": {"google.com/tpu": chips}, "limits": {"google.com/tpu": chips}},
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "nodeSelector": node_selector(accelerator),
        "containers": [container],
    }
    job = {
        "completionMode": "Indexed",
        "completions": accelerator.hosts,
        "parallelism": accelerator.hosts,
        # A host that fails must fail the job: the others cannot continue without it.
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": options.retry},
            "replicatedJobs": [{"name": JOB, "replicas": options.slices, "template": {"spec": job}}],
        },
    }


def _megascale(options: ManifestOptions) -> list[dict[str, Any]]:
    """Return the variables that describe a pod's slice among several.

    Source: "Deploy TPU Multislices in GKE" for the names of the variables. JobSet labels a pod with the
        number of its job, which is the slice's, and gives the first pod of the first job this name.
    """
    if options.slices == 1:
        return []
    number = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
    first = f"{options.name}-{JOB}-0-0.{options.name}:{MEGASCALE_PORT}"
    return [
        {"name": tpu_env.MEGASCALE_NUM_SLICES, "value": str(options.slices)},
        {"name": tpu_env.MEGASCALE_COORDINATOR_ADDRESS, "value": first},
        {"name": tpu_env.MEGASCALE_SLICE_ID, "valueFrom": number},
    ]


def _literal(text: str) -> str:
    """Return a text that Kubernetes takes as it is, where it would expand ``$(NAME)``."""
    return text.replace("$", "$$")


def _check_name(name: str, slices: int, hosts: int) -> None:
    # A pod's name is at most 63 characters, and adds the job, its number, the pod's and five random ones.
    # Source: the JobSet controller's webhook, which refuses what would be longer.
    longest = 63 - len(f"-{JOB}-{slices - 1}-{hosts - 1}-abcde")
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > longest:
        raise UsageError(
            f"{name!r} cannot be the name of a JobSet",
            where=f"--name {name}",
            fix=f"Write lower-case letters, digits and dashes, at most {longest}, a letter first.",
        )


def as_yaml(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as YAML."""
    # Imported here, because only this command needs it.
    import yaml

    text: str = yaml.safe_dump(dict(manifest), sort_keys=False, default_flow_style=False)
    return text
