"""What pytest must know."""

collect_ignore = ["scripts"]  # they are run by torchrun, and importing them would run them
