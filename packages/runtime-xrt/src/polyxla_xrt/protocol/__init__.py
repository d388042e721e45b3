"""What travels between clients and workers."""
