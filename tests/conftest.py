"""What pytest must know."""

import os
from pathlib import Path

collect_ignore = ["script/scripts"]  # they are run by torchrun, and importing them would run them

# Probes of this machine, which the lab keeps for a day: not among the user's own, and one for all tests.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent.parent / ".pytest_cache" / "laconic")
# No test waits for a compiler beside it but those of the kernels, which ask for it.
os.environ["LACONIC_FUSED"] = "0"
