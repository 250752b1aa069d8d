"""Imported by every Python process that ``tests/mutants/changed.py`` has prepared."""

from tests.mutants.changed import begin_worker

begin_worker()
