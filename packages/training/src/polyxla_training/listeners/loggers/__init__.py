"""What writes the logged values: a class for each of the names in ``Trainer(loggers=...)``."""
