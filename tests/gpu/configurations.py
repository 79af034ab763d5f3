"""Random configurations through the triton engine on this GPU, many at a time: `configurations.py first last [seconds]`.

Each compiles kernels of its own for seconds, so they run side by side. A process dies after a few of them: an illegal access
would spoil all that came after it.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback

import torch

from support import kernel_cases

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def one(seed: int) -> str:
    """What is wrong with a configuration; nothing where it is right."""
    torch.cuda.set_per_process_memory_fraction(0.05)
    case = kernel_cases.at_random(seed, TYPES)
    try:
        kernel_cases.judged(case, "cuda")
    except Exception as error:
        where = [f"{f.name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if "regard" in f.filename]
        text = str(error) if isinstance(error, AssertionError) else str(error)[:150]
        return f"{type(error).__name__} {text} {' '.join(where[-3:])} [{case}]".replace("\n", " ")
    return ""


def main(first: int, last: int, seconds: float = 3600.0) -> int:
    begin, done, complaints = time.time(), 0, 0
    with multiprocessing.get_context("spawn").Pool(15, maxtasksperchild=8) as pool:
        for complaint in pool.imap_unordered(one, range(first, last)):
            done += 1
            complaints += bool(complaint)
            if complaint:
                print("wrong:", complaint, flush=True)
            if time.time() - begin > seconds:
                break
    print(f"{done} configurations, {complaints} wrong, {time.time() - begin:.0f} s", flush=True)
    return int(complaints > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:])))
