"""What the user sees of the hosts' output: lines, tracebacks, and a live table on a terminal."""
