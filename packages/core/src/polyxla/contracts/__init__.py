"""The contracts between core, runtimes and plugins: data and abstract classes."""
