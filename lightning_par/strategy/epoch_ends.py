"""What a module logs at the end of an epoch is what the last stage of a pipeline knows.

Note [The end of an epoch]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Stages before the last never come to the end of a step, so what a step keeps on the module for the end of the epoch, they do not have: the
state of metrics, counts, sums. So before ``on_train_epoch_end``, ``on_validation_epoch_end`` and ``on_test_epoch_end`` of the module they
take over the states of torchmetrics from the last stage, and afterwards the values of all that was logged in these hooks, by callbacks
too. Early stopping, the choice of checkpoints and schedulers then decide alike everywhere. All ranks log the same names there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from lightning_par.comm import Mesh
from lightning_par.strategy import seams

HOOKS = ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end")


@contextmanager
def last_stage_speaks(module: pl.LightningModule, mesh: Mesh, device: torch.device) -> Iterator[None]:
    """Inside, hooks at the end of an epoch agree. See Note [The end of an epoch]."""
    before = {name: module.__dict__[name] for name in HOOKS if name in module.__dict__}
    module.__dict__.update({name: _agreeing(module, name, mesh, device) for name in HOOKS})
    try:
        yield
    finally:
        for name in HOOKS:
            del module.__dict__[name]
        module.__dict__.update(before)


def _agreeing(module: pl.LightningModule, name: str, mesh: Mesh, device: torch.device) -> Callable[[], None]:
    hook, speaks = getattr(module, name), mesh.pp.index == mesh.layout.loss_index

    def heard(mine: Any) -> Any:
        """What the last stage has in this place."""
        onto_host = apply_to_collection(mine, Tensor, lambda tensor: tensor.detach().cpu()) if speaks else None
        shared = mesh.pp.broadcast_object(onto_host, mesh.layout.loss_index)
        return apply_to_collection(shared, Tensor, lambda tensor: tensor.to(device))

    @wraps(hook)
    def agreeing() -> None:
        states = heard(seams.metric_states(module))
        if not speaks and (lost := seams.set_metric_states(module, states)):
            raise RuntimeError(
                f"the metric {lost[0]} is updated on a pipeline stage before the last, inside a layer: what {name} logs is what the last "
                "stage knows. Update it in the step, after the layers, or use pp=1"
            )
        try:
            hook()
        except Exception as error:
            if not speaks:
                error.add_note(
                    f"{name} runs on every pipeline rank, but only the last stage comes to the end of steps: what they keep in lists and "
                    "the like is empty on the others. Keep it in a torchmetrics.Metric, whose state is handed over, or self.log it in steps"
                )
            raise
        logged = heard(seams.logged_in(module.trainer, name))
        if not speaks and (differs := sorted(logged.keys() ^ seams.logged_in(module.trainer, name).keys())):
            raise RuntimeError(
                f"in {name} only some pipeline ranks have logged {', '.join(differs)}: call self.log on every rank, or with "
                "rank_zero_only=True for what only rank 0 shall log; the value is that of the last stage"
            )
        if not speaks:
            seams.set_logged(module.trainer, logged)

    return agreeing
