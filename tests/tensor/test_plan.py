"""Plans: found, resolved, refused. No process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_par.recipes.gpt import GPTConfig, GPTModule
from lightning_par.tensor import PlanError, plan_shards, resolve_plan
from lightning_par.tensor.checks import violations
from lightning_par.tensor.plan import with_ties
from tests.tensor.models import ATTENTION_PLAN, LM_PLAN, MLP, QK_NORM_PLAN, TinyLM


def _gpt(**config) -> GPTModule:
    return GPTModule(GPTConfig(vocab_size=33, hidden=24, layers=2, heads=6, ffn=37, **config))


def test_a_plan_on_a_submodule_is_found_and_its_patterns_matched() -> None:
    plan = resolve_plan(_gpt())
    assert len(plan) == 2 + 7 * 2
    assert plan["model.embed"] == "embedding_rowwise"
    assert plan["model.layers.1.attention.q_proj"] == "colwise"
    assert plan["model.head"] == "colwise_gather_output"


def test_the_outermost_plan_speaks_for_everything_below_it() -> None:
    class Outer(nn.Module):
        def __init__(self, plan: dict[str, str]) -> None:
            super().__init__()
            self.a, self.b = MLP(), MLP()
            if plan:
                self.tp_plan = plan

    assert set(resolve_plan(Outer({}))) == {"a.up", "a.down", "b.up", "b.down"}
    assert set(resolve_plan(Outer({"b.*": "replicate"}))) == {"b.up", "b.down"}


def test_a_star_is_one_segment() -> None:
    module = nn.ModuleDict({"x": nn.ModuleDict({"up": MLP()}), "up": nn.Linear(2, 2)})
    assert resolve_plan(module, {"*.up.down": "rowwise"}) == {"x.up.down": "rowwise"}
    with pytest.raises(PlanError, match="matches no module"):
        resolve_plan(module, {"*.down": "rowwise"})


def test_all_that_is_wrong_with_a_plan_is_said_at_once() -> None:
    plan = {"up": "columnwise", "upp": "colwise", "down.weight": "rowwise", "d*": "rowwise", "down": "rowwise_rep"}
    with pytest.raises(PlanError) as error:
        resolve_plan(MLP(), plan)
    text = str(error.value)
    assert len(error.value.reasons) == 4
    for part in (
        "for 4 reasons",
        "'up': unknown style 'columnwise'; known are colwise,",
        "'upp': matches no module",
        "'down.weight': names a parameter",
        "down: two styles, 'rowwise' by 'd*' and 'rowwise_split_input' by 'down'",
    ):
        assert part in text


def test_a_module_without_a_plan_is_refused_with_a_way_out() -> None:
    with pytest.raises(PlanError, match=r"neither Linear nor any module in it has one\. Give the model a class attribute tp_plan"):
        resolve_plan(nn.Linear(2, 2))


def test_a_module_under_two_names_is_one() -> None:
    module = nn.Module()
    module.a = module.b = nn.Linear(4, 4)
    assert resolve_plan(module, {"b": "colwise"}) == {"a": "colwise"}


def test_T7_a_tie_makes_the_silent_side_follow() -> None:
    lm = TinyLM(tied=True)
    for told, word, silent, followed in (
        ("head", "colwise_gather_output", "embed", "embedding_rowwise"),
        ("head", "colwise", "embed", "embedding_rowwise"),
        ("embed", "embedding_rowwise", "head", "colwise_gather_output"),
    ):
        assert with_ties(lm, {told: word}) == {told: word, silent: followed}
        assert not violations(lm, with_ties(lm, {told: word}), 2)
    assert with_ties(TinyLM(), {"embed": "embedding_rowwise"}) == {"embed": "embedding_rowwise"}


def test_T7_a_tie_told_two_ways_is_refused_by_name() -> None:
    (reason,) = violations(TinyLM(tied=True), {"embed": "embedding_rowwise", "head": "replicate"}, 2)
    assert "embed.weight: one parameter" in reason
    assert "embed.weight (cut along dim 0), head.weight (whole)" in reason


def test_T2_an_unnamed_norm_inside_the_sharded_region_is_refused() -> None:
    lm = TinyLM(qk_norm=True)
    reasons = violations(lm, ATTENTION_PLAN, 2)
    assert len(reasons) == 2
    assert "attention.q_norm: its weight of shape (4,) stands beside q_proj (colwise) and o_proj (rowwise)" in reasons[0]
    assert "'replicated_with_grad_allreduce'" in reasons[0]
    assert not violations(lm, ATTENTION_PLAN | QK_NORM_PLAN, 2)
    assert not violations(lm, ATTENTION_PLAN | dict.fromkeys(QK_NORM_PLAN, "replicate"), 2)


def test_T2_a_learned_scalar_and_a_learned_activation_are_refused_but_a_norm_in_front_is_not() -> None:
    mlp = MLP()
    mlp.norm = nn.LayerNorm(10)
    assert not violations(mlp, MLP.tp_plan, 2)
    mlp.act = nn.PReLU()
    mlp.slope = nn.Parameter(torch.ones(()))
    assert [reason.split(":")[0] for reason in violations(mlp, MLP.tp_plan, 2)] == ["the module itself", "act"]


def test_T5_heads_that_cannot_be_shared_are_refused_with_both_numbers() -> None:
    lm = TinyLM(heads=6, kv_heads=3, head_dim=4)
    reasons = violations(lm, ATTENTION_PLAN, 2)
    assert [reason.split(":")[0] for reason in reasons] == ["attention.k_proj", "attention.v_proj"]
    assert "its 3 heads of 4 features cannot be shared by 2 ranks; choose tp among 1, 3" in reasons[0]


def test_alike_layers_are_refused_once() -> None:
    module = _gpt(kv_heads=3)
    reasons = violations(module, resolve_plan(module), 2)
    assert [reason.split(":")[0] for reason in reasons] == ["model.layers.*.attention.k_proj", "model.layers.*.attention.v_proj"]


class Direct(nn.Linear):
    def forward(self, input):
        return input @ self.weight.T


def test_modules_that_cannot_be_sharded_are_refused_by_name() -> None:
    module = nn.Module()
    module.conv = nn.Conv1d(2, 2, 1)
    module.renorm = nn.Embedding(9, 2, max_norm=1.0)
    module.sparse = nn.Embedding(9, 2, sparse=True, scale_grad_by_freq=True)
    module.tiny = nn.Linear(9, 1)
    module.direct = Direct(4, 4)
    module.computed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    module.mha = nn.MultiheadAttention(4, 2)
    words = {"conv": "colwise", "renorm": "embedding_rowwise", "sparse": "embedding_rowwise", "tiny": "colwise", "direct": "colwise"}
    reasons = violations(module, {**words, "computed": "colwise", "mha.out_proj": "rowwise"}, 2)
    for part, reason in zip(
        (
            "conv: 'colwise' is for nn.Linear, but this is a Conv1d",
            "renorm: max_norm=1.0 does not work",
            "sparse: scale_grad_by_freq=True does not work",
            "sparse: sparse=True does not work",
            "tiny: dim 0 of its weight has 1 elements, too few for 2 ranks",
            "tiny: dim 0 of its bias has 1 elements, too few for 2 ranks",
            "direct: Direct.forward does not call super().forward",
            "computed: ParametrizedLinear has other parameters than weight and bias",
            "mha.out_proj: MultiheadAttention reads this module's weight without calling it",
        ),
        reasons,
        strict=True,
    ):
        assert reason.startswith(part)


@pytest.mark.parametrize("size", [2, 3])
def test_shards_of_all_ranks_cover_every_parameter_once(size: int) -> None:
    lm = TinyLM(qk_norm=True, tied=True)
    plan = resolve_plan(lm, LM_PLAN | QK_NORM_PLAN)
    ranks = [plan_shards(lm, plan, size, index) for index in range(size)]
    for name, parameter in lm.named_parameters():
        specs = [shards.specs[name] for shards in ranks]
        assert all(spec.shape == tuple(parameter.shape) and spec.dtype == parameter.dtype for spec in specs)
        elements = sum(spec.span.size for spec in specs)
        assert elements == parameter.numel() * (size if specs[0].is_whole else 1)
    assert ranks[0].partial == {f"attention.{norm}.{key}" for norm in ("q_norm", "k_norm") for key in ("weight", "bias")}
    assert "head.weight" not in ranks[0].specs  # a tie is one parameter
