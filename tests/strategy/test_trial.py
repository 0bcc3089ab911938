"""What is the mean of its parts, by numbers. No process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par.pipeline import PipelineError
from lightning_par.strategy.logs import LogRecorder
from lightning_par.strategy.pieces import Piece
from lightning_par.strategy.trial import Outcome, Trial, frozen_stay, tolerance, trying

DOUBLE, SINGLE, HALF = (torch.finfo(kind).eps for kind in (torch.float64, torch.float32, torch.bfloat16))


@pytest.mark.parametrize(
    ("numbers", "precision", "is_combined"),
    [
        ((1.0, 2.0, 1.5, 1.5, 0.0), DOUBLE, True),
        ((1.0, 2.0, 1.5, 1.5001, 0.0), DOUBLE, False),
        ((1.0, 2.0, 1.5, 1.5001, 0.0), SINGLE, True),
        ((1.0, 2.0, 1.5, 1.51, 0.0), SINGLE, False),
        ((1.0, 2.0, 1.5, 1.51, 0.0), HALF, None),
        ((1.0, 4.0, 2.5, 2.51, 0.0), HALF, True),
        ((1.0, 2.0, 1.5, 3.0, 0.0), HALF, False),
        ((1.0, 2.0, 1.5, 1.6, 1e-5), SINGLE, None),
        ((1.0, 2.0, 1.5, 1.6, 1e-7), SINGLE, False),
        ((2.2, 2.21, 2.205, 2.204999, 0.0), SINGLE, None),
        ((2.2, 2.2, 2.2, 4.4, 0.0), SINGLE, False),
        ((math.nan, 2.0, math.nan, 1.5, 0.0), SINGLE, None),
        ((math.inf, 2.0, math.inf, math.inf, math.nan), SINGLE, None),
        ((0.0, 0.0, 0.0, 0.0, 0.0), SINGLE, None),
        ((1e-9, 2e-9, 1.5e-9, -3e-9, 0.0), SINGLE, None),
    ],
)
def test_a_number_is_compared_as_closely_as_it_is_precise(numbers: tuple[float, ...], precision: float, is_combined: bool | None) -> None:
    assert Outcome("", *numbers, precision).is_combined is is_combined


def test_less_precise_numbers_may_differ_more() -> None:
    assert tolerance(DOUBLE) < tolerance(SINGLE) < tolerance(HALF) < 0.1


def in_place(layer: nn.Module) -> nn.Module:
    layer.compile(backend="eager")
    return layer


def by_forward(layer: nn.Module) -> nn.Module:
    layer.forward = torch.compile(layer.forward, backend="eager")
    return layer


class Net(L.LightningModule):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.trainer = layer, L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")


@pytest.mark.parametrize("how", [in_place, by_forward, partial(torch.compile, backend="eager")])
def test_layers_that_were_compiled_are_tried_as_they_are_written(how: Callable[[nn.Module], nn.Module]) -> None:
    seen = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.compiler.is_compiling())
            return 2 * x

    module = Net(how(Layer()))
    before = dict(vars(module.layer))
    with trying(module):
        assert not module.layer.training
        module.layer(torch.ones(2))
        module.layer(torch.ones(3))
    assert seen == [False, False]
    assert vars(module.layer) == before
    module.layer(torch.ones(2))
    assert any(seen)


def test_a_trial_keeps_nothing_for_a_backward_and_puts_modes_back() -> None:
    module = Net(nn.Sequential(nn.Dropout(), nn.Linear(2, 2).eval()))
    x = torch.ones(3, requires_grad=True)
    with trying(module):
        loss = x.exp().sum()
        assert module.training
        assert not any(part.training for part in module.layer.modules())
    assert [part.training for part in module.layer.modules()] == [True, True, False]
    with pytest.raises(RuntimeError, match="without keeping what its backward needs"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8, torch.float8_e4m3fn])
def test_frozen_weights_of_any_dtype_may_stay_or_are_told(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(4).to(dtype), requires_grad=False)
    module = Net(nn.Linear(2, 2))
    module.layer.frozen = weight
    with frozen_stay(module):
        weight.clone()
    with pytest.raises(PipelineError, match=r"writes to layer\.frozen"), frozen_stay(module):
        weight.copy_(torch.zeros(4).to(dtype))


@pytest.mark.parametrize(("together", "error"), [(False, torch.OutOfMemoryError), (True, ValueError)])
def test_a_step_that_fails_is_not_judged(together: bool, error: type[Exception]) -> None:
    trial = failed(together, error)
    assert trial.error == f"{error.__name__}: no"
    assert trial.loss.is_combined is None


def test_nobody_waits_for_a_rank_without_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        failed(True, torch.OutOfMemoryError)


def failed(together: bool, error: type[Exception]) -> Trial:
    def step() -> None:
        raise error("no")

    trial = Trial(0, (1, 1), [Piece(None, torch.ones(()))] * 5, together)
    trial.run(step, LogRecorder(print, torch.device("cpu"), deferred=True), Net(nn.Linear(2, 2)))
    return trial
