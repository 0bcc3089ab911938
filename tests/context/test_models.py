"""Whole models on shards against one process: a plain decoder and untouched transformers models."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.comm import Group, Mesh
from lightning_par.context import UnsupportedAttentionError, Zigzag, prepare, ring_attention, shard_batch, verify_step
from lightning_par.layout import ParallelLayout
from lightning_par.recipes.gpt import GPT, GPTConfig
from tests.harness import run_world

VOCAB = 32


def _gpt() -> nn.Module:
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=VOCAB, hidden=48, layers=2, heads=6, kv_heads=2)).double()


def _checkpointed(use_reentrant: bool) -> nn.Module:
    model = _gpt()
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=use_reentrant)
    return model


def _batch(total: int) -> dict[str, Tensor]:
    """Labels are spread unevenly over the ranks."""
    torch.manual_seed(total)
    ids = torch.randint(0, VOCAB, (3, total))
    labels = ids.clone()
    labels[0, : total // 2] = -100
    return {"input_ids": ids, "labels": labels}


def _loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The mean loss in float64, and the model's own, which transformers computes in float32."""
    out = model(**batch)
    shifted = batch["shift_labels"] if "shift_labels" in batch else F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(out.logits.mT, shifted, ignore_index=-100), out.loss


def _assert_parity(model: nn.Module, batch: dict[str, Any], group: Group) -> None:
    """The weighted losses of the shards add up to the loss of one process, and so do their gradients."""
    reference, own = _loss(model, batch)
    reference.backward()
    grads = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    shard, total = shard_batch(batch, group)
    weights = torch.stack([shard.weight(), shard.weight()])
    group.all_reduce(weights[1:])
    with ring_attention(group, total, padded=shard.padded) as ring:
        loss, own_loss = (part * weights[0] / weights[1] for part in _loss(model, shard))
        loss.backward()
    verify_step(shard, ring)
    assert weights[1] == (batch["labels"][:, 1:] != -100).sum()
    for value, expected, tolerance in ((loss, reference, 1e-10), (own_loss, own, 1e-6)):
        value = value.detach().clone()
        group.all_reduce(value)
        torch.testing.assert_close(value, expected.detach(), atol=tolerance, rtol=0, check_dtype=False)
    for (name, param), grad in zip(model.named_parameters(), grads, strict=True):
        group.all_reduce(param.grad)
        torch.testing.assert_close(param.grad, grad, atol=1e-10, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
    model.zero_grad()


def _decoder(size: int) -> None:
    group = Mesh.build(ParallelLayout(cp=size).resolve(size)).cp
    for total in (2 * size - 1, 13, 16):
        _assert_parity(_gpt(), _batch(total), group)
    for use_reentrant in (False, True):
        _assert_parity(_checkpointed(use_reentrant), _batch(13), group)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_C1_C5_loss_and_gradients_of_a_decoder_do_not_depend_on_cp_nor_on_checkpointing(size: int) -> None:
    run_world(_decoder, size, size)


def _token_losses(size: int) -> None:
    group = Mesh.build(ParallelLayout(cp=size).resolve(size)).cp
    model, batch = _gpt(), _batch(13)
    shard, total = shard_batch(batch, group)
    with ring_attention(group, total), torch.no_grad():
        logits = model(**shard).logits
    whole_logits = model(**batch).logits.detach()
    mine = F.cross_entropy(logits.mT, shard["shift_labels"], reduction="none", ignore_index=-100)
    joined = Zigzag(total, size).join(group.gather_objects(mine), 1)
    expected = F.cross_entropy(whole_logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none", ignore_index=-100)
    torch.testing.assert_close(joined[:, :-1], expected, atol=1e-10, rtol=0)
    assert not joined[:, -1].any()


@pytest.mark.parametrize("size", [2, 4])
def test_C2_the_loss_of_every_token_is_that_of_one_process(size: int) -> None:
    run_world(_token_losses, size, size)


def _padded(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 9:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def _small(**fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    return {"vocab_size": VOCAB, "max_position_embeddings": 64, "use_cache": False, **sizes, **fields}


def _transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    cp4 = Mesh.build(ParallelLayout(cp=4).resolve(4)).cp
    cp2 = Mesh.build(ParallelLayout(cp=2, dp=2).resolve(4)).cp
    torch.manual_seed(2)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    llama = LlamaForCausalLM(LlamaConfig(**_small()))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=6, n_positions=64, use_cache=False, **dropouts))
    for model in (llama, gpt2):
        left = _batch(13) | {"attention_mask": torch.ones(3, 13, dtype=torch.int64)}
        left["attention_mask"][1, :4] = 0
        before = [model(**batch).logits for batch in (_batch(13), left)]
        prepare(nn.ModuleDict({"inside": model}))
        after = [model(**batch).logits for batch in (_batch(13), left)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))  # outside the block it is as it was
        for group in (cp2, cp4):
            for batch in (_batch(13), _padded(_batch(13))):
                _assert_parity(model, batch, group)
    llama.activation_checkpointing_enable()
    _assert_parity(llama.train(), _batch(7), cp4)

    windowed = MistralForCausalLM(MistralConfig(**_small(sliding_window=4)))
    prepare(windowed)
    shard, total = shard_batch(_batch(13), cp2)
    with ring_attention(cp2, total), pytest.raises(UnsupportedAttentionError, match="window or chunk of 4 tokens"):
        windowed(**shard)
    torch.set_default_dtype(default)


def test_C1_C10_C13_untouched_transformers_models_do_not_depend_on_cp() -> None:
    pytest.importorskip("transformers")
    run_world(_transformers, 4, timeout=120.0)


def test_prepare_leaves_other_modules_alone() -> None:
    model = _gpt()
    before = repr(model)
    prepare(model)
    assert repr(model) == before
