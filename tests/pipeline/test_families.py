"""Untouched causal models of transformers, of many families, through the Trainer in two stages against a plain loop in one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from lightning_par.pipeline import PipelineError, dry_run, place
from tests.harness import run_world
from tests.harness.models import QUIET

transformers = pytest.importorskip("transformers")

VOCAB, RATE = 37, 0.1
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = BASE | {"num_key_value_heads": 2, "head_dim": 4}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 4}
OPT = {"ffn_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 8, "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Gemma2": GROUPED,
    "Gemma3": GROUPED,
    "Cohere": GROUPED,
    "Phi3": BASE | {"pad_token_id": 0},
    "GPTNeoX": BASE,
    "Mixtral": GROUPED | {"num_local_experts": 4},
    "Qwen3Moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "GptOss": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": BASE | LATENT | EXPERTS | {"num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "OPT": SMALL | OPT,
    "Mpt": {"vocab_size": VOCAB, "d_model": 16, "n_layers": 4, "n_heads": 4, "max_seq_len": 32},
    "Falcon": SMALL | {"num_attention_heads": 4},
    "Mamba": SMALL | {"state_size": 4},
}


class Causal(L.LightningModule):
    """In float32: kernels of experts know no other dtype on a CPU."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = getattr(transformers, f"{name}ForCausalLM")
        self.model = kind(kind.config_class(**MODELS[name], use_cache=False)).float()
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def padded() -> DataLoader:
    """Sequences of three lengths."""
    generator, rows = torch.Generator().manual_seed(1), []
    for row in range(12):
        ids, mask = torch.randint(3, VOCAB, (9,), generator=generator), torch.arange(9) < 9 - row % 3
        rows.append({"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)})
    return DataLoader(rows, batch_size=4)


def _fit(name: str) -> list[Tensor]:
    module = Causal(name)
    options = QUIET | {"gradient_clip_val": None, "precision": "32-true"}
    L.Trainer(max_epochs=1, devices=2, strategy=HybridParallelStrategy(pp=2), **options).fit(module, padded())
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_stages_equal_a_plain_loop(name: str) -> None:
    module, expected = Causal(name), []
    optimizer = module.configure_optimizers()
    for batch in padded():
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for losses in run_world(_fit, 2, name):
        torch.testing.assert_close(torch.stack(losses).float(), torch.stack(expected), rtol=0, atol=5e-6)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_router_losses_of_layers_on_other_stages_are_refused(name: str) -> None:
    kind = getattr(transformers, f"{name}ForCausalLM")
    model = kind(kind.config_class(**MODELS[name], use_cache=False, output_router_logits=True, router_aux_loss_coef=0.5)).float()
    uses = dry_run(model, "model.layers", lambda batch: model(**batch).loss, next(iter(padded())))
    with pytest.raises(PipelineError, match=r"model\.layers\.0 is used after the layers by another way.*router logits"):
        place(model, 2, uses=uses)
