"""What pytest must know."""

collect_ignore_glob = ["face*.py"]  # they are read by type checkers, and not run
