"""Averaging between steps: parameters, deltas, fragments, what is outstanding, the optimizers' moments, outliers."""
