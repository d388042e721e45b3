"""Process 1 ends by the code that the second argument holds, while process 0 waits for its end."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm

fifo, ending = sys.argv[1:]
print((torch.ones(2, device="xla") + 1).sum().item(), flush=True)
if os.environ["POLYXLA_BRIDGE_PROCESS"] == "0":
    Path(fifo).read_text()
else:
    held = Path(fifo).open("w")  # noqa: SIM115 -- it is open until the process ends
    if ending == "raise after a collective":
        # It waits for process 0, which never takes part.
        xm.all_reduce(xm.REDUCE_SUM, torch.ones(2, device="xla"))
        torch_xla.sync()
        raise KeyError("mine")
    if ending == "raise in a thread":
        thread = threading.Thread(target=lambda: dict[str, int]()["mine"])
        thread.start()
        thread.join()
    elif ending == "os._exit":
        os._exit(3)
    elif ending == "sys.exit":
        sys.exit(3)
    elif ending == "interrupt":
        signal.raise_signal(signal.SIGINT)
    elif ending == "raise":
        raise KeyError("mine")
