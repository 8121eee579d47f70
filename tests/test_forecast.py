"""What `predict` says before a run: of how many steps it is, and that shortcuts cost no byte."""

import itertools
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import laconic
from laconic.comm.collectives import Traffic
from laconic.forecast import layer_bytes
from laconic.forecast.exchanges import Exchanges
from laconic.forecast.prediction import default_buckets
from laconic.reducers.base import Reducer
from laconic.reducers.blockwise import layout
from tests.reducers.every import EVERY, NAMES

Asked = tuple[list[tuple[int, ...]], torch.dtype, int, int, int]  # shapes, dtype, world, step, exchange
SIZES = {"node": 2}
WARM = [
    "ddp(reducer=Warmup(3, AlternatingPowerSGD(1), before=Warmup(2, Exact(), Cast('fp16'))))",
    "powersgd(rank=1, warmup=4)",
    "int8(warmup=5)",
    "diloco(3, warmup=4, reducer=Warmup(8, Quantized(4)))",
    "streaming_diloco(6, fragments=2, delay=2, warmup=5)",
    "post_local_sgd(4, 3, subgroup='node')",
    "hierarchical_sgd({2: 'node', 4: 'world'}, warmup=3)",
    "slowmo(QSR(2, 0.1), warmup=3)",
    "local_adam(3, warmup=4, refresh=5)",
    "onebit_adam(warmup=3)",
]


def repeated() -> nn.Module:
    """Layers that are alike, some that nearly are, another dtype, and buffers."""
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(48, 24), nn.Linear(24, 48), nn.BatchNorm1d(48)) for _ in range(2)]
        return nn.Sequential(nn.Embedding(99, 48), *blocks, nn.Linear(48, 99, bias=False), nn.Linear(48, 99).half())


def test_what_is_predicted_says_of_how_many_steps_it_is() -> None:
    layer = nn.Linear(1000, 1000, device="meta")
    plain, seldom = (laconic.predict(text, layer, world_size=4) for text in ("ddp()", "diloco(32)"))
    assert plain.wire_bytes == seldom.wire_bytes
    assert (plain.steps, seldom.steps) == (1, 32)
    assert plain.wire_bytes_per_step == 32 * seldom.wire_bytes_per_step == plain.wire_bytes
    assert plain != laconic.Forecast(plain.payload_bytes, plain.wire_bytes, plain.collectives, 32)
    assert repr(seldom).endswith("steps=32, wire_bytes_per_step=187687.5)")
    for text, steps in itertools.product(["ddp()", "diloco(32)"], [0, 1, 64]):
        found = laconic.predict(text, layer, world_size=4, steps=steps)
        assert found.steps == steps
        assert (found.wire_bytes_per_step, found.payload_bytes_per_step, found.collectives_per_step) == (
            (found.wire_bytes / steps, found.payload_bytes / steps, found.collectives / steps) if steps else (0.0, 0.0, 0.0)
        )
    for wrong in ({"world_size": "8"}, {"world_size": 2.0}, {"steps": "3"}, {"sizes": {"node": "2"}}, {"shards": None}):
        with pytest.raises(TypeError, match="must be a whole number, such as 8, got"):
            laconic.predict("ddp()", nn.Linear(2, 2), **{"world_size": 2, **wrong})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        laconic.predict("ddp()", 3, world_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps must be 0 or more, got -1"):
        laconic.predict("ddp()", layer, world_size=4, steps=-1)


def test_a_forecast_is_a_traffic() -> None:
    one, other = laconic.Forecast(8, 6, 2, steps=4), Traffic(8, 6, 2)
    assert one == other
    assert other == one
    assert hash(one) == hash(other)
    assert one != Traffic(8, 6, 1)
    assert one != "a text"
    assert type(one + one) is type(one - other) is Traffic, "a sum may be of anything"
    assert one + other == Traffic(16, 12, 4)


@pytest.mark.parametrize(
    "text", ["int4()", "sign(warmup=1)", "topk(warmup=1)", *WARM[:3], "post_local_sgd(2, 2, subgroup='node')"]
)
def test_buckets_that_are_alike_cost_what_each_of_them_does(text: str) -> None:
    """A prediction of one bucket alone has nothing to share."""
    model = repeated()
    buckets = [*default_buckets(dict(model.named_parameters())), ["1.0.weight"], ["1.1.weight"], ["2.0.weight"], ["2.1.bias"]]

    def sent(*buckets: list[str]) -> Traffic:
        return laconic.predict(text, model, world_size=4, buckets=buckets, step=0, steps=6, sizes=SIZES)

    between = sent()
    assert sent(*buckets) == sum((sent(bucket) - between for bucket in buckets), between)


def test_without_buckets_ddp_s_own_rule_is_followed() -> None:
    """1 MiB in the first bucket, 25 MiB in the others, from the last parameter to the first; frozen ones are in none."""
    model = nn.Sequential(*[nn.Linear(1000, 1000, device="meta") for _ in range(9)])
    model[8].bias.requires_grad_(False)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = list(named)[::-1]
    assert default_buckets(named) == [names[:1], names[1:15], names[15:]], "seven layers are the first that fill 25 MiB"
    found = laconic.predict("ddp()", model, world_size=2)
    assert (found.collectives, found.payload_bytes) == (3, 4 * (9 * 1000 * 1000 + 8 * 1000))
    assert laconic.predict("ddp()", model, world_size=2, buckets=[["0.bias"], ["0.weight"]]).payload_bytes == 4 * 1001 * 1000
    with pytest.raises(ValueError, match=r"buckets name parameters that the model doesn't train: 8\.bias, nobody"):
        laconic.predict("ddp()", model, world_size=2, buckets=[["0.bias", "8.bias"], ["nobody"]])


def test_who_takes_part_decides_over_the_bytes() -> None:
    """A ring of N sends 2 (N-1)/N of what it averages."""
    layer, one = nn.Linear(99, 100, device="meta"), 4 * 100 * 100

    def sent(text: str, sizes: dict[str, int] | None = None) -> float:
        return laconic.predict(text, layer, world_size=4, sizes=sizes).wire_bytes / one

    node = "post_local_sgd(0, 4, subgroup='node')"  # gradients with the node each step, parameters with all each fourth
    assert sent(node) == 4 * 1.5 + 1.5, "without sizes all are on one node"
    assert sent(node, {"node": 2}) == 4 * 1.0 + 1.5
    assert sent(node, {"node": 1}) == 1.5, "a rank alone on its node sends nothing there"
    auto = "post_local_sgd(0, 4)"  # with the node, where there are several
    assert sent(auto) == sent(auto, {"node": 4}) == 1.5
    assert sent(auto, {"node": 2}) == 4 * 1.0 + 1.5
    assert sent("hierarchical_sgd({2: 'rack', 4: 'world'})", {"rack": 2}) == 1.0 + 1.5
    with pytest.raises(ValueError, match=r"how many ranks has 'rack'\? Give sizes=\{'rack': \.\.\.\}"):
        sent("hierarchical_sgd({2: 'rack', 4: 'world'})")


def test_bytes_by_layer_are_those_of_what_is_sent() -> None:
    layer = nn.Linear(100, 100, device="meta")
    plain = layer_bytes("ddp()", layer, 4)
    assert plain == layer_bytes("local_sgd(4)", layer, 4) == {"weight": 60_000, "bias": 600}
    quantized = layer_bytes("int8(warmup=9)", layer, 4)
    assert quantized == layer_bytes("diloco(4, reducer=Quantized(8))", layer, 4), "when every warm-up is over"
    assert quantized["weight"] < 0.3 * plain["weight"]
    assert layer_bytes("silent()", layer, 4) == {"weight": 0, "bias": 0}


def test_deltas_of_16_bit_parameters_travel_in_32() -> None:
    """Their anchors are kept in fp32, and a delta is in the anchor's dtype; gradients and parameters travel as they are."""
    layer = nn.Linear(100, 100, device="meta", dtype=torch.bfloat16)
    assert (
        laconic.predict("diloco(4)", layer, world_size=2).wire_bytes
        == 40_400
        == sum(layer_bytes("diloco(4)", layer, 2).values())
    )
    for text in ("ddp()", "local_sgd(4)"):
        assert laconic.predict(text, layer, world_size=2).wire_bytes == 20_200
    assert layer_bytes("ddp()", layer, 2) == {"weight": 20_000, "bias": 200}


def test_moments_with_periods_of_their_own_count() -> None:
    layer = nn.Linear(100, 100, device="meta")
    once = 40_400 * 2 * 3 // 4
    found = laconic.predict("local_sgd(4, moments={'exp_avg': 6, 'exp_avg_sq': 12, 'step': 2})", layer, world_size=4)
    assert (found.steps, found.wire_bytes) == (12, (3 + 2 + 1) * once)
    long = laconic.predict("local_sgd(500, moments={'exp_avg': 999, 'exp_avg_sq': 1999})", layer, world_size=4)
    assert (long.steps, long.wire_bytes) == (10_000, (20 + 10 + 5) * once), "not the 998,500,500 steps of the whole cycle"


def test_a_prediction_on_fake_tensors_leaves_no_trace() -> None:
    with FakeTensorMode():
        fake = laconic.predict("local_adam()", nn.Linear(10, 10), world_size=2)
    assert laconic.predict("local_adam()", nn.Linear(10, 10, device="meta"), world_size=2) == fake


@pytest.mark.parametrize("reducer", EVERY, ids=NAMES)
def test_one_exchange_stands_for_all_that_are_alike(reducer: Reducer) -> None:
    shared, draw = Exchanges(reducer), Random(0)
    first: Asked = ([(8, 6)], torch.float32, 3, 0, 0)
    others: list[Asked] = [
        ([(8, 6)], torch.float32, 3, 1, 2),
        ([(6, 8)], torch.float32, 3, 0, 0),
        ([(48,)], torch.float32, 3, 0, 0),
    ]
    others += [([(8, 6)], torch.bfloat16, 3, 0, 0), ([(8, 6)], torch.float32, 2, 0, 0), ([(8, 6)], torch.float32, 3, 2, 0)]
    others += [
        ([(8, 6)], torch.float32, 3, 0, 1),
        ([(8, 6), ()], torch.float32, 3, 0, 0),
        ([(), (8, 6)], torch.float32, 3, 3, 3),
    ]
    for shapes, dtype, world, step, number in [first, *draw.sample(others, len(others)), first]:
        bucket = {str(place): torch.empty(shape, dtype=dtype, device="meta") for place, shape in enumerate(shapes)}
        assert shared.of(bucket, world, step, number) == Exchanges(reducer).of(bucket, world, step, number)


@pytest.mark.parametrize("text", WARM)
def test_a_prediction_over_the_end_of_a_warm_up_is_the_sum_of_its_steps(text: str) -> None:
    """Step by step nothing can be taken for something earlier."""
    model, warmup = repeated(), laconic.strategy(text).warmup
    steps = warmup + 1 if "QSR" in text else warmup + 5  # when a period that moves is due depends on when it was due last
    single = [laconic.predict(text, model, world_size=4, step=now, steps=1, sizes=SIZES) for now in range(steps)]
    for end in (warmup, warmup + 1, steps):
        assert laconic.predict(text, model, world_size=4, step=0, steps=end, sizes=SIZES) == sum(single[:end], Traffic()), end
    plain = laconic.predict("ddp()", model, world_size=4)
    if "before" not in text and "adam" not in text:  # those warm up in fewer bits
        assert all(found == plain for found in single[:warmup]), "a warm-up is plain all-reduce to its last step"
    assert single[warmup] != plain, "and not one step longer"


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any),
    block=st.integers(1, 20),
    world=st.integers(1, 6),
    align=st.sampled_from([4, 8]),
)
def test_blocks_end_where_a_parameter_or_a_rank_s_share_does(sizes: list[int], block: int, world: int, align: int) -> None:
    plan = layout(tuple(sizes), block, world, align)
    wanted: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    ends = set(itertools.accumulate(sizes))
    for place in range(sum(sizes)):  # number by number
        owner, start = divmod(place, plan.chunk)
        last = wanted[owner][-1] if wanted[owner] else None
        if last is not None and place not in ends and last[1] < block:
            wanted[owner][-1] = (last[0], last[1] + 1)
        else:
            wanted[owner].append((start, 1))
    whole = [[(run.start + n * run.length, run.length) for run in part.runs for n in range(run.blocks)] for part in plan.parts]
    found = [sorted([*runs, *part.short]) for runs, part in zip(whole, plan.parts, strict=True)]
    assert found == wanted
    assert plan.scales == max(map(len, wanted))
    for part in plan.parts:
        scales = [run.scale + n for run in part.runs for n in range(run.blocks)]
        assert scales == list(range(part.short_scales.start)), "one for each block, those of short ones last"
        assert part.short_scales.stop == part.blocks == len(scales) + len(part.short)
        assert all(length < block for _, length in part.short)
        assert all(one.numbers.stop != other.start for one, other in itertools.pairwise(part.runs)), "as few runs as can be"
