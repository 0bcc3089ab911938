from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_par.recipes.gpt import GPTModule
from lightning_par.recipes.text import TextDataModule, WindowSampler, token_file


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(256)) * 8)  # 2048 bytes; a window says where it starts, modulo 256
    return path


def data_module(text, replicas=1, rank=0, **options):
    data = TextDataModule(text, **{"sequence_length": 16, "batch_size": 12, **options})
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": rank})
    data.setup()
    return data


def batches(loader, count):
    return [batch["input_ids"] for batch in islice(loader, count)]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_k10_any_number_of_replicas_sees_the_same_global_batches(text, replicas):
    whole = batches(data_module(text).train_dataloader(), 5)
    parts = [batches(data_module(text, replicas, rank).train_dataloader(), 5) for rank in range(replicas)]
    for step, expected in enumerate(whole):
        together = torch.stack([part[step] for part in parts], dim=1).flatten(0, 1)  # replica r holds samples r, r+n, ...
        assert torch.equal(together, expected)


@pytest.mark.parametrize("back", [0, 1])
def test_k10_a_state_means_the_same_for_any_number_of_replicas(text, back):
    """Also of a batch ago, whose gradient was not in the weights yet."""
    whole = batches(data_module(text).train_dataloader(), 5)
    half = data_module(text, 2, 0).train_dataloader()
    batches(half, 3)
    state = half.state_before(back)
    assert half.state_is_global
    parts = [data_module(text, 3, rank).train_dataloader() for rank in range(3)]
    for part in parts:
        part.load_state_dict(state)
    together = torch.stack([batches(part, 1)[0] for part in parts], dim=1).flatten(0, 1)
    assert torch.equal(together, whole[3 - back])


def test_a_sample_is_a_window_of_the_text_and_its_own_label(text):
    (batch,) = islice(data_module(text).train_dataloader(), 1)
    assert batch["input_ids"].dtype == torch.int64
    assert batch["input_ids"].shape == (12, 16)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert ((batch["input_ids"].diff(dim=1) - 1) % 256 == 0).all()


def test_samples_depend_on_the_seed_and_later_epochs_bring_new_ones(text):
    loader = data_module(text).train_dataloader()
    first = batches(loader, 3)
    second = batches(loader, 3)
    other_seed = batches(data_module(text, seed=1).train_dataloader(), 3)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert not torch.equal(torch.cat(first), torch.cat(other_seed))
    assert list(WindowSampler(12, num_replicas=2, rank=1)) == [1, 3, 5, 7, 9, 11]


def test_the_held_out_part_comes_in_order_without_overlap_or_padding_and_is_never_trained_on(text):
    data = data_module(text, held_out=0.3, replicas=2)
    held_out = data.held_out_windows
    flat = torch.cat([held_out[i]["input_ids"] for i in range(len(held_out))])
    expected = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)[int(2048 * 0.7) :].long()
    assert torch.equal(flat, expected[: len(flat)])
    assert len(held_out) == 36
    assert sum(len(b["input_ids"]) for b in data.val_dataloader()) == 18
    assert len(data.train_windows.tokens) == int(2048 * 0.7)


def test_a_batch_that_does_not_split_over_the_replicas_is_refused(text):
    with pytest.raises(ValueError, match=r"batch_size=12 does not split evenly over 5 .*multiple of 5"):
        data_module(text, replicas=5).train_dataloader()


def test_too_little_text_is_refused_by_name(text):
    with pytest.raises(ValueError, match=r"training text has only .* bytes"):
        data_module(text, sequence_length=4000)
    with pytest.raises(ValueError, match=r"held-out text has only .* bytes"):
        data_module(text, batch_size=100)
    with pytest.raises(ValueError, match=r"held_out=1\.5"):
        data_module(text, held_out=1.5)


def test_a_folder_stands_for_its_files_in_order_and_what_is_missing_is_named(tmp_path):
    folder = tmp_path / "books"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("second")
    (folder / "a.txt").write_text("first ")
    (folder / "sub" / "c.txt").write_text(" third")
    assert token_file(TextDataModule(folder).files, tmp_path / "cache").read_text() == "first second third"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TextDataModule([folder, tmp_path / "nowhere"])


def test_many_processes_may_make_the_token_file_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: token_file(None, tmp_path), range(8)))
    assert len(paths) == 1
    assert list(tmp_path.iterdir()) == list(paths)
    assert paths.pop().stat().st_size > 300_000


class Seen(Callback):
    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch["input_ids"])


@pytest.mark.parametrize("stop", [3, 10, 14], ids=["mid-epoch", "end of epoch", "second epoch"])
def test_k10_a_resumed_run_goes_on_with_the_batches_of_the_straight_run(text, tmp_path, stop):
    def run(max_steps, checkpoint=None):
        seen = Seen()
        trainer = L.Trainer(
            max_steps=max_steps,
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            callbacks=[seen],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        module = GPTModule({"hidden": 8, "layers": 1, "heads": 2, "ffn": 8})
        data = TextDataModule(text, sequence_length=16, batch_size=12, samples_per_epoch=120)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt", weights_only=False)
        return seen.batches

    straight = run(24)
    resumed = run(stop) + run(24, tmp_path / f"{stop}.ckpt")
    assert len(straight) == 24
    assert torch.equal(torch.stack(straight), torch.stack(resumed))
