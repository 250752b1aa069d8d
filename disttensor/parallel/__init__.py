"""Data parallelism with sharded state, and strategies that combine parallelisms: all from ``Partial``."""
