"""What plain torch_xla programs need on every runtime: faults of torch_xla that are mended in place."""
