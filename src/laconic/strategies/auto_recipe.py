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

    `risk` is the strongest class that may be chosen: "same" arithmetic, "rounding" only, "delay" (what one step does not send
    is sent in later ones), or "local" (replicas step on their own, which is another training). Of the strategies that reach
    `share` of the rate without communication, the mildest is chosen. After the first few steps, `steps` steps are timed;
    then the network is probed for about `seconds`. With `link`, such as "1gbit:20ms", the choice is for a link of that rate.
    Bytes: those of ddp(), then those of the choice; the probe's are not counted.
    """
    return Strategy(Exact(), routes.world(), advised=Advised(risk, share, link, steps, seconds))
