"""The processes of a host: who holds its chips, which signals end a replica's, what only a job's know."""
