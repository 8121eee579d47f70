"""Run the benchmarks that are named, or all."""

import importlib
import pkgutil
import sys

import benchmarks

SHARED = {"__main__", "harness"}
known = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if module.name not in SHARED]
wanted = sys.argv[1:] or known
unknown = [name for name in wanted if name not in known]
if unknown:
    sys.exit(f"no benchmark called {', '.join(unknown)}; there are {', '.join(known)}")
for name in wanted:
    importlib.import_module(f"benchmarks.{name}").main()
