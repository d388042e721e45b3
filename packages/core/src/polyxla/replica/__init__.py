"""What runs in a replica: `Replica` and what it is made of."""
