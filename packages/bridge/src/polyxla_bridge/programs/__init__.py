"""Compiled programs: HLO and its rewriting, program files, the compilation cache."""
