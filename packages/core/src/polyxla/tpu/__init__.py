"""TPU hosts: accelerator types, topology, metadata, chips, emulated hosts, and a job's processes on them."""
