"""What runtimes on torch_xla have in common; such a runtime brings torch_xla, which core does without.

Heavy: imported in replicas and by what torch_xla imports of a runtime, never by ``import polyxla``.
"""
