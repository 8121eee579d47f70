"""Averaging of whole models between optimizer steps."""
