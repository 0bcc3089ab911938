"""What cannot run says so when a run starts: before any process is started or joined, with every reason in one message."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelPruning
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_par import (
    ContextParallelStrategy,
    HybridParallelStrategy,
    LayoutError,
    ParallelLayout,
    PipelineParallelStrategy,
    TensorParallelStrategy,
    ZeROStrategy,
)
from tests.harness.models import TinyGPT, token_loader

Trainer = partial(L.Trainer, accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)


class Data(L.LightningDataModule):
    sequence_length = 3

    def train_dataloader(self) -> Any:
        return token_loader(4, length=3)

    predict_dataloader = train_dataloader


@pytest.fixture(autouse=True)
def _nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> Any:
    def started(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", started)
    yield
    assert not dist.is_initialized()


def test_every_violation_of_world_model_and_data_in_one_message() -> None:
    """TinyGPT has 4 heads, 2 key-value heads; the datamodule says 3 tokens."""
    with pytest.raises(LayoutError) as error:
        Trainer(devices=4, strategy=HybridParallelStrategy(tp=3, pp=3, cp=4)).fit(TinyGPT(layers=2), Data())
    assert len(error.value.violations) == 5
    for words in ("world size 4", "3 stages", "4 attention heads", "2 key-value heads", "sequence of 3"):
        assert words in str(error.value)


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_every_entry_point_checks(entry: str) -> None:
    trainer = Trainer(devices=4, strategy=HybridParallelStrategy(tp=3))
    with pytest.raises(LayoutError, match="world size 4"):
        getattr(trainer, entry)(Steps(layers=2), token_loader(4))


class Steps(TinyGPT):
    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.filterwarnings("ignore")
def test_T5_the_facts_of_a_hugging_face_model_are_known() -> None:
    pytest.importorskip("transformers")
    from lightning_par.recipes.hf import HFCausalLM

    sizes = {"vocab_size": 33, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    module = HFCausalLM({"model_type": "llama", **sizes, "num_attention_heads": 6, "num_key_value_heads": 3})
    with pytest.raises(LayoutError, match=r"tp=2 does not divide the model's 3 key-value heads: choose tp among 1, 3"):
        Trainer(devices=2, strategy=HybridParallelStrategy(tp=2)).fit(module, token_loader(4))


def test_predict_under_context_parallelism_is_refused() -> None:
    with pytest.raises(LayoutError, match="predict with cp=2"):
        Trainer(devices=2, strategy=HybridParallelStrategy(cp=2)).predict(Steps(layers=2), token_loader(4))


def test_unknown_layout_fields_are_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"unknown layout fields pipeline: choose among dp, tp, pp, cp"):
        HybridParallelStrategy(pipeline=2)


def test_a_layout_object_and_fields_go_together() -> None:
    assert HybridParallelStrategy(ParallelLayout(tp=2), pp=3).requested == ParallelLayout(tp=2, pp=3)


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        (ZeROStrategy(2), ParallelLayout(zero=2)),
        (TensorParallelStrategy(2), ParallelLayout(tp=2)),
        (PipelineParallelStrategy(2, schedule="gpipe"), ParallelLayout(pp=2, schedule="gpipe")),
        (ContextParallelStrategy(2), ParallelLayout(cp=2)),
        ("par", ParallelLayout()),
        ("par_zero1", ParallelLayout(zero=1)),
        ("par_tp2_pp2", ParallelLayout(tp=2, pp=2)),
    ],
)
def test_presets_and_registered_names_are_layouts(strategy: Any, layout: ParallelLayout) -> None:
    trainer = Trainer(devices=4, strategy=strategy)
    assert trainer.strategy.requested == layout
    assert trainer.strategy.layout.world == 4


def test_a_loss_that_transformers_collects_from_all_routers_is_refused_with_pipelines() -> None:
    model = TinyGPT(layers=2)
    model.model.config = SimpleNamespace(output_router_logits=True)
    with pytest.raises(LayoutError, match=r"pp=2: GPT has config\.output_router_logits=True.*set it to False"):
        Trainer(devices=2, strategy=HybridParallelStrategy(pp=2)).fit(model, token_loader(4))


class Stateful(TinyGPT):
    """With a layer that keeps count of what it has seen, or an example for the summary."""

    def __init__(self, what: str) -> None:
        super().__init__(layers=2)
        if what == "instance norm":
            self.extra = nn.InstanceNorm1d(2, track_running_stats=True)
        elif what == "frequent":
            self.extra = nn.Embedding(2, 2, scale_grad_by_freq=True)
        elif what == "example":
            self.example_input_array = torch.zeros(1, 3, dtype=torch.long)
        else:
            self.extra = nn.Sequential((spectral_norm if what == "parametrized" else nn.utils.spectral_norm)(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("instance norm", r"extra is an instance norm with track_running_stats=True: with pp=2"),
        ("parametrized", r"extra\.0\.parametrizations\.weight\.0 has a spectral_norm: with pp=2"),
        ("by a hook", r"extra\.0 has a spectral_norm: with pp=2"),
        ("frequent", r"extra is an embedding with scale_grad_by_freq=True: with dp=1, pp=2"),
        ("example", r"example_input_array with pp=2: the model summary.*enable_model_summary=False"),
    ],
)
def test_what_would_run_once_a_micro_batch_or_outside_of_steps_is_refused(what: str, why: str) -> None:
    layout = HybridParallelStrategy(pp=2)
    with pytest.raises(LayoutError, match=why):
        Trainer(devices=2, strategy=layout).fit(Stateful(what), token_loader(4))
    with pytest.raises(LayoutError) as error:  # of something else, of everything
        Trainer(devices=3, strategy=HybridParallelStrategy(pp=2, microbatches=1), enable_model_summary=False).fit(
            Stateful(what), token_loader(4)
        )
    assert len(error.value.violations) == 1


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
@pytest.mark.parametrize("layout", [{}, {"zero": 1}, {"pp": 2}, {"cp": 2, "dp": 1}])
def test_embeddings_that_work_by_the_tokens_of_a_whole_batch_are_refused(option: dict[str, Any], layout: dict[str, int]) -> None:
    model = TinyGPT(layers=2)
    model.extra = nn.Embedding(2, 2, **option)
    with pytest.raises(LayoutError, match=f"extra is an embedding with {next(iter(option))}.*: with dp="):
        Trainer(devices=4 if "pp" in layout else 2, strategy=HybridParallelStrategy(**layout)).fit(model, token_loader(4))


def test_a_module_that_another_trainer_has_cut_is_refused_as_such() -> None:
    model = TinyGPT(layers=2)
    model._lightning_par_cut = "tp=1 pp=2"
    with pytest.raises(RuntimeError, match=r"TinyGPT was cut for tp=1 pp=2 by another strategy.*Go on with the Trainer that did"):
        Trainer(devices=2, strategy=HybridParallelStrategy(pp=2)).test(model, token_loader(4))


class Thawing(BaseFinetuning):
    """One of the user's own, that adds no param groups."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        pass

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        pass


@pytest.mark.parametrize(
    ("callback", "layout"),
    [
        (partial(ModelPruning, "l1_unstructured"), {"dp": 2}),
        (BackboneFinetuning, {"dp": 2}),
        (BackboneFinetuning, {"pp": 2}),
        (Thawing, {"dp": 2, "zero": 1}),
        (Thawing, {"pp": 2}),
    ],
)
def test_callbacks_that_exchange_what_is_trained_are_refused_by_name(callback: Any, layout: dict[str, int]) -> None:
    made, strategy = callback(), HybridParallelStrategy(**layout)
    with pytest.raises(LayoutError, match=f"the {type(made).__name__} callback"):
        Trainer(devices=2, strategy=strategy, callbacks=[made]).fit(TinyGPT(layers=2), token_loader(4))
