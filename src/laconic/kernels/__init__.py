"""Kernels: what reducers work out over many numbers, as pure functions that run as they are or compiled into one pass."""
