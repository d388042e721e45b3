"""The mesh service: `rendezvous` holds its state, `server` answers its calls and runs it."""
