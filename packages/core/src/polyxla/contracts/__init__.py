"""What core, runtimes and plugins agree on: data and abstract classes, no behaviour of their own."""
