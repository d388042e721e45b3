"""The mesh service: `rendezvous` holds its state, `service` answers its calls, `server` runs it."""
