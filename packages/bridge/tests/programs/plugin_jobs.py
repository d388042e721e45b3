"""Programs of test_plugin_jobs.py: engines on a PJRT plugin, one after the other or on an emulated libtpu."""

from __future__ import annotations

import ctypes
from ctypes import addressof as address
from pathlib import Path
from statistics import median

import numpy as np
from engine_helpers import OPTIONS, SETTINGS, main, module, say

from polyxla_bridge import LIBRARY, abi
from polyxla_bridge.engine.pjrt_engine import PjrtEngine
from polyxla_bridge.env import BridgeSettings
from polyxla_bridge.errors import PjrtError
from polyxla_bridge.plugin_client import buffers, plugin
from polyxla_bridge.plugin_client.client import PluginClient
from polyxla_testing.engine_conformance import ADD, DONATING, compiled, download, ones, upload

JOBS, WARM, WINDOW = 200, 40, 20


def resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def every(replicas: int) -> str:
    """Return a program that sums over all replicas."""
    return f"""HloModule every, replica_count={replicas}
        {ADD}
        ENTRY main {{ x = f32[4] parameter(0)
          ROOT r = f32[4] all-reduce(x), replica_groups={{}}, to_apply=add }}"""


def many_jobs() -> None:
    """Run jobs that each have an engine, and report by how much their memory grew."""
    summing, donating = module(every(2)), module(DONATING)
    resident = []
    for _ in range(JOBS):
        engine = PjrtEngine(BridgeSettings(), Path(SETTINGS.plugin), SETTINGS.plugin_options)
        programs = [engine.compile(program, OPTIONS) for program in (summing, donating)]
        inputs = [upload(engine, ones(1), index) for index in range(2)]
        for device in engine.devices:
            inputs[device.index], _ = engine.execute(
                programs[1], device, [inputs[device.index], upload(engine, ones(1), device.index)]
            )
        results = [
            engine.execute(programs[0], device, [inputs[device.index]])[0] for device in engine.devices
        ]
        assert [download(engine, result)[0] for result in results] == [4, 4]
        large = upload(engine, np.zeros(1 << 20, np.uint8))
        assert not large.is_deleted
        engine.close()
        assert engine.live_buffers == 0
        resident.append(resident_bytes())
    warm, last = median(resident[WARM : WARM + WINDOW]), median(resident[-WINDOW:])
    say(round(last / warm, 3))


def emulated_libtpu() -> None:
    """Run programs on the devices of an emulated libtpu, which is a PJRT plugin, too."""
    engine = PjrtEngine(BridgeSettings(), LIBRARY)
    say(
        engine.platform,
        [device.place[:4] for device in engine.devices if device.place],
        engine.devices[0].kind,
    )
    count = len(engine.devices)
    x, y = upload(engine, ones(1)), upload(engine, ones(2))
    total, _ = engine.execute(compiled(engine, DONATING), engine.devices[0], [x, y])
    say(download(engine, total).tolist(), x.is_deleted)
    summing = compiled(engine, every(count))
    inputs = [upload(engine, ones(index), index) for index in range(count)]
    results = [engine.execute(summing, device, [inputs[device.index]])[0] for device in engine.devices]
    say([float(download(engine, result)[0]) for result in results])
    say(dict(engine.memory_stats(engine.devices[0]))["bytes_in_use"])
    engine.close()
    say(engine.live_buffers)


def host_layouts() -> None:
    """Read an array of an emulated libtpu in several layouts, and say which it refuses."""
    client = PluginClient(plugin.load(LIBRARY), {})
    given = np.arange(6, dtype=np.float32)
    array = buffers.put(client, client.devices[0], "float32", (2, 1, 3), given.view(np.uint8).data)
    for type_, numbers in (
        (abi.TILED, (2, 1, 0)),
        (abi.TILED, (1, 2, 0)),
        (abi.TILED, (0, 1, 2)),
        (abi.STRIDES, (12, 12, 4)),
        (abi.STRIDES, (12, 1000, 4)),
        (abi.STRIDES, (4, 8, 8)),
    ):
        listed = (ctypes.c_int64 * 3)(*numbers)
        layout = abi.MemoryLayout(struct_size=ctypes.sizeof(abi.MemoryLayout), type=type_)
        layout.layout.tiled.minor_to_major, layout.layout.tiled.minor_to_major_size = address(listed), 3
        found = np.zeros(6, np.float32)
        try:
            made = client.plugin.call(
                "Buffer_ToHostBuffer",
                src=array.handle,
                host_layout=address(layout),
                dst=found.ctypes.data,
                dst_size=found.nbytes,
            )
        except PjrtError as error:
            say(error.code, error.message)
        else:
            buffers.Event(client.plugin, made.event).wait()
            say(found.tolist() == given.tolist())
    client.close()


if __name__ == "__main__":
    main(globals())
