"""Imported by every Python process that ``tests/mutants/changed.py`` has prepared."""

import os

from tests.mutants.changed import begin_worker

begin_worker()
if os.environ.get("RAN_STATEMENTS"):
    from tests.mutants.statements import begin

    begin()
