"""Constraints by which pip takes the oldest versions that laconic's extras allow; torch and the tests' tools stay as pinned."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("torch", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "tensorboard")


def main() -> None:
    """Print them."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    lowest = {name: pins[name] for name in TOOLS}
    for extra in re.findall(r"\w+", extras["all"][0])[1:]:
        for need in extras[extra]:
            name, bound = need.partition(";")[0].strip().split(">=")
            lowest[name] = bound
    print("\n".join(f"{name}=={version}" for name, version in lowest.items()))


if __name__ == "__main__":
    main()
