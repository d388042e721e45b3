"""Compiled programs: HLO, its rewriting, files and caches."""
