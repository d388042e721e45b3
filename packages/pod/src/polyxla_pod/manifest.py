"""``polyxla pod manifest``: a JobSet that runs a command on every host of a TPU slice of GKE.

Source: "TPUs in GKE" and "Deploy TPU Multislices in GKE", Google Kubernetes Engine documentation, for labels
    and resources; the type JobSetSpec of kubernetes-sigs/jobset, API v1alpha2, for the fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyxla import UsageError
from polyxla.plugin import GENERATIONS, POLYXLA_RUNTIME, AcceleratorType

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
    """

    name: str = "polyxla"
    namespace: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    runtime: str | None = None
    grace_s: int = 120
    retry: int = 0


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
    """Return a JobSet with a pod for each host of one slice.

    The JobSet's controller makes the headless service; GKE gives each pod its TPU's variables.

    Raises:
        UsageError: GKE does not have the type, or the name is not one of Kubernetes's.
    """
    _check_name(options.name, accelerator.hosts)
    metadata: dict[str, Any] = {"name": options.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    # This puts all pods on the nodes of one slice, and keeps other jobs away from it.
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    runtime = {POLYXLA_RUNTIME: options.runtime} if options.runtime else {}
    environ = {"PYTHONUNBUFFERED": "1", **runtime, **options.environ}
    # A pod takes all chips of its host: GKE does not share a slice's hosts.
    chips = str(accelerator.chips_per_host)
    container = {
        "name": "polyxla",
        "image": image,
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in environ.items()],
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
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _check_name(name: str, hosts: int) -> None:
    # A pod's name is a host name of at most 63 characters, and adds the job, its number and the pod's.
    longest = 63 - len(f"-{JOB}-0-{hosts - 1}")
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
