"""Comparisons made up for tests."""

from laconic.report import comparison_records as records


def result(*runs: tuple[str, float | None, float, float]) -> records.Results:
    """(strategy, loss, ms a step, bytes a step)"""
    made = [
        records.Record(
            strategy=name,
            seed=0,
            steps=10,
            val_loss=loss,
            seconds=1.0,
            step_ms=ms,
            predicted_step_ms=None,
            wire_bytes_per_step={"counted": size, "predicted": size, "kernel": None},
            wait_ms=None,
            curve=[[5, 0.5, 1, 3.0], [10, 1.0, 2, loss]],
            pace=[[ms, ms / 2], [ms, None]],
        )
        for name, loss, ms, size in runs
    ]
    return records.Results({"cores": 2, "cpu": "some"}, {}, "digits", 2, "100mbit", None, made)
