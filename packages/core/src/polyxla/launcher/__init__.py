"""Starting replicas: what `polyxla.launch` checks, how processes are made, watched and ended."""
