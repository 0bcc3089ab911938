"""Text as bytes: windows of `sequence_length` tokens, one token a byte.

Note [the same batches everywhere]
Training sample i is a window at an offset that depends on (seed, i) alone, and step s takes samples s*batch_size ...
(s+1)*batch_size - 1, where `batch_size` is the global one. Replica r of n reads samples r, r+n, r+2n, ... of that range. So any
number of replicas sees the same global batches in the same order, and so does a run that goes on from a checkpoint: the loader's
state, which Lightning saves, is how many samples all replicas have been given. Epochs only group them: the next one brings new windows.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

VOCAB_SIZE = 256
DEFAULT_CACHE = "~/.cache/lightning_par"

Sample = dict[str, Tensor]  # input_ids and labels, both int64 [sequence_length]; the model shifts the labels


class TextDataModule(L.LightningDataModule):
    """`source`: None for the documentation topics inside Python's standard library, else text files, or folders of them.

    `batch_size` is the global batch, over all replicas. The last `held_out` share of the bytes is for validation and test, read
    in order in windows that do not overlap; `held_out_batches` caps how many batches of them. `samples_per_epoch` defaults to as
    many windows as cover the training text once.
    """

    def __init__(
        self,
        source: str | Path | Sequence[str | Path] | None = None,
        *,
        sequence_length: int = 128,
        batch_size: int = 16,
        held_out: float = 0.1,
        held_out_batches: int | None = None,
        samples_per_epoch: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | Path = DEFAULT_CACHE,
    ) -> None:
        super().__init__()
        if not 0 < held_out < 1:
            raise ValueError(f"held_out={held_out} must lie between 0 and 1: it is the share of the text kept for validation")
        self.files = None if source is None else text_files(source)
        self.sequence_length, self.batch_size = sequence_length, batch_size
        self.held_out, self.held_out_batches = held_out, held_out_batches
        self.samples_per_epoch, self.seed, self.num_workers = samples_per_epoch, seed, num_workers
        self.cache_dir = Path(cache_dir).expanduser()

    @override
    def prepare_data(self) -> None:
        token_file(self.files, self.cache_dir)

    @override
    def setup(self, stage: str | None = None) -> None:
        tokens = np.memmap(token_file(self.files, self.cache_dir), dtype=np.uint8, mode="r")
        boundary = int(len(tokens) * (1 - self.held_out))
        train, held_out = tokens[:boundary], tokens[boundary:]
        self._require(len(train) > self.sequence_length, len(train), "training", "give more text, or shorten data.sequence_length")
        windows = len(held_out) // self.sequence_length // self.batch_size * self.batch_size
        self._require(windows > 0, len(held_out), "held-out", "give more text, raise data.held_out, or lower data.batch_size")
        if self.held_out_batches is not None:
            windows = min(windows, self.held_out_batches * self.batch_size)
        self.train_windows = RandomWindows(train, self.sequence_length, self.seed)
        self.held_out_windows = WindowsInOrder(held_out, self.sequence_length, windows)

    def _require(self, enough: bool, found: int, part: str, fix: str) -> None:
        if not enough:
            wanted = f"sequence_length={self.sequence_length}, batch_size={self.batch_size}"
            raise ValueError(f"{wanted}: the {part} text has only {found} bytes, less than one batch of windows; {fix}")

    @override
    def train_dataloader(self) -> DataLoader[Sample]:
        replicas = self._replicas()
        samples = self.samples_per_epoch or len(self.train_windows.tokens) // self.sequence_length
        sampler = WindowSampler(max(1, samples // self.batch_size) * self.batch_size, **replicas)
        return ResumableLoader(self.train_windows, self._local_batch(replicas), sampler=sampler, num_workers=self.num_workers)

    @override
    def val_dataloader(self) -> DataLoader[Sample]:
        replicas = self._replicas()
        sampler = DistributedSampler(self.held_out_windows, shuffle=False, **replicas)
        return DataLoader(self.held_out_windows, self._local_batch(replicas), sampler=sampler, num_workers=self.num_workers)

    @override
    def test_dataloader(self) -> DataLoader[Sample]:
        return self.val_dataloader()

    def _replicas(self) -> dict[str, int]:
        """`num_replicas` and `rank` among those that read different samples; one replica without a distributed trainer."""
        trainer = self.trainer
        kwargs = None if trainer is None else trainer.distributed_sampler_kwargs
        return {"num_replicas": 1, "rank": 0} | (kwargs or {})

    def _local_batch(self, replicas: dict[str, int]) -> int:
        local, rest = divmod(self.batch_size, replicas["num_replicas"])
        if rest:
            raise ValueError(
                f"batch_size={self.batch_size} does not split evenly over {replicas['num_replicas']} data-parallel replicas; "
                f"data.batch_size is the global batch: make it a multiple of {replicas['num_replicas']}"
            )
        return local


class RandomWindows(Dataset[Sample]):
    """Window i, for any i >= 0, at an offset drawn from (seed, i) alone."""

    def __init__(self, tokens: np.ndarray, length: int, seed: int) -> None:
        self.tokens, self.length, self.seed = tokens, length, seed

    def __getitem__(self, index: int) -> Sample:
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        return _sample(self.tokens, int(draw.integers(len(self.tokens) - self.length + 1)), self.length)


class WindowsInOrder(Dataset[Sample]):
    def __init__(self, tokens: np.ndarray, length: int, count: int) -> None:
        self.tokens, self.length, self.count = tokens, length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        return _sample(self.tokens, index * self.length, self.length)


def _sample(tokens: np.ndarray, start: int, length: int) -> Sample:
    window = torch.from_numpy(tokens[start : start + length].astype(np.int64))
    return {"input_ids": window, "labels": window}


class WindowSampler(DistributedSampler[Sample]):
    """Numbers this replica's samples from `first` on; see Note [the same batches everywhere].

    A DistributedSampler, so that Lightning leaves it as it is; the epoch that Lightning tells it has no effect.
    """

    def __init__(self, samples: int, *, num_replicas: int, rank: int) -> None:
        super().__init__(range(samples), num_replicas=num_replicas, rank=rank, shuffle=False)
        self.samples = samples  # of all replicas together, in an epoch
        self.first = 0

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first + self.rank, self.first + self.samples, self.num_replicas))


class ResumableLoader(DataLoader[Sample]):
    """A loader over a WindowSampler that counts the samples of all replicas, and always goes on with the next one.

    The count is the state that Lightning saves and restores. It is no place inside an epoch: the next epoch brings new windows.
    """

    state_is_global = True  # it means the same for any number of replicas

    def __init__(self, dataset: RandomWindows, batch_size: int, *, sampler: WindowSampler, num_workers: int) -> None:
        super().__init__(dataset, batch_size, sampler=sampler, num_workers=num_workers)
        self._given = 0

    @override
    def __iter__(self) -> Iterator[Any]:
        self.sampler.first = self._given
        for batch in super().__iter__():
            self._given += self._global_batch
            yield batch

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.sampler.num_replicas

    def state_dict(self) -> dict[str, int]:
        return {"samples": self._given}

    def state_before(self, batches: int) -> dict[str, int]:
        """As many batches ago: their gradients are in no checkpoint."""
        return {"samples": self._given - batches * self._global_batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._given = state["samples"] if "samples" in state else state["drawn"] * self._global_batch  # as saved by earlier versions


def text_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `source` names, a folder standing for all the files in it, sorted by path."""
    roots = [Path(source)] if isinstance(source, str | Path) else [Path(root) for root in source]
    missing = [str(root) for root in roots if not root.exists()]
    if missing:
        raise FileNotFoundError(f"data.source: no such file or folder: {', '.join(missing)} (in {Path.cwd()})")
    files = [file for root in roots for file in (sorted(f for f in root.rglob("*") if f.is_file()) if root.is_dir() else [root])]
    if not files:
        raise FileNotFoundError(f"data.source: no file in {', '.join(map(str, roots))}")
    return files


def token_file(files: Sequence[Path] | None, cache_dir: Path) -> Path:
    """A file with all the bytes of `files` (None: the embedded text) one after the other, made in `cache_dir` if it is not there.

    Several processes may ask at once: each writes its own temporary file and renames it into place.
    """
    if files is not None and len(files) == 1:
        return files[0]
    path = cache_dir / f"tokens-{_fingerprint(files)}.bin"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_dir, prefix=path.name, delete=False) as partial:
            partial.writelines(_embedded_text() if files is None else (file.read_bytes() for file in files))
        os.replace(partial.name, path)
    return path


def _fingerprint(files: Sequence[Path] | None) -> str:
    digest = hashlib.sha256()
    if files is None:
        for text in _embedded_text():
            digest.update(text)
    else:
        for file in files:
            stat = file.stat()
            digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _embedded_text() -> Iterable[bytes]:
    from pydoc_data.topics import topics

    return (text.encode() for _, text in sorted(topics.items()))
