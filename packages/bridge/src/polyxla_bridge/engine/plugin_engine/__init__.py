"""The parts of `polyxla_bridge.engine.pjrt_engine.PjrtEngine`."""
