pytest_plugins = ["polyxla_testing.fixtures"]
