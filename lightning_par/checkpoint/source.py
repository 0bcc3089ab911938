"""A checkpoint of any format, seen as one: tensors that are read when they are wanted, and plain data.

Note [One form for all formats]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each format is a function that opens a file or folder as a ``Source`` and one that writes a ``Source``. So a conversion is one of the
first and one of the second, and a strategy that can load from a ``Source`` can load everything::

    entries   model.<name>                    a parameter or buffer, whole, under its first name in the module; parameters as exact as
                                              the format has them (float32 masters, not the half-precision values made of them)
              current.<name>                  where weight averaging was used: what is trained, and model.<name> its average
              optimizer.<i>.<name>.<key>      the state of optimizer i: moments in the shape of their parameter, step counts; a dot in a
                                              key is %2E there (``state_entry``), since names have dots
              rng.<rank>.<generator>          random generators
    meta      Lightning's keys (epoch, global_step, loops, lr_schedulers, ...) and
              optimizer_states                for each optimizer its groups, with the names of parameters, in the order it got them, and
                                              state that is no tensor
              lightning_par_module            aliases: each key of the state dict, in order, and the first name of what it stands for,
                                              and behind them, under its own name, what the state dict leaves out;
                                              buffers and frozen: first names; layers: see LAYERS; extra: what modules'
                                              get_extra_state returned, by its key in the state dict
              ParallelPrecision               what a loss scale remembers: scale, good, left, last_overflow, steps, skipped

Formats that number parameters instead of naming them (a ``.ckpt`` file of Lightning, DeepSpeed without ZeRO) have ``#<number>`` for the
name, which no parameter is called (``is_number``), until somebody who knows the order tells it: ``Source.named``.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.errors import CheckpointError
from lightning_par.checkpoint.shard import Shard

MODEL, CURRENT, OPTIMIZER, RNG = "model", "current", "optimizer", "rng"
OPTIMIZERS, MODULE, LOSS_SCALE = "optimizer_states", "lightning_par_module", "ParallelPrecision"
CURRENT_STATE, AVERAGING_STATE = "current_model_state", "averaging_state"
"""Lightning's keys, beside a state_dict of averages: the weights that are trained, and what the averages have to remember."""
DATA = "lightning_par_data"
"""The key of a run's place in its training data."""
LAYERS = "layers"
"""In what is told of the module: names are those of a list of layers ("3.weight"), whose places in the module nobody has told yet."""
EXTRA_STATES = "extra"
CHUNK = 2**20
NUMBERED = "#"
UNTOLD = "#?"
"""The only parameter of an optimizer whose state cannot be told apart, so that it has none."""


@dataclass(frozen=True)
class Entry:
    """A tensor that is read, whole and on CPU, each time it is asked for. It may share memory with a file: do not write into it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        plain = tensor.resolve_conj().resolve_neg()
        return cls(tuple(plain.shape), plain.dtype, lambda: plain)

    def like(self) -> Tensor:
        """One of its shape and dtype, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Joining:
    """What files of DeepSpeed's pipeline and tensor ranks do not tell.

    Attributes:
        layers: what each layer of a pipeline is in the module; see Note [What a layer is] in ``checkpoint.layers``.
        tp_plan: how tensor ranks cut each parameter; see Note [How a parameter was cut] in ``checkpoint.deepspeed.join``.
    """

    layers: Sequence[str] | Mapping[str, str] | None = None
    tp_plan: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Source:
    """An opened checkpoint. See Note [One form for all formats].

    Attributes:
        path: as given.
        format: in words, for people.
        facts: about the files, for people.
        files: of ``torch.save``, which hold a checksum of every tensor.
        mark: what tells it from another that takes its place while it is read, where that can be told.
    """

    path: Path
    format: str
    meta: dict[str, Any]
    entries: dict[str, Entry]
    facts: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    mark: bytes = b""

    def read(self, name: str) -> Tensor:
        return self.entries[name].read()

    def fill(self, shards: Mapping[str, Shard]) -> None:
        """Fill the data of ``shards``, in their own dtypes. Any rank may call alone.

        Raises:
            CheckpointError: a tensor is missing, or has another shape; all of them are named.
        """
        wanted = {name: shard for name, shard in shards.items() if shard.spec.span.size}
        require_fit(self.path, {name: entry.shape for name, entry in self.entries.items()}, wanted)
        for name, shard in wanted.items():
            whole, flat = self.read(name), shard.data.detach().view(-1)
            for box in shard.spec.boxes():
                box.view(flat).copy_(whole[tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))])
            shard.loaded()

    def check(self, *, index: int = 0, ranks: int = 1) -> None:
        """Look for damage, where the format can tell: this process does one part in ``ranks``.

        Raises:
            CheckpointError: files are damaged; all of them are named.
        """
        if faults := [fault for file in self.files[index::ranks] for fault in _damage(file)]:
            raise CheckpointError(f"checkpoint {self.path} is damaged: {'; '.join(faults)}")

    def renamed(self, rename: Callable[[str], str]) -> Source:
        """The same, with other names of parameters and buffers."""

        def told(module: Mapping[str, Any]) -> dict[str, Any]:
            aliases = {rename(key): rename(name) for key, name in module.get("aliases", {}).items()}
            lists = {key: [rename(name) for name in module[key]] for key in ("buffers", "frozen") if key in module}
            return {key: value for key, value in module.items() if key != LAYERS} | {"aliases": aliases} | lists

        metas = [
            {
                "groups": [group | {"params": [rename(name) for name in group["params"]]} for group in meta["groups"]],
                "scalars": {rename(name): state for name, state in meta["scalars"].items()},
            }
            for meta in self.meta.get(OPTIMIZERS, [])
        ]
        meta = self.meta | {OPTIMIZERS: metas, MODULE: told(self.meta.get(MODULE, {}))}
        return replace(self, meta=meta, entries={_renamed(name, rename): entry for name, entry in self.entries.items()})

    def with_weights(self, weights: Mapping[str, str | Tensor]) -> Source:
        """The same with these parameters and buffers alone, by name: each an entry of this checkpoint, or a tensor."""
        replaced = {*self.weights, *self.current}
        rest = {name: entry for name, entry in self.entries.items() if name not in replaced}
        chosen = {
            f"{MODEL}.{name}": Entry.of(weight) if isinstance(weight, Tensor) else self.entries[weight] for name, weight in weights.items()
        }
        return replace(self, entries=rest | chosen)

    def trained(self) -> Source:
        """The same with the weights that are trained in the place of their averages."""
        return self.with_weights({entry.removeprefix(f"{CURRENT}."): entry for entry in self.current}) if self.current else self

    @property
    def is_of_a_run(self) -> bool:
        """Whether it is a moment of a training, not weights alone that one may begin with."""
        return bool(self.meta.get(OPTIMIZERS)) or "global_step" in self.meta

    @property
    def weights(self) -> list[str]:
        """The entries of named parameters and buffers."""
        return [name for name in self.entries if name.startswith(f"{MODEL}.") and not is_number(name.removeprefix(f"{MODEL}."))]

    @property
    def current(self) -> list[str]:
        """The entries of what is trained, where ``weights`` are its averages."""
        return [name for name in self.entries if name.startswith(f"{CURRENT}.")]

    @property
    def is_numbered(self) -> bool:
        """Whether parameters of optimizers are numbered, not named."""
        return any(is_number(name) for meta in self.meta.get(OPTIMIZERS, []) for g in meta["groups"] for name in g["params"])

    def require_told(self) -> None:
        """Raise a CheckpointError if nobody can tell which state of an optimizer is whose."""
        if any(UNTOLD in group["params"] for meta in self.meta.get(OPTIMIZERS, []) for group in meta["groups"]):
            raise CheckpointError(
                f"{self.path}: the stages of a pipeline without ZeRO number the parameters of their optimizers, and shapes do not tell "
                "which is which: save with ZeRO stage 1, which holds the same, or convert the weights alone with optimizer=false"
            )

    def named(self, orders: Sequence[Sequence[str]], frozen: Collection[str] = ()) -> Source:
        """The same with names for numbers.

        Args:
            orders: the parameters of each optimizer, in the order it got them.
            frozen: those among them that the writer may have left out.

        Raises:
            CheckpointError: an optimizer has another number of parameters, or the state of one has another shape.
        """
        self.require_told()
        names: dict[str, str] = {}
        metas = []
        for index, (meta, order) in enumerate(zip_longest(self.meta.get(OPTIMIZERS, []), orders, fillvalue=())):
            count = sum(len(group["params"]) for group in meta["groups"]) if meta else 0
            fitting = [names for names in (order, [name for name in order if name not in frozen]) if len(names) == count]
            if not fitting:
                raise CheckpointError(
                    f"checkpoint {self.path}: optimizer {index} has {count} parameters there, and {len(order)} in the model"
                )
            names |= {f"{index}.{NUMBERED}{place}": name for place, name in enumerate(fitting[0])}
            groups = [group | {"params": [names[f"{index}.{number}"] for number in group["params"]]} for group in meta["groups"]]
            scalars = {names[f"{index}.{number}"]: state for number, state in meta["scalars"].items()}
            metas.append({"groups": groups, "scalars": scalars})
        moments = self._moments(orders)
        entries = {}
        for entry, value in self.entries.items():
            index, number, key = _numbered(entry)
            if index is not None:
                name = names[f"{index}.{number}"]
                entry = state_entry(index, name, key) if key else f"{MODEL}.{name}"
                model = self.entries.get(f"{MODEL}.{name}")
                moment = not key or (f"{index}.{key}" in moments and key != "step")
                if model is not None and moment and value.shape and value.shape != model.shape:
                    raise CheckpointError(f"checkpoint {self.path}: {entry} has shape {value.shape} there, but {name} has {model.shape}")
            entries[entry] = value
        return replace(self, meta=self.meta | {OPTIMIZERS: metas}, entries=entries)

    def _moments(self, orders: Sequence[Sequence[str]]) -> set[str]:
        """The keys of numbered state (``0.exp_avg``) that can have, in some order, the shapes of the optimizer's parameters."""
        weights = [Counter(self.entries[e].shape for name in order if (e := f"{MODEL}.{name}") in self.entries) for order in orders]
        shapes: dict[tuple[int, str], Counter[tuple[int, ...]]] = {}
        for entry, value in self.entries.items():
            index, _, key = _numbered(entry)
            if index is not None and key:
                shapes.setdefault((index, key), Counter())[value.shape] += 1
        return {f"{index}.{key}" for (index, key), found in shapes.items() if found <= weights[index]}


def _damage(file: Path) -> list[str]:
    """What in a file of ``torch.save`` is not what was written. A checksum of 0 is one that ``set_crc32_options(False)`` left out."""
    try:
        if not zipfile.is_zipfile(file):
            return []  # as torch wrote before 1.6, without checksums
        with zipfile.ZipFile(file) as records:
            for record in records.infolist():
                with records.open(record) as opened:
                    while record.CRC and opened.read(CHUNK):
                        pass
    except Exception as error:
        return [f"{file.name} holds other bytes than were written ({error})"]
    return []


def is_extra(key: str) -> bool:
    """Whether this key of a state dict is what a module's ``get_extra_state`` returned."""
    return key.rpartition(".")[2] == "_extra_state"


def is_number(name: str) -> bool:
    """Whether this stands for a parameter that nobody has named yet."""
    return re.fullmatch(rf"{NUMBERED}(\d+|\?)", name) is not None


def state_entry(index: int, name: str, key: str) -> str:
    """The entry of what optimizer ``index`` keeps of a parameter under ``key``.

    Raises:
        CheckpointError: the key is no string, and would come back as one.
    """
    if not isinstance(key, str):
        raise CheckpointError(
            f"optimizer {index} keeps state of {name} under {key!r} (of type {type(key).__name__}), for which checkpoints have no place: "
            "use strings as keys of its state"
        )
    return f"{OPTIMIZER}.{index}.{name}.{key.replace('%', '%25').replace('.', '%2E')}"


def told_state(entry: str) -> tuple[int, str, str] | None:
    """Index, name and key, of a ``state_entry``; None for entries of other kinds."""
    kind, _, rest = entry.partition(".")
    if kind != OPTIMIZER:
        return None
    index, _, rest = rest.partition(".")
    name, _, key = rest.rpartition(".")
    return int(index), name, key.replace("%2E", ".").replace("%25", "%")


def parameter_of(entry: str) -> str:
    """The name of the parameter or buffer that an entry belongs to; empty for random generators."""
    kind, _, rest = entry.partition(".")
    if (state := told_state(entry)) is not None:
        return state[1]
    return rest if kind in (MODEL, CURRENT) else ""


def _renamed(entry: str, rename: Callable[[str], str]) -> str:
    name = parameter_of(entry)
    if not name:
        return entry
    if (state := told_state(entry)) is not None:
        return state_entry(state[0], rename(name), state[2])
    return f"{entry.partition('.')[0]}.{rename(name)}"


def _numbered(entry: str) -> tuple[int | None, str, str]:
    """Index of the optimizer, number and key, of an entry with a number; a ``model.#n`` is the master of that parameter."""
    kind, _, rest = entry.partition(".")
    if kind == MODEL and is_number(rest):
        return 0, rest, ""
    if (state := told_state(entry)) is not None and is_number(state[1]):
        return state
    return None, "", ""


def require_fit(path: str | os.PathLike[str], stored: Mapping[str, Sequence[int]], wanted: Mapping[str, Shard]) -> None:
    """Raise a CheckpointError that names every tensor of ``wanted`` which is not in ``stored`` (whole shapes), or has another shape."""
    faults = [f"{name} is missing" for name in wanted if name not in stored]
    for name, shard in wanted.items():
        if name in stored and tuple(stored[name]) != shard.spec.shape:
            faults.append(f"{name} has shape {tuple(stored[name])}, but the model needs {shard.spec.shape}")
    if faults:
        raise CheckpointError(f"checkpoint {path} does not fit:\n" + "\n".join(f"  - {fault}" for fault in faults))


@dataclass(frozen=True)
class Contents:
    """What a whole model's checkpoint holds, by name: what a writer of another format goes by.

    Attributes:
        aliases: each key of the state dict, in order, and the first name of what it stands for. Keys of what the checkpoint lacks are not
            among them; what it holds without a key has its own name.
        buffers, frozen: first names of what it holds.
        groups: of all optimizers, with the names of trained parameters only, in the order they were given.
    """

    aliases: dict[str, str]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    groups: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, source: Source) -> Contents:
        """Raise a CheckpointError if something has no key of its own, since hooks of the module gave its name to something else."""
        names = [entry.removeprefix(f"{MODEL}.") for entry in source.weights]
        told = source.meta.get(MODULE, {})
        metas = source.meta.get(OPTIMIZERS, [])
        buffers = tuple(name for name in told.get("buffers", ()) if f"{MODEL}.{name}" in source.entries)
        frozen = told["frozen"] if "frozen" in told else _stateless(source, metas)
        groups = tuple(
            group | {"params": [name for name in group["params"] if name not in frozen]} for meta in metas for group in meta["groups"]
        )
        trained = {name for group in groups for name in group["params"]}
        aliases = {key: name for key, name in told.get("aliases", {}).items() if f"{MODEL}.{name}" in source.entries}
        keyed = {*aliases.values()}
        keyless = [name for name in names if name not in keyed]
        if taken := [f"{name} ({name} there is {aliases[name]})" for name in keyless if name in aliases]:
            raise CheckpointError(f"{source.path} holds weights that have no name of their own in its state dict: {', '.join(taken)}")
        aliases |= {name: name for name in keyless}
        return cls(aliases, buffers, tuple(n for n in names if n not in trained and n not in buffers), groups)


def states(source: Source, index: int) -> dict[str, dict[str, Entry]]:
    """The state of optimizer ``index``: by parameter, by key."""
    found: dict[str, dict[str, Entry]] = {}
    for entry, value in source.entries.items():
        if (state := told_state(entry)) is not None and state[0] == index:
            found.setdefault(state[1], {})[state[2]] = value
    return found


def _stateless(source: Source, metas: Sequence[Mapping[str, Any]]) -> set[str]:
    """Parameters that an optimizer has, but never stepped, while it stepped others: where nothing is told, they are taken for frozen."""
    found: set[str] = set()
    for index, meta in enumerate(metas):
        stepped = states(source, index).keys() | meta["scalars"].keys()
        found |= {name for group in meta["groups"] for name in group["params"] if stepped and name not in stepped}
    return found


def rng_of(source: Source) -> Iterator[tuple[str, Entry]]:
    return ((name, entry) for name, entry in source.entries.items() if name.startswith(f"{RNG}."))
