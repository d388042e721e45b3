"""What TorchTPU imports of torch, which takes most of the time of its own import; it opens nothing."""
