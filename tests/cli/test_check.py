import pytest
from omegaconf import OmegaConf

from lightning_par.cli.check import check_layout, check_strategy, check_world, local_world_size
from lightning_par.layout import LayoutError


def config(parallel=None, devices=1, model=None, batch_size=16):
    return OmegaConf.create(
        {
            "parallel": {"dp": "auto", "tp": 1, "pp": 1, "cp": 1, "zero": 0, "schedule": "1f1b", "microbatches": None} | (parallel or {}),
            "trainer": {"devices": devices, "num_nodes": 1, "accelerator": "cpu"},
            "model": model or {"config": {"layers": 4, "heads": 4, "kv_heads": 2, "vocab_size": 256}},
            "data": {"sequence_length": 128, "batch_size": batch_size},
        }
    )


def test_a_good_layout_gets_its_number_of_replicas():
    assert check_layout(config({"tp": 2}, devices=4)).dp == 2


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(LayoutError) as error:
        check_layout(config({"tp": 3, "pp": 5}, devices=4))
    message = str(error.value)
    for part in ("world size 4", "the model has 4", "4 attention heads", "2 key-value heads"):
        assert part in message


def test_the_batch_must_split_over_the_replicas_and_give_every_micro_batch_a_sample():
    with pytest.raises(LayoutError, match=r"data\.batch_size=16 .* dp=3 replicas: make it a multiple of 3"):
        check_layout(config(devices=3))
    with pytest.raises(LayoutError, match="microbatches=9"):
        check_layout(config({"pp": 2, "microbatches": 9}, devices=4))
    assert check_layout(config({"pp": 2, "microbatches": 8}, devices=4)).dp == 2


def test_async_save_is_true_or_false_and_for_our_own_strategy_only():
    assert check_layout(config({"async_save": True})).dp == 1
    with pytest.raises(LayoutError, match=r"parallel\.async_save=maybe: give true or false"):
        check_layout(config({"async_save": "maybe"}))
    check_strategy(OmegaConf.create({"parallel": {"dp": "auto", "async_save": False}, "trainer": {"strategy": "ddp"}}))
    with pytest.raises(LayoutError, match=r"trainer\.strategy=ddp replaces the whole group parallel, but parallel\.async_save=True is set"):
        check_strategy(OmegaConf.create({"parallel": {"dp": "auto", "async_save": True}, "trainer": {"strategy": "ddp"}}))


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama"},
        {"n_layer": 2, "n_head": 2, "model_type": "gpt2"},
    ],
)
def test_the_sizes_of_hugging_face_configs_are_read(sizes):
    with pytest.raises(LayoutError, match=r"pp=3 .* 2") as error:
        check_layout(config({"tp": 4, "pp": 3}, devices=12, model={"model": sizes}))
    assert "heads" in str(error.value)


def test_a_model_that_tells_nothing_is_not_checked():
    assert check_layout(config({"pp": 3}, devices=3, model={"_target_": "mine.Module"})).pp == 3


@pytest.mark.parametrize(("devices", "expected"), [(3, 3), ("3", 3), ([1, 3], 2), ("auto", 1), (-1, 1)])
def test_the_ranks_of_a_node_are_counted(devices, expected):
    assert local_world_size(config(devices=devices).trainer) == expected


def test_ranks_started_from_outside_must_be_as_many_as_the_config_says():
    check_world(config(devices=4).trainer, {"WORLD_SIZE": "4"})
    with pytest.raises(LayoutError, match=r"WORLD_SIZE=2 .* asks for 4"):
        check_world(config(devices=4).trainer, {"WORLD_SIZE": "2"})


def test_a_strategy_of_lightning_beside_a_parallel_layout_is_refused():
    chosen = config({"tp": 2})
    chosen.trainer.strategy = "ddp"
    with pytest.raises(LayoutError, match=r"trainer\.strategy=ddp replaces the whole group parallel, but parallel\.tp=2 is set"):
        check_strategy(chosen)
    chosen.parallel.tp = 1
    check_strategy(chosen)
