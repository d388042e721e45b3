"""Tracing of single steps: lines that wait for the device, and floating-point operations."""
