"""Column- and row-parallel linear layers (Megatron-LM, arXiv 1909.08053, section 3).

Shapes: ``...`` any leading dims (batch, tokens), I input features, O output features, tp the size of the group. A cut dim is split by
``layout.split``, so it need not divide by tp. All ranks of the group must call, in the same order, forward and backward.

=====================  ============  ===========  ===================================================================
class                  weight here   bias here    communication
=====================  ============  ===========  ===================================================================
ColumnParallelLinear   [O/tp, I]     [O/tp]       backward: all-reduce of the input's gradient
GatheredColumn...      [O/tp, I]     [O/tp]       the same; forward: all-gather of the output
RowParallelLinear      [O, I/tp]     [O]          forward: all-reduce of the output
SplitInputRow...       [O, I/tp]     [O]          the same; backward: all-gather of the input's gradient
=====================  ============  ===========  ===================================================================

Note [Input gradient first]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A column-parallel layer multiplies the same input by different rows, so each rank has one term of the input's gradient. The layer
below waits for their sum, nobody waits for the weight's gradient; so the backward pass computes the input's gradient, starts its
all-reduce, computes the weight's gradient meanwhile, and waits last::

    compute        | grad_x = grad_y W | grad_W = grad_yᵀ x | wait |
    communication                      | all-reduce of grad_x      |

The collective starts after the work queued so far on the current CUDA stream, and ``wait`` makes that stream wait for it.

Several layers that read one input (q, k and v; gate and up) each reduce their term of its gradient. Reducing the sum of the terms once
is less traffic, with less to hide it behind; the place to merge them is ``column_parallel_linear``, which alone decides it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_par.comm import Group, gather_from, reduce_from, scatter_to
from lightning_par.tensor.in_place import Sharding


class ColumnParallelLinear(nn.Linear):
    """Whole input [..., I] -> this rank's output features [..., O/tp]."""

    sharding: Sharding

    @override
    def forward(self, input: Tensor) -> Tensor:
        return column_parallel_linear(input, self.weight, self.bias, self.sharding.group)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, out_features {self.sharding}"


class GatheredColumnParallelLinear(ColumnParallelLinear):
    """Whole input [..., I] -> whole output [..., O]."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return gather_from(super().forward(input), self.sharding.group, dim=-1, total=self.sharding.total)


class RowParallelLinear(nn.Linear):
    """This rank's input features [..., I/tp] -> whole output [..., O]; the bias is added once, to the sum."""

    sharding: Sharding

    @override
    def forward(self, input: Tensor) -> Tensor:
        output = reduce_from(F.linear(input, self.weight), self.sharding.group)  # [..., O]
        return output if self.bias is None else output + self.bias.to(output.dtype)

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, in_features {self.sharding}"


class SplitInputRowParallelLinear(RowParallelLinear):
    """Whole input [..., I], of which each rank uses its own features -> whole output [..., O]."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(scatter_to(input, self.sharding.group, dim=-1))


def column_parallel_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
    """``F.linear`` with this rank's rows: x [..., I], weight [O/tp, I], bias [O/tp] -> [..., O/tp]; x's gradient is whole.

    Under autocast its operands are cast as ``F.linear``'s are. See Note [Input gradient first].
    """
    return _ColumnParallelLinear.apply(_autocast(x), _autocast(weight), None if bias is None else _autocast(bias), group)


def _autocast(tensor: Tensor) -> Tensor:
    """The tensor in autocast's dtype where autocast would cast it. Outside the Function, so that backward sees one dtype."""
    kind = tensor.device.type
    casts = torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


class _ColumnParallelLinear(torch.autograd.Function):
    """See Note [Input gradient first]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = reduction = None
        if needs_x:
            grad_x = grad_y.matmul(weight)  # [..., I], one term of the sum
            reduction = ctx.group.all_reduce(grad_x, async_op=True)
        grad_NO = grad_y.reshape(-1, weight.shape[0])
        if needs_weight:
            grad_weight = grad_NO.t().mm(x.reshape(-1, weight.shape[1]))
        if needs_bias:
            grad_bias = grad_NO.sum(0)
        if reduction is not None:
            reduction.wait()
        return grad_x, grad_weight, grad_bias, None
