"""Whole jobs on workers."""
