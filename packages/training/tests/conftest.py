pytest_plugins = ["polyxla.testing.fixtures"]
