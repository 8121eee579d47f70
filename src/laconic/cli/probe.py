"""`laconic probe`."""
