"""Benchmarks: ratios measured in one interleaved run, side by side with torch's own. `python -m benchmarks [NAME ...]`."""
