"""`laconic advise`."""
