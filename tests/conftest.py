"""What pytest must know."""

collect_ignore = ["script/scripts"]  # they are run by torchrun, and importing them would run them
