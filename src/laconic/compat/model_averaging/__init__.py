"""Averaging of whole models between optimizer steps."""

from laconic.compat.model_averaging import averagers, hierarchical_model_averager, utils

__all__ = ["averagers", "hierarchical_model_averager", "utils"]
