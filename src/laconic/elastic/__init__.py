"""Elastic training on torchft: workers leave, die and join between syncs, and the run goes on.

The core installs without it: `pip install 'laconic[elastic]'`.
"""

from laconic.elastic.attach import attach
from laconic.elastic.membership import Membership, MembershipError, lighthouse
from laconic.elastic.run import ElasticRun
from laconic.elastic.stats import ElasticStats

__all__ = ["ElasticRun", "ElasticStats", "Membership", "MembershipError", "attach", "lighthouse"]
