"""Monitoring of a job on TPU cores: replicas that wait forever for another, and hosts that fail."""
