"""The hook for a DDP that keeps its parameters in two precisions.

DDP itself enters an accelerator's stream in forward, so what it does there is done here by hand: parameters in bf16 for
forward and backward, with the fp32 ones beside them.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tests.compat.libraries import mean, module, noise
from tests.live import ranks
from tests.models import everywhere_equal


def two_precisions(rank: int, reduce_dtype: torch.dtype) -> None:
    hooks = module("laconic", "ddp_comm_hooks.mixed_precision_hooks")
    layer = nn.Linear(6, 4)
    layer.bias.requires_grad = False
    full: dict[str, Any] = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    layer.to(torch.bfloat16)
    model = DistributedDataParallel(layer)
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for name, parameter in layer.named_parameters():
        parameter._fp_param = full[name]  # type: ignore[attr-defined]
        parameter._mp_param = parameter.data  # type: ignore[attr-defined]
    state = hooks._AllreduceUpcastHookState(weakref.ref(model), torch.Stream("cpu"))
    model.register_comm_hook(state, hooks._reducer_allreduce_and_upcast_hook)
    (x,) = noise(rank, (5, 6))
    model(x.bfloat16()).sum().backward()
    assert layer.weight.dtype == layer.bias.dtype == torch.float32
    assert layer.weight.data_ptr() == full["weight"].data_ptr()
    gradient = layer.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    (wanted,) = mean(lambda rank: [noise(rank, (5, 6))[0].bfloat16().sum(0).float().expand(4, 6)], 2)
    assert torch.allclose(gradient, wanted.to(reduce_dtype).float(), rtol=1e-6, atol=1e-6), (
        "averaged in the dtype that was given"
    )
    low: Any = layer.weight
    assert low._mp_param.untyped_storage().size() == 0, "the next forward fills it again"
    assert everywhere_equal([gradient])
    assert not state.wait_for_stream_enqueued


def test_parameters_and_gradients_come_back_in_fp32() -> None:
    for reduce_dtype in (torch.bfloat16, torch.float32):
        ranks(2, two_precisions, reduce_dtype)
