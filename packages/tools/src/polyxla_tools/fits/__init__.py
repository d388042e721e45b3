"""``polyxla fits``: whether a program fits a TPU, found out without one."""
