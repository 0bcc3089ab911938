"""The user's optimizer stays the user's: any that works element by element on spans, others on whole parameters, or a refusal by name."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_par.zero import ZeroOptions, full_gradient
from tests.harness import run_world
from tests.zero.bare import Case, Place, assert_parity, data_parallel, next_token, outcomes, reference, rows, two_groups, weights
from tests.zero.models import Awkward

MIDDLE = ZeroOptions(min_unit_mb=0, bucket_mb=5e-4)


class Lamb(Optimizer):
    """Steps as long as the weights, whole tensor by whole tensor."""

    def __init__(self, params: object, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    update = p.grad + group["weight_decay"] * p
                    p.sub_(update, alpha=group["lr"] * (p.norm() / (update.norm() + 1e-6)).item())


class LayerwiseAdam(torch.optim.Adam):
    """A subclass of a known class, with maths of its own."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    p.sub_(p.grad / (p.grad.norm() + 1e-6), alpha=group["lr"])


class Labelled(torch.optim.AdamW):
    """A subclass with an option of its own, and the maths of AdamW."""

    def __init__(self, params: object, *, label: str, **options: object) -> None:
        super().__init__(params, **options)
        self.label = label


def one(cls: type[Optimizer], /, **options: object) -> partial:
    return partial(_one, cls, options)


def _one(cls: type[Optimizer], options: dict, module: nn.Module) -> list[Optimizer]:
    return [cls(two_groups(module), **options)]


def adafactor(module: nn.Module) -> list[Optimizer]:
    """It divides by the number of elements, so it takes no zero-sized parameters."""
    return [torch.optim.Adafactor([p for p in module.parameters() if p.numel()], lr=0.01)]


def muon_and_adamw(module: nn.Module) -> list[Optimizer]:
    """Muon for hidden matrices (it takes no others), AdamW for the rest."""
    hidden = [p for p in module.layers.parameters() if p.dim() == 2 and p.numel()]
    rest = [p for p in module.parameters() if not any(p is h for h in hidden)]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


optim = torch.optim
ELEMENTWISE = {
    "SGD": one(optim.SGD, lr=0.1),
    "SGD nesterov": one(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "SGD fused": one(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam amsgrad": one(optim.Adam, lr=0.01, amsgrad=True),
    "Adam fused": one(optim.Adam, lr=0.01, fused=True),
    "AdamW foreach": one(optim.AdamW, lr=0.01, foreach=True),
    "AdamW loop": one(optim.AdamW, lr=0.01, foreach=False),
    "NAdam": one(optim.NAdam, lr=0.01),
    "RAdam": one(optim.RAdam, lr=0.01),
    "Adamax": one(optim.Adamax, lr=0.01),
    "Adadelta": one(optim.Adadelta, lr=0.5),
    "Adagrad, which has state from the start": one(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "ASGD": one(optim.ASGD, lr=0.05),
    "RMSprop": one(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Rprop": one(optim.Rprop, lr=0.01),
    "Z29 a subclass": one(Labelled, lr=0.01, label="mine"),
}
WHOLE = {
    "Z26 Muon": muon_and_adamw,
    "Z28 Adafactor": adafactor,
    "LAMB": one(Lamb),
    "a subclass with maths of its own": one(LayerwiseAdam, lr=0.01),
}
CASES = {
    f"stage{stage} {name}": Case(optimizers=make, stage=stage, options=MIDDLE)
    for stages, some in (((1, 3), ELEMENTWISE), ((1, 2), WHOLE))
    for stage in stages
    for name, make in some.items()
}
AT_STAGE_2 = {f"stage2 {name}": Case(optimizers=make, stage=2, options=MIDDLE) for name, make in ELEMENTWISE.items()}


@pytest.mark.parametrize("name", CASES)
def test_every_optimizer_equals_one_process(name: str) -> None:
    assert_parity(CASES[name], [rank[name] for rank in outcomes(CASES, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_STAGE_2)
def test_at_stage_2_too(name: str) -> None:
    """Spans are those of stage 1."""
    assert_parity(AT_STAGE_2[name], [rank[name] for rank in outcomes(AT_STAGE_2, 2)])


def test_Z26_more_ranks_than_matrices_in_a_bucket() -> None:
    cases = {name: case for name, case in CASES.items() if name in ("stage1 Z26 Muon", "stage2 LAMB")}
    for name, case in cases.items():
        assert_parity(case, [rank[name] for rank in outcomes(cases, 4)])


def _refusals() -> dict[str, str]:
    told = {}
    for stage in (1, 2, 3):
        for name, make in (WHOLE | {"LBFGS": lambda module: [torch.optim.LBFGS(module.parameters())]}).items():
            module = Awkward()
            optimizers = make(module)
            try:
                data_parallel(module, optimizers, stage)
            except ValueError as error:
                told[f"stage{stage} {name}"] = str(error)
    return told


def test_Z26_Z28_what_a_stage_cannot_do_right_is_refused_by_name() -> None:
    told = run_world(_refusals, 2)[1]
    assert set(told) == {"stage1 LBFGS", "stage2 LBFGS", *(f"stage3 {name}" for name in (*WHOLE, "LBFGS"))}
    assert "Muon is not known to work element by element" in told["stage3 Z26 Muon"]
    assert "zero=1 or zero=2" in told["stage3 Z28 Adafactor"]
    assert "LBFGS computes with all parameters at once" in told["stage1 LBFGS"]


def _muon_sees_matrices() -> int:
    torch.set_default_dtype(torch.float64)
    module = Awkward()
    optimizers = muon_and_adamw(module)
    data_parallel(module, optimizers, 2)
    params = [p for group in optimizers[0].param_groups for p in group["params"]]
    assert all(p.dim() == 2 for p in params)
    return len(params)


def test_Z26_together_ranks_handle_as_many_matrices_as_one_process() -> None:
    assert sum(run_world(_muon_sees_matrices, 3)) == 6


def _setup_keeps_the_optimizer() -> None:
    torch.set_default_dtype(torch.float64)
    for stage in (0, 1, 2, 3):
        module = Awkward()
        optimizer = Labelled(two_groups(module), lr=0.01, label="mine", betas=(0.8, 0.99))
        defaults, groups = copy.deepcopy(optimizer.defaults), [dict(group) for group in optimizer.param_groups]
        identities = [id(group) for group in optimizer.param_groups]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        _, dp = data_parallel(module, [optimizer], stage)
        assert (type(optimizer), optimizer.label, optimizer.defaults) == (Labelled, "mine", defaults)
        assert [id(group) for group in scheduler.optimizer.param_groups] == identities
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            assert {k: v for k, v in group.items() if k not in ("params", "initial_lr")} == {
                k: v for k, v in before.items() if k != "params"
            }
        for _ in range(2):
            next_token(module, rows(0, 0), Place(0, 0, 0)).backward()
            dp.finish()
            optimizer.step()
            scheduler.step()
        assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.0025]
        assert scheduler.get_last_lr() == [0.0025, 0.0025]


def test_Z29_K8_type_options_and_schedulers_survive_setup() -> None:
    run_world(_setup_keeps_the_optimizer, 2)


def _add_a_group() -> None:
    for stage in (0, 1, 2, 3):
        module = Awkward()
        optimizer = torch.optim.SGD(module.layers.parameters(), lr=0.1)
        _, dp = data_parallel(module, [optimizer], stage)
        next_token(module, rows(0, 0), Place(0, 0, 0)).backward()
        dp.finish()
        optimizer.add_param_group({"params": [module.norm.weight]})
        with pytest.raises(RuntimeError, match="SGD had 1 param groups when training started and has 2 now"):
            optimizer.step()


def test_a_group_added_later_is_refused_by_name() -> None:
    run_world(_add_a_group, 2)


def _foreign_parameters() -> None:
    module = Awkward()
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3, 2))], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD holds tensors of shapes \[\(3, 2\)\]"):
        data_parallel(module, [foreign], 1)


def test_tensors_that_are_not_the_modules_are_refused() -> None:
    run_world(_foreign_parameters, 2)


def _train_with_closure(stage: int | None, make: partial, world: int = 1) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    module = Awkward()
    optimizer = make(module)[0]
    mesh, dp = data_parallel(module, [optimizer], stage) if stage is not None else (None, None)

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = []
        for index, part in enumerate(rows(0, 0).chunk(world)):
            if mesh is None or index == mesh.data.index:
                losses.append(next_token(module, part, Place(0, 0, index)) / (world if mesh is None else 1))
        loss = sum(losses)
        loss.backward()
        if mesh is None:
            return loss.detach()
        dp.finish()
        value = loss.detach().clone()  # a line search must see the same loss on every rank
        mesh.data.all_reduce(value)
        value /= mesh.data.size
        return value

    for _ in range(2):
        optimizer.step(closure)
    return {n: p.detach().clone() for n, p in module.named_parameters()} if mesh is None else weights(module)


def lbfgs(module: nn.Module) -> list[Optimizer]:
    return [torch.optim.LBFGS([p for p in module.parameters() if p.requires_grad], lr=0.5, max_iter=4, line_search_fn="strong_wolfe")]


def _closures() -> dict[str, dict[str, Tensor]]:
    run = {f"stage{stage}": _train_with_closure(stage, ELEMENTWISE["SGD"], 2) for stage in (0, 1, 2, 3)}
    return run | {"lbfgs": _train_with_closure(0, lbfgs, 2)}


def test_closures_and_lbfgs_equal_one_process() -> None:
    before = torch.get_default_dtype()
    try:
        want = {"sgd": _train_with_closure(None, ELEMENTWISE["SGD"], 2), "lbfgs": _train_with_closure(None, lbfgs, 2)}
    finally:
        torch.set_default_dtype(before)
    for results in run_world(_closures, 2):
        for name, got in results.items():
            for param, value in want["lbfgs" if name == "lbfgs" else "sgd"].items():
                torch.testing.assert_close(got[param], value, rtol=1e-9, atol=1e-9, msg=lambda t, where=f"{name} {param}": f"{where}: {t}")


def _zero_grad_everywhere() -> None:
    torch.set_default_dtype(torch.float64)
    for stage in (0, 1, 2, 3):
        module = Awkward()
        optimizer = ELEMENTWISE["SGD"](module)[0]
        mesh, dp = data_parallel(module, [optimizer], stage)
        mine = rows(0, 0).chunk(mesh.data.size)[mesh.data.index]

        def backward() -> Tensor:
            next_token(module, mine, Place(0, 0, 0)).backward()  # noqa: B023
            dp.finish()  # noqa: B023
            return full_gradient(module.norm.weight).clone()  # noqa: B023

        once = backward()
        for forget in (optimizer.zero_grad, module.zero_grad, module.norm.zero_grad, copy.copy(optimizer.zero_grad)):
            forget()
            torch.testing.assert_close(backward(), once, msg=f"stage {stage}: {forget}")
        torch.testing.assert_close(backward(), 2 * once, msg="without zero_grad gradients add up")
        optimizer.zero_grad(set_to_none=False)
        assert not full_gradient(module.norm.weight).any()
        module.zero_grad()
        with dp.no_sync():  # what was not reduced yet is forgotten too
            next_token(module, mine, Place(0, 0, 0)).backward()
            if stage < 2:
                dp.finish()
        if stage < 2:
            optimizer.zero_grad()
            torch.testing.assert_close(backward(), once)
        dp.close()
        assert "zero_grad" not in vars(module) | vars(optimizer)


def test_zero_grad_of_the_module_and_of_the_optimizer_mean_the_same() -> None:
    run_world(_zero_grad_everywhere, 2)


def _toggled() -> None:
    torch.set_default_dtype(torch.float64)
    for stage in (1, 2, 3):
        module = Awkward()
        first = torch.optim.SGD(module.layers.parameters(), lr=0.1)
        second = torch.optim.SGD(module.norm.parameters(), lr=0.1)
        _, dp = data_parallel(module, [first, second], stage)
        for group in second.param_groups:
            for param in group["params"]:
                param.requires_grad = False
        next_token(module, rows(0, 0), Place(0, 0, 0)).backward()
        dp.finish()
        assert full_gradient(module.norm.weight) is None, "switched off through its optimizer, as toggle_optimizer does"
        assert full_gradient(module.layers[0].inner.weight) is not None


def test_parameters_of_a_toggled_optimizer_get_no_gradient() -> None:
    run_world(_toggled, 2)


def test_the_reference_learns() -> None:
    losses = reference(Case(optimizers=ELEMENTWISE["SGD"], steps=5), 2).losses
    assert losses[-1] < losses[0]
