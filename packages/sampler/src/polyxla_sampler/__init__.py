"""Which records each replica sees. Nothing divides records yet: one replica reads all of them."""
