"""Which records each replica sees."""
