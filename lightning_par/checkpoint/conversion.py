"""From any format to any other, a tensor at a time; every tensor of the result is compared with that of the source."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_par.checkpoint import numbers
from lightning_par.checkpoint.deepspeed import is_deepspeed, is_universal, open_deepspeed, open_universal, write_deepspeed, write_universal
from lightning_par.checkpoint.deepspeed.write import Target
from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.files import give_back, local_path, put_in_place, without_scheme
from lightning_par.checkpoint.hf import hf_part, is_hf, open_hf, write_hf
from lightning_par.checkpoint.layers import tell_layers
from lightning_par.checkpoint.native import is_native, require_name
from lightning_par.checkpoint.source import MODEL, MODULE, OPTIMIZERS, Contents, Entry, Joining, Source, is_number
from lightning_par.checkpoint.whole import open_native, open_single, write_native, write_single


def is_torch(path: Path) -> bool:
    """Whether ``path`` is a file that begins as those of ``torch.save`` (zip; before torch 1.6 a pickle), or cannot be read."""
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as opened:
            return opened.read(2).startswith((b"PK", b"\x80"))
    except OSError:
        return True  # opening it tells why


READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Source]], ...] = (
    (is_native, open_native),
    (is_universal, open_universal),
    (is_deepspeed, open_deepspeed),
    (is_hf, open_hf),
    (is_torch, open_single),
)
"""Whether a path is of a format, and how it is opened: the first that fits."""

WRITERS: dict[str, Callable[[Source, Path, Target], None]] = {
    "native": lambda source, path, _: write_native(source, path),
    "ckpt": lambda source, path, _: write_single(source, path),
    "deepspeed": write_deepspeed,
    "universal": write_universal,
    "hf": write_hf,
}

READ: dict[str, tuple[str, ...]] = {"deepspeed": tuple(vars(Target())), "universal": ("dtype",), "hf": ("dtype",), "native": (), "ckpt": ()}
"""What of a target a format reads."""

MALFORMED = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What comes up where a file holds other things than its format has."""

OFTEN = 2**23
"""Bytes of tensors that are read before memory is given back."""


class Progress(Protocol):
    """Told how many bytes of tensors the source has, and whenever some of them were read to be written, or were ``compared``."""

    def begin(self, total: int) -> None: ...

    def advance(self, amount: int, *, compared: bool) -> None: ...


class Silent:
    """Nobody watches."""

    def begin(self, total: int) -> None:
        """Nothing."""

    def advance(self, amount: int, *, compared: bool) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Report:
    """What was converted: every tensor of the source is in the result, to the bit, or rounded to the result's dtype."""

    source: str
    tensors: int
    elements: int
    rounded: tuple[str, ...]


def open_checkpoint(path: str | os.PathLike[str], joining: Joining | None = None) -> Source:
    """A checkpoint of any format that we read. Any process may call alone.

    Args:
        joining: what files of DeepSpeed's pipeline and tensor ranks do not tell.

    Raises:
        CheckpointError: there is none, it is incomplete or damaged, or would run code.
    """
    path = Path(without_scheme(path))
    place = path if path.name else path.resolve()
    for fits, opens in READERS:
        if fits(place):
            try:
                return opens(place) if joining is None else _joined(opens, place, joining)
            except CheckpointError:
                raise
            except MALFORMED as error:
                what = f"{opens.__name__.removeprefix('open_')} ({type(error).__name__}: {error})"
                raise CheckpointError(f"{place} cannot be read as {what}: it is damaged, or something else wrote it") from error
    what = "no checkpoint" if place.exists() else "not there"
    if place.is_file():
        what = "no checkpoint of a known format: it is damaged, or no file of torch.save"
    raise CheckpointError(
        f"{place} is {what}: give a complete folder of lightning_par, a .ckpt file of "
        "Lightning, a folder that DeepSpeed's save_checkpoint wrote, a universal checkpoint, or a folder of transformers with safetensors"
    )


def _joined(opens: Callable[..., Source], place: Path, joining: Joining) -> Source:
    if opens is open_deepspeed:
        return opens(place, joining)
    if joining.tp_plan is not None:
        raise CheckpointError(f"tp_plan: {place} holds whole parameters; a plan joins those that tensor ranks of DeepSpeed wrote")
    source = opens(place)
    return source if joining.layers is None else tell_layers(source, joining.layers)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    format: str = "native",
    *,
    target: Target | None = None,
    optimizer: bool = True,
    layers: Sequence[str] | Mapping[str, str] | None = None,
    tp_plan: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the checkpoint ``src`` anew at ``dst``, in one process, without ranks or devices.

    It is written beside ``dst``, read back, compared tensor by tensor by checksum, and then takes its name by one rename. Memory stays
    near the largest tensor; all but universal checkpoints need room on the disk for a second copy while they are written.

    Args:
        format: native, ckpt, deepspeed, universal, or hf (the weights of a model of transformers, for ``from_pretrained``).
        target: deepspeed: the stage, number of data ranks and precision of the engine that is to load it; universal and hf: the precision.
        optimizer: take the optimizers' state along, and beside averages of weights those that are trained.
        layers: of a pipeline of DeepSpeed: what each layer is in the module, ``["embed", "layers.*", "norm", "head"]``. If it is left out,
            parameters are named by layer (``3.weight``), and ``ckpt_path`` finds by order what they are in a module.
        tp_plan: of tensor ranks of DeepSpeed: how each parameter was cut, ``{"layers.*.up": "colwise", "layers.*.qkv": {"dim": 0, "parts":
            3}}``; see Note [How a parameter was cut] in ``checkpoint.deepspeed.join``.

    Raises:
        CheckpointError: ``src`` cannot be read, ``dst`` is there already, or one is inside the other, the format has no place for
            something, or no use for what ``target`` says, or the comparison fails.
    """
    if not isinstance(format, str) or format not in WRITERS:
        raise CheckpointError(f"format={format!r}: choose one of {', '.join(WRITERS)}")
    target = Target() if target is None else target
    if not isinstance(target, Target):
        raise CheckpointError(f"target={target!r} is a {type(target).__name__}: give a DeepSpeedTarget, such as DeepSpeed{Target()}")
    if unread := [f"{key}={value}" for key, value in vars(target).items() if value != getattr(Target, key) and key not in READ[format]]:
        why = "is the same for any number of ranks" if READ[format] else "has no ranks, and keeps every tensor in its own dtype"
        raise CheckpointError(f"{', '.join(unread)}: format={format} {why}")
    if not isinstance(optimizer, bool):
        raise CheckpointError(f"optimizer={optimizer!r}: must be true or false")
    place = Path(local_path(dst))
    if format == "native":
        require_name(place)
    _require_apart(without_scheme(src), place)
    with put_in_place(place) as path:
        source = open_checkpoint(src, None if layers is None and tp_plan is None else Joining(layers, tp_plan))
        with _faults_told(f"{src} cannot be converted to format={format}"):
            source.check()
            source = hf_part(source) if format == "hf" else _named(source) if optimizer else without_optimizer(source)
            progress = progress or Silent()
            progress.begin(sum(map(_bytes, source.entries.values())))
            WRITERS[format](_watched(source, progress), path, target)
            rounded = compare(source, open_checkpoint(path), progress)
    return Report(source.format, len(source.entries), sum(math.prod(entry.shape) for entry in source.entries.values()), tuple(rounded))


def _require_apart(src: str | os.PathLike[str], dst: Path) -> None:
    """Raise a CheckpointError if one is inside the other."""
    paths = {Path(os.path.realpath(path)): path for path in (src, dst)}
    for inner, outer in ((inner, outer) for inner in paths for outer in paths):
        if outer in inner.parents:
            raise CheckpointError(
                f"{paths[inner]} is inside {paths[outer]}: a checkpoint is written beside the one it is made from; choose another path"
            )


@contextmanager
def _faults_told(what: str) -> Iterator[None]:
    """What comes up is raised as a CheckpointError that begins with ``what``."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def compare(source: Source, result: Source, progress: Progress) -> list[str]:
    """The names of tensors that ``result`` holds rounded to a narrower dtype; all others have the same values.

    Raises:
        CheckpointError: a tensor is missing in ``result`` or has another checksum; all of them are named.
    """
    faults, rounded = [], []
    for name, entry in _watched(source, Silent()).entries.items():
        if name not in result.entries:
            faults.append(f"{name} is missing")
            continue
        dtype = result.entries[name].dtype
        if checksum(entry.read().to(dtype)) != checksum(result.read(name)):
            faults.append(f"{name} differs")
        elif torch.promote_types(dtype, entry.dtype) != dtype:
            rounded.append(name)
        progress.advance(_bytes(entry), compared=True)
    if faults:
        raise CheckpointError(f"what was written is not what {source.path} holds:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return rounded


def checksum(tensor: Tensor) -> bytes:
    """Of shape, dtype and every bit."""
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def without_optimizer(source: Source) -> Source:
    """Weights and buffers, and what is no tensor."""
    entries = {name: source.entries[name] for name in source.weights}
    return replace(source, meta=source.meta | {OPTIMIZERS: []}, entries=entries)


def _named(source: Source) -> Source:
    """Names for numbers, where the file tells them: torch has named them, one group has all parameters of the module, or shapes do."""
    source.require_told()
    if not source.is_numbered:
        return source
    metas = source.meta[OPTIMIZERS]
    if all("param_names" in group for meta in metas for group in meta["groups"]):
        return source.named([[name for group in meta["groups"] for name in group["param_names"]] for meta in metas])
    contents = Contents.of(source)
    names = [name for name in dict.fromkeys(contents.aliases.values()) if name not in contents.buffers]
    if len(metas) == 1 and len(metas[0]["groups"]) == 1 and len(names) == len(metas[0]["groups"][0]["params"]):
        return source.named([names])
    shaped = [(name, source.entries[f"{MODEL}.{name}"].shape) for name in names]
    orders = [numbers.by_shapes(numbers.shapes(source, index), shaped) for index in range(len(metas))]
    if None not in orders:
        return source.named([[name for group in order for name in group] for order in orders])
    raise CheckpointError(
        f"{source.path} numbers the parameters of its optimizer, and shapes do not tell which is which: load it once with "
        "trainer.fit(ckpt_path=...), which knows the model, and convert what that saves; or leave the state out with optimizer=false"
    )


def _watched(source: Source, progress: Progress) -> Source:
    """The same; the first reading of each tensor is told, and memory is given back now and then."""
    seen: set[str] = set()
    since = [0]

    def watch(name: str, entry: Entry) -> Entry:
        def read() -> Tensor:
            since[0] += _bytes(entry)
            if since[0] >= OFTEN:
                since[0] = 0
                give_back()
            value = entry.read()
            if name not in seen:
                seen.add(name)
                progress.advance(_bytes(entry), compared=False)
            return value

        return replace(entry, read=read)

    return replace(source, entries={name: watch(name, entry) for name, entry in source.entries.items()})


def _bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def summary(source: Source) -> Iterable[tuple[str, str]]:
    """What a checkpoint holds, as rows of a name and a value, for people."""
    model = {name.removeprefix(f"{MODEL}."): entry for name, entry in source.entries.items() if name.startswith(f"{MODEL}.")}
    model = {name: entry for name, entry in model.items() if not is_number(name)}
    told = source.meta.get(MODULE, {})
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in model.values()})
    tied = [key for key, name in told.get("aliases", {}).items() if key != name]
    yield "format", source.format
    yield from ((name.replace("_", " "), str(value)) for name, value in source.facts.items() if value is not None)
    yield "weights", f"{len(model)} tensors, {sum(math.prod(entry.shape) for entry in model.values()):,} elements, {', '.join(dtypes)}"
    if source.current:
        yield "averaged", "the weights are averages; those that are trained are beside them"
    for what, names in (("buffers", told.get("buffers", ())), ("frozen", told.get("frozen", ())), ("tied", tied)):
        if names:
            yield what, ", ".join(names)
    for index, meta in enumerate(source.meta.get(OPTIMIZERS, [])):
        for group in meta["groups"]:
            options = ", ".join(f"{key}={group[key]}" for key in ("lr", "betas", "momentum", "weight_decay") if key in group)
            yield f"optimizer {index}", f"{len(group['params'])} parameters, {options}"
    yield from ((key.replace("_", " "), str(source.meta[key])) for key in ("epoch", "global_step") if key in source.meta)
    yield "bytes", f"{sum(map(_bytes, source.entries.values())):,}"
