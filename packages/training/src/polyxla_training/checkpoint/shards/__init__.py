"""Checkpoints in shards: a directory with a file from each replica, read again in any division."""
