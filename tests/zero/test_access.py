"""Whole values, gradients and optimizer states for those who ask by name; everybody else gets the right value or a named error."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lightning_par.zero import DataParallel, ZeroOptions, full_gradient, full_optimizer_state, full_parameters
from tests.harness import run_world
from tests.zero.bare import Case, Place, data_parallel, next_token, reference, rows, two_groups, weights
from tests.zero.models import Awkward, awkward

STAGES = (1, 2, 3)
MIDDLE = ZeroOptions(min_unit_mb=0, bucket_mb=5e-4)


def _adamw(module: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(two_groups(module), lr=lr)


def _set_up(stage: int, lr: float = 0.01, **settings: object) -> tuple[nn.Module, torch.optim.Optimizer, DataParallel, Tensor]:
    torch.set_default_dtype(torch.float64)
    module = Awkward(**settings)
    optimizer = _adamw(module, lr)
    mesh, dp = data_parallel(module, [optimizer], stage, options=MIDDLE)
    return module, optimizer, dp, rows(0, 0).chunk(mesh.data.size)[mesh.data.index]


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, dp: DataParallel, ids: Tensor) -> None:
    next_token(module, ids, Place(0, 0, 0)).backward()
    dp.finish()
    optimizer.step()
    optimizer.zero_grad()


def _read() -> dict[int, dict]:
    told = {}
    for stage in STAGES:
        module, optimizer, dp, ids = _set_up(stage)
        next_token(module, ids, Place(0, 0, 0)).backward()
        dp.finish()
        grads = {name: full_gradient(param) for name, param in module.named_parameters() if param.numel()}
        optimizer.step()
        states = {name: full_optimizer_state(param) for name, param in module.named_parameters() if param.requires_grad or stage == 3}
        told[stage] = {"grads": grads, "states": states, "values": weights(module)}
        for name, param in module.named_parameters():
            assert param.shape == Awkward().get_parameter(name).shape, f"{name} keeps its shape at stage {stage}"
    return told


def test_gradients_states_and_values_are_whole_on_every_rank() -> None:
    """Moments are linear and quadratic in the one gradient there was, so they are known without a second optimizer."""
    want = reference(Case(model=awkward, steps=1), 3)
    for ranks in run_world(_read, 3):
        for stage, told in ranks.items():
            for name, grad in told["grads"].items():
                if want.grads[name] is None:
                    assert grad is None, (stage, name)
                    continue
                torch.testing.assert_close(grad, want.grads[name], rtol=1e-10, atol=1e-10)
                state = told["states"][name]
                assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
                assert state["step"] == 1
                torch.testing.assert_close(state["exp_avg"], 0.1 * want.grads[name], rtol=1e-10, atol=1e-10)
                torch.testing.assert_close(state["exp_avg_sq"], 0.001 * want.grads[name] ** 2, rtol=1e-10, atol=1e-10)
            for name, value in want.weights.items():
                torch.testing.assert_close(told["values"][name], value, rtol=1e-10, atol=1e-10)


def _edit() -> None:
    for stage in (0, *STAGES):
        module, optimizer, dp, ids = _set_up(stage, lr=0.0)
        _step(module, optimizer, dp, ids)
        with full_parameters(module, modify=True), torch.no_grad():
            module.layers[1].inner.weight.zero_()
            module.frozen.weight.fill_(2.0)
        _step(module, optimizer, dp, ids)
        after = weights(module)
        assert not after["layers.1.inner.weight"].any(), "an edit stays through a step at lr=0"
        assert (after["frozen.weight"] == 2).all()
        before = after["embed.weight"]
        with full_parameters(module), torch.no_grad():
            module.embed.weight.add_(1)
        edited = weights(module)["embed.weight"]
        assert torch.equal(edited, before if stage == 3 else before + 1), "without modify=True stage 3 drops an edit"


def test_Z14_edits_inside_the_context_persist() -> None:
    run_world(_edit, 2)


def _compute_inside() -> None:
    for stage in STAGES:
        module, optimizer, dp, ids = _set_up(stage)
        _step(module, optimizer, dp, ids)
        whole = Awkward()
        whole.load_state_dict(weights(module), strict=False)
        with torch.no_grad(), full_parameters(module):
            module.norm.weight.mul_(2)
            whole.norm.weight.mul_(2)
            torch.testing.assert_close(module(ids), whole(ids), msg=f"stage {stage}: forward computes with the edits")
            assert torch.equal(module.norm.weight, whole.norm.weight), f"stage {stage}: forward leaves the edits"
            with full_parameters(module.layers[0]):
                module.layers[0].inner.weight.detach()
            module.layers[0].inner.weight.detach()  # still open for the outer block
        dp.end_pass()


def test_forward_inside_the_context_sees_the_edits() -> None:
    run_world(_compute_inside, 2)


def _edit_what_the_cache_holds() -> None:
    """In between forward and backward some layers are whole anyway."""
    module, _, _, ids = _set_up(3)
    loss = next_token(module, ids, Place(0, 0, 0))
    before = weights(module)
    with full_parameters(module), torch.no_grad():
        for param in module.parameters():
            param.zero_()
    assert all(torch.equal(value, before[name]) for name, value in weights(module).items())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as anywhere in torch
        loss.backward()


def test_an_edit_without_modify_is_dropped_between_forward_and_backward_too() -> None:
    run_world(_edit_what_the_cache_holds, 2)


def _forward_before_the_step() -> dict[int, Tensor]:
    """A forward pass between backward and step leaves nothing behind that the next one would take for the new values."""
    out = {}
    for stage in (0, *STAGES):
        module, optimizer, dp, ids = _set_up(stage)
        next_token(module, ids, Place(0, 0, 0)).backward()
        dp.finish()
        with torch.no_grad():
            module(ids)
        optimizer.step()
        with torch.no_grad():
            out[stage] = next_token(module, rows(0, 0), Place(0, 0, 0))
        dp.end_pass()
    return out


def test_values_used_before_a_step_are_not_used_after_it() -> None:
    want = reference(replace(Case(steps=1)), 2).weights
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        whole = Awkward()
        whole.load_state_dict(want, strict=False)
        loss = next_token(whole, rows(0, 0), Place(0, 0, 0)).detach()
    finally:
        torch.set_default_dtype(before)
    for out in run_world(_forward_before_the_step, 2):
        for stage, value in out.items():
            torch.testing.assert_close(value, loss, rtol=1e-10, atol=1e-10, msg=f"stage {stage}")


class Borrowing(Awkward):
    """Uses a submodule's weight in place of calling it."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(self.embed(ids)), self.embed.weight)


TOUCHES = {
    "arithmetic": lambda p: p + 1,
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "item": lambda p: p[0].item() if p.dim() == 1 else p[0, 0].item(),
    "norm": lambda p: p.norm(),
    "foreach": lambda p: torch._foreach_norm([p]),
    "edit": lambda p: torch.no_grad()(lambda: p.mul_(1.0))(),
    "numpy": lambda p: p.detach().numpy(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "set data": lambda p: setattr(p, "data", torch.zeros_like(p, device="cpu")),
    "init": lambda p: nn.init.zeros_(p),
}


def _touch_what_is_away() -> None:
    module, optimizer, dp, ids = _set_up(3)
    _step(module, optimizer, dp, ids)
    for param in (module.layers[0].inner.weight, module.norm.bias, module.gain.gain):
        for touch in TOUCHES.values():
            with pytest.raises(RuntimeError, match=r"is sharded over 2 ranks \(zero=3\)"):
                touch(param)
        assert "values away" in repr(param)
        assert param.shape == torch.Size(param.size())
        assert (param.dtype, param.requires_grad, param.is_leaf, param.device.type) == (torch.float64, True, True, "cpu")
        assert isinstance(param, nn.Parameter)
    with pytest.raises(RuntimeError, match=r"empty_first.weight is sharded"):
        copy.deepcopy(module)
    with pytest.raises(RuntimeError, match=r"is sharded"):
        module.state_dict()
    borrowing, *_ = Borrowing(), None
    data_parallel(borrowing, [_adamw(borrowing)], 3)
    with pytest.raises(RuntimeError, match=r"full_parameters\(module\).*ZeroOptions\(ignored"):
        borrowing(ids)


def test_Z31_Z32_touching_a_freed_parameter_is_a_named_error() -> None:
    run_world(_touch_what_is_away, 2)


def _borrow_what_stays_whole() -> None:
    torch.set_default_dtype(torch.float64)
    module = Borrowing()
    optimizer = _adamw(module)
    _, dp = data_parallel(module, [optimizer], 3, options=ZeroOptions(min_unit_mb=0, ignored=("embed",)))
    _step(module, optimizer, dp, rows(0, 0))


def test_Z32_an_ignored_submodule_may_be_used_anywhere() -> None:
    run_world(_borrow_what_stays_whole, 2)


def _touch_what_is_coming() -> dict[str, Tensor]:
    """Right after a step other ranks' values may still be on their way. ``data`` is set last: it takes the parameter out."""
    seen = {}
    for stage in (1, 2):
        for name, touch in TOUCHES.items():
            module, optimizer, dp, ids = _set_up(stage)
            _step(module, optimizer, dp, ids)
            param = module.layers[2].outer.weight
            assert type(param) is not nn.Parameter, "it is on its way"
            if name not in ("set data", "init"):
                touch(param)
                assert type(param) is nn.Parameter
                seen[f"{stage} {name}"] = param.detach().clone()
        module, optimizer, dp, ids = _set_up(stage)
        _step(module, optimizer, dp, ids)
        seen[f"{stage} copy of the module"] = copy.deepcopy(module).layers[2].outer.weight.detach()
        _step(module, optimizer, dp, ids)
        repr(module)
    return seen


def test_at_stages_1_and_2_any_touch_right_after_a_step_gives_the_new_value() -> None:
    want = reference(Case(steps=1), 3).weights["layers.2.outer.weight"]
    for seen in run_world(_touch_what_is_coming, 3):
        for how, value in seen.items():
            torch.testing.assert_close(value, want, rtol=1e-10, atol=1e-10, msg=how)


def _copies() -> None:
    module, optimizer, dp, ids = _set_up(3)
    _step(module, optimizer, dp, ids)
    with full_parameters(module):
        twin = copy.deepcopy(module)
    assert all(type(p) is nn.Parameter and not hasattr(p, "zero") for p in twin.parameters())
    with torch.no_grad():
        mine = twin(ids)  # on its own values: nothing is gathered
        assert not dp.end_pass()
        torch.testing.assert_close(module(ids), mine)
    dp.end_pass()
    twin(ids).sum().backward()
    assert twin.norm.weight.grad is not None
    twin.zero_grad()
    assert twin.norm.weight.grad is None


def test_a_copy_of_the_module_has_values_of_its_own() -> None:
    run_world(_copies, 2)


class Opaque(nn.Module):
    """Returns its result in a box that nobody can look into."""

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(4))
        self.boxed = nn.ModuleList([Boxing() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.boxed:
            x = layer(x).tensor
        for layer in self.layers:
            x = layer(x)
        return x


class Boxing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Opaque.Box:
        return Opaque.Box(torch.tanh(self.linear(x)))


def _opaque_outputs() -> None:
    torch.set_default_dtype(torch.float64)
    module = Opaque()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data_parallel(module, [optimizer], 3)
    x = torch.randn(2, 5, requires_grad=True)
    loss = module(x).sum()
    with pytest.raises(RuntimeError, match=r"out of bounds for storage of size 0|not allocated"):
        loss.backward()


def test_an_output_that_cannot_be_seen_is_an_error_not_a_wrong_gradient() -> None:
    run_world(_opaque_outputs, 2)


def _below_zero_1() -> None:
    module, *_ = _set_up(0)
    with pytest.raises(ValueError, match=r"this one is whole: read optimizer\.state"):
        full_optimizer_state(module.norm.weight)


def test_full_optimizer_state_below_stage_1_says_where_to_look() -> None:
    run_world(_below_zero_1, 2)
