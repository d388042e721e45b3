"""``polyxla doctor``: what of this machine fits, what does not, and what to do."""
