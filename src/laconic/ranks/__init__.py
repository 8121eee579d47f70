"""What ranks know of each other: agreement, who is still there, process groups by scope, replicas compared."""
