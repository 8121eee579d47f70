"""Run the benchmarks that are named, or all; `check` and `gate` compare with what is committed."""

import importlib
import pkgutil
import sys

import benchmarks
from benchmarks import check

SHARED = {"__main__", "harness", "check", "long_steps", "peers", "quiet", "simulation", "stacked_models", "torchft_peer"}
SHARED |= {"elastic_growth", "elastic_hosts", "elastic_workers"}
known = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in SHARED]
checking = sys.argv[1:2] == ["check"]
if sys.argv[1:2] == ["gate"]:
    in_ci = sys.argv[2:] == ["--ci"]
    if sys.argv[2:] and not in_ci:
        sys.exit(f"gate takes --ci or nothing, got {' '.join(sys.argv[2:])}")
    sys.exit(check.gate(check.CI if in_ci else check.QUICK, only_if_quiet=in_ci))
wanted = sys.argv[2:] if checking else sys.argv[1:] or known
unknown = [name for name in wanted if name not in known]
if unknown:
    sys.exit(f"no benchmark called {', '.join(unknown)}; there are {', '.join(known)}, check, and gate")
if checking:
    sys.exit(check.main(wanted))
for name in wanted:
    importlib.import_module(f"benchmarks.{name}").main()
