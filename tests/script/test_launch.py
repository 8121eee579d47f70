"""How `laconic run` starts a script and ends it, without starting processes: tests/script/test_scripts.py does that."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from laconic.run import environment
from laconic.script import __main__ as script
from laconic.script import launch
from laconic.script.exit_codes import LOST_A_PEER
from tests.live import ranks
from tests.script.test_auto import installed

PEER = "from laconic import PeerError\n"
CODES = {
    "pass": 0,
    "import sys; sys.exit()": 0,
    "import sys; sys.exit(3)": 3,
    "import sys; sys.exit('in words')": 1,
    "raise KeyboardInterrupt": 130,
    "1 / 0": 1,
    f"{PEER}raise PeerError('gone')": LOST_A_PEER,
    f"{PEER}try: raise PeerError('gone')\nexcept PeerError as error: raise KeyError from error": LOST_A_PEER,
    f"{PEER}try: raise PeerError('gone')\nfinally: 1 / 0": LOST_A_PEER,
    "import sys; assert __name__ == '__main__' and sys.argv[1:] == ['--epochs', '3'] and sys.argv[0].endswith('one.py')": 0,
    "import os, sys; assert sys.path[0] == os.path.dirname(__file__) and os.path.isabs(__file__)": 0,
}


def ends(rank: int, folder: str) -> list[tuple[int, str]]:
    """The code with which the process would end, and what was printed."""
    found = []
    os.environ["LACONIC_STRATEGY"] = "ddp()"
    before, leave = (sys.argv, list(sys.path)), script._leave
    script._leave = lambda code: found.append(code)  # type: ignore[assignment,return-value]  # the process goes on
    said = []
    for text in CODES:
        Path(folder, "one.py").write_text(text)
        with installed("ddp()") as lines:
            script.main([f"{folder}/one.py", "--epochs", "3"])
            said.append(lines.getvalue())
        sys.argv, sys.path = before[0], list(before[1])
    script._leave = leave
    del os.environ["LACONIC_STRATEGY"]
    return list(zip(found, said, strict=True))


def test_a_script_ends_with_its_own_code_and_its_own_words(tmp_path: Path) -> None:
    (found,) = ranks(1, ends, str(tmp_path))
    assert [code for code, _ in found] == list(CODES.values())
    by_text = dict(zip(CODES, (said for _, said in found), strict=True))
    assert by_text["import sys; sys.exit('in words')"] == "in words\n"
    trace = by_text["1 / 0"].replace("[rank0]: ", "")  # which torch puts before
    assert trace.startswith("Traceback")
    assert trace.splitlines()[1].strip().startswith(f'File "{tmp_path}/one.py", line 1, in <module>')
    assert "ZeroDivisionError" in trace


def parsed(monkeypatch: pytest.MonkeyPatch, *arguments: str, **more: Any) -> tuple[Any, dict[str, str]]:
    """What torchrun would be given, and the variables that are new."""
    given: list[object] = []
    before = dict(os.environ)

    def torchrun(options: object) -> int:
        given.append(options)
        return 5

    monkeypatch.setattr(launch, "_torchrun", torchrun)
    try:
        assert launch.launch("diloco(64)", [*arguments, __file__, "--epochs", "3"], **more) == 5
        return given[0], {name: value for name, value in os.environ.items() if before.get(name) != value}
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]


def test_torchrun_is_given_the_script_and_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    options, variables = parsed(monkeypatch, "--nproc-per-node=3")
    assert (options.module, options.training_script) == (True, "laconic.script")
    assert options.training_script_args == [__file__, "--epochs", "3"]
    assert options.nproc_per_node == "3"
    assert options.standalone, "a free port"
    assert variables == {"LACONIC_STRATEGY": "diloco(period=64)"}
    for own in (["--master-port=4"], ["--master_addr=there"], ["--nnodes=2"], ["--rdzv-endpoint=there:4"]):
        assert not parsed(monkeypatch, *own)[0].standalone, own
    assert parsed(monkeypatch, "--nnodes=1:1")[0].standalone
    assert parsed(monkeypatch, "--max-restarts=1")[1]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    _, variables = parsed(monkeypatch, record=Path("here"), tensorboard=True)
    assert variables["LACONIC_RECORD"] == str(Path.cwd() / "here")
    assert variables["LACONIC_TENSORBOARD"] == "1"
    with pytest.raises(ValueError, match="--tensorboard writes into the folder that --record names; give one"):
        parsed(monkeypatch, tensorboard=True)
    with pytest.raises(ValueError, match="--no-python is for other programs"):
        parsed(monkeypatch, "--no-python")


def test_of_ranks_that_failed_the_code_is_that_of_the_first_to_fail_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def code(*failures: tuple[int, int]) -> int:
        made = {}
        for rank, (when, exit_code) in enumerate(failures):
            made[rank] = ProcessFailure(rank, 1, exit_code, "none")
            made[rank].timestamp = when
        return ended(ChildFailedError("script", made))

    def ended(error: BaseException | None) -> int:
        def run(_: object) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr("torch.distributed.run.run", run)
        return launch._torchrun(None)

    assert ended(None) == 0
    assert code((2, 4), (1, 3)) == 3
    assert code((1, LOST_A_PEER), (2, 7)) == 7
    assert code((1, LOST_A_PEER), (2, LOST_A_PEER)) == 1
    assert code((1, -9)) == 128 + 9
    assert ended(SignalException("stop", signal.SIGTERM)) == 128 + 15


def test_a_strategy_that_nobody_reads_is_said_once_and_by_the_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LACONIC_STRATEGY", "int8()")
    monkeypatch.delitem(sys.modules, "laconic.script.auto", raising=False)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(environment, "_said", False)
        for _ in range(2):
            environment.explain_unread()
        assert capsys.readouterr().err.count("LACONIC_STRATEGY=int8() has no effect here") == lines
