"""Starting replicas: `polyxla.launch`, and making, monitoring and ending their processes."""
