"""Random configurations through the triton engine on this GPU, many at a time: python3 bench/gpucheck.py first last."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback

import torch

import cover

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def one(seed: int) -> str:
    torch.cuda.set_per_process_memory_fraction(0.05)
    case = cover.at_random(seed, TYPES)
    try:
        cover.judged(case, "cuda")
    except Exception as error:
        where = [f"{f.name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if "regard" in f.filename]
        text = str(error) if isinstance(error, AssertionError) else str(error)[:150]
        return f"{type(error).__name__} {text} {' '.join(where[-3:])} [{case}]".replace("\n", " ")
    return ""


def main(first: int, last: int, seconds: float) -> None:
    begin, done, complaints = time.time(), 0, []
    pool = multiprocessing.get_context("spawn").Pool(15, maxtasksperchild=1)
    for complaint in pool.imap_unordered(one, range(first, last)):
        done += 1
        if complaint:
            complaints.append(complaint)
            print("BAD", complaint, flush=True)
        if time.time() - begin > seconds:
            break
    pool.terminate()
    print(f"{done} configurations, {len(complaints)} bad, {time.time() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
