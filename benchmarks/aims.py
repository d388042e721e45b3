"""The aims of the benchmarks, which docs/performance.md lists."""

from __future__ import annotations

from collections.abc import Mapping

AIMS: Mapping[str, Mapping[str, str]] = {
    "replicas": {
        "step: 1 replica / native": ">= 0.95",
        "plugin: 1 replica / on jaxlib": ">= 0.95",
        "scaling: convnet, 4 processes / native": ">= 0.85",
        "scaling: convnet, 4 processes / DDP": ">= 0.9",
        "scaling: convnet, 4 threads / native": ">= 0.85",
        "scaling: convnet, 4 threads / DDP": ">= 0.9",
        "scaling: block, 4 processes / DDP": ">= 1.05",
        "scaling: block, 4 threads / DDP": ">= 1.05",
        "collectives: 1 KiB / torch on gloo": ">= 2.0",
        "collectives: 32 MiB / torch on gloo": ">= 5.0",
        "agreement: convnet, 4 processes / not compared": ">= 0.98",
        "agreement: block, 4 processes / not compared": ">= 0.98",
        "spmd: convnet, 4 devices / 4 replicas": ">= 0.8",
        "spmd: block, 4 devices / 4 replicas": ">= 0.8",
        "start: 4 processes / bare spawn of 4": "<= 0.55",
        "start: 8 processes / 4": "<= 1.3",
        "start: an emulated v3-8 / 8 processes": "<= 1.1",
        "compile: 4 replicas / 1": "<= 1.3",
        "memory: resident after 2000 steps / 200": "<= 1.03",
        "memory: live buffers, most / least": "<= 1.0",
        "memory: extra copies of 1 GiB to device": "<= 1.01",
        "memory: extra copies of 1 GiB from device": "<= 1.01",
        "jax: block, 8 emulated chips / 8 CPU devices": ">= 0.9",
    },
    "startup": {
        "start: all-reduce, warm / cold": "<= 0.25",
        "start: all-reduce, warm / torchrun": "<= 1.0",
    },
    "convolutions": {"networks": "<= 1.0", "random": "<= 1.0"},
    "topology": {"topology": "<= 1.0"},
    "xrt": {
        "step: 1 core / native": ">= 0.92",
        "step: 1 core / bridge": ">= 0.93",
        "start: 8 processes / 1": "<= 1.4",
        "trips: waits a step, loss not read": "<= 0.0",
        "trips: waits a step, loss read": "<= 1.0",
        "transfer: upload / gRPC": ">= 0.6",
        "transfer: download / gRPC": ">= 0.7",
        "memory: peak of a worker / upload": "<= 1.3",
        "encoding: upload / protobuf": ">= 2.0",
        "latency: 20 ms one way / 0": ">= 0.8",
        "jobs: resident after 200 / 20": "<= 1.03",
        "resume: convnet / without": ">= 0.95",
        "resume: block / without": ">= 0.95",
    },
    "torchtpu": {
        "eager: convnet / CPU": "<= 1.5",
        "compiled: convnet / CPU, the faster": "<= 1.3",
        "compiled: block / CPU, the faster": "<= 1.1",
        "ddp: block, 4 replicas / gloo (samples/s)": ">= 0.8",
        "start: 4 replicas / torchrun with gloo": "<= 1.2",
    },
}
"""For each benchmark and row, the least or the most that its ratio should be. A part's name stands for all of
its rows."""
