"""Benchmarks: this project side by side with what a user would take instead. See README.md in this folder."""
