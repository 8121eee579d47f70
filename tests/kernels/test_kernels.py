"""Every kernel compiled gives the bits of the function itself; what can't be compiled is said, and nobody waits."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import laconic
from laconic.kernels import cache, compiling
from laconic.kernels.compiling import CompilerError, prepare
from laconic.kernels.kernel import Kernel, Spec
from laconic.reducers import discover
from tests.reducers.every import EVERY, bits

CPU = torch.device("cpu")
discover()
LOADED = """
import torch, laconic.reducers.quantized
from laconic.kernels import cache, kernel
print(cache.loaded(kernel.Kernel.known["int8-quantize-left"], torch.device("cpu")) is not None)
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path))
    cache.forget()
    yield tmp_path
    cache.forget()


def filled(spec: Spec, sizes: dict[str, int], draw: torch.Generator) -> Tensor:
    """Numbers of all sizes, zeros and next to nothing among them; codes of all kinds."""
    shape = [sizes[size] for size in spec.sizes]
    numbers = torch.randn(shape, generator=draw) * torch.exp(8 * torch.randn(shape[:1], generator=draw)).view(
        -1, *[1] * (len(shape) - 1)
    )
    if spec.dtype == torch.float32:
        numbers[::7] = 0
        numbers[3::11] *= 1e-42
        return numbers
    return (
        torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8).view(spec.dtype)
        if spec.dtype.itemsize == 1
        else numbers.to(spec.dtype)
    )


def known_bits(tensor: Tensor) -> Tensor:
    """Its bits; those of a NaN depend on who makes it."""
    return bits(tensor.nan_to_num(float("nan"))) if tensor.dtype == torch.float32 else bits(tensor)


def same(kernel: Kernel) -> None:
    prepare([kernel], True, CPU)
    names = list(dict.fromkeys(size for spec in kernel.specs for size in spec.sizes))
    for seed, chosen in enumerate([(2, 2), (3, 5), (64, 64), (37, 512), (301, 129), (4097, 257)]):
        draw = torch.Generator().manual_seed(seed)
        sizes = dict(zip(names, chosen, strict=False))
        eager = [filled(spec, sizes, draw) for spec in kernel.specs]
        if "quantize" in kernel.name or "stochastic" in kernel.name:  # scales that codes can be made with
            eager[-1] = eager[0].abs().amax(1)
        if "stochastic" in kernel.name:
            eager[1] = torch.rand(eager[1].shape, generator=draw)
        fused = [tensor.clone() for tensor in eager]
        kernel(*eager)
        assert cache.loaded(kernel, CPU) is not None
        kernel(*fused, fused=True)
        for number, (one, other) in enumerate(zip(eager, fused, strict=True)):
            assert torch.equal(known_bits(one), known_bits(other)), (kernel.name, sizes, number)


@pytest.mark.soak  # compiling takes four seconds each
@pytest.mark.parametrize("name", Kernel.known)
def test_compiled_and_eager_give_the_same_bits(name: str) -> None:
    same(Kernel.known[name])


def test_pieces_give_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in Kernel.known.values():
        sizes = {"blocks": 40, "length": 24, "bytes": 960, "rows": 40, "columns": 24}
        draw = torch.Generator().manual_seed(0)
        whole = [filled(spec, sizes, draw) for spec in kernel.specs]
        parts = [tensor.clone() for tensor in whole]
        kernel(*whole)
        monkeypatch.setattr("laconic.kernels.kernel.PIECE", 100)
        kernel(*parts)
        monkeypatch.undo()
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(whole, parts, strict=True)), kernel.name


def test_every_kernel_belongs_to_a_reducer() -> None:
    reducers = [*EVERY, laconic.Quantized(8, rounding="stochastic"), laconic.ErrorFeedback(laconic.Float8("e5m2"))]
    shown = {"halve"}  # by docs/extending.md, which may be run by the same process
    assert {kernel.name for reducer in reducers for kernel in reducer.kernels()} == set(Kernel.known) - shown


@pytest.mark.soak
def test_auto_compiles_in_the_background_and_the_next_process_finds_it(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel.known["int8-quantize-left"]
    numbers, codes, scales = torch.ones(4, 8), torch.zeros(4, 8, dtype=torch.int8), torch.zeros(4)
    began = time.monotonic()
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    assert prepare([kernel], "auto", CPU)
    assert not (empty_cache / "kernels" / "log").exists(), "no core is free: when the process ends"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert prepare([kernel], "auto", CPU)
    assert time.monotonic() - began < 2, "nobody waits"
    kernel(numbers, codes, scales, fused=True)
    assert codes.eq(127).all(), "as it is, until then"
    while cache.loaded(kernel, CPU) is None:
        assert time.monotonic() - began < 120
        time.sleep(0.2)
    same(kernel)
    assert {path.suffix for path in (empty_cache / "kernels").iterdir()} == {".pt2", ".sha256", ""}, "and the lock and a log"
    assert not place(kernel).stat().st_mode & 0o077
    found = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "True"
    damaged = bytearray(place(kernel).read_bytes())
    damaged[len(damaged) // 2 :] = bytes(len(damaged) - len(damaged) // 2)
    place(kernel).write_bytes(damaged)
    cache.forget()
    with pytest.warns(UserWarning, match="can't be loaded, and has been removed"):
        kernel(numbers, codes, scales, fused=True)
    assert list(compiling.missing([kernel], CPU)) == [kernel], "to be compiled again"


def place(kernel: Kernel) -> Path:
    path = cache.file(kernel, CPU)
    assert path is not None
    return path


def pretended(kernel: Kernel) -> Path:
    """A file that looks complete."""
    path = place(kernel)
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(b"no archive")
    cache.checksum(path).write_text(hashlib.sha256(b"no archive").hexdigest())
    path.chmod(0o600)
    return path


def test_what_others_could_have_written_is_not_run(empty_cache: Path) -> None:
    path = pretended(Kernel.known["int8-decode"])
    assert cache.there(path)
    path.chmod(0o620)
    assert not cache.there(path)
    path.chmod(0o600)
    path.parent.chmod(0o770)
    assert not cache.there(path)
    assert cache.loaded(Kernel.known["int8-decode"], CPU) is None


def test_what_torch_can_not_load_is_removed_and_said(empty_cache: Path) -> None:
    kernel = Kernel.known["int8-decode"]
    path, out = pretended(kernel), torch.zeros(2, 2)
    with pytest.warns(UserWarning, match="can't be loaded, and has been removed"):
        kernel(torch.ones(2, 2, dtype=torch.int8), torch.ones(2), out, fused=True)
    assert out.eq(1).all()
    assert not path.exists()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What would have been compiled."""
    found: list[object] = []
    monkeypatch.setattr(compiling, "_compile_later", lambda: found.append("something"))
    monkeypatch.setattr(compiling, "_later", {})
    monkeypatch.setattr(compiling, "_core_is_free", lambda: True)
    return found


def test_without_a_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, started: list[object]) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    kernel = Kernel.known["int8-decode"]
    assert prepare([kernel], "auto", CPU), "what is there already may be used"
    assert not started
    with pytest.raises(CompilerError, match=r"no g\+\+ or clang\+\+"):
        prepare([kernel], True, CPU)
    assert not prepare([kernel], False, CPU)


def test_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[object]) -> None:
    kernel = Kernel.known["int8-decode"]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    for folder, why in ((str(tmp_path), "others could write to"), ("/proc/nowhere", "there is no folder to keep kernels in")):
        monkeypatch.setenv("LACONIC_CACHE", folder)
        assert prepare([kernel], "auto", CPU)
        with pytest.raises(CompilerError, match=why):
            prepare([kernel], True, CPU)
    monkeypatch.delenv("LACONIC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert not prepare([kernel], "auto", CPU)
    with pytest.raises(CompilerError, match="no home"):
        prepare([kernel], True, CPU)
    assert not started


def no_home() -> Path:
    raise RuntimeError("no home")


def test_no_room_for_another_process(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **named: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", full)
    monkeypatch.setattr(compiling, "_core_is_free", lambda: True)
    assert prepare([Kernel.known["int8-decode"]], "auto", CPU)
    with pytest.raises(CompilerError, match="no more processes"):
        prepare([Kernel.known["int8-decode"]], True, CPU)


def test_one_rank_of_a_machine_has_it_compiled(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, started: list[object]
) -> None:
    for rank, expected in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        prepare([Kernel.known["int8-decode"]], "auto", CPU)
        assert len(started) == expected == len(compiling._later)


def test_another_machine_has_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel.known["int8-decode"]
    here = place(kernel)
    cache._key.cache_clear()
    monkeypatch.setattr(cache, "_hardware", lambda kind: "another processor")
    assert place(kernel) != here
    cache._key.cache_clear()


@pytest.mark.soak
def test_what_the_compiler_says_is_kept_and_auto_does_not_try_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = empty_cache / "g++"
    fails.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("CXX", str(fails))
    kernel = Kernel.known["int8-decode"]
    with pytest.raises(CompilerError, match="int8-decode can't be compiled here"):
        prepare([kernel], True, CPU)
    assert cache.failure(place(kernel)).exists()
    monkeypatch.setattr(compiling, "_compile_later", lambda: pytest.fail("it tries again"))
    monkeypatch.setattr(compiling, "_core_is_free", lambda: True)
    prepare([kernel], "auto", CPU)
    assert not compiling._later


FUSED = [("auto", "1", True), ("auto", "0", False), ("auto", "auto", "auto"), (True, "0", True), (False, "1", False)]


@pytest.mark.parametrize(("given", "environment", "wanted"), FUSED)
def test_the_environment_stands_for_auto(
    given: object, environment: str, wanted: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "LACONIC_FUSED", environment)
    assert compiling.checked(given) == wanted


def test_wrong_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="fused must be 'auto', True or False, got 'yes'"):
        compiling.checked("yes")
    monkeypatch.setenv("LACONIC_FUSED", "yes")
    with pytest.raises(ValueError, match="LACONIC_FUSED must be 1, 0 or auto, got 'yes'"):
        compiling.checked("auto")
