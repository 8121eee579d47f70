"""A script as it is: `laconic run`, and what attaches by itself in the processes that it starts."""
