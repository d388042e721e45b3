"""Training a module whose parameters are divided among replicas, by torch's own libraries."""
