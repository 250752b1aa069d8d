"""Measures the CPU of this machine, and gloo between its processes, for a simulation.

    python -m benchmarks.calibrate             # one process
    python -m benchmarks.calibrate --ranks 4   # four gloo processes, which share the cores

Prints Python code that defines ``device``, and with several ranks ``network``. A file with it is an
option of the simulator: ``python -m disttensor.simulate --device FILE ...``. The machine should be
idle.
"""

from .measure import main

if __name__ == "__main__":
    main()
