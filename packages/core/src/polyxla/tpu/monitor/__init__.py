"""Monitoring of a job on TPU cores: replicas that wait for ever for another, and hosts that fail."""
