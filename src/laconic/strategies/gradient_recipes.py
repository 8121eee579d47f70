"""Recipes that average the gradients of every step."""

from laconic.reducers.base import Reducer, checked, checked_steps
from laconic.reducers.cast import Cast
from laconic.reducers.error_feedback import ErrorFeedback
from laconic.reducers.exact import Exact
from laconic.reducers.float8 import Float8
from laconic.reducers.momentum import Momentum
from laconic.reducers.powersgd import PowerSGD
from laconic.reducers.quantized import Quantized
from laconic.reducers.randomk import RandomK
from laconic.reducers.sign import Sign
from laconic.reducers.topk import TopK
from laconic.reducers.warmup import Warmup
from laconic.strategies import routes
from laconic.strategies.recipe import recipe
from laconic.strategies.strategy import Strategy


def _warmed(warmup: int, reducer: Reducer, before: Reducer = Exact()) -> Reducer:  # noqa: B008  (a frozen value)
    checked(before, "warmup_reducer")
    return Warmup(warmup, reducer, before) if checked_steps(warmup, "warmup") else reducer


@recipe
def ddp(
    *,
    reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    warmup: int = 0,
    warmup_reducer: Reducer = Exact(),  # noqa: B008  (a frozen value)
    second_moment: str = "local",
) -> Strategy:
    """Average the gradients of every step, by any reducer.

    As given, it is DDP without a hook, bit for bit.

    Bytes: the reducer's; as given, 2(N-1)/N * n * itemsize a step (N ranks, n numbers).

    Memory: the reducer's; as given, none.

    Arguments:
      `reducer`: how gradients are averaged. Default Exact().
      `warmup`: steps at first in which `warmup_reducer` averages them instead. Default 0.
      `warmup_reducer`: how they are averaged in the warm-up. Default Exact().
      `second_moment`: how Adam's second moment moves after the warm-up: "local", as without laconic; "slow"; or "shared"
        (`Strategy` explains them). Default "local".

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(laconic.ddp(), layer, world_size=4).wire_bytes
    6000000
    >>> str(laconic.ddp(reducer=laconic.ErrorFeedback(laconic.TopK(0.05)), warmup=20))
    'ddp(reducer=ErrorFeedback(inner=TopK(ratio=0.05)), warmup=20)'
    """
    return Strategy(_warmed(warmup, reducer, warmup_reducer), routes.world(), second_moment=second_moment)


@recipe
def fp16(*, warmup: int = 0) -> Strategy:
    """Gradients as fp16 on the wire, summed in fp32.

    Bytes: 2(N-1)/N * 2n a step (N ranks, n numbers).

    Memory: none.

    Not: for tiny gradients without a GradScaler: what is below about 6e-8 * N becomes zero. `bf16` has the range of fp32.

    Arguments:
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(laconic.fp16(), layer, world_size=4).wire_bytes  # 2(N-1)/N * 2n
    3000000
    """
    return Strategy(_warmed(warmup, Cast("fp16")), routes.world())


@recipe
def bf16(*, warmup: int = 0) -> Strategy:
    """Gradients as bf16 on the wire, summed in fp32.

    Bytes: 2(N-1)/N * 2n a step (N ranks, n numbers).

    Memory: none.

    Arguments:
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(laconic.bf16(), layer, world_size=4).wire_bytes  # 2(N-1)/N * 2n
    3000000
    """
    return Strategy(_warmed(warmup, Cast("bf16")), routes.world())


@recipe
def int8(*, warmup: int = 0) -> Strategy:
    """Gradients as 8-bit whole numbers, with a scale for each block of 512.

    The reducer is `Quantized(8)`.

    Bytes: 2(N-1)/N * 1.008n a step (N ranks, n numbers).

    Memory: none.

    Arguments:
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 1.008n
    >>> laconic.predict(laconic.int8(), layer, world_size=4).wire_bytes
    1511736
    """
    return Strategy(_warmed(warmup, Quantized(8)), routes.world())


@recipe
def int4(*, warmup: int = 0) -> Strategy:
    """Gradients as 4-bit whole numbers, with a scale for each block of 128, and error feedback.

    The reducer is `ErrorFeedback(Quantized(4))`.

    Bytes: 2(N-1)/N * 0.531n a step (N ranks, n numbers).

    Memory: n numbers, what was left out.

    Arguments:
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 0.531n
    >>> laconic.predict(laconic.int4(), layer, world_size=4).wire_bytes
    796896
    """
    return Strategy(_warmed(warmup, ErrorFeedback(Quantized(4))), routes.world())


@recipe
def fp8(*, warmup: int = 0) -> Strategy:
    """Gradients as 8-bit floats (e4m3), with a scale for each block of 512.

    The reducer is `Float8()`.

    Bytes: 2(N-1)/N * 1.008n a step (N ranks, n numbers).

    Memory: none.

    Arguments:
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 0.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 1.008n
    >>> laconic.predict(laconic.fp8(), layer, world_size=4).wire_bytes
    1511736
    """
    return Strategy(_warmed(warmup, Float8()), routes.world())


@recipe
def powersgd(*, rank: int = 4, warmup: int = 10) -> Strategy:
    """Matrices by low rank, everything else as it is, with error feedback.

    The reducer is `ErrorFeedback(PowerSGD(rank))`.

    Bytes: 2(N-1)/N * 4(rank * (rows + columns) per matrix + the rest) a step (N ranks).

    Memory: n numbers, what was left out, and rank * columns per matrix.

    Paper: Vogels et al. 2019, arXiv:1905.13727.

    Arguments:
      `rank`: columns of the thin factors that stand for a matrix; more is finer. Default 4.
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 10.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # 2(N-1)/N * 4 * 4 * 2000
    >>> laconic.predict(laconic.powersgd(rank=4), layer, world_size=4).wire_bytes
    48000
    """
    return Strategy(_warmed(warmup, ErrorFeedback(PowerSGD(rank))), routes.world())


@recipe
def sign(*, warmup: int = 10) -> Strategy:
    """One bit a number, and a size for each block of 64, with error feedback.

    The reducer is `ErrorFeedback(Sign())`.

    Bytes: 2(N-1)/N * 0.1875n a step (N ranks, n numbers).

    Memory: n numbers, what was left out.

    Paper: Karimireddy et al. 2019, arXiv:1901.09847.

    Arguments:
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 10.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 0.1875n
    >>> laconic.predict(laconic.sign(), layer, world_size=4).wire_bytes
    281280
    """
    return Strategy(_warmed(warmup, ErrorFeedback(Sign())), routes.world())


@recipe
def topk(*, ratio: float = 0.01, warmup: int = 10) -> Strategy:
    """The largest entries with error feedback.

    The reducer is `ErrorFeedback(TopK(ratio))`.

    Bytes: 2(N-1)/N * 6 * ratio * n a step (N ranks, n numbers).

    Memory: n numbers, what was left out.

    Paper: Stich et al. 2018, arXiv:1809.07599.

    Arguments:
      `ratio`: the share of entries that is sent, above 0 and at most 1. Default 0.01.
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 10.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 0.06n
    >>> laconic.predict(laconic.topk(ratio=0.01), layer, world_size=4).wire_bytes
    91488
    """
    return Strategy(_warmed(warmup, ErrorFeedback(TopK(ratio))), routes.world())


@recipe
def randomk(*, ratio: float = 0.05, warmup: int = 10) -> Strategy:
    """Entries drawn alike by all ranks, with error feedback.

    The reducer is `ErrorFeedback(RandomK(ratio))`. An entry is sent once in 1 / ratio steps on average.

    Bytes: 2(N-1)/N * 4 * ratio * n a step (N ranks, n numbers).

    Memory: n numbers, what was left out.

    Paper: Stich et al. 2018, arXiv:1809.07599.

    Arguments:
      `ratio`: the share of entries that is sent, above 0 and at most 1. Default 0.05.
      `warmup`: steps at first in which gradients are averaged uncompressed. Default 10.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 0.2n
    >>> laconic.predict(laconic.randomk(ratio=0.05), layer, world_size=4).wire_bytes
    300006
    """
    return Strategy(_warmed(warmup, ErrorFeedback(RandomK(ratio))), routes.world())


@recipe
def onebit_adam(
    *,
    warmup: int = 100,
    reducer: Reducer = ErrorFeedback(Sign(block=256)),  # noqa: B008  (a frozen value)
    beta: float = 0.9,
    warmup_reducer: Reducer = Quantized(8),  # noqa: B008  (a frozen value)
) -> Strategy:
    """For Adam: momentum in one bit with error feedback, by a second moment that is slow when the warm-up is over.

    The second moment comes from the warm-up, which must be long enough for it to settle: a fifth of a run from scratch; from
    a warm model with its optimizer's state, none. The paper freezes it.

    Bytes: 2(N-1)/N * 0.141n a step, 1/28 of ddp's; 2(N-1)/N * 1.008n in the warm-up (N ranks, n numbers).

    Memory: 2n numbers, the momentum and what was left out.

    Paper: Tang et al. 2021, arXiv:2102.02888.

    Not: with clipping of gradient norms: see `Momentum`.

    Arguments:
      `warmup`: steps at first in which `warmup_reducer` averages gradients. Default 100.
      `reducer`: how the momentum is averaged. Default ErrorFeedback(Sign(block=256)).
      `beta`: the decay of Adam's first moment, its `betas[0]`. Default 0.9.
      `warmup_reducer`: how gradients are averaged in the warm-up. Default Quantized(8).

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> # about 2(N-1)/N * 0.141n
    >>> laconic.predict(laconic.onebit_adam(warmup=0), layer, world_size=4).wire_bytes
    210960
    """
    return Strategy(_warmed(warmup, Momentum(reducer, beta), warmup_reducer), routes.world(), second_moment="slow")


@recipe
def silent() -> Strategy:
    """Every rank for itself; replicas are averaged once, when the run ends.

    It shows how fast a run would be without communication: the upper limit in a comparison.

    Bytes: none a step.

    Not: for training: replicas drift apart.

    >>> import torch, laconic
    >>> layer = torch.nn.Linear(1000, 1000, bias=False, device="meta")
    >>> laconic.predict(laconic.silent(), layer, world_size=4).wire_bytes
    0
    """
    return Strategy(Exact(), routes.silent())
