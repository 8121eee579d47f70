"""Checkpoints of sharded models: exact on the same mesh; on another one, what the model would still receive stays."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import laconic
from laconic.comm.flat_tensors import local
from laconic.run.run import engine_of
from tests.islands import adam, full, loss, same_on_islands, sharded, shards, step_once, tokens, whole
from tests.live import ranks
from tests.models import difference
from tests.run.test_resume import chosen

STEPS = 8
SAVES = [3, 6]


def plain(tree: Any) -> Any:
    """A tree in which each rank has its own shards, to be compared to the bit."""
    if isinstance(tree, Tensor):
        return local(tree).clone()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(value) for value in tree] if isinstance(tree, list | tuple) else tree


def everything(model: Any, optimizer: Any, run: Any) -> Any:
    own = {key: value for key, value in run.state_dict().items() if key != "counts"}
    return plain({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "run": own})


def text_for_islands(text: str) -> str:
    return text.replace("{2: 2, 4: 'world'}", "{2: 'node', 4: 'world'}").replace("BatchedPowerSGD", "PowerSGD")


def straight_and_resumed(rank: int, texts: list[str], folder: str) -> None:
    warnings.filterwarnings("ignore", ".*never began")
    for number, text in enumerate(texts):
        where = Path(folder) / str(number)
        torch.manual_seed(100 + rank)
        model, optimizer, mesh = sharded(2, adam)
        run = laconic.attach(model, optimizer, text, mesh=mesh)
        saved = {}
        for step in range(STEPS):
            if step in SAVES:
                saved[step] = everything(model, optimizer, run)
                laconic.checkpoint.save(where, run=run, keep=None, extra={"rank": rank}, asynchronous=step == SAVES[-1])
            step_once(model, optimizer, rank, step)
        end = everything(model, optimizer, run)
        run.sync()
        run.detach()
        for at in SAVES:
            other, others, mesh = sharded(2, adam, seed=9)
            again = laconic.attach(other, others, text, mesh=mesh)
            found = laconic.checkpoint.load(where / f"step-{at:08d}", run=again)
            assert found.extra == {"rank": rank}
            assert difference(everything(other, others, again), saved[at]) is None, f"{text}, loaded at {at}"
            for step in range(at, STEPS):
                step_once(other, others, rank, step)
            unlike = difference(everything(other, others, again), end)
            assert unlike is None, f"{text}, resumed at {at}: {unlike}"
            again.sync()
            again.detach()


TEXTS = list(dict.fromkeys(text_for_islands(text) for text in chosen()))


@pytest.mark.parametrize("part", range(2))
def test_a_resumed_run_is_the_same_run(part: int, tmp_path: Path) -> None:
    quick = [
        "ddp(reducer=ErrorFeedback(TopK(0.05)))",
        "streaming_diloco(4, fragments=2, delay=2, reducer=ErrorFeedback(Ternary()))",
    ]
    ranks(4, straight_and_resumed, quick[part::2], str(tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("text", TEXTS)
def test_a_resumed_run_is_the_same_run_by_every_strategy(text: str, tmp_path: Path) -> None:
    ranks(4, straight_and_resumed, [text], str(tmp_path))


# Another mesh

RESHAPED = [
    # (ranks, islands) before and after
    ((4, 2), (6, 3)),
    ((4, 4), (2, 2)),
    ((4, 2), (8, 2)),
    ((4, 2), (3, 3)),
]
FEEDBACK = "diloco(4, reducer=ErrorFeedback(TopK(0.1)))"
STRATEGIES = [
    "ddp(reducer=ErrorFeedback(TopK(0.1)))",
    FEEDBACK,
    "streaming_diloco(4, fragments=2, delay=2, reducer=ErrorFeedback(Quantized(4)))",
    "ddp(reducer=ErrorFeedback(PowerSGD(1)))",
]


def whole_of(run: Any, name: str, tensor: Tensor) -> Tensor:
    """What all shards of an island have of this, as one tensor."""
    from laconic.checkpoint.shards import Shards

    return Shards(engine_of(run)).joined(("run", "memory", name, "error"), tensor).full_tensor()  # type: ignore[attr-defined,no-any-return]


def owed(run: Any, mesh: Any) -> dict[str, Tensor]:
    """The mean over islands of all residuals and outstanding deltas, whole: what the model would still receive."""
    state = run.state_dict()
    deltas = state["local"]["deltas"]
    found: dict[str, Tensor] = {}
    entries = [(name, slot["error"]) for name, slot in state["memory"].items() if "error" in slot]
    if deltas is not None:
        entries += [(name, slot["error"]) for name, slot in deltas["memory"].items() if "error" in slot]
        entries += [pair for entry in deltas["outstanding"] for pair in entry["deltas"].items()]
    for name, tensor in entries:
        mine = whole_of(run, name, tensor).double()
        dist.all_reduce(mine, group=mesh.get_group("replicate"))
        mine /= mesh.get_group("replicate").size()
        found[name] = found[name] + mine if name in found else mine
    return found


def evaluate(model: Any, run: Any) -> float:
    model.eval()
    with run.consensus(), torch.no_grad():
        value = sum(float(loss(model, tokens(77, step))) for step in range(8)) / 8
    model.train()
    return value


def begun(rank: int, islands: int, text: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    random.seed(rank)
    model, optimizer, mesh = sharded(islands, adam)
    run = laconic.attach(model, optimizer, text, mesh=mesh)
    for step in range(7):
        step_once(model, optimizer, rank, step)
    with run.consensus():
        mean = full(model)
    before = owed(run, mesh)
    value = evaluate(model, run)
    laconic.checkpoint.save(folder, run=run)
    run.sync()
    run.detach()
    return before, mean, value


def went_on(rank: int, islands: int, text: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    model, optimizer, mesh = sharded(islands, adam, seed=5)
    run = laconic.attach(model, optimizer, text, mesh=mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*begins anew")
        laconic.checkpoint.load(folder, run=run)
    with run.consensus():
        mean = full(model)
    now = owed(run, mesh)
    value = evaluate(model, run)
    losses = [step_once(model, optimizer, rank, step) for step in range(7, 15)]
    run.sync()
    assert same_on_islands(shards(model), mesh)
    assert all(torch.isfinite(torch.tensor(losses)))
    after = evaluate(model, run)
    assert after < value + 0.1, f"the loss went from {value} to {after}"
    run.detach()
    return now, mean, value


def reshaped(text: str, before: tuple[int, int], after: tuple[int, int], folder: Path) -> None:
    old, mean, value = ranks(before[0], begun, before[1], text, str(folder))[0]
    for now, again, then in ranks(after[0], went_on, after[1], text, str(folder)):
        assert now.keys() == old.keys()
        for name in old:
            assert float((now[name] - old[name]).norm()) <= 1e-6 * float(old[name].norm()), name
        assert all(torch.allclose(again[name], mean[name], rtol=1e-5, atol=1e-6) for name in mean)
        assert abs(then - value) < 1e-4, f"the loss jumps from {value} to {then}"


@pytest.mark.parametrize(("before", "after"), [RESHAPED[0]])
def test_another_mesh(before: tuple[int, int], after: tuple[int, int], tmp_path: Path) -> None:
    reshaped(STRATEGIES[2], before, after, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), RESHAPED)
@pytest.mark.parametrize("text", STRATEGIES)
def test_another_mesh_by_every_kind_of_strategy(
    text: str, before: tuple[int, int], after: tuple[int, int], tmp_path: Path
) -> None:
    reshaped(text, before, after, tmp_path)


def whole_again(rank: int, folder: str) -> tuple[dict[str, Tensor], list[str]]:
    """The same on replicas that are not sharded: a DDP."""
    model, optimizer = whole(adam)
    run = laconic.attach(model, optimizer, STRATEGIES[0])
    laconic.checkpoint.load(folder, run=run)
    mine = {name: slot["error"].double() for name, slot in run.state_dict()["memory"].items()}
    for tensor in mine.values():
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    step_once(model, optimizer, rank, 7)
    run.detach()
    return mine, sorted(mine)


def test_a_sharded_run_goes_on_in_a_ddp(tmp_path: Path) -> None:
    old, _, _ = ranks(4, begun, 2, STRATEGIES[0], str(tmp_path))[0]
    for now, names in ranks(3, whole_again, str(tmp_path)):
        assert names == sorted(old)
        assert all(float((now[name] - old[name]).norm()) <= 1e-6 * float(old[name].norm()) for name in old)


# Inside a user's own DCP


def own_dcp(rank: int, text: str, folder: str) -> None:
    model, optimizer, mesh = sharded(2, adam)
    run = laconic.attach(model, optimizer, text, mesh=mesh)
    for step in range(3):
        step_once(model, optimizer, rank, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    key = laconic.checkpoint.island_key(run)
    assert key == ("islands" if "ddp" in text else f"island{rank // 2}")
    state = {key: {"model": model_state, "optimizer": optimizer_state}, "laconic": laconic.checkpoint.RankState(run)}
    dcp.save(state, checkpoint_id=folder)
    for step in range(3, 6):
        step_once(model, optimizer, rank, step)
    end = everything(model, optimizer, run)
    run.sync()
    run.detach()

    other, others, mesh = sharded(2, adam, seed=3)
    again = laconic.attach(other, others, text, mesh=mesh)
    model_state, optimizer_state = get_state_dict(other, others)  # it makes a step at rate 0, to have places for moments
    state = {key: {"model": model_state, "optimizer": optimizer_state}, "laconic": laconic.checkpoint.RankState(again)}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, others, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for step in range(3, 6):
        step_once(other, others, rank, step)
    found = everything(other, others, again)
    del found["model"]["seen"], end["model"]["seen"]  # DCP keeps one buffer for all ranks of an island
    unlike = difference(found, end)
    assert unlike is None, unlike
    again.sync()
    again.detach()


@pytest.mark.parametrize("text", ["diloco(4, reducer=ErrorFeedback(TopK(0.1)))", "ddp(reducer=ErrorFeedback(Sign()))"])
def test_inside_a_checkpoint_of_the_users_own(text: str, tmp_path: Path) -> None:
    ranks(4, own_dcp, text, str(tmp_path))
