"""polyxla's runtime for TorchTPU: PyTorch on TPUs, and on emulated ones on any machine."""
