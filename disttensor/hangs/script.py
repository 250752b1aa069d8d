"""Runs a script as a rank of ``python -m disttensor.watch``. This file is run by its path, as
``disttensor/launching/script.py`` is for ``disttensor.run``."""

from __future__ import annotations

import os
import sys

from disttensor.hangs import watch
from disttensor.launching import script

if __name__ == "__main__":
    watch(float(os.environ["DISTTENSOR_WATCH"]))
    script.main(sys.argv[1:])
