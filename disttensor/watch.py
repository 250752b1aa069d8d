"""Starts a script on several processes, and prints why they wait for each other if they do:
``python -m disttensor.watch --nproc 4 script.py``.

The options are those of ``python -m disttensor.run``. The script may use any library on
``torch.distributed``. The ranks import disttensor before the script.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from disttensor import hangs, run
from disttensor.hangs.flight import start_recorder

if __name__ != "__main__":  # an import would replace the function dt.watch by this module
    raise ImportError("disttensor.watch is a command: python -m disttensor.watch")

start_recorder()
os.environ.setdefault("DISTTENSOR_WATCH", "3")  # seconds
runner = str(Path(hangs.__file__).with_name("script.py"))
sys.exit(run.main(prog="python -m disttensor.watch", runner=runner))
