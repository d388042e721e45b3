"""The hooks of polyxla-sampler; `polyxla_shard_loader` comes with the samplers."""
