"""Importing the package is free, and its names are what they say."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import laconic
from laconic.cli import EXTRA
from tests.report.made import result


def test_importing_laconic_does_not_import_torch() -> None:
    code = "import sys, laconic; assert 'torch' not in sys.modules; laconic.Exact; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in laconic.__all__:
        assert getattr(laconic, name) is not None
    assert set(dir(laconic)) == set(laconic.__all__)
    assert not hasattr(laconic, "no_such_name")


def test_a_submodule_never_hides_a_public_name() -> None:
    code = "import laconic.run.attach, laconic.forecast, laconic.strategies.strategy, laconic.comm.exchange; import laconic; "
    code += "names = set(laconic.__all__) - set(laconic._PACKAGES); "
    code += "assert all(type(getattr(laconic, n)).__name__ != 'module' for n in names)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_come_with_the_first_use_of_their_names() -> None:
    code = "import laconic; laconic.compat.ddp_comm_hooks.powerSGD_hook.PowerSGDState; "
    code += "laconic.compat.optim.PostLocalSGDOptimizer; "
    code += "laconic.compat.model_averaging.averagers.PeriodicModelAverager; laconic.checkpoint.save; laconic.elastic.attach; "
    code += "import sys; assert not hasattr(laconic.integrations, 'nothing'); "
    code += "assert not {'torchft', 'transformers', 'lightning_fabric'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


LINE = "laconic: LACONIC_STRATEGY=int8() has no effect here: start the script by `laconic run`"
ATTACH = "try: laconic.attach(0, 0, 0)\nexcept RuntimeError: pass"
COMMAND = "import runpy, sys; sys.argv = ['laconic', '--help']; runpy.run_module('laconic.cli', run_name='__main__')"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import laconic", ["end", LINE]),
        (f"import laconic\n{ATTACH}", [LINE, "end"]),
        ("import laconic.auto", ["end"]),
        (COMMAND, []),
    ],
    ids=["no use of it", "attach", "auto", "the command line"],
)
def test_a_strategy_in_the_environment_that_nobody_reads_gets_a_line(code: str, said: list[str]) -> None:
    environment = {**os.environ, "LACONIC_STRATEGY": "int8()"}
    code += "\nimport sys; print('end', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    lines = [line for line in done.stderr.splitlines() if line == "end" or "LACONIC_STRATEGY" in line]
    assert len(lines) == len(said), done.stderr
    assert all(line.startswith(wanted) for line, wanted in zip(lines, said, strict=True)), done.stderr


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["laconic", *{arguments!r}]
from laconic.cli import main
main()
"""


@pytest.mark.parametrize(
    ("lacking", "arguments"),
    [
        (["typer", "rich", "numpy", "plotly", "sklearn", "pyroute2"], ["--help"]),
        (["rich"], ["watch", "nowhere", "--once"]),
        (["plotly"], ["show", "RESULTS"]),
    ],
)
def test_the_command_without_its_extra_says_so_in_a_line(lacking: list[str], arguments: list[str], tmp_path: Path) -> None:
    result(("ddp()", 1.0, 10.0, 100.0), ("silent()", 1.0, 5.0, 0.0)).write(tmp_path)
    arguments = [str(tmp_path) if argument == "RESULTS" else argument for argument in arguments]
    code = WITHOUT.format(lacking=set(lacking), arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == (
        f"the laconic command needs {lacking[0]}, which `pip install .` leaves out; in laconic's folder: pip install '.[lab]'"
    )


def test_every_module_of_the_extra_is_known_as_such() -> None:
    names = {"scikit-learn": "sklearn"}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extra = {re.split(r"[^\w-]", need)[0] for need in project["optional-dependencies"]["lab"]}
    assert {names.get(name, name) for name in extra} == EXTRA
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert "pip install '.[lab]'" in readme
    assert "laconic[lab]" not in readme, "there is no such package to be had from elsewhere"
