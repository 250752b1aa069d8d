"""A million calls that are carried out in C leave nothing behind: ``python -m tests.dispatch.leaks
[calls]``.

Each kind of call of tests/dispatch/test_native.py is made many times; the memory of the process
may grow by less than a byte for each, and it ends with an error else.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

import torch

import disttensor as dt
from disttensor.comm import compare_programs
from disttensor.dispatch import native
from tests.dispatch.test_native import CALLS, tensor
from tests.support.pool import fake_world


def memory() -> int:
    """Bytes of this process that are in memory."""
    compare_programs.CALLS.clear()
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


def main(calls: int) -> int:
    if native.module is None:
        print(f"no C code: {native.why}")
        return 1
    torch.set_num_threads(1)
    each, leaks = calls // len(CALLS), 0
    with fake_world(8), native.using(True):
        mesh = dt.ProcessMesh([[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "tp"))
        x, y = tensor(mesh, grad=True), tensor(mesh)
        for name, (call, _) in CALLS.items():
            for _ in range(each // 10):
                call(x, y)
            before = memory()
            for i in range(each):
                call(x, y)
                if i % 10000 == 0:
                    compare_programs.CALLS.clear()
            grown = memory() - before
            leaks += grown > max(each, 1 << 20)
            print(f"{name:20} {each} calls, {grown} bytes more", flush=True)
    print(f"{leaks} of {len(CALLS)} kinds of calls leak; {native.module.counts()}")
    return int(leaks > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000))
