"""The part that runs where the user is: one connection to each host, and what follows from a failure."""
