"""The loop that the Trainer runs in each replica. Heavy, except `call`."""
