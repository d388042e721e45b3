"""A PJRT plugin written in Python: any engine becomes a torch_xla device. Nothing is in here yet."""
