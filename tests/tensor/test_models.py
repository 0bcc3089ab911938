"""Whole models against one process: a tiny language model in many shapes, and the GPT recipe."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_par.recipes.gpt import GPTConfig, GPTModule
from lightning_par.tensor import PlanError, shard_module
from tests.harness import WorldError, run_world
from tests.tensor.models import ATTENTION_PLAN, LM_PLAN, MLP_PLAN, QK_NORM_PLAN, TinyLM, tokens
from tests.tensor.parity import assert_parity, tp_mesh


def _lm_parity(size: int, model: dict, plan: dict[str, str], optimizer: str) -> None:
    group = tp_mesh(size).tp
    lm = TinyLM(**model).double()
    for p in lm.parameters():  # norms and biases too: a constant hides mistakes
        nn.init.normal_(p, std=0.5)
    sharded, shards = assert_parity(lm, group, lambda m, step: m.loss(tokens(model["vocab"], step)), plan=plan, optimizer=optimizer)
    if model.get("tied"):
        assert sharded.head.weight is sharded.embed.weight
        assert not shards.specs["embed.weight"].is_whole


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_T1_T4_grouped_query_attention_equals_one_process_in_every_gradient(size: int, optimizer: str) -> None:
    run_world(_lm_parity, size, size, {"vocab": 33}, LM_PLAN, optimizer)


def test_T4_one_kv_head_a_rank() -> None:
    run_world(_lm_parity, 2, 2, {"vocab": 13, "heads": 6, "kv_heads": 2}, LM_PLAN, "adamw")


@pytest.mark.parametrize("size", [2, 3])
def test_T2_a_norm_on_each_ranks_own_heads_gets_the_whole_gradient(size: int) -> None:
    run_world(_lm_parity, size, size, {"vocab": 13, "qk_norm": True}, LM_PLAN | QK_NORM_PLAN, "adamw")


@pytest.mark.parametrize("plan", [LM_PLAN, {**ATTENTION_PLAN, "embed": "embedding_rowwise"}, {"head": "colwise_gather_output"}])
def test_T7_tied_embedding_and_head_whether_the_plan_names_both_or_one(plan: dict[str, str]) -> None:
    run_world(_lm_parity, 3, 3, {"vocab": 13, "tied": True, "padding_idx": 2}, plan, "adamw")


def test_T13_a_plan_for_a_part_of_the_model_leaves_the_rest_replicated() -> None:
    run_world(_lm_parity, 2, 2, {"vocab": 33}, MLP_PLAN, "sgd")


def _gpt_parity(size: int, config: dict) -> None:
    mesh = tp_mesh(size)
    gpt = GPTModule(GPTConfig(vocab_size=33, hidden=24, layers=2, ffn=37, **config)).double()

    def loss(module: GPTModule, step: int) -> torch.Tensor:
        ids = tokens(33, step)
        return module.model(ids, labels=ids).loss

    sharded, shards = assert_parity(gpt, mesh.tp, loss)
    assert not shards.partial
    with mesh.trace.recording() as sent:
        total = loss(sharded, 0)
        forward = [s.op for s in sent]
        total.backward()
    assert forward == ["all_reduce"] * (1 + 2 * 2) + ["all_gather"]  # embedding, two a layer, logits
    assert [s.op for s in sent[len(forward) :]] == ["all_reduce"] * (1 + 5 * 2)  # head; q, k, v, gate and up of each layer


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("size", "config"), [(2, {"heads": 6, "kv_heads": 2}), (3, {"heads": 12, "kv_heads": 6}), (3, {"heads": 3})])
def test_the_gpt_recipe_equals_one_process(size: int, config: dict, tied: bool) -> None:
    run_world(_gpt_parity, size, size, {**config, "tie_embeddings": tied})


def _first_loss(size: int) -> float:
    gpt = GPTModule(GPTConfig(vocab_size=33, hidden=24, layers=2, heads=6))
    shard_module(gpt, tp_mesh(size).tp)
    ids = tokens(33)
    return gpt.model(ids, labels=ids).loss.item()


def test_T19_the_loss_does_not_depend_on_tp() -> None:
    (alone,) = run_world(_first_loss, 1, 1)  # a group of one: the same code, nothing sent
    for size in (2, 3):
        assert run_world(_first_loss, size, size) == pytest.approx([alone] * size, abs=1e-6)


def _differently_seeded() -> None:
    group = tp_mesh(2).tp
    torch.manual_seed(group.index)
    lm = TinyLM()
    before = [(type(m), [p.shape for p in m.parameters()]) for m in lm.modules()]
    with pytest.raises(PlanError, match=r"mlp\.up\.weight: differs from rank to rank \(\(37, 10\), sum .* / .*seed every rank alike"):
        shard_module(lm, group, plan=LM_PLAN)
    assert before == [(type(m), [p.shape for p in m.parameters()]) for m in lm.modules()]


def test_T16_ranks_that_start_from_different_weights_are_refused_on_all_of_them() -> None:
    run_world(_differently_seeded, 2)


def _partial_without_a_sum() -> None:
    group = tp_mesh(2).tp
    plan = LM_PLAN | dict.fromkeys(QK_NORM_PLAN, "replicate")
    assert_parity(TinyLM(13, qk_norm=True).double(), group, lambda m, step: m.loss(tokens(13, step)), plan=plan)


def test_T2_the_wrong_word_would_be_seen() -> None:
    with pytest.raises(WorldError, match=r"grad of attention\.q_norm\.weight"):
        run_world(_partial_without_a_sum, 2, grace=0.2)
