"""What compression costs in quality: scikit-learn's digits, eight simulated workers, five seeds, with and without feedback."""

import statistics
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import laconic
from benchmarks.harness import report
from laconic.comm.bucket import Bucket, Slot
from laconic.comm.dryrun import simulate
from laconic.comm.flat_tensors import flatten
from laconic.comm.ledger import Ledger
from laconic.reducers.base import Reducer
from laconic.strategies.strategy import render

WORKERS, BATCH, STEPS, SEEDS = 8, 16, 300, 5
LOSSY: list[Reducer] = [
    laconic.Cast("bf16"),
    laconic.Quantized(8),
    laconic.Quantized(4),
    laconic.Quantized(2),
    laconic.Float8(),
    laconic.Ternary(),
    laconic.Sign(),
    laconic.Sign(phases=1),
    laconic.TopK(0.01),
    laconic.TopK(0.03, values="bf16"),
    laconic.TopK(0.01, values="2bit"),
    laconic.TopK(0.01, phases=1),
    laconic.RandomK(0.05),
    laconic.PowerSGD(1),
    laconic.PowerSGD(4),
    laconic.AlternatingPowerSGD(2),
    laconic.BatchedPowerSGD(1),
]


class Outcome(NamedTuple):
    """One training run."""

    accuracy: float
    loss: float
    wire_bytes: int


def train(reducer: Reducer, seed: int) -> Outcome:
    """A two-layer network; all workers' gradients are averaged by `reducer` in this process."""
    torch.manual_seed(seed)
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    held_out, kept = order[:360], order[360:]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    memory: list[list[Slot]] = [[{} for _ in names] for _ in range(WORKERS)]
    ledger = Ledger()
    draw = torch.Generator().manual_seed(seed)
    for step in range(STEPS):
        buckets = []
        for worker in range(WORKERS):
            batch = kept[torch.randint(len(kept), (BATCH,), generator=draw)]
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            flat, views = flatten(gradients)
            buckets.append(Bucket(flat, views, names, memory[worker], worker, WORKERS, step, step))
        results = simulate([reducer.reduce(bucket) for bucket in buckets], ledger)
        for result in results:
            result.finish()
        _apply(optimizer, model, results[0].mean)
    with torch.no_grad():
        accuracy = (model(inputs[held_out]).argmax(1) == labels[held_out]).float().mean().item()
        final = nn.functional.cross_entropy(model(inputs[kept]), labels[kept]).item()
    return Outcome(accuracy, final, ledger.total.wire_bytes // STEPS)


def _apply(optimizer: torch.optim.Optimizer, model: nn.Module, mean: Tensor) -> None:
    start = 0
    for parameter in model.parameters():
        parameter.grad = mean[start : start + parameter.numel()].view_as(parameter).clone()
        start += parameter.numel()
    optimizer.step()


def main() -> None:
    """Every compressor, with and without error feedback."""
    torch.set_num_threads(1)
    reducers: list[Reducer] = [laconic.Exact()]
    for lossy in LOSSY:
        reducers += [lossy, laconic.ErrorFeedback(lossy), laconic.ErrorFeedback(lossy, dtype="bf16")]
    rows: list[dict[str, object]] = []
    base = 0
    for reducer in reducers:
        outcomes = [train(reducer, seed) for seed in range(SEEDS)]
        base = base or outcomes[0].wire_bytes
        fed = reducer.dtype or "yes" if isinstance(reducer, laconic.ErrorFeedback) else ""
        accuracies = [100 * outcome.accuracy for outcome in outcomes]
        rows.append(
            {
                "reducer": render(reducer.inner if isinstance(reducer, laconic.ErrorFeedback) else reducer),
                "feedback": fed,
                "test accuracy, %": f"{statistics.mean(accuracies):.1f} ± {statistics.stdev(accuracies):.1f}",
                "train loss": f"{statistics.mean(outcome.loss for outcome in outcomes):.4f}",
                "bytes a step": outcomes[0].wire_bytes,
                "against fp32": f"{outcomes[0].wire_bytes / base:.3f}x",
            }
        )
    legend = (
        f"Digits of scikit-learn, 64-128-64-10 network, SGD with momentum 0.9 and lr 0.02 for all, {WORKERS} simulated workers "
        f"with batches of {BATCH}, {STEPS} steps, {SEEDS} seeds (mean ± standard deviation). Bytes are wire bytes of one rank."
    )
    report("quality", "Quality under compression", rows, legend)


if __name__ == "__main__":
    main()
