"""Touch the device, print READY and sleep."""

import time

import torch_xla

torch_xla.device()
print("READY", flush=True)
time.sleep(1000)
