"""Serve a mesh and wait in a way that Ctrl-C must end: ``meet``, ``close``, ``connect`` or ``nothing``."""

from __future__ import annotations

import sys

from polyxla_xrt.client.mesh import MeshClient
from polyxla_xrt.server.mesh.server import MeshServer

SECRET = "of one job"


def main(what: str) -> None:
    server = MeshServer("127.0.0.1:0", 2, SECRET)
    try:
        if what == "close":
            print("ready", flush=True)
            server.close(60)
        elif what == "connect":
            print("ready", flush=True)
            MeshClient("127.0.0.1:9", 0, 2, SECRET, connect_wait_s=60)
        client = MeshClient(server.address, 0, 2, SECRET)
        print("ready", flush=True)
        if what == "meet":
            client.rendezvous("tag")
    except KeyboardInterrupt:
        print("interrupted", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
