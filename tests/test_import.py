"""Importing the package is free, and its names are what they say."""

import os
import subprocess
import sys

import pytest

import laconic


def test_importing_laconic_does_not_import_torch() -> None:
    code = "import sys, laconic; assert 'torch' not in sys.modules; laconic.Exact; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in laconic.__all__:
        assert getattr(laconic, name) is not None
    assert set(dir(laconic)) == set(laconic.__all__)
    assert not hasattr(laconic, "no_such_name")


def test_a_submodule_never_hides_a_public_name() -> None:
    code = "import laconic.run, laconic.forecast, laconic.plan, laconic.spec, laconic.wire; import laconic; "
    code += "names = set(laconic.__all__) - {'checkpoint', 'compat'}; "
    code += "assert all(type(getattr(laconic, n)).__name__ != 'module' for n in names)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_come_with_the_first_use_of_their_names() -> None:
    code = "import laconic; laconic.compat.ddp_comm_hooks.powerSGD_hook.PowerSGDState; "
    code += "laconic.compat.optim.PostLocalSGDOptimizer; "
    code += "laconic.compat.model_averaging.averagers.PeriodicModelAverager; laconic.checkpoint.save"
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
