"""Any causal language model of Hugging Face transformers as a LightningModule, trained as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from lightning_par.recipes.causal import CausalLMModule, OptimizerFactory

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class HFCausalLM(CausalLMModule):
    """`model`: a name or path to load (with weights), a config object, or a mapping with `model_type` and config fields.

    The last two build the model from scratch. Further options as in CausalLMModule; needs the extra `hf`.
    """

    def __init__(
        self,
        model: str | PretrainedConfig | Mapping[str, Any],
        *,
        optimizer: OptimizerFactory | None = None,
        warmup_steps: int = 0,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.1,
    ) -> None:
        config = hf_config(model)
        from transformers import AutoModelForCausalLM

        if isinstance(model, str):
            network = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32)
        else:
            network = AutoModelForCausalLM.from_config(config)
        network.train()
        schedule = {"warmup_steps": warmup_steps, "decay_steps": decay_steps, "min_lr_ratio": min_lr_ratio}
        super().__init__(network, optimizer=optimizer, **schedule)
        self.save_hyperparameters({"model": config.to_diff_dict(), **schedule})


def hf_config(model: str | PretrainedConfig | Mapping[str, Any]) -> PretrainedConfig:
    """The config that `HFCausalLM(model)` uses; reads a name or path, builds nothing. The cache for generation is off."""
    try:
        from transformers import AutoConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("HFCausalLM needs transformers: pip install 'lightning-par[hf]'") from error

    if isinstance(model, str):
        return AutoConfig.from_pretrained(model, use_cache=False)
    if isinstance(model, Mapping):
        if "model_type" not in model:
            raise ValueError(f"model={dict(model)}: a mapping needs the key 'model_type', for example model_type='llama'")
        return AutoConfig.for_model(**{"use_cache": False, **model})
    return model
