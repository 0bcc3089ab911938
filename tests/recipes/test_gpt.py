import dataclasses

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_par.recipes.causal import decay_groups, warmup_cosine
from lightning_par.recipes.gpt import GPT, GPTConfig, GPTModule

SMALL = GPTConfig(vocab_size=33, hidden=24, layers=3, heads=6, kv_heads=3, ffn=40)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(SMALL).double()


@pytest.fixture
def tokens():
    return torch.randint(33, (3, 13), generator=torch.Generator().manual_seed(1))


def test_labels_are_shifted_by_the_model_and_shift_labels_are_taken_as_they_are(model, tokens):
    shifted = torch.cat((tokens[:, 1:], torch.full((3, 1), -100)), dim=1)
    loss = model(tokens, labels=tokens).loss
    assert torch.equal(loss, model(tokens, shift_labels=shifted).loss)
    assert torch.equal(loss, model(tokens, labels=tokens * 0, shift_labels=shifted).loss)
    by_hand = -model(tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).mean()
    torch.testing.assert_close(loss, by_hand, rtol=1e-12, atol=0)


def test_ignored_labels_count_in_neither_sum_nor_number(model, tokens):
    labels = tokens.clone()
    labels[1:] = -100
    torch.testing.assert_close(model(tokens, labels=labels).loss, model(tokens[:1], labels=tokens[:1]).loss, rtol=1e-12, atol=0)


def test_a_token_sees_only_those_before_it(model, tokens):
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 33
    before, after = model(tokens).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_positions_default_to_the_order_and_only_their_differences_matter(model, tokens):
    order = torch.arange(13)[None]
    logits = model(tokens).logits
    assert torch.equal(logits, model(tokens, position_ids=order).logits)
    torch.testing.assert_close(logits, model(tokens, position_ids=order.expand(3, -1) + 100).logits, rtol=0, atol=1e-10)
    assert not torch.allclose(logits, model(tokens, position_ids=order * 2).logits)


def test_grouped_query_attention_is_attention_with_each_key_head_repeated(model, tokens):
    full = GPT(dataclasses.replace(SMALL, kv_heads=6)).double()
    state = model.state_dict()
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = weight.unflatten(0, (3, 4)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(model(tokens).logits, full(tokens).logits, rtol=0, atol=1e-12)


def test_the_loss_is_computed_in_float32_or_better(tokens):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert GPT(SMALL).to(dtype)(tokens, labels=tokens).loss.dtype == expected


def test_tied_embeddings_are_one_parameter():
    model = GPT(dataclasses.replace(SMALL, tie_embeddings=True))
    assert model.head.weight is model.embed.weight
    assert GPT(SMALL).head.weight is not GPT(SMALL).embed.weight


def test_every_name_of_the_tp_plan_is_a_module_and_every_matrix_is_named():
    names = {name for name, module in GPT(SMALL).named_modules() if isinstance(module, nn.Linear | nn.Embedding)}
    planned = {name.replace("*", str(i)) for name in GPT.tp_plan for i in range(SMALL.layers)}
    assert planned == names


def test_impossible_sizes_are_named():
    with pytest.raises(ValueError, match="hidden=30 with heads=4"):
        GPTConfig(hidden=30, heads=4)
    with pytest.raises(ValueError, match="heads=4 is not a multiple of kv_heads=3"):
        GPTConfig(heads=4, kv_heads=3)


def test_only_matrices_decay_and_frozen_weights_are_left_out():
    module = GPTModule(SMALL)
    module.model.head.requires_grad_(False)
    decayed, kept = decay_groups(module)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in kept["params"]} == {1}
    assert kept["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(kept["params"]) == len(list(module.parameters())) - 1


def test_the_learning_rate_rises_then_follows_a_cosine():
    def at(step, decay_steps=30):
        return warmup_cosine(step, warmup_steps=10, decay_steps=decay_steps, min_ratio=0.1)

    assert [at(0), at(9), at(10)] == [0.1, 1.0, 1.0]
    assert at(20) == pytest.approx(0.55)
    assert at(30) == at(99) == pytest.approx(0.1)
    assert at(99, float("inf")) == 1.0


def test_it_learns_and_its_checkpoint_loads_with_weights_only(tmp_path, tokens):
    L.seed_everything(0, verbose=False)
    module = GPTModule(SMALL)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = L.Trainer(
        max_steps=30, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    trainer.fit(module, DataLoader(data, batch_size=3))
    assert trainer.callback_metrics["train_loss"] < 3.3  # ln 33 = 3.50 at the start
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = GPTModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert torch.equal(loaded.model(tokens).logits, module.model(tokens).logits)
