"""A Ray cluster on this machine: a head, and two nodes that say that they are the hosts of a TPU v4-16.

Prints its address, then does what each line of standard input says, such as ``remove 1``, and answers.
"""

from __future__ import annotations

import sys
from typing import Any

from ray.cluster_utils import Cluster

ADDRESSES = sys.argv[1].split(",")


def add(cluster: Cluster, worker: int) -> Any:
    labels = {"slice-name": "my-tpu", "pod-type": "v4-16", "topology": "2x2x2", "worker-id": str(worker)}
    return cluster.add_node(
        num_cpus=1,
        node_ip_address=ADDRESSES[worker],
        resources={"TPU": 4, "my-tpu": 1},
        labels={f"ray.io/tpu-{name}": value for name, value in labels.items()},
    )


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    # The order in which they join does not number them.
    nodes = {worker: add(cluster, worker) for worker in (1, 0)}
    print(cluster.address, flush=True)
    for line in sys.stdin:
        what, worker = line.split()
        if what == "add":
            nodes[int(worker)] = add(cluster, int(worker))
        else:
            # One that is removed ends like a machine without power, and Ray notices it late.
            cluster.remove_node(nodes.pop(int(worker)), allow_graceful=what == "leave")
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
