from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_par import HybridParallelStrategy, ParallelLayout, ZeroOptions
from lightning_par.cli.check import check_layout
from lightning_par.cli.launch import CONF

CHOICES = sorted(f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml") if file.parent.name != "paths")


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", overrides=["paths.run=somewhere", *overrides])


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_and_resolves(choice):
    assert OmegaConf.to_container(composed(choice), resolve=True, throw_on_missing=True)


def test_every_field_of_the_layout_can_be_overridden_without_a_plus():
    parallel = composed().parallel
    assert set(parallel) == {*ParallelLayout.__dataclass_fields__, "async_save", "restore_optimizer", "zero_options"}
    assert ZeroOptions(**parallel.zero_options) == ZeroOptions()


def test_the_demo_is_a_valid_layout_of_four_ranks():
    layout = check_layout(composed("experiment=demo"))
    assert (layout.tp, layout.pp, layout.dp) == (2, 2, 1)


@pytest.mark.parametrize("model", ["gpt", "hf_llama", "hf_gpt2"])
def test_h6_what_is_built_holds_plain_containers_only(model):
    module = instantiate(composed(f"model={model}").model, _convert_="all")
    optimizer = module.optimizer_factory([{"params": list(module.parameters())}])
    assert type(optimizer.param_groups[0]["betas"]) in (list, tuple)
    assert plain(dict(module.hparams))


def plain(value):
    if isinstance(value, dict):
        return type(value) is dict and all(plain(v) for v in value.values())
    if isinstance(value, list | tuple):
        return all(plain(v) for v in value)
    return value is None or type(value) in (int, float, str, bool)


def test_the_tree_is_on_the_search_path_of_other_hydra_apps(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults:\n  - parallel: zero1\n  - _self_\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("mine", overrides=["parallel.tp=2"])
    assert HybridParallelStrategy(**config.parallel).requested == ParallelLayout(zero=1, tp=2)
