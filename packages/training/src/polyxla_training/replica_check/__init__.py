"""``polyxla check-replicas``: whether several replicas train as one does."""
