"""Observation of loops that users write themselves: on by default, and silent while all is well."""
