"""The end of a run: replicas made equal, everything taken off."""

import warnings

from laconic.run.engine import Engine


def make_equal(engine: Engine) -> None:
    """At the end: replicas become their mean, unless users have loaded parameters of their own on some ranks alone."""
    with engine.during("making replicas equal"):
        restored = engine.presence.restored()
        if any(restored):
            engine.local.discard_outstanding()
        if not any(restored) or all(restored):
            engine.local.equalise(engine.counter.training)
            # What some optimizers did beyond the clock is in it, too: nothing differs any more.
            engine.clock.set(engine.step, [0] * len(engine.clock.ahead))
        else:
            engine.unequal = True
    engine.wrote()


def warn_if_still_warming_up(engine: Engine) -> None:
    """At the end: the strategy that was asked for has done nothing."""
    if 0 < engine.step <= engine.strategy.warmup:
        warnings.warn(
            f"{engine.strategy} never began: its warm-up of {engine.strategy.warmup} steps lasted for all {engine.step}",
            stacklevel=3,
        )
