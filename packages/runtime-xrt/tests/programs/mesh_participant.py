"""A participant of a mesh that executes orders, lines of JSON on its input, and answers each with a line."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from polyxla import PolyxlaError
from polyxla_xrt.client.mesh import MeshClient
from polyxla_xrt.server.mesh.server import MeshServer

SECRET = "of one job"


def perform(client: MeshClient, order: dict[str, Any]) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        payloads = client.rendezvous(order["tag"], order["payload"].encode(), order["replicas"], order["s"])
    except PolyxlaError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"payloads": [payload.decode() for payload in payloads]}


def main(address: str, ordinal: int, world_size: int) -> None:
    server = MeshServer(address, world_size, SECRET) if address.endswith(":0") else None
    client = MeshClient(server.address if server else address, ordinal, world_size, SECRET, connect_wait_s=30)
    print(json.dumps({"address": client.address}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order == "leave":
            client.close()
            staying = server.close(30) if server else ()
            print(json.dumps({"staying": staying}), flush=True)
            return
        print(json.dumps(perform(client, order)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
