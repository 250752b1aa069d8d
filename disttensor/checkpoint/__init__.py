"""Checkpoints: a training run, saved on one mesh and resumed on any."""
