"""Instructions written as simpler ones, which XLA splits over devices or runs quickly."""
