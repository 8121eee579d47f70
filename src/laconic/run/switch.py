"""Going on by another strategy in mid-run."""

from laconic._torch.optimizers import scaler_tensors
from laconic.local.parameter_averaging import ParameterAverager
from laconic.run.arguments import scopes
from laconic.run.engine import Engine
from laconic.run.state import memory_of
from laconic.strategies.strategy import Strategy


def switch_to(engine: Engine, strategy: Strategy, *, equal: bool = False) -> None:
    """Go on by another strategy from the next step; all ranks together, and they agree on which.

    Replicas that have drifted become equal first, unless they are said to be.
    """
    drifted = not equal and (engine.agree_on_drift() or engine.local.deltas is not None)
    if drifted and (strategy.route.communicates or strategy.averaging or engine.local.deltas):
        engine.local.equalise(engine.counter.training, release=True)
        if strategy.route.communicates:  # equal gradients keep replicas equal only if the optimizers' memory is equal, too
            engine.local.moments.equalise(engine.replicas)
            _equalise_scaler(engine)
    drifted, before = engine.drifted and not equal, engine.local
    if before.deltas is not None:
        before.deltas.abandon()
    engine.second_moment.release()
    engine.strategy = strategy
    engine.whose |= memory_of(strategy)
    engine.groups.add(scopes(strategy))
    engine.local = engine.new_local_updates()
    engine.local.syncs, engine.local.skipped_before = before.syncs, before.skipped
    if drifted:
        engine.local.drift()
    if engine.hook is not None:
        engine.hook.use(engine.residuals.released_by(strategy.reducer), engine.replicas)
        engine.hook.strategy = str(strategy)
    engine.watch_order()
    engine.wrote()
    engine.begin_step()


def _equalise_scaler(engine: Engine) -> None:
    """A loss scale that moved on one rank alone would scale gradients differently that are now averaged."""
    if engine.scaler is not None and engine.scaler.is_enabled():
        ParameterAverager(scaler_tensors(engine.scaler), engine.counter.control).adopt_first(engine.replicas)
