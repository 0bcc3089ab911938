from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_par.recipes.gpt import GPT, GPTConfig
from tests.harness import run_world
from tests.pipeline.parity import VOCAB, Twin, pp_group, tokens


def gpt(layers: int = 7, tie: bool = False) -> nn.Module:
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=VOCAB, hidden=24, layers=layers, heads=4, kv_heads=2, ffn=29, tie_embeddings=tie)).double()


def _gpt(size: int, schedule: str, chunks: int) -> None:
    group = pp_group(size)
    for tie in (False, True):
        twin = Twin(gpt(tie=tie), group, schedule, chunks)
        for microbatches in range(1, 6):
            twin.train_step(tokens(7, 9, seed=microbatches), microbatches)


@pytest.mark.parametrize(
    ("size", "schedule", "chunks"),
    [(2, "gpipe", 1), (3, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved_1f1b", 2), (3, "interleaved_1f1b", 2), (2, "interleaved_1f1b", 3)],
)
def test_P1_P3_P5_P7_P8_any_number_of_microbatches_gives_the_gradients_of_one_process(size: int, schedule: str, chunks: int) -> None:
    run_world(_gpt, size, size, schedule, chunks, timeout=30.0)
