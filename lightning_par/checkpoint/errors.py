"""What is raised when a checkpoint does not work."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or written; the message says which and why."""
