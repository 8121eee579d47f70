"""Averaging inside backward: the hook, what DDP holds of it, and the order of DDP's buckets."""
