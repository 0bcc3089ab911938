"""Untouched transformers models under a layout equal one process, to 1e-5 in float32."""

from __future__ import annotations

from functools import cache, partial
from math import prod
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from lightning_par.recipes.hf import HFCausalLM
from tests.harness.models import token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world

SIZES = {"vocab_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 32}
LLAMA = {"model_type": "llama", **SIZES, "hidden_size": 24, "intermediate_size": 29, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 37,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 24,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {"llama": LLAMA, "gpt2": GPT2 | NO_DROPOUT}
LOADER = partial(token_loader, 6, rows=12)


def _module(name: str) -> HFCausalLM:
    torch.manual_seed(1)
    return HFCausalLM(MODELS[name], optimizer=partial(torch.optim.SGD, lr=0.1))


@cache
def _reference(name: str) -> Run:
    return fit(partial(_module, name), LOADER, precision="32-true", validation=LOADER)


GPT2_AT_STAGE_3 = {"pp": 2, "microbatches": 3, "dp": 2, "zero": 3, "zero_options": {"min_unit_mb": 0}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("llama", layout) for layout in ({"tp": 2}, {"pp": 2}, {"cp": 2}, {"zero": 1, "dp": 2})),
        ("gpt2", {"pp": 2}),
        pytest.param("gpt2", GPT2_AT_STAGE_3, marks=pytest.mark.slow, id="gpt2-pp dp zero3"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_an_untouched_model_equals_one_process(name: str, layout: dict[str, Any]) -> None:
    ranks = prod(layout.get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    runs = fit_world(partial(_module, name), LOADER, layout, ranks, precision="32-true", validation=LOADER)
    assert_same(runs, _reference(name), tolerance=1e-5)


def test_gpt2_has_a_tied_head() -> None:
    model = _module("gpt2").model
    assert model.lm_head.weight is model.transformer.wte.weight, "the parity at pp=2 above is one over a weight tied across stages"
