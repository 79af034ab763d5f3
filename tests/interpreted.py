"""Kernels in Triton's interpreter: python tests/interpreted.py <part> <of>. Prints what is wrong; exit code 1 if anything.

A process of its own, since Triton asks once, when it is imported, whether it is to interpret. bfloat16 is silently
wrong there, and races never show: those are for tests/gpu.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

import cover
from regard.engines.triton import configuration, flow, largest, launch, prepared

torch.set_num_threads(1)
np.seterr(all="ignore")  # empty rows divide by 0, and are told so; what comes out is judged


def poisoned(*shape: int, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Outputs are full of nan before a kernel runs: what it does not write shows."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -9, dtype=dtype, device=like.device)


def main(part: int, of: int) -> int:
    flow.empty = largest.empty = launch.empty = prepared.empty = poisoned
    wrong = 0
    for n, case in enumerate(cover.pairwise((torch.float32, torch.float16))[part::of]):
        # Tiles of two shapes, so that rows and keys cannot be mistaken for one another.
        configuration.forced["any"] = (
            configuration.Config(32, 32, 4, 1) if n % 2 else configuration.Config(16, 32, 4, 1)
        )
        try:
            cover.judged(case)
        except Exception as error:
            wrong += 1
            print(f"{type(error).__name__}: {error} [{case}]")
    if part == 1:
        configuration.forced["any"] = configuration.Config(32, 32, 4, 1)
        wrong += cover.judged_by_ballot((torch.float16,))
    if part == 2:
        configuration.forced["any"] = configuration.Config(16, 32, 4, 1)
        cover.judged_with_many_columns(torch.float32)
    if part == 0:
        cover.judged_where_all_scores_are_huge(torch.float32)
        cover.judged_where_all_scores_are_huge(torch.float16)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
