"""The listeners that the Trainer adds: progress, TensorBoard, checkpoints, profiles."""
