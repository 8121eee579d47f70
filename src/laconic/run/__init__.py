"""Attaching a strategy: `attach`, the `Run` that a user holds, the engine behind it, its clock, its state and its counts."""
