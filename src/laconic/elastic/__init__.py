"""Elastic training on torchft: workers leave, die and join between syncs, and the run goes on.

The core installs without it; with it: `pip install '.[elastic]'` in laconic's folder.

Start a lighthouse, `torchft_lighthouse --bind 10.0.0.1:29510`, and each worker with its address in $TORCHFT_LIGHTHOUSE:

>>> import laconic.elastic
>>> with laconic.elastic.attach(model, optimizer, "diloco(period=16)") as run:  # doctest: +SKIP
...     while run.step < steps:
...         loss(model, next(batches)).backward()
...         optimizer.step()
...         optimizer.zero_grad()
"""

from laconic.elastic.attach import attach
from laconic.elastic.membership import Membership, MembershipError, lighthouse
from laconic.elastic.run import ElasticRun
from laconic.elastic.stats import ElasticStats

__all__ = ["ElasticRun", "ElasticStats", "Membership", "MembershipError", "attach", "lighthouse"]
