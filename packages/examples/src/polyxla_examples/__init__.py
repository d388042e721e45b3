"""One idea a file. Each runs on whatever runtime the environment selects: ``python -m polyxla_examples.digits``."""
