"""``polyxla pod``: one command on all hosts of a TPU, over connections that the user already has."""
