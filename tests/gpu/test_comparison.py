"""Two matrices compared by the triton kernels on a GPU, judged by float64: long rows, full tiles and edges, every measure."""

from __future__ import annotations

import pytest
import torch

from support import comparison_cases
from support.comparison_cases import MEASURES, PairOnGpu


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("masks", comparison_cases.MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("d", "d2", "n"), [(128, 64, 512), (64, 64, 333)])
def test_a_measure_and_its_gradients_are_those_of_float64(
    d: int, d2: int, n: int, dtype: torch.dtype, masks: str, measure: str
) -> None:
    PairOnGpu(masks, (4, 4), (2, 4), (d, d2), n).judge(measure, dtype)


@pytest.mark.parametrize("measure", ["kl", "js"])
@pytest.mark.parametrize("masks", ["causal", "window"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "rows", "keys"),
    [((4, 1), (2, 1), 200, 453), ((1, 4), (1, 4), 700, 129), ((16, 16), (16, 16), 2048, 2048)],
)
def test_heads_and_lengths_that_differ_and_more_blocks_than_programs(
    heads: tuple[int, int], key_heads: tuple[int, int], rows: int, keys: int, masks: str, measure: str
) -> None:
    PairOnGpu(masks, heads, key_heads, (64, 128), rows, keys).judge(measure, torch.bfloat16)


@pytest.mark.parametrize("masks", ["none", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_student_learns_from_a_teacher_that_gets_no_gradient(dtype: torch.dtype, masks: str) -> None:
    PairOnGpu(masks, (4, 4), (4, 4), (128, 128), 512, student_alone=True).judge("kl", dtype)


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("broken", ["bias", "gradient"])
def test_a_row_of_nan_reaches_the_keys_that_it_sees_and_no_other(measure: str, broken: str) -> None:
    comparison_cases.judged_where_a_row_is_nan(measure, broken, "cuda")
