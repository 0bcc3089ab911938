"""Lightning's count of epochs and batches, as its checkpoints have it: ``loops.fit_loop``.

Note [Counts of a saved loop]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Of an epoch, and of a batch in it, Lightning counts four moments: ready, started, processed, completed. By the differences between them a
resumed loop tells when it was saved. From a save in ``on_train_batch_end``, where a batch is processed and not yet completed, it goes on
right, unless that batch is the last, or validation comes next. From others it does not::

    in on_train_batch_end, before      the validation is left out. Told as a save within it, before its first batch
    a validation, or within one
    in on_train_batch_end of an        the next epoch begins without being counted as ready, and a second resume takes it for over
    epoch's last batch                 (without a length of the data: its batches are counted on). Told as after the epoch
    after an epoch, max_steps set      Lightning trains one batch more in that epoch. Told as completed, and the loop begins anew
    after a fit that ended within an   the batches that come next are taken for those of the following epoch. Told as a save in
    epoch (max_steps, should_stop)     on_train_batch_end of the last batch
    in on_train_epoch_start            that epoch is left out. Told as after the one before
    between two optimizer steps        the gradients that wait are lost. Told as a save after the earlier step
"""

from __future__ import annotations

from typing import Any

BATCHES, EPOCHS = "epoch_loop.batch_progress", "epoch_progress"
STEPPED = "_batches_that_stepped"
SCOPES = ("total", "current")


def is_over(loop: dict[str, Any]) -> bool:
    """The epoch at hand was counted as processed."""
    epoch = loop[EPOCHS]["current"]
    return 0 < epoch["ready"] == epoch["processed"]


def is_at_end(loop: dict[str, Any]) -> bool:
    """No batch of the epoch at hand is left."""
    return loop[BATCHES]["is_last_batch"] and loop[BATCHES]["current"]["processed"] == loop[BATCHES]["current"]["ready"]


def is_in_batch_end(loop: dict[str, Any]) -> bool:
    """It is that of a save in ``on_train_batch_end``, or told as one."""
    total = loop[BATCHES]["total"]
    return total["completed"] == total["processed"] - 1 == total["ready"] - 1


def is_in_epoch_end(loop: dict[str, Any]) -> bool:
    """It is that of a save in ``on_train_epoch_end`` of a complete epoch."""
    return is_over(loop) and is_at_end(loop) and loop[EPOCHS]["total"]["completed"] == loop[EPOCHS]["total"]["processed"] - 1


def batches_given(loop: dict[str, Any]) -> int | None:
    """Of the epoch at hand, as far as weights know them; None: a new epoch begins next."""
    if is_over(loop):
        return None
    return loop[BATCHES]["current"]["processed" if is_in_batch_end(loop) else "completed"]


def reopen(loop: dict[str, Any], *, by_steps: bool, validates: bool = False) -> None:
    """Tell the epoch at hand so that Lightning goes on right. See Note [Counts of a saved loop].

    Args:
        by_steps: ``max_steps`` is set.
        validates: it was saved in ``on_train_batch_end`` or in a validation, and that comes next.
    """
    batch, epoch = loop[BATCHES], loop[EPOCHS]
    if not batch["current"]["ready"]:
        return
    if validates:
        for scope in SCOPES:
            batch[scope]["completed"] = batch[scope]["processed"]
    elif is_in_batch_end(loop) and is_at_end(loop) and not is_over(loop):
        for scope in SCOPES:
            epoch[scope]["processed"] = epoch[scope]["completed"] = epoch[scope]["ready"]
            batch[scope]["completed"] = batch[scope]["processed"]
        _count_steps(loop, 1)
    elif is_over(loop) and not batch["is_last_batch"]:
        for scope in SCOPES:
            epoch[scope]["processed"] = epoch[scope]["completed"] = epoch[scope]["ready"] - 1
        _in_batch_end(loop, batch["current"]["processed"])
    elif is_over(loop) and by_steps:
        for scope in SCOPES:
            epoch[scope]["completed"] = epoch[scope]["processed"]


def unbegin(loop: dict[str, Any]) -> None:
    """Tell a save in ``on_train_epoch_start``, where an epoch is ready and not yet started, as one after the epoch before."""
    for scope in SCOPES:
        loop[EPOCHS][scope]["ready"] = loop[EPOCHS][scope]["started"]


def rewind(loop: dict[str, Any], accumulate: int) -> int | None:
    """Tell a save between two optimizer steps as one after the earlier of them.

    Returns:
        How many batches of the epoch that is after; None: nothing waits for the next step.
    """
    batch = loop[BATCHES]
    ready, processed = batch["current"]["ready"], batch["current"]["processed"]
    stepped = processed if is_at_end(loop) else processed - processed % accumulate
    if stepped == ready:
        return None
    batch["is_last_batch"] = False
    _in_batch_end(loop, stepped)
    return stepped


def _in_batch_end(loop: dict[str, Any], batches: int) -> None:
    """As counted in ``on_train_batch_end`` of the last of ``batches``, whose step is not yet among those that loggers count."""
    counts = loop[BATCHES]
    if counts["current"]["completed"] >= batches:
        _count_steps(loop, -1)
    back = counts["current"]["ready"] - batches
    for scope in SCOPES:
        ready = counts[scope]["ready"] - back
        counts[scope] |= {"ready": ready, "started": ready, "processed": ready, "completed": ready - 1}


def _count_steps(loop: dict[str, Any], more: int) -> None:
    """Batches after which there was a step, by which loggers count."""
    if STEPPED in (state := loop.get("epoch_loop.state_dict", {})):
        state[STEPPED] += more
