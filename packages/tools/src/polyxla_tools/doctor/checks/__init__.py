"""The checks: pure functions from facts to findings."""
