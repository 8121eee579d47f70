"""What is worked out without torch, beside what is worked out on meta tensors."""

import pytest
import torch

from laconic.advisor import shapes, tabulate
from laconic.advisor.candidates import PassesCodec, candidates, meta_model, risk_of
from laconic.advisor.catalogue import OptimizerKind, families
from laconic.advisor.estimates import Passes, estimated
from laconic.advisor.memory import extra_bytes, kept_bytes
from laconic.advisor.traffic_table import METHODS
from laconic.cost.link import Link
from laconic.cost.network import Network
from laconic.cost.step_time import Compute, step_time
from laconic.forecast import predict
from laconic.forecast.prediction import default_buckets
from laconic.local.fragments import buckets as delta_buckets
from laconic.local.fragments import fragments
from laconic.strategies.parsing import strategy

REFERENCE = shapes.Decoder(hidden=512, layers=5, vocabulary=4000)  # 18 million numbers: several buckets of each kind
NETWORK = Network(Link(10**9, 1e-3))


def test_the_table_is_what_the_reducers_do() -> None:
    """Where this fails: OMP_NUM_THREADS=1 python -m laconic.advisor.tabulate > src/laconic/advisor/traffic_table.py"""
    assert list(METHODS) == tabulate.methods()
    for name, method in METHODS.items():
        rounds, kept, rank = tabulate.rounds_and_memory(name)
        assert (method.rounds, method.kept, method.rank) == (rounds, kept, rank), name
        assert len(method.passes) == len(method.rounds) + 1


@pytest.mark.parametrize(("optimizer", "world", "node"), [("adam", 8, 1), ("sgd", 8, 4)])
def test_estimates_are_those_of_the_exact_path(optimizer: OptimizerKind, world: int, node: int) -> None:
    model, compute = meta_model(REFERENCE.shapes), Compute.of(0.2)
    sizes = {"node": node}
    exact = candidates(model, world, PassesCodec(Passes()), sizes=sizes, optimizer=optimizer)
    quick = estimated(REFERENCE.shapes, world, Passes(), per_node=node, optimizer=optimizer)
    for family, others in zip(exact, quick, strict=True):
        sent = predict(family[0].strategy, model, world_size=world, sizes=sizes)
        assert family[0].wire_bytes_per_step() == pytest.approx(sent.wire_bytes_per_step, rel=0.001), "but for heartbeats"
        for one, other in zip(family, others, strict=True):
            assert (one.strategy, one.risk, one.words) == (other.strategy, other.risk, other.words)
            assert other.wire_bytes_per_step() == pytest.approx(one.wire_bytes_per_step(), rel=0.01), one.strategy
            assert other.extra_memory_bytes == pytest.approx(one.extra_memory_bytes, rel=0.03), one.strategy
            times = [step_time(each.steps, compute, NETWORK) for each in (one, other)]
            assert times[1].seconds == pytest.approx(times[0].seconds, rel=0.01), one.strategy
            assert times[1].work == pytest.approx(times[0].work, rel=0.01), one.strategy


def test_more_workers_than_are_worked_out_have_scaled_bytes() -> None:
    model = meta_model({"weight": (1024, 1024)})
    many = [family[0] for family in candidates(model, 64, PassesCodec(Passes()))]
    for one in many[:6]:
        sent = predict(one.strategy, model, world_size=64)
        assert one.wire_bytes_per_step() == pytest.approx(sent.wire_bytes_per_step, rel=0.01), one.strategy
        assert {each.world for exchange in one.steps[0].in_backward for each in exchange.rounds} == {64}


def test_shapes_are_cut_as_tensors_are() -> None:
    named = REFERENCE.shapes
    tensors = {name: torch.empty(shape, device="meta") for name, shape in named.items()}
    cut = [[tuple(tensors[name].shape) for name in names] for names in default_buckets(tensors)]
    assert shapes.buckets(named) == cut
    parts = [
        [[tuple(tensors[name].shape) for name in names] for names in delta_buckets(tensors, part)]
        for part in fragments(tensors, 4, "strided")
    ]
    assert shapes.fragments(named, 4) == parts


@pytest.mark.parametrize("text", ["10000", "470k", "1m", "124m", "1.3b", "70b", "1t"])
def test_a_decoder_has_the_parameters_that_were_asked_for(text: str) -> None:
    wanted = shapes.count(text)
    found = shapes.decoder(wanted)
    assert shapes.size(list(found.shapes.values())) == pytest.approx(wanted, rel=0.01)
    assert found.layers >= 1
    assert found.vocabulary > 10


@pytest.mark.parametrize("text", ["", "many", "-1b", "0", "1.3x", "1e9", "5k", "99t"])
def test_a_number_of_parameters_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"a number of parameters is written as|a model has from"):
        shapes.decoder(shapes.count(text))


def test_what_a_strategy_keeps() -> None:
    parameters = {"weight": torch.empty(100, 50, device="meta"), "bias": torch.empty(50, device="meta")}
    n = 4 * 5050

    def kept(text: str) -> float:
        return extra_bytes(strategy(text), parameters) / n

    assert [kept(text) for text in ("ddp()", "bf16()", "int8()", "int4()", "silent()")] == [0, 0, 0, 1, 0]
    assert kept("local_sgd(4)") == 1
    assert kept("local_sgd(4, atomic=False)") == 0
    assert kept("diloco(4)") == 2
    assert kept("diloco(4, outer_momentum=0.0)") == 1
    assert kept("slowmo(4)") == 2
    assert kept("streaming_diloco(8, fragments=2, delay=1)") == 3  # and one of two fragments, as it is sent and as it left
    assert kept("diloco(4, outer=OuterOptimizer(torch.optim.adam:Adam, {'lr': 0.1}))") == 3
    assert kept("diloco(4, offload=True)") == 0, "it is on the CPU"
    low = strategy("powersgd(rank=4)").reducer
    assert kept_bytes(low, parameters) == 4 * (5000 + 4 * 50), "the matrix's residual and Q; a vector is sent as it is"


@pytest.mark.parametrize(
    ("text", "risk"),
    [
        ("ddp()", "same"),
        ("fp8()", "rounding"),
        ("int8(warmup=10)", "rounding"),
        ("sign()", "delay"),
        ("onebit_adam()", "delay"),
        ("ddp(reducer=TopK(0.01))", "local"),
        ("local_sgd(4)", "local"),
        ("silent()", "local"),
    ],
)
def test_the_risk_of_any_strategy(text: str, risk: str) -> None:
    assert risk_of(strategy(text)).option == risk


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_catalogue_goes_from_mild_to_strong(optimizer: OptimizerKind) -> None:
    known = families(optimizer, nodes=True)
    assert [family[0].risk for family in known] == sorted(plan.risk for plan in (family[0] for family in known))
    for family in known:
        assert len({plan.risk for plan in family}) == 1
        for plan in family:
            assert risk_of(strategy(plan.text)) == plan.risk, plan.text
            assert plan.words, plan.text
    periods = [[plan.period for plan in family] for family in known if family[0].between is not None]
    assert all(found == sorted(found) for found in periods)


def test_a_model_of_few_layers_has_fewer_fragments() -> None:
    small = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    found = candidates(small, 2, PassesCodec(Passes()))
    assert "fragments=2" in found[-1][0].strategy
    alone = candidates(torch.nn.Linear(4, 4), 2, PassesCodec(Passes()))
    assert "fragments=2" in alone[-1][0].strategy, "its weight and its bias"


def test_more_strategies_are_in_the_table_once() -> None:
    model = torch.nn.Linear(64, 64)
    found = candidates(model, 2, PassesCodec(Passes()), extra=["int8()", "topk(ratio=0.1)"])
    texts = [family[0].strategy for family in found]
    assert texts.count("int8()") == 1
    assert texts[-1] == "topk(ratio=0.1)"
    assert sum(found[-1][0].steps[0].in_backward[0].work) > 0
    with pytest.raises(ValueError, match="2 workers at least"):
        candidates(model, 1, PassesCodec(Passes()))
