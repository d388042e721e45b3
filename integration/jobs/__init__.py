"""Tests of whole jobs on workers."""
