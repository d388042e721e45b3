"""Listeners of a training: progress, TensorBoard, checkpoints, profiles."""
