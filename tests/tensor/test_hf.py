"""Untouched transformers models by their own plans."""

from __future__ import annotations

import pytest
import torch

from lightning_par.tensor import PlanError, resolve_plan
from tests.harness import run_world
from tests.tensor.models import tokens
from tests.tensor.parity import assert_parity, tp_mesh

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _model(kind: str, **config):
    config = transformers.AutoConfig.for_model(kind, **SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2, **config)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def _hf_parity(kind: str, tolerance: float) -> None:
    mesh = tp_mesh(2)
    model = _model(kind)

    def loss(module, step: int) -> torch.Tensor:
        ids = tokens(33, step)
        return module(input_ids=ids, labels=ids, use_cache=False).loss

    sharded, shards = assert_parity(model, mesh.tp, loss, tolerance=tolerance)
    weights = sharded.get_input_embeddings().weight, sharded.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == model.config.tie_word_embeddings
    assert weights[0].shape[0] == weights[1].shape[0] == (17, 16)[mesh.tp.index]
    assert bool(shards.partial) == (kind == "qwen3")


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma"])
def test_an_untouched_hf_model_equals_one_process(kind: str) -> None:
    run_world(_hf_parity, 2, kind, 1e-10)


def test_gpt2_has_no_plan_and_is_refused_with_a_way_out() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8))
    with pytest.raises(PlanError, match=r"no plan: GPT2LMHeadModel\.tp_plan, GPT2Model\.tp_plan is empty.*tp_plan"):
        resolve_plan(model)
