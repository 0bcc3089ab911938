"""Worlds of gloo ranks for tests, parity with one process, and tiny models."""

from tests.harness.world import WorldError, run_world

__all__ = ["WorldError", "run_world"]
