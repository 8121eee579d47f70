"""What a strategy will send, before anything runs: exchange by exchange, step by step, and in sum."""

from laconic.forecast.prediction import Forecast, layer_bytes, predict

__all__ = ["Forecast", "layer_bytes", "predict"]
