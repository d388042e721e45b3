"""TPU hosts: accelerator types, topology, metadata, chips and cores."""
