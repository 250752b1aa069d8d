"""Measures the CPU of this machine, and gloo between its processes, for a simulation.

    python -m benchmarks.calibrate             # one process
    python -m benchmarks.calibrate --ranks 4   # four gloo processes, which share the cores

Prints a Device, and with several ranks a Network, as Python code. The machine should be idle.
"""

from .measure import main

if __name__ == "__main__":
    main()
