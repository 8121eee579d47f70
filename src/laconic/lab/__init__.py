"""The lab: strategies side by side, in real processes over a real, limited link."""
