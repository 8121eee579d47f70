"""The recipe that leaves the choice of a strategy to the advisor."""

from laconic.reducers.exact import Exact
from laconic.strategies import routes
from laconic.strategies.recipe import recipe
from laconic.strategies.strategy import Advised, Strategy


@recipe
def auto(
    *, risk: str = "delay", share: float = 0.95, link: str | None = None, steps: int = 10, seconds: float = 5.0
) -> Strategy:
    """Train as ddp() at first; then go over to what the advisor chooses for this model, these ranks and their network.

    After the first few steps, `steps` steps are timed and the network is probed. Of the strategies that reach `share` of the
    rate without communication, the mildest is chosen.

    Bytes: those of ddp(), then those of the choice; the probe's are not counted.

    Memory: that of the choice.

    Arguments:
      `risk`: the strongest class that may be chosen: "same" arithmetic, "rounding" only, "delay" (what one step does not send
        is sent in later ones), or "local" (replicas step on their own, which is another training). Default "delay".
      `share`: of the rate without communication, above 0 and at most 1. Default 0.95.
      `link`: a link to choose for, such as "1gbit:20ms"; None: the ranks' own network is probed. Default None.
      `steps`: how many steps are timed. Default 10.
      `seconds`: how long the network is probed, from 0.1 to 60. Default 5.0.

    >>> import laconic
    >>> str(laconic.strategy("auto(risk='rounding')"))
    "auto(risk='rounding')"
    """
    return Strategy(Exact(), routes.world(), advised=Advised(risk, share, link, steps, seconds))
