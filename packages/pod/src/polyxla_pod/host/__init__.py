"""The part that runs on each host: ``python -m polyxla_pod.host``."""
