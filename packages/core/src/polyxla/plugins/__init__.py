"""Finding plugins, and choosing the runtime, the devices and the precision policy."""
