"""The processes of a host: those that hold its chips, the signals that end a replica's, the secret of a job's."""
