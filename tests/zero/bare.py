"""A plain training loop over DataParallel, without Lightning, and the same loop in one process.

One process stands for all ranks: a step's loss is the mean of what every rank's loss would be. So cases in which ranks do different
things have a reference too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.comm import Mesh
from lightning_par.layout import ParallelLayout, ShardSpec
from lightning_par.zero import (
    DataParallel,
    ModelGradients,
    ParameterInfo,
    ReduceGroups,
    ZeroOptions,
    bucket,
    full_gradient,
    full_parameters,
)
from tests.harness import WorldError, run_world
from tests.zero.models import awkward

ROWS, LENGTH, VOCAB = 12, 4, 11
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Which piece of the data a loss is computed on, and where."""

    step: int
    micro: int
    index: int


Model = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Tensor, Place], "Tensor | tuple[Tensor, ...]"]


def next_token(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    return nn.functional.cross_entropy(module(ids).flatten(0, 1), ids.flatten())


def two_groups(module: nn.Module) -> list[dict]:
    """Interleaved parameters, one group with weight decay."""
    params = list(module.parameters())
    return [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "weight_decay": 0.0}]


def sgd(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.SGD(two_groups(module), lr=0.1, momentum=0.9)]


def adamw(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.AdamW(two_groups(module), lr=0.01)]


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        loss: a rank's loss on its rows; several are sent backward one after the other before the step.
        clip: (norm type, greatest norm).
    """

    model: Model = awkward
    optimizers: Callable[[nn.Module], list[Optimizer]] = adamw
    loss: Loss = next_token
    stage: int = 0
    accumulate: int = 1
    replicate: int = 1
    steps: int = 3
    clip: tuple[float, float] | None = None
    options: ZeroOptions = field(default_factory=lambda: ZeroOptions(min_unit_mb=0))

    def at(self, stage: int) -> Case:
        return replace(self, stage=stage)


@dataclass
class Result:
    """By step: losses and the first optimizer's gradient norm. After the last: the gradients it used, and all weights."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor | None]
    weights: dict[str, Tensor]


def rows(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)


def data_parallel(
    module: nn.Module,
    optimizers: list[Optimizer],
    stage: int,
    *,
    replicate: int = 1,
    cp: int = 1,
    options: ZeroOptions | None = None,
    scaled: bool = False,
) -> tuple[Mesh, DataParallel]:
    """``module`` and its optimizers, prepared on the ranks of the default group. All ranks call."""
    world = torch.distributed.get_world_size()
    mesh = Mesh.build(ParallelLayout(zero=stage, replicate=replicate, cp=cp).resolve(world))
    infos = [ParameterInfo(name, param, ShardSpec.whole(param)) for name, param in module.named_parameters()]
    options = options or ZeroOptions(min_unit_mb=0)
    dp = DataParallel(module, infos, ReduceGroups.of(mesh), stage=stage, options=options, optimizers=optimizers, scaled=scaled)
    for optimizer in optimizers:
        dp.attach(optimizer)
    return mesh, dp


def model_gradients(mesh: Mesh, dp: DataParallel) -> ModelGradients:
    return ModelGradients(dp, (mesh.copy if dp.disjoint else mesh.model,), mesh.world, CPU)


def weights(module: nn.Module) -> dict[str, Tensor]:
    with full_parameters(module):
        return {name: param.detach().clone() for name, param in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    grads = {name: full_gradient(param) for name, param in module.named_parameters()}
    return {name: None if grad is None else grad.clone() for name, grad in grads.items()}


def train(case: Case) -> Result:
    """This rank's run. All ranks call."""
    torch.set_default_dtype(torch.float64)
    module = case.model()
    optimizers = case.optimizers(module)
    with mock.patch.object(bucket, "SMALL", 32):  # so that of a few dozen elements some gradients are small and some are not
        mesh, dp = data_parallel(module, optimizers, case.stage, replicate=case.replicate, options=case.options)
    shared = model_gradients(mesh, dp)
    result = Result([], [], {}, {})
    for step in range(case.steps):
        losses = []
        for micro in range(case.accumulate):
            mine = rows(step, micro).chunk(mesh.data.size)[mesh.data.index]
            with dp.no_sync() if micro < case.accumulate - 1 else nullcontext():
                parts = _parts(case.loss(module, mine, Place(step, micro, mesh.data.index)))
                for part in parts:
                    (part / case.accumulate).backward(retain_graph=len(parts) > 1)
                    dp.finish()
            losses.append(sum(part.detach() for part in parts))
        mean = torch.stack(losses).mean()
        mesh.data.all_reduce(mean)
        mean /= mesh.data.size
        result.losses.append(mean.item())
        for optimizer in optimizers:
            norm_type, limit = case.clip or (2.0, math.inf)
            norm = shared.clip_norm(optimizer, limit, norm_type) if case.clip else shared.norm(optimizer)
            if optimizer is optimizers[0]:
                result.norms.append(norm.item())
        if step == case.steps - 1:
            result.grads = gradients(module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    result.weights = weights(module)
    dp.close()
    return result


@cache
def reference(case: Case, world: int) -> Result:
    """``case`` in this process, for ``world`` data ranks; give it with ``stage=0``, ``replicate=1`` and no options."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _train_alone(case, world)
    finally:
        torch.set_default_dtype(before)


def _train_alone(case: Case, world: int) -> Result:
    module = case.model()
    optimizers = case.optimizers(module)
    result = Result([], [], {}, {})
    for step in range(case.steps):
        total = 0.0
        for micro in range(case.accumulate):
            for index, mine in enumerate(rows(step, micro).chunk(world)):
                loss = sum(_parts(case.loss(module, mine, Place(step, micro, index)))) / case.accumulate / world
                loss.backward()
                total += loss.item()
        result.losses.append(total)
        for optimizer in optimizers:
            norm_type, limit = case.clip or (2.0, math.inf)
            params = [param for group in optimizer.param_groups for param in group["params"] if param.numel()]
            norm = torch.nn.utils.clip_grad_norm_(params, limit, norm_type)
            if optimizer is optimizers[0]:
                result.norms.append(norm.item())
        result.grads = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    result.weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return result


def _parts(loss: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return loss if isinstance(loss, tuple) else (loss,)


def _train_all(cases: dict[str, Case]) -> dict[str, Result]:
    results = {}
    for name, case in cases.items():
        try:
            results[name] = train(case)
        except Exception as error:
            raise AssertionError(f"case {name!r}: {error}") from error
    return results


@cache
def _outcomes(names: tuple[str, ...], cases: tuple[Case, ...], world: int) -> list[dict[str, Result]] | WorldError:
    try:
        return run_world(_train_all, world, dict(zip(names, cases, strict=True)), timeout=500)
    except WorldError as error:
        return error


def outcomes(cases: dict[str, Case], world: int) -> list[dict[str, Result]]:
    """Every rank's results of all ``cases``, from one world; computed once."""
    results = _outcomes(tuple(cases), tuple(cases.values()), world)
    if isinstance(results, WorldError):
        raise results
    return results


def assert_parity(case: Case, results: list[Result], tolerance: float = 1e-10) -> None:
    """Every rank's result is that of one process."""
    want = reference(replace(case, stage=0, replicate=1, options=ZeroOptions()), len(results))
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    for rank, got in enumerate(results):
        where = f"rank {rank}"
        _close_lists(got.losses, want.losses, tolerance, f"{where} losses")
        _close_lists(got.norms, want.norms, tolerance, f"{where} norms")
        for name, grad in want.grads.items():
            mine = got.grads[name]
            if not want.weights[name].numel():
                continue  # from stage 1 on nobody holds a shard of it
            assert (mine is None) == (grad is None), f"{where}: {name} has {'no' if mine is None else 'a'} gradient"
            if grad is not None:
                close(mine, grad, msg=lambda text, name=name, where=where: f"{where} gradient of {name}: {text}")
        for name, value in want.weights.items():
            close(got.weights[name], value, msg=lambda text, name=name, where=where: f"{where} {name}: {text}")


def _close_lists(got: list[float], want: list[float], tolerance: float, what: str) -> None:
    assert len(got) == len(want), what
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert abs(mine - theirs) <= tolerance * (1 + abs(theirs)), f"{what} of step {step}: {mine} != {theirs}"
