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
    """Average the gradients of every step, by any reducer; `warmup` steps by `warmup_reducer` first.

    `second_moment` is what becomes of Adam's after the warm-up: "local", "slow" or "shared".
    Bytes: the reducer's; as given, 2(N-1)/N * n * itemsize a step, bit for bit DDP without a hook.
    """
    return Strategy(_warmed(warmup, reducer, warmup_reducer), routes.world(), second_moment=second_moment)


@recipe
def fp16(*, warmup: int = 0) -> Strategy:
    """Gradients as fp16 on the wire, summed in fp32. Bytes: 2(N-1)/N * 2n a step."""
    return Strategy(_warmed(warmup, Cast("fp16")), routes.world())


@recipe
def bf16(*, warmup: int = 0) -> Strategy:
    """Gradients as bf16 on the wire, summed in fp32. Bytes: 2(N-1)/N * 2n a step."""
    return Strategy(_warmed(warmup, Cast("bf16")), routes.world())


@recipe
def int8(*, warmup: int = 0) -> Strategy:
    """Gradients as 8-bit whole numbers with block scales. Bytes: 2(N-1)/N * 1.008n a step."""
    return Strategy(_warmed(warmup, Quantized(8)), routes.world())


@recipe
def int4(*, warmup: int = 0) -> Strategy:
    """Gradients as 4-bit whole numbers with block scales and error feedback. Bytes: 2(N-1)/N * 0.531n a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(Quantized(4))), routes.world())


@recipe
def fp8(*, warmup: int = 0) -> Strategy:
    """Gradients as 8-bit floats (e4m3) with block scales. Bytes: 2(N-1)/N * 1.008n a step."""
    return Strategy(_warmed(warmup, Float8()), routes.world())


@recipe
def powersgd(*, rank: int = 4, warmup: int = 10) -> Strategy:
    """Matrices by low rank with error feedback. Bytes: 2(N-1)/N * 4(rank * (rows + columns) per matrix + the rest) a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(PowerSGD(rank))), routes.world())


@recipe
def sign(*, warmup: int = 10) -> Strategy:
    """One bit a number, and a size for each block, with error feedback. Bytes: 2(N-1)/N * 0.1875n a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(Sign())), routes.world())


@recipe
def topk(*, ratio: float = 0.01, warmup: int = 10) -> Strategy:
    """The largest entries with error feedback. Bytes: 2(N-1)/N * 6 * ratio * n a step."""
    return Strategy(_warmed(warmup, ErrorFeedback(TopK(ratio))), routes.world())


@recipe
def randomk(*, ratio: float = 0.05, warmup: int = 10) -> Strategy:
    """Entries drawn alike by all ranks, with error feedback. Bytes: 2(N-1)/N * 4 * ratio * n a step."""
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

    `beta` is that of Adam's first moment. The second moment comes from the warm-up, which must be long enough for
    it to settle: a fifth of a run from scratch; from a warm model with its optimizer's state, none. The paper freezes it.
    Don't clip gradient norms with it: see Momentum.
    Bytes: 2(N-1)/N * 0.141n a step, 1/28 of ddp's; 2(N-1)/N * 1.008n in the warm-up.  Memory: 2n.
    Paper: Tang et al. 2021, arXiv:2102.02888.
    """
    return Strategy(_warmed(warmup, Momentum(reducer, beta), warmup_reducer), routes.world(), second_moment="slow")


@recipe
def silent() -> Strategy:
    """Every rank for itself; replicas are averaged once, on leaving. Bytes: none a step. The speed limit of a comparison."""
    return Strategy(Exact(), routes.silent())
