"""Checkpoints in tests/data, written by laconic as it was before its packages: they load, and resume to the same numbers.

Not to the same bits: what codes leave out was rounded once then, and is rounded twice now, as the peers round.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from tests.live import ranks
from tests.models import everywhere_equal

DATA = Path(__file__).parents[1] / "data"
CASES = {  # strategy, and the step at which the run ended
    "gradients": ("int4(warmup=2)", 11),
    "outstanding": ("streaming_diloco(8, fragments=2, delay=3, warmup=2, reducer=ErrorFeedback(Quantized(4)))", 29),
}


class Lines(nn.Module):
    """Numbers by numbers: no sum whose order depends on the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.arange(float(n)) / 16) for n in (40, 7, 130)])
        self.register_buffer("seen", torch.zeros(3))
        self.seen: Tensor

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += 0.25
        return torch.stack([(layer * batch[: layer.numel()]).sum() for layer in self.layers]).sum()


def resumed(rank: int, text: str, folder: str, stop: int) -> tuple[int, list[str], list[Tensor]]:
    model = DistributedDataParallel(Lines())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    with laconic.attach(model, optimizer, text) as run:
        first = laconic.checkpoint.load(folder, run=run).step
        kept = run.state_dict()["kept"]
        for step in range(run.step, stop):
            data = torch.arange(130.0) * ((step * 7 + rank * 3) % 5 - 2) / 32 + torch.arange(130.0).remainder(3 + rank)
            model(data).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [parameter.detach().clone() for parameter in model.module.parameters()]
    assert everywhere_equal(found)
    return first, kept, found


@pytest.mark.parametrize("name", CASES)
def test_a_former_checkpoint_resumes_to_the_same_numbers(name: str) -> None:
    text, stop = CASES[name]
    expected = torch.load(DATA / name / "expected.pt")
    for first, kept, found in ranks(2, resumed, text, str(DATA / name), stop):
        assert 0 < first < stop
        assert any("error" in each for each in kept)
        assert any(each.startswith("outstanding: ") for each in kept) == (name == "outstanding")
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-6 * other.abs().max()


def test_a_former_checkpoint_is_dealt_to_more_ranks() -> None:
    text, stop = CASES["outstanding"]
    for first, kept, _ in ranks(3, resumed, text, str(DATA / "outstanding"), stop):
        assert first == 16
        assert any(each.startswith("outstanding: ") for each in kept)


def test_a_former_state_that_is_damaged_is_said_to_be() -> None:
    from laconic.run.state import upgraded

    with pytest.raises(ValueError, match="the state is damaged: KeyError: 'local'"):
        upgraded({"version": 4, "rounds": 3})
    assert upgraded({"version": 7}) == {"version": 7}, "to be refused by who reads it"
