"""Adam's second moment under a strategy: each replica's own, slow, or shared by all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Adam, Optimizer

# A second moment that stood still altogether blew up: a parameter that had no gradient for long has next to none, and
# divides the first gradient that comes by it. By 0.999, torch's default, that first one counts.
SLOW = 0.999
LEAST = 0.8  # a gradient that stands for many steps still weighs no more than a fifth: it is one sample


class SecondMoment:
    """Decides by which beta2 torch.optim.Adam and AdamW make their next step; other optimizers are left alone.

    Maths: Adam divides by sqrt(v / (1 - beta2**t)). When beta2 becomes b, v is multiplied once by
    (1 - b**t) / (1 - beta2**t), so that the divisor is the same before and after; then it moves by 1 - b of each new square.
    By "slow", b is 0.999 at least. By "shared" that holds in local steps, and in a step whose gradients all ranks average, the
    first for k steps, b = max(beta2**k, 0.8). All in the optimizer's own code: no copy of v, no work in a step where b stays,
    and foreach, fused and capturable steps need to know nothing of it. Where beta2 is b already, no bit changes.

    A second moment of fewer than 1 / (1 - beta2) steps is not worth sharing yet, and moves as the user set it.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._own: dict[tuple[int, int], float] = {}  # the user's beta2, by the numbers of optimizer and group
        self._last: int | None = None  # steps that were complete after the last one that all ranks averaged

    def prepare(self, kind: str, step: int, *, synchronous: bool) -> None:
        """For the step after `step` completed ones. Asked every time: a user may load an optimizer's state in between."""
        if kind == "local":
            return
        moves = synchronous and kind == "shared"
        gap = 1 if self._last is None else step + 1 - self._last
        for place, optimizer, group in self._groups():
            now = float(group["betas"][1])
            own = self._own.get(place, now)
            wanted = max(own**gap, min(own, LEAST)) if moves else max(own, SLOW) if _settled(optimizer, group, own) else own
            if wanted != now:
                self._own[place] = own
                _change(optimizer, group, now, wanted)

    def synchronised(self, step: int) -> None:
        """All ranks averaged the gradients of the last of `step` completed steps."""
        self._last = step

    def release(self) -> None:
        """Give every group its own beta2 back."""
        for place, optimizer, group in self._groups():
            if place in self._own:
                _change(optimizer, group, float(group["betas"][1]), self._own.pop(place))

    def state(self) -> dict[str, Any]:
        """Plain data."""
        return {"last": self._last, "own": [[*place, beta2] for place, beta2 in self._own.items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Which decays are the user's. Those of now are in the optimizers' own state."""
        self._last = state["last"]
        self._own = {(int(optimizer), int(group)): float(beta2) for optimizer, group, beta2 in state["own"]}

    def _groups(self) -> Iterator[tuple[tuple[int, int], Optimizer, dict[str, Any]]]:
        for number, optimizer in enumerate(self._optimizers):
            if isinstance(optimizer, Adam):
                for index, group in enumerate(optimizer.param_groups):
                    yield (number, index), optimizer, group


def _settled(optimizer: Optimizer, group: Mapping[str, Any], beta2: float) -> bool:
    if float(group["betas"][1]) != beta2:  # held already
        return True
    steps = [float(optimizer.state[parameter].get("step", 0)) for parameter in group["params"] if parameter in optimizer.state]
    return max(steps, default=0.0) * (1 - beta2) >= 1 - 1e-9


def _change(optimizer: Optimizer, group: dict[str, Any], old: float, new: float) -> None:
    beta1, beta2 = group["betas"]
    group["betas"] = (beta1, beta2.new_tensor(new) if isinstance(beta2, Tensor) else new)
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        steps = float(state.get("step", 0))
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            if steps and key in state:
                state[key].mul_((1 - new**steps) / (1 - old**steps))
