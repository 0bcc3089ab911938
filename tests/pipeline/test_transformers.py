"""Untouched transformers models in a pipeline against one process, in float64: loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tests.harness import run_world
from tests.pipeline.parity import VOCAB, Twin, pp_group, tokens


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 29, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=32, use_cache=False, **sizes)).double()


def gpt2(tie: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 7, "n_head": 4, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, use_cache=False, tie_word_embeddings=tie, **sizes, **dropout)).double()


def _transformers(size: int, cases: list[tuple[str, int]]) -> None:
    group = pp_group(size)
    for schedule, chunks in cases:
        for model in (llama(), gpt2(tie=True), gpt2(tie=False)):
            twin = Twin(model, group, schedule, chunks, pieces=True)
            for microbatches in (2, 5):
                twin.train_step(tokens(5, 9), microbatches)
            twin.evaluate(tokens(3, 6), 2)
    checkpointed = llama()
    checkpointed.activation_checkpointing_enable()
    Twin(checkpointed.train(), group, *cases[-1], pieces=True).train_step(tokens(5, 9), 3)


@pytest.mark.parametrize(("size", "cases"), [(2, [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]), (3, [("gpipe", 1), ("1f1b", 1)])])
def test_untouched_transformers_models_give_the_gradients_of_one_process(size: int, cases: list[tuple[str, int]]) -> None:
    run_world(_transformers, size, size, cases)
