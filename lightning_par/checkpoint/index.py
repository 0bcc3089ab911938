"""The index of a native checkpoint: torch's own file, read without running what is in it.

``torch.distributed.checkpoint`` pickles its index, which ``torch.load(weights_only=True)`` cannot read, and unpickles it freely. Here only
the names that such an index is made of are known; any other is refused. See Note [What is refused] in ``files``. So are names of files that
are not those of a checkpoint's own: they would lead out of its folder.
"""

from __future__ import annotations

import os
import pickle
import re
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata
from typing_extensions import override

from lightning_par.checkpoint.errors import CheckpointError

INDEX = ".metadata"
FILE = re.compile(r"__\d+_\d+\.distcp")
"""The names of the files with tensors."""

_KNOWN = {
    metadata.__name__: {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    filesystem.__name__: {"_StorageInfo"},
    "torch": {"Size"} | {f"{dtype}".removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}
"""By module, all that an index may name."""


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if name not in _KNOWN.get(module, ()):
            raise CheckpointError(f"it names {module}.{name}, which no index is made of, so reading it could run any code: refused")
        return super().find_class(module, name)


class IndexReader(dcp.FileSystemReader):
    """torch's reader, but for the index, which is read once and carefully."""

    @cached_property
    def _index(self) -> Metadata:
        with open(Path(self.path) / INDEX, "rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise CheckpointError(f"{INDEX} holds no index, but {type(index).__name__}")
        if strange := [name for name in _files(index) if not (isinstance(name, str) and FILE.fullmatch(name))]:
            raise CheckpointError(f"{INDEX} names {', '.join(map(repr, strange))}, which is no file of a checkpoint: refused")
        return index

    @property
    def files(self) -> set[str]:
        """The names of the files with tensors."""
        return _files(self._index)

    def at(self, folder: str | os.PathLike[str]) -> Self:
        """The same, where the folder is called so now."""
        self.path = self.fs.init_path(folder)
        return self

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def _files(index: Metadata) -> set[str]:
    return {info.relative_path for info in (index.storage_data or {}).values()}
