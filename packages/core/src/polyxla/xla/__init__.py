"""What runtimes on torch_xla have in common; such a runtime brings torch_xla, which core does without.

Heavy: imported in replicas and by what torch_xla imports of a runtime, never by ``import polyxla``. Since
torch_xla's import comes to them, `first_touch` and `launches` can be imported only after it, or by it.
"""
