"""The errors of a pipeline that cannot go on."""

from __future__ import annotations


class PipelineError(RuntimeError):
    """A model, or a step of it, that a pipeline cannot run; the message says why and names the way out."""
