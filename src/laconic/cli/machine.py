"""What `laconic doctor` finds: versions, what torch can do here, and what is missing. Imports no torch, nothing of an extra."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from laconic import __version__

VERSION = 1  # of the JSON
EXTRAS = ("lab", "lightning", "accelerate", "transformers", "elastic")
BENEATH = ("numpy", "rich", "typer", "plotly", "tensorboard")  # shown, whoever needs them
INSTEAD = {"pytorch-lightning": "lightning"}  # the same library under another name
NEEDED = ("all_reduce", "all_gather", "all_to_all", "broadcast")  # by laconic, and by DDP under it
FACTS_SECONDS, COLLECTIVES_SECONDS = 90.0, 30.0
RANKS = 2


@dataclass(frozen=True)
class Package:
    """A Python package that laconic, or one of its extras, needs."""

    name: str
    wanted: str  # such as ">=2.13"
    extra: str | None  # None: laconic itself
    version: str | None  # None: it is not installed

    @property
    def problem(self) -> str | None:
        if self.version is None:
            return "not installed"
        return f"{self.version} is too old" if _older(self.version, self.wanted) else None


@dataclass
class Missing:
    """Something that is not there."""

    what: str
    use: str  # what does not work without it
    command: str | None  # that installs it; None: no command does


@dataclass
class Findings:
    """All of it."""

    python: dict[str, str]
    machine: dict[str, Any]
    packages: list[Package]
    torch: dict[str, Any]  # {"error": ...} where it can't be imported
    kernels: dict[str, Any] | None
    collectives: dict[str, str | None]  # on gloo; None: it works
    links: str | None  # why they can't be emulated; None: they can
    delays: str | None  # why links with a delay can't be; None: they can
    missing: list[Missing] = field(default_factory=list)

    @property
    def broken(self) -> str | None:
        """Why laconic can't work here at all; None: it can."""
        if "error" in self.torch:
            return str(self.torch["error"])
        old = next((one for one in self.packages if one.extra is None and one.problem), None)
        if old is not None:
            return f"laconic needs {old.name}{old.wanted}, and {old.problem}"
        if not self.torch["distributed"]:
            return "this torch was built without torch.distributed"
        failed = [name for name in NEEDED if self.collectives.get(name)]
        if failed and not any(on for name, on in self.torch["backends"].items() if name != "gloo"):
            return f"{failed[0]} fails on gloo, and this torch has no other backend: {self.collectives[failed[0]]}"
        return None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it, version 1."""
        return {
            "version": VERSION,
            "laconic": __version__,
            "python": self.python,
            "machine": self.machine,
            "packages": [{**vars(one), "problem": one.problem} for one in self.packages],
            "torch": self.torch,
            "kernels": self.kernels,
            "collectives": self.collectives,
            "links": {"possible": self.links is None, "why_not": self.links},
            "delays": {"possible": self.delays is None, "why_not": self.delays},
            "missing": [vars(one) for one in self.missing],
            "broken": self.broken,
        }


def examine() -> Findings:
    """Look at everything; some seconds, most of which are torch's import."""
    packages = needed_packages()
    torch, kernels = _torch()
    links = _links(0.0)
    found = Findings(_python(), _machine(), packages, torch, kernels, {}, links, links or _links(0.001))
    if torch.get("distributed") and torch["backends"]["gloo"]:
        found.collectives = _collectives()
    found.missing = _missing(found)
    return found


def _python() -> dict[str, str]:
    return {"version": platform.python_version(), "executable": sys.executable, "laconic": str(Path(__file__).parents[1])}


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }


def needed_packages() -> list[Package]:
    """What laconic's own metadata asks for, each once; and of what is beneath, what is there."""
    try:
        asked = metadata.requires("laconic") or []
    except metadata.PackageNotFoundError:
        asked = ["torch"]
    found: dict[str, Package] = {}
    for line in asked:
        need, _, marker = line.partition(";")
        named = re.fullmatch(r"([\w.-]+)\s*(.*)", need.strip())
        extra = next(iter(re.findall(r"extra == ['\"](\w+)['\"]", marker)), None)
        other = re.search(r"sys_platform == ['\"](\w+)['\"]", marker)
        if named is None or (extra is not None and extra not in EXTRAS) or (other and other[1] != sys.platform):
            continue
        name = named[1]
        found.setdefault(name, Package(name, named[2], extra, _version(name) or _version(INSTEAD.get(name, ""))))
    for name in BENEATH:
        if name not in found and _version(name) is not None:
            found[name] = Package(name, "", "", _version(name))
    return list(found.values())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name) if name else None
    except metadata.PackageNotFoundError:
        return None


def _older(version: str, wanted: str) -> bool:
    """Whether it is below the `>=` that is wanted.

    >>> _older("2.12.1+cpu", ">=2.13"), _older("2.13.0", ">=2.13"), _older("15", "")
    (True, False, False)
    """
    least = re.search(r">=\s*([\d.]+)", wanted)
    return least is not None and _numbers(version) < _numbers(least[1])


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _ask(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "laconic.cli.torch_check", *arguments]


def _torch() -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What torch says of itself, and its kernels; or why it doesn't."""
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run(_ask("facts"), capture_output=True, text=True, timeout=FACTS_SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"torch was not imported within {FACTS_SECONDS:g} s"}, None
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        return {"error": f"torch can't be imported: {_last(done.stderr, done.returncode)}"}, None
    return answers[0], answers[1] if len(answers) > 1 else {"refused": _last(done.stderr, done.returncode)}


def _last(said: str, code: int) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"its process ended with exit code {code}"


def _collectives() -> dict[str, str | None]:
    """Which work between two processes on gloo, as far as they came in the time."""
    with tempfile.TemporaryDirectory() as folder:
        file, environment = str(Path(folder, "store")), {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        started = [
            subprocess.Popen(
                _ask("collectives", str(rank), str(RANKS), file),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(RANKS)
        ]
        found: dict[str, str | None] = {}
        for process in started:
            try:
                output, errors = process.communicate(timeout=COLLECTIVES_SECONDS)
                problem = _last(errors, process.returncode) if process.returncode else None
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                problem = f"no answer within {COLLECTIVES_SECONDS:g} s"
            answers = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            for answer in answers:
                found[answer["collective"]] = found.get(answer["collective"]) or answer["problem"]
            if problem is not None:
                found |= {name: found.get(name) or problem for name in NEEDED if name not in {a["collective"] for a in answers}}
        return found


def _links(delay_seconds: float) -> str | None:
    """The lab's own check."""
    from laconic.cost.link import Link
    from laconic.lab.link import refusal

    try:
        return refusal(Link(100_000_000, delay_seconds))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"limited links can't be tried here: {error}"


def _missing(found: Findings) -> list[Missing]:
    gone: list[Missing] = []
    bad: dict[str | None, list[Package]] = {}
    for one in found.packages:
        if one.problem is not None:
            bad.setdefault(one.extra, []).append(one)
    for extra, some in bad.items():
        what = ", ".join(f"{one.name} ({one.problem})" for one in some)
        wanted = " ".join(f"'{one.name}{one.wanted}'" for one in some)
        gone.append(Missing(what, "everything" if extra is None else f"the extra `{extra}`", f"pip install {wanted}"))
    if "error" in found.torch and not any(one.use == "everything" for one in gone):
        gone.append(Missing("a torch that can be imported", "everything", "pip install --force-reinstall torch"))
    if found.kernels is not None and found.kernels.get("compiler", "") is None:
        command = _system_command({"apt-get": "g++", "dnf": "gcc-c++", "apk": "g++", "pacman": "gcc"})
        gone.append(Missing("a C++ compiler", "compiled kernels; strategies run without them, encoding is slower", command))
    for program in ("unshare", "nsenter"):
        if sys.platform == "linux" and shutil.which(program) is None:
            command = _system_command(dict.fromkeys(("apt-get", "dnf", "apk", "pacman"), "util-linux"))
            gone.append(Missing(f"the program {program}", "limited links: --link of compare, run and probe", command))
    return gone


def _system_command(packages: dict[str, str]) -> str | None:
    """By the machine's own package manager."""
    verbs = {"apt-get": "apt-get install", "dnf": "dnf install", "apk": "apk add", "pacman": "pacman -S"}
    return next((f"sudo {verbs[name]} {package}" for name, package in packages.items() if shutil.which(name)), None)
