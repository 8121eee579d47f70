"""Adam's second moment under a strategy: each replica's own, slow, or shared by all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Adam, Optimizer

# Not 1: a second moment that stood still blew up in one run of two. A parameter that had no gradient for long has next to
# none, and the first gradient that comes is divided by it, unless that gradient counts.
SLOW = 0.9999
# While a group's beta2 is held at another, it has the user's own under this key: so that is saved with the optimizer.
OWN = "laconic_beta2"
LEAST = 0.8  # a gradient that stands for many steps still weighs no more than a fifth: it is one sample
AGED = 1 << 23  # added to a step count: there Adam corrects no bias any more, and fp32 still counts one by one


class SecondMoment:
    """Decides by which beta2 torch.optim.Adam and AdamW make their next step; other optimizers are left alone.

    Maths: Adam divides by sqrt(v / (1 - beta2**t)), and moves v by 1 - beta2 of each new square. By "slow", beta2 is 0.9999 at
    least. By "shared" that holds in local steps, and in a step whose gradients all ranks average, the first for k steps,
    it is max(beta2**k, 0.8). By a large beta2, Adam's correction for its start would give each new square a weight of 1 / t,
    not of 1 - beta2. So v and the first moment are corrected once, when beta2 first changes, and t is set forward by 2**23,
    where nothing is left to correct; the step that Adam would make stays the same. `release` takes it back.

    All of it is in the optimizer's own code: no copy of v, no work in a step, and foreach and fused steps need to know
    nothing of it. Where beta2 is as wanted already, no bit changes. A second moment of fewer than
    1 / (1 - beta2) steps is not worth sharing yet, and moves as the user set it.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._last: int | None = None  # steps that were complete after the last one that all ranks averaged

    def prepare(self, kind: str, step: int, *, synchronous: bool) -> None:
        """For the step after `step` completed ones. Asked every time: a user may load an optimizer's state in between."""
        if kind == "local":
            self.release()  # a user may have loaded an optimizer's state of another strategy
            return
        moves = synchronous and kind == "shared"
        gap = 1 if self._last is None else step + 1 - self._last
        for optimizer, group in self._groups():
            now = float(group["betas"][1])
            own = float(group.get(OWN, now))
            if not _settled(optimizer, group, own):
                wanted = own
            else:
                wanted = max(own**gap, min(own, LEAST)) if moves else max(own, SLOW)
            if wanted != now:
                group[OWN] = own
                _age(optimizer, group, now)
                _use(group, wanted)

    def synchronised(self, step: int) -> None:
        """All ranks averaged the gradients of the last of `step` completed steps."""
        self._last = step

    def release(self) -> None:
        """Give every group its own beta2 back, and every parameter its own age."""
        self._last = None
        for optimizer, group in self._groups():
            if OWN in group:
                _age(optimizer, group, float(group["betas"][1]))  # those that had no gradient before beta2 was held
                _use(group, float(group.pop(OWN)))
                _rejuvenate(optimizer, group)

    def state(self) -> dict[str, Any]:
        """Plain data. Which decays are held, and what they were, is in the optimizers' own state."""
        return {"last": self._last}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._last = state["last"]

    def _groups(self) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
        for optimizer in self._optimizers:
            if isinstance(optimizer, Adam):
                for group in optimizer.param_groups:
                    yield optimizer, group


def _settled(optimizer: Optimizer, group: Mapping[str, Any], beta2: float) -> bool:
    """Whether its second moment has seen 1 / (1 - beta2) steps: the first parameter speaks for all."""
    steps = next((float(optimizer.state[p].get("step", 0)) for p in group["params"] if p in optimizer.state), 0.0)
    return OWN in group or steps * (1 - beta2) >= 1 - 1e-9


def _use(group: dict[str, Any], beta2: float) -> None:
    beta1, before = group["betas"]
    group["betas"] = (beta1, before.new_tensor(beta2) if isinstance(before, Tensor) else beta2)


def _age(optimizer: Optimizer, group: Mapping[str, Any], beta2: float) -> None:
    """Correct the moments of each parameter for their start, made by this beta2, and put its step where Adam does not."""
    for state, steps in _states(optimizer, group):
        if steps < AGED:
            _scale(state, 1 / (1 - float(group["betas"][0]) ** steps), 1 / (1 - beta2**steps))
            state["step"] += AGED


def _rejuvenate(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    for state, steps in _states(optimizer, group):
        if steps > AGED:
            beta1, beta2 = (float(beta) for beta in group["betas"])
            _scale(state, 1 - beta1 ** (steps - AGED), 1 - beta2 ** (steps - AGED))
            state["step"] -= AGED


def _scale(state: Mapping[str, Any], first: float, second: float) -> None:
    for key, factor in (("exp_avg", first), ("exp_avg_sq", second), ("max_exp_avg_sq", second)):
        if key in state:
            state[key].mul_(factor)


def _states(optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    for parameter in group["params"]:
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        if steps := float(state.get("step", 0)):
            yield state, steps
