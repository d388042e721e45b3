"""The facts of this machine. Nothing is judged, opened for writing, or changed here."""
