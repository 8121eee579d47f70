"""What is done beside the exchanges of a step: passes over memory, and a heartbeat before each sync. Imports no torch."""

from typing import NamedTuple

from laconic.cost.step_time import Exchange

# Passes over memory, a number. Of gradients: into the bucket and out of it again, which a step that averages nothing is spared.
# Of a sync: the deltas and their norm, the outer optimizer's step, the way back; or into a chunk and back. Fitted to the time
# by which a step of one process without peers is longer than a step of silent(): see docs/advisor.md.
GRADIENT_PASSES, DELTA_PASSES, MEAN_PASSES = 4.0, 16.0, 6.0
TENSOR_OPERATIONS = 8.0  # small operations on each tensor, which count where tensors are small
HEARTBEAT_BYTES = 64  # of each rank, gathered by all before a sync: its step, norm and learning rates


class Flow(NamedTuple):
    """A round, in numbers."""

    kind: str
    wire_bytes: float
    world: int


def heartbeat(world: int) -> Exchange:
    """What ranks tell each other before they average between steps."""
    return Exchange([Flow("AllGather", HEARTBEAT_BYTES * (world - 1), world)], [0.0, 0.0])
