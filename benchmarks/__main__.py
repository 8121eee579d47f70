"""Run the benchmarks that are named, or all; `check` compares with what is committed."""

import importlib
import pkgutil
import sys

import benchmarks
from benchmarks import check

SHARED = {"__main__", "harness", "check", "long_steps", "peers", "simulation", "stacked_models"}
known = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in SHARED]
checking = sys.argv[1:2] == ["check"]
wanted = sys.argv[2:] if checking else sys.argv[1:] or known
unknown = [name for name in wanted if name not in known]
if unknown:
    sys.exit(f"no benchmark called {', '.join(unknown)}; there are {', '.join(known)}, and check")
if checking:
    sys.exit(check.main(wanted))
for name in wanted:
    importlib.import_module(f"benchmarks.{name}").main()
