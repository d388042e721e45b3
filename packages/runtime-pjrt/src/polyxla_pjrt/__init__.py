"""polyxla's runtime for TPU VMs and for any machine's CPU, on torch_xla's own PJRT clients."""
