"""A rank's part of a tensor, in the words of ``torch.distributed.checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from lightning_par.layout import Box, ShardSpec


@dataclass(frozen=True)
class Shard:
    """Flat data and what part of the whole it is. DCP saves and loads it box by box: see Note [Boxes of a shard].

    Attributes:
        spec: which part of the whole tensor.
        data: contiguous, ``spec.span.size`` elements in any shape; loading writes into it.
        writes: of all ranks that hold this part, this one saves it.
        origin: a tensor that is not contiguous, of which ``data`` is a copy.
    """

    spec: ShardSpec
    data: Tensor
    writes: bool = True
    origin: Tensor | None = None

    @classmethod
    def of(cls, spec: ShardSpec, tensor: Tensor, *, writes: bool = True) -> Shard:
        """A tensor in any memory format."""
        tensor = tensor.detach()
        return cls(spec, tensor.contiguous(), writes, None if tensor.is_contiguous() else tensor)

    @classmethod
    def whole(cls, tensor: Tensor, *, writes: bool) -> Shard:
        """All of a tensor that every rank holds."""
        return cls.of(ShardSpec.whole(tensor), tensor, writes=writes)

    def __getattr__(self, name: str) -> Any:
        """Hooks that take it for a tensor are told."""
        raise AttributeError(
            f"a weight in checkpoint['state_dict'] is a rank's shard: it can be left out of the checkpoint, but has no {name}"
        )

    def loaded(self) -> None:
        """``data`` was written into."""
        if self.origin is not None:
            self.origin.copy_(self.data)

    def _view(self, box: Box) -> Tensor:
        return box.view(self.data.detach().view(-1))

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if not self.writes:
            return []
        properties = TensorProperties.create_from_tensor(self.data)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(self.spec.shape)),
            )
            for box in self.spec.boxes()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self.spec.boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self.spec.boxes():
            if torch.Size(box.offsets) == index.offset:
                return self._view(box)
        raise ValueError(f"no box at {index.offset} of {index.fqn} in {self.spec}")


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


class SavePlanner(DefaultSavePlanner):
    """Finds the data of shards; torch's own asks tensors only."""

    @override
    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class LoadPlanner(DefaultLoadPlanner):
    """As SavePlanner, for loading."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    @override
    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """As torch's own, which would put None in place of everything that is no tensor."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    @override
    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].loaded()
