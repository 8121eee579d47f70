"""Who can reach a worker, and what it takes from those who can."""

import ctypes
import hashlib
import json
import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Self

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic import elastic
from laconic.elastic import healing
from laconic.elastic.group import ElasticGroup
from laconic.elastic.healing import HealingError
from laconic.elastic.island import Island
from laconic.elastic.parts import Parts
from laconic.elastic.state import adopt, check, looks_of, state_of
from laconic.strategies.parsing import strategy
from tests.elastic.training import batch, model
from tests.live import ranks

# Where sockets listen

CLONE_NEWUTS, CLONE_NEWUSER = 0x04000000, 0x10000000
_processes = multiprocessing.get_context("forkserver")


def rename_host(name: str) -> None:
    """Give this process a host name of its own, that of its whole machine as far as it can see."""
    space = CLONE_NEWUTS | (0 if os.geteuid() == 0 else CLONE_NEWUSER)
    if ctypes.CDLL(None, use_errno=True).unshare(space):
        raise PermissionError(os.strerror(ctypes.get_errno()))
    socket.sethostname(name)


def listening() -> list[str]:
    """The addresses at which this process listens."""
    return sorted({found.laddr.ip for found in psutil.Process().net_connections() if found.status == psutil.CONN_LISTEN})


def look(pipe: Connection, host_name: str | None, options: dict[str, Any], bind: str) -> None:
    """Be a worker, with a lighthouse; where the two of them listen."""
    torch.set_num_threads(1)
    try:
        if host_name is not None:
            rename_host(host_name)
    except PermissionError as error:
        pipe.send(str(error))
        return
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with elastic.lighthouse(bind=f"{bind}:0") as address:
        manager = elastic.Membership(lighthouse=address, name="one", timeout_seconds=5, quorum_seconds=10, **options)
        with elastic.attach(net, optimizer, "diloco(period=2)", manager) as run:
            for _ in range(2):
                torch.autograd.backward(net(torch.ones(1, 16)).sum())
                optimizer.step()
            assert run.stats().syncs == 2
            pipe.send(listening())


def looked(host_name: str | None, bind: str | None = None, lighthouse: str = "127.0.0.1") -> list[str]:
    ours, theirs = _processes.Pipe()
    options = {} if bind is None else {"bind": bind}
    process = _processes.Process(target=look, args=(theirs, host_name, options, lighthouse), daemon=True)
    process.start()
    theirs.close()
    try:
        found: list[str] | str = ours.recv()
    finally:
        process.join(20)
        process.kill()
    if isinstance(found, str):
        pytest.skip(f"a host can't be given another name here: {found}")
    return found


def own_address() -> str | None:
    """One of this machine's addresses by which others reach it."""
    found = [address for every in psutil.net_if_addrs().values() for address in every if address.family == socket.AF_INET]
    return next((address.address for address in found if not address.address.startswith("127.")), None)


def test_by_default_everything_listens_on_loopback_alone() -> None:
    assert looked(None) == ["127.0.0.1"]


def test_the_name_of_the_host_does_not_decide_where_a_worker_listens() -> None:
    """gloo looks the host's own name up, and listens at what it finds, unless it is told an address."""
    address = own_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    assert looked(address) == ["127.0.0.1"], f"the host's name is {address}"


@pytest.mark.parametrize("bind", ["127.0.0.5", "::1"])
def test_with_bind_everything_listens_at_that_address_alone(bind: str) -> None:
    if bind == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert looked(None, bind, f"[{bind}]" if ":" in bind else bind) == [bind]


# What a peer sends

INT8 = "diloco(period=2, reducer=ErrorFeedback(Quantized(8)))"
LONG = 10**400  # JSON has such numbers, and no float holds them


class Net(nn.Module):
    """With a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = model(), nn.BatchNorm1d(16)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(self.norm(x))
        return y


@dataclass
class Message:
    """What a peer is about to send. Tests spoil it."""

    facts: Any
    looks: Any
    tensors: dict[str, Tensor]
    form: Any = healing.FORM
    text: bytes | None = None  # instead of the description
    length: int | None = None  # instead of the description's own

    @property
    def deltas(self) -> Any:
        return self.facts["deltas"]

    def parts(self) -> list[Tensor]:
        description = {"form": self.form, "facts": self.facts, "tensors": self.looks}
        text = json.dumps(description).encode() if self.text is None else self.text
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        length = torch.tensor([len(head) if self.length is None else self.length])
        return [length, head, *(one.contiguous().view(-1).view(torch.uint8) for one in self.tensors.values() if one.numel())]

    def put(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor
        self.looks[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    def drop(self, *names: str) -> Self:
        for name in names:
            del self.tensors[name], self.looks[name]
        return self


Spoil = Callable[[Message], object]
WEIGHT, MOMENTUM = "anchor/net.0.weight", "outer/net.0.weight/momentum_buffer"


def spoilt(name: str, place: int, value: float) -> Spoil:
    """One number of a tensor is another one."""

    def spoil(message: Message) -> None:
        tensor = message.tensors[name].clone()
        tensor.view(-1)[place] = value
        message.tensors[name] = tensor

    return spoil


def with_group(**changed: Any) -> Spoil:
    """The outer optimizer's settings are others."""
    return lambda message: message.deltas["outer_groups"][0].update(changed)


# What is sent, and words that the error must have.
DESCRIPTIONS: dict[str, tuple[Spoil, str]] = {
    "no JSON": (lambda m: setattr(m, "text", b"{'form': 1}"), "no JSON"),
    "no text": (lambda m: setattr(m, "text", b"\xff\xfe\x00"), "no JSON"),
    "a list": (lambda m: setattr(m, "text", b"[1, 2]"), "form"),
    "nested without end": (lambda m: setattr(m, "text", b"[" * 200_000 + b"]" * 200_000), "no JSON|nested|deep"),
    "another form": (lambda m: setattr(m, "form", "laconic elastic 0"), "form.*laconic elastic 1"),
    "no form": (lambda m: setattr(m, "form", None), "form"),
    "an empty one": (lambda m: setattr(m, "length", 0), "description of 0 bytes"),
    "a negative length": (lambda m: setattr(m, "length", -1), "description of -1 bytes"),
    "too long": (lambda m: setattr(m, "length", 1 << 40), f"description of {1 << 40} bytes; at most"),
    "tensors in a list": (lambda m: setattr(m, "looks", []), "form"),
}
TENSORS: dict[str, tuple[Spoil, str]] = {
    "an unknown parameter": (lambda m: m.put("parameter/evil", torch.ones(3)), "parameter/evil.*doesn't have"),
    "an unknown buffer": (lambda m: m.put("buffer/evil", torch.ones(3)), "buffer/evil.*doesn't have"),
    "an unknown anchor": (lambda m: m.put("anchor/evil", torch.ones(3)), "anchor/evil.*doesn't have"),
    "an unknown kind": (lambda m: m.put("evil/net.0.weight", torch.ones(3)), "evil/net.0.weight.*doesn't have"),
    "a memory that no reducer has": (lambda m: m.put("memory/net.0.weight/evil", torch.ones(3)), "memory/net.0.weight/evil"),
    "a residual": (lambda m: m.put("residual/net.0.weight", torch.ones(32, 16)), "residual/net.0.weight.*doesn't have"),
    "no name": (lambda m: m.put("", torch.ones(3)), "''.*doesn't have"),
    "another shape": (lambda m: m.put(WEIGHT, torch.ones(16, 32)), r"\[16, 32\].*\[32, 16\]"),
    "a shape of fractions": (lambda m: m.looks.update({WEIGHT: ["float32", [32.0, 16.0]]}), WEIGHT),
    "a negative shape": (lambda m: m.looks.update({WEIGHT: ["float32", [-1, 16]]}), WEIGHT),
    "a shape of truths": (lambda m: m.looks.update({"anchor/net.2.weight": ["float32", [True, 32]]}), "anchor/net.2.weight"),
    "another dtype": (lambda m: m.put(WEIGHT, torch.ones(32, 16, dtype=torch.float64)), "float64.*float32"),
    "an unknown dtype": (lambda m: m.looks.update({WEIGHT: ["object", [32, 16]]}), WEIGHT),
    "a dtype that is a list": (lambda m: m.looks.update({WEIGHT: [["float32"], [32, 16]]}), WEIGHT),
    "a look that is a word": (lambda m: m.looks.update({WEIGHT: "float32"}), WEIGHT),
    "a look of three": (lambda m: m.looks.update({WEIGHT: ["float32", [32, 16], 0]}), WEIGHT),
    "a NaN": (spoilt(WEIGHT, 7, float("nan")), f"not finite.*{WEIGHT}"),
    "an infinite momentum": (spoilt(MOMENTUM, 0, float("-inf")), f"not finite.*{MOMENTUM}"),
    "no tensors": (lambda m: m.drop(*m.looks), "lacks"),
    "an anchor less": (lambda m: m.drop(WEIGHT), f"lacks.*{WEIGHT}"),
    "a buffer less": (lambda m: m.drop("buffer/norm.running_var"), "lacks.*buffer/norm.running_var"),
    "a frozen parameter less": (lambda m: m.drop("frozen/norm.weight"), "lacks.*frozen/norm.weight"),
}
COUNTS: dict[str, tuple[Any, ...]] = {
    "exchanges": (None, 3, "many", [], [1, 2], ["1"], [-1], [1 << 62], [1.5]),
    "norms": (None, 1.0, [], [1.0], ["x"], [["x"]], [[None]], [[float("nan")]], [[LONG]], [[], []]),
    "skipped": (None, "none", -1, 1.5, 1 << 62, [0]),
}
FACTS: dict[str, tuple[Spoil, str]] = {
    "none": (lambda m: m.facts.clear(), "step"),
    "a list": (lambda m: setattr(m, "facts", [1, 2]), "description|facts"),
    "null": (lambda m: setattr(m, "facts", None), "description|facts"),
    **{
        f"{key} {value!r:.12}": (lambda m, key=key, value=value: m.facts.update({key: value}), key)  # type: ignore[misc]
        for key in ("step", "last")
        for value in ("7", -1, 1 << 62, LONG, True, 1.5, None, [1], float("nan"))
    },
    "a rate that is a word": (lambda m: m.facts.update(rate="fast"), "rate"),
    "a rate that is not finite": (lambda m: m.facts.update(rate=float("inf")), "rate"),
    "a rate that no float holds": (lambda m: m.facts.update(rate=LONG), "rate"),
    "no deltas": (lambda m: m.facts.pop("deltas"), "deltas"),
    "deltas in a word": (lambda m: m.facts.update(deltas="all"), "deltas"),
    **{
        f"{key} {value!r:.12}": (lambda m, key=key, value=value: m.deltas.update({key: value}), key)  # type: ignore[misc]
        for key, values in COUNTS.items()
        for value in values
    },
    **{f"no {key}": (lambda m, key=key: m.deltas.pop(key), key) for key in ("exchanges", "norms", "skipped")},  # type: ignore[misc]
}
OUTER: dict[str, tuple[Spoil, str]] = {
    "no groups": (lambda m: m.deltas.pop("outer_groups"), "outer"),
    "one group more": (lambda m: m.deltas["outer_groups"].append({}), "outer"),
    "a group that is a list": (lambda m: m.deltas.update(outer_groups=[[]]), "outer"),
    "an unknown setting": (with_group(evil=1), "outer"),
    "parameters": (with_group(params=[]), "outer"),
    "a rate that is a word": (with_group(lr="fast"), "lr of the outer"),
    "a rate that is not finite": (with_group(lr=float("nan")), "lr of the outer"),
    "a rate that no float holds": (with_group(lr=LONG), "lr of the outer"),
    "a momentum that is a word": (with_group(momentum="much"), "momentum of the outer"),
    "a momentum that is not finite": (with_group(momentum=float("inf")), "momentum of the outer"),
    "no number at all": (with_group(momentum=None), "momentum of the outer"),
    "entries that are no list": (lambda m: m.deltas.update(outer={"net.0.weight": {"step": 1}}), "outer"),
    "an entry of two": (lambda m: m.deltas["outer"].append(["net.0.weight", "step"]), "outer"),
    "an unknown parameter": (lambda m: m.deltas["outer"].append(["evil", "step", 1]), "outer.*evil"),
    "an entry with a word": (lambda m: m.deltas["outer"].append(["net.0.weight", "step", "1"]), "outer"),
    "an entry that is not finite": (lambda m: m.deltas["outer"].append(["net.0.weight", "step", float("nan")]), "outer"),
    "an entry that no float holds": (lambda m: m.deltas["outer"].append(["net.0.weight", "step", LONG]), "outer"),
    "a name that is a number": (lambda m: m.deltas["outer"].append([0, "step", 1]), "outer"),
    "a key that is a number": (lambda m: m.deltas["outer"].append(["net.0.weight", 0, 1]), "outer"),
    "a momentum that is a number": (
        lambda m: m.drop(MOMENTUM).deltas["outer"].append(["net.0.weight", "momentum_buffer", 0.5]),
        "momentum_buffer",
    ),
    "a tensor of an unknown parameter": (lambda m: m.put("outer/evil/momentum_buffer", torch.ones(3)), "outer/evil"),
    "a momentum of another shape": (lambda m: m.put(MOMENTUM, torch.ones(16, 32)), MOMENTUM),
    "a momentum of one number": (lambda m: m.put(MOMENTUM, torch.tensor(1.0)), MOMENTUM),
    "a momentum of whole numbers": (lambda m: m.put(MOMENTUM, torch.ones(32, 16, dtype=torch.int64)), MOMENTUM),
    "a key that its optimizer doesn't have": (lambda m: m.put("outer/net.0.weight/evil", torch.ones(32, 16)), "evil"),
}
LIES = {"descriptions": DESCRIPTIONS, "tensors": TENSORS, "facts": FACTS, "outer": OUTER}


def trained(group: ElasticGroup, seed: int, exchanges: int) -> Parts:
    """A worker's model, with a state that is its own; `exchanges` with nobody but itself."""
    torch.manual_seed(seed)
    net, alone = Net(), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    group.meet(alone, ["worker alone"])
    made = Parts(strategy(INT8), net, [optimizer], None, group, Island(None), sharded=False)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, 2 * exchanges + 1):
        x, y = batch(generator)
        torch.autograd.backward(nn.functional.mse_loss(net(x), y))
        optimizer.step()
        optimizer.zero_grad()
        made.drift()
        due = made.departures(step)
        made.exchange(step, due, lambda _: None)
        made.mark()
    return made


def everything(parts: Parts) -> str:
    """A digest of all that a peer's state could change."""
    state = state_of(parts, 0, first=True)
    tensors = {**state.tensors, **parts.residuals(), **parts.snapshot()}
    found = hashlib.sha256(repr((state.facts, parts.departures(2), parts.departures(3), sorted(tensors))).encode())
    for name in sorted(tensors):
        found.update(tensors[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def sent(parts: Parts, spoil: Spoil | None, pipe: dist.ProcessGroup) -> list[Any]:
    """Send a message without waiting for anybody to take it."""
    state = state_of(parts, 40, first=True)
    looks = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in state.tensors.items()}
    message = Message(deepcopy(dict(state.facts)), looks, dict(state.tensors))
    if spoil is not None:
        spoil(message)
    return [dist.isend(part, group=pipe, group_dst=1, tag=healing.TAG) for part in message.parts()]


def taken(parts: Parts, group: ElasticGroup) -> str:
    """Take what is sent; what came of it."""
    before = everything(parts)
    try:
        state = healing.receive(group, 0, looks_of(parts))
        check(parts, state, first=True)
        adopt(parts, state, carry=False, sent=None)
        answer = "it was taken"
    except HealingError as error:
        answer = f"refused: {error}"
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    return answer if answer == "it was taken" or everything(parts) == before else f"half of it was written, and then {answer}"


def lies(rank: int, kind: str) -> dict[str, str]:
    """Rank 0 sends one lie after the other, and the truth; what rank 1 makes of each."""
    group = ElasticGroup()
    parts = trained(group, rank, 3 if rank == 0 else 1)
    found = {}
    for name in [*LIES[kind], "the truth"]:
        pipe = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        group.meet(pipe, ["worker liar", "worker victim"])
        if rank == 0:
            on_the_way = sent(parts, LIES[kind].get(name, (None, ""))[0], pipe)
        else:
            found[name] = taken(parts, group)
        dist.barrier()
        if rank == 0:
            del on_the_way
        dist.destroy_process_group(pipe)
    return found


@pytest.mark.parametrize("kind", list(LIES))
def test_what_a_peer_sends_is_checked_before_anything_is_written(kind: str) -> None:
    _, found = ranks(2, lies, kind)
    assert found["the truth"] == "it was taken"
    wrong = [f"{lie}: {found[lie]}" for lie, (_, words) in LIES[kind].items() if not _is_refusal(found[lie], words)]
    assert not wrong, f"{len(wrong)} of {len(LIES[kind])}:\n" + "\n".join(wrong)


def _is_refusal(answer: str, words: str) -> bool:
    """Whether nothing was written, and the error says who sent what."""
    return answer.startswith("refused: ") and "worker liar" in answer and re.search(words, answer, re.DOTALL) is not None


class Masked(nn.Module):
    """With a causal mask, as many language models have one: infinities that are meant."""

    mask: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net: nn.Module = model(seed=seed)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


def masked(rank: int, lighthouse: str) -> tuple[bool, set[str]]:
    """Rank 0 trains, and rank 1 joins it; what became of the mask."""
    net = Masked(rank)
    before = net.mask.clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager = elastic.Membership(lighthouse=lighthouse, name=f"worker-{rank}", timeout_seconds=4, quorum_seconds=4)
    if rank == 1:
        dist.barrier()
    with elastic.attach(net, optimizer, "diloco(period=2)", manager) as run:
        if rank == 0:
            dist.barrier()
        limit = run.step + 1000 if rank == 0 else run.step + 4
        while run.step < limit:
            torch.autograd.backward(net(torch.ones(1, 16)).sum())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            if rank == 0 and len(run.stats().workers) == 2:
                limit = min(limit, run.step + 4)
        return torch.equal(net.mask, before), set(run.stats().workers)


def test_infinities_that_a_model_is_made_of_are_no_reason_to_refuse_its_state() -> None:
    with elastic.lighthouse() as address:
        found = ranks(2, masked, address)
    assert found == [(True, {"worker-0", "worker-1"})] * 2
