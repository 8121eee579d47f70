"""Records of comparisons as tables and words. Nothing here imports torch."""
