"""The processes of a host: those that hold its chips, and the signals that end a replica's."""
