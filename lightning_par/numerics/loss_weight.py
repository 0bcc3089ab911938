"""How much each piece of a batch counts in the loss of the whole batch.

Note [The weight of a loss]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A replica's batch is cut into pieces: micro-batches of a pipeline, shards of the sequence. ``training_step`` returns a mean over the
piece it sees. The loss of the unsplit batch is then the mean of the pieces' losses, each weighted by what it averaged over:

    loss = sum_i(weight_i · loss_i) / sum_i(weight_i)

The weight is the number of labels that count if the batch has labels, else the number of samples. Labels follow Hugging Face's words:
``labels`` beside ``input_ids`` are unshifted (the model shifts them, so the first of each row predicts nothing); ``shift_labels`` are
shifted already and win; -100 counts nothing. Every rank of a replica sees the whole batch, so the sum needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_par.numerics.samples import batch_size

IGNORED_LABEL = -100


def loss_weight(batch: Any) -> Tensor:
    """The weight of the mean loss of ``batch``, a 0-dim float64 tensor on the batch's device. See Note [The weight of a loss]."""
    if isinstance(batch, Mapping):
        shifted, labels = batch.get("shift_labels"), batch.get("labels")
        if isinstance(shifted, Tensor):
            return _counted(shifted)
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            return _counted(labels[:, 1:] if _is_unshifted(batch, labels) else labels)
    return torch.tensor(float(batch_size(batch)), dtype=torch.float64)


def _counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED_LABEL).sum(dtype=torch.float64)


def _is_unshifted(batch: Mapping[str, Any], labels: Tensor) -> bool:
    ids = batch.get("input_ids")
    return isinstance(ids, Tensor) and labels.dim() == 2 and labels.shape == ids.shape
