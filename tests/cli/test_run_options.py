"""laconic run's own options among torchrun's: each is read by the one that it is for, and none of the script's is touched."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from laconic.cli import app
from laconic.cli.run_options import by_word, sorted_out

COMMAND: Any = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
ORDERS = {
    "-s x --nproc-per-node 2 --record r t.py": "-s x --record r -- --nproc-per-node 2 t.py",
    "--nproc-per-node 2 --record=r t.py -s y --elastic": "--record=r -- --nproc-per-node 2 t.py -s y --elastic",
    "--standalone --elastic --nproc_per_node=2 --min-replicas 2 -s x t.py": "--elastic --min-replicas 2 -s x -- "
    "--standalone --nproc_per_node=2 t.py",
    "-t 3 -r3 -sx --tensorboard -m pack.mod --record r": "-sx --tensorboard -- -t 3 -r3 -m pack.mod --record r",
    "--stand --rol x --risk same t.py": "--risk same -- --stand --rol x t.py",
    "--nnodes 2 --rdzv-endpoint h:1 -s x -- t.py -- -s y": "-s x -- --nnodes 2 --rdzv-endpoint h:1 t.py -- -s y",
    "--nproc-per-node 2 --help t.py": "--help -- --nproc-per-node 2 t.py",
    # With --advise, what both commands have is advise's, which takes several strategies.
    "-s x --workers 4 --advise -s y --link 1gbit t.py": "--advise -- -s x --workers 4 -s y --link 1gbit t.py",
    "--workers 4 --advise --record r --json t.py --advise": "--advise --record r -- --workers 4 --json t.py --advise",
    "t.py --advise": "-- t.py --advise",
    "-s x": "-s x",
    "": "",
}


@pytest.mark.parametrize("given", ORDERS)
def test_own_options_may_stand_anywhere_before_the_script(given: str) -> None:
    assert shlex.join(sorted_out(shlex.split(given), by_word(COMMAND))) == ORDERS[given]


def test_no_name_of_an_option_is_both_laconics_and_torchruns() -> None:
    from laconic.script.launch import option_names, takes_value

    assert {"--nproc-per-node", "--standalone", "--rdzv-endpoint", "--module", "--tee"} <= set(option_names())
    both = [word for word in by_word(COMMAND) if word not in ("-h", "--help") and takes_value(word, ["1"]) is not None]
    assert not both


def test_the_command_gets_both() -> None:
    words = shlex.split("--nproc-per-node 2 --record r --elastic --max-restarts 1 -s x t.py --record z")
    context = COMMAND.make_context("laconic run", words)
    found = {name: context.params[name] for name in ("strategy", "elastic", "advise", "record")}
    assert found == {"strategy": "x", "elastic": True, "advise": False, "record": Path("r")}
    assert context.args == shlex.split("--nproc-per-node 2 --max-restarts 1 t.py --record z")
