"""A task for the lab: bytes-gpt:500k in batches of 32 windows instead of 8, so that a step takes four times as long."""

from laconic.lab.tasks import BytesGPT


class LongSteps(BytesGPT):
    """2048 bytes a step for each worker."""

    BATCH = 32


_task = LongSteps("500k")
model, optimizer, batches, loss, evaluate = _task.model, _task.optimizer, _task.batches, _task.loss, _task.evaluate
