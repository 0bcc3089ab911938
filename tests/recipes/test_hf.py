import pytest
import torch

pytest.importorskip("transformers")

from lightning_par.recipes.hf import HFCausalLM, hf_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.fixture
def tokens():
    return torch.randint(33, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_built_from_a_mapping_from_a_config_and_from_a_folder(tmp_path, tokens):
    torch.manual_seed(0)
    from_mapping = HFCausalLM(LLAMA)
    torch.manual_seed(0)
    from_config = HFCausalLM(hf_config(LLAMA))
    from_mapping.model.save_pretrained(tmp_path)
    from_folder = HFCausalLM(str(tmp_path))
    expected = from_mapping.model(input_ids=tokens, labels=tokens).loss
    for module in (from_config, from_folder):
        assert module.model.training
        assert torch.equal(module.model(input_ids=tokens, labels=tokens).loss, expected)


def test_the_saved_hyperparameters_are_plain_and_build_the_same_model():
    module = HFCausalLM(LLAMA)
    again = HFCausalLM(module.hparams["model"])
    assert [p.shape for p in again.parameters()] == [p.shape for p in module.parameters()]
    assert type(module.hparams["model"]) is dict


def test_a_mapping_without_model_type_is_refused():
    with pytest.raises(ValueError, match="model_type"):
        HFCausalLM({"vocab_size": 33})
