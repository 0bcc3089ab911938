"""A model of transformers trained in parts, exported whole under its own names, and loaded back."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

pytest.importorskip("transformers")

from lightning_par import DeepSpeedTarget, HybridParallelStrategy, convert
from lightning_par.checkpoint import CheckpointError, hf, open_checkpoint
from lightning_par.checkpoint.source import Entry, Source
from lightning_par.checkpoint.whole import write_native
from lightning_par.recipes.hf import HFCausalLM
from tests.checkpoint.fits import QUIET, world_size
from tests.checkpoint.synthetic import synthetic
from tests.harness import WorldError, run_world
from tests.harness.models import token_loader

LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
PROMPT = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))


def _module(tied: bool) -> HFCausalLM:
    torch.manual_seed(0)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return HFCausalLM(LLAMA | {"tie_word_embeddings": tied}, optimizer=optimizer, decay_steps=5)


def _train(layout: dict[str, int], folder: Path, tied: bool) -> dict[str, torch.Tensor] | None:
    strategy = HybridParallelStrategy(**layout)
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, max_steps=2, **QUIET)
    trainer.fit(_module(tied), token_loader(4, rows=8, **strategy.distributed_sampler_kwargs))
    trainer.save_checkpoint(folder)
    return strategy.full_state_dict()


def _pretrained(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def _logits(folder: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return _pretrained(folder, **options).eval()(input_ids=PROMPT).logits


def _logits_of(weights: dict[str, torch.Tensor], tied: bool) -> torch.Tensor:
    module = _module(tied)
    module.load_state_dict(weights)
    with torch.no_grad():
        return module.model.eval()(input_ids=PROMPT).logits


@pytest.mark.parametrize(
    ("layout", "tied"),
    [({"dp": 1}, True), pytest.param({"tp": 2, "pp": 2}, False, marks=pytest.mark.slow)],
    ids=["one rank, tied", "tp2 pp2"],
)
@pytest.mark.filterwarnings("ignore")
def test_Z2_from_pretrained_gives_the_logits_of_the_trained_model(layout: dict[str, int], tied: bool, tmp_path: Path) -> None:
    weights = run_world(_train, world_size(layout), layout, tmp_path / "last", tied)[0]
    report = convert(tmp_path / "last", tmp_path / "out", "hf")
    assert report.rounded == ()
    assert torch.equal(_logits(tmp_path / "out", dtype=torch.float32), _logits_of(weights, tied))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architectures"], config["num_hidden_layers"], config["num_attention_heads"]) == (["LlamaForCausalLM"], 3, 4)
    model = _pretrained(tmp_path / "out")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    back = run_world(_load, 1, tmp_path / "out", tied)[0]
    for name, value in weights.items():
        assert torch.equal(back[name], value), name


def _load(folder: Path, tied: bool) -> dict[str, torch.Tensor]:
    module = _module(tied)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1.0)
    trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), **QUIET)
    trainer.validate(module, token_loader(4, rows=4), ckpt_path=folder, verbose=False)
    return trainer.strategy.full_state_dict()


class _Adapted(torch.nn.Module):
    """As PEFT puts one around a model."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.base_model, self.config = network, network.config

    def forward(self, **options: Any) -> Any:
        return self.base_model(**options)

    def save_pretrained(self, folder: str) -> None:
        """Its own."""


class _Holder(L.LightningModule):
    """``how``: what names parts of the model of transformers before ``self.hf`` does."""

    def __init__(self, how: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        network = _module(how == "tied").model
        if how in ("embed", "tied"):
            self.embed = network.get_input_embeddings()
        elif how == "body":
            self.body = network.model
        elif how == "weight":
            self.weight = network.lm_head.weight
        elif how == "tied by hand":
            network.lm_head.weight = network.model.embed_tokens.weight
        elif how == "two":
            self.teacher = _module(False).model
        elif how == "compiled":
            torch.compiler.set_stance("force_eager")  # the names are what matters
            network.model.layers[1] = torch.compile(network.model.layers[1])
            network = torch.compile(network)
        elif how == "changed":
            network.model.layers[1].self_attn.q_proj = torch.nn.Sequential(network.model.layers[1].self_attn.q_proj)
            network.extra = torch.nn.Linear(2, 2)
        elif how == "adapted":
            network = _Adapted(network)
        self.hf = network

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.hf(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.hf.parameters(), lr=1e-2)


def _hold(how: str, folder: Path, steps: int, seed: int = 0, source: Path | None = None) -> torch.Tensor:
    """The logits of the model inside, after training that began with ``source``."""
    module = _Holder(how, seed)
    trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), max_steps=steps, **QUIET)
    trainer.fit(module, token_loader(4, rows=8), ckpt_path=source)
    trainer.save_checkpoint(folder)
    with torch.no_grad():
        return module.hf.eval()(input_ids=PROMPT).logits


@pytest.mark.parametrize(
    "how", ["tied", *(pytest.param(n, marks=pytest.mark.slow) for n in ["compiled", "embed", "body", "weight", "tied by hand"])]
)
@pytest.mark.filterwarnings("ignore")
def test_the_outermost_model_goes_whole_out_and_in_whatever_names_its_parts_first(how: str, tmp_path: Path) -> None:
    trained = run_world(_hold, 1, how, tmp_path / "last", 2)[0]
    convert(tmp_path / "last", tmp_path / "out", "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(_logits(tmp_path / "out", dtype=torch.float32), trained)
    assert ("model.lm_head.weight" in open_checkpoint(tmp_path / "out").entries) is (how != "tied")
    straight = run_world(_hold, 1, how, tmp_path / "straight", 1, 5, tmp_path / "out")[0]
    convert(tmp_path / "out", tmp_path / "native", "native")
    assert torch.equal(run_world(_hold, 1, how, tmp_path / "again", 1, 6, tmp_path / "native")[0], straight)


@pytest.mark.filterwarnings("ignore")
def test_two_models_beside_each_other_are_refused_by_name(tmp_path: Path) -> None:
    run_world(_hold, 1, "two", tmp_path / "last", 1)
    with pytest.raises(CheckpointError, match="several models of transformers, teacher, hf, and a folder is one"):
        convert(tmp_path / "last", tmp_path / "out", "hf")
    _module(False).model.save_pretrained(tmp_path / "hf")
    with pytest.raises(WorldError, match="one model of transformers, but the module has several, teacher, hf"):
        run_world(_hold, 1, "two", tmp_path / "again", 1, 0, tmp_path / "hf")


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_adapters_is_refused_by_name(tmp_path: Path) -> None:
    run_world(_hold, 1, "adapted", tmp_path / "last", 1)
    with pytest.raises(CheckpointError, match=r"hf \(_Adapted\) has other weights than a model of transformers, .* merge adapters"):
        convert(tmp_path / "last", tmp_path / "out", "hf")
    _module(False).model.save_pretrained(tmp_path / "hf")
    with pytest.raises(WorldError, match=r"hf \(_Adapted\) has other weights than such a model"):
        run_world(_hold, 1, "adapted", tmp_path / "again", 1, 0, tmp_path / "hf")


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_not_what_its_class_makes_of_its_config_is_refused_by_name(tmp_path: Path) -> None:
    run_world(_hold, 1, "changed", tmp_path / "last", 1)
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "last", tmp_path / "out", "hf")
    layer = "model.layers.1.self_attn.q_proj"
    told = f"hf (LlamaForCausalLM) has {layer}.0.weight, extra.weight, extra.bias and lacks {layer}.weight, unlike a model of its class"
    assert told in str(error.value)
    convert(tmp_path / "last", tmp_path / "out.ckpt", "ckpt")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.bool, torch.complex64], ids=str)
def test_tensors_of_a_dtype_that_a_folder_has_no_place_for_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    told = {"aliases": {"a": "a", "b": "b"}, "huggingface": {"prefix": "", "config": {}}}
    entries = {"model.a": Entry.of(torch.ones(3)), "model.b": Entry.of(torch.tensor([1, 0, 1]).to(dtype))}
    source = Source(tmp_path, "made", {"lightning_par_module": told}, entries)
    if dtype == torch.complex64:
        with pytest.raises(CheckpointError, match=r"has no place for b \(complex64\)"):
            hf.write_hf(source, tmp_path / "out", DeepSpeedTarget())
        return
    hf.write_hf(source, tmp_path / "out", DeepSpeedTarget())
    assert torch.equal(open_checkpoint(tmp_path / "out").read("model.b"), source.read("model.b"))


def test_a_dtype_that_is_not_read_is_named(tmp_path: Path) -> None:
    header = b'{"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}'
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: w has the dtype F8_E4M3, which is not read: only F64, F32"):
        open_checkpoint(tmp_path)


def test_an_export_without_a_weight_of_the_model_is_refused(tmp_path: Path) -> None:
    told = {"aliases": {"hf.a": "hf.a", "hf.b": "other"}, "huggingface": {"prefix": "hf.", "config": {}}}
    source = Source(tmp_path, "made", {"lightning_par_module": told}, {"model.hf.a": Entry.of(torch.ones(2))})
    with pytest.raises(CheckpointError, match="lacks of the model of transformers: b"):
        hf.hf_part(source)
    more = replace(source, entries=source.entries | {"model.other": Entry.of(torch.ones(2)), "model.hf.untold": Entry.of(torch.ones(2))})
    assert list(hf.hf_part(more).entries) == ["model.a", "model.b", "model.untold"]


def _begin(layout: dict[str, int], source: Path | None, weights: Path) -> tuple[dict[str, torch.Tensor] | None, int]:
    """Train two steps from a checkpoint, or from a model that transformers has loaded."""
    strategy = HybridParallelStrategy(**layout)
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, max_steps=2, **QUIET)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    module = HFCausalLM(str(weights), optimizer=optimizer, decay_steps=5) if source is None else _module(False)
    trainer.fit(module, token_loader(4, rows=8, **strategy.distributed_sampler_kwargs), ckpt_path=source)
    return strategy.full_state_dict(), trainer.global_step


@pytest.mark.parametrize("layout", [{"dp": 1}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_training_begins_with_the_weights_of_a_folder_of_transformers(layout: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(4)
    _module(False).model.apply(_shake).save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "native", "native")
    (wanted, steps) = run_world(_begin, 1, {"dp": 1}, None, tmp_path / "hf")[0]
    for folder in ("hf", "native"):
        got = run_world(_begin, world_size(layout), layout, tmp_path / folder, tmp_path / "hf")[0]
        assert got[1] == steps == 2
        for name, value in wanted.items():
            torch.testing.assert_close(got[0][name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def _shake(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.add_(0.1 * torch.randn_like(param))


@pytest.mark.filterwarnings("ignore")
def test_many_files_and_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = run_world(_train, 1, {"dp": 1}, tmp_path / "last", False)[0]
    monkeypatch.setattr(hf, "SHARD", 8000)
    report = convert(tmp_path / "last", tmp_path / "out", "hf", target=DeepSpeedTarget(dtype="bf16"))
    assert len(report.rounded) == report.tensors
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    half = {name: value.bfloat16().float() for name, value in weights.items()}
    assert torch.equal(_logits(tmp_path / "out", dtype=torch.float32), _logits_of(half, False))
    (first, *_) = sorted((tmp_path / "out").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{first.name} is damaged"):
        open_checkpoint(tmp_path / "out")


HEADERS = {
    "a length beyond the file": (2**62, b"{}"),
    "a list": (None, b"[1, 2]"),
    "no tensor": (None, b'{"weight": 1}'),
    "no numbers": (None, b'{"weight": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}'),
    "no JSON": (None, b"\xff\xfe"),
}


@pytest.mark.parametrize("told", HEADERS.values(), ids=HEADERS)
def test_a_damaged_header_is_named(told: tuple[int | None, bytes], tmp_path: Path) -> None:
    length, header = told
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    with pytest.raises(CheckpointError, match=r"is damaged"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert not open_checkpoint(tmp_path).entries
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"is damaged"):
        open_checkpoint(tmp_path)


def test_an_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/config.json").write_text("{}")
    (tmp_path / "secret.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    for file in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        (tmp_path / "out/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(CheckpointError, match=rf"the file '{file}' cannot be the name of a file or folder"):
            open_checkpoint(tmp_path / "out")


def test_a_module_without_a_model_of_transformers_is_refused(tmp_path: Path) -> None:
    write_native(synthetic(), tmp_path / "last")
    with pytest.raises(CheckpointError, match="does not tell of a model of Hugging Face transformers"):
        convert(tmp_path / "last", tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
