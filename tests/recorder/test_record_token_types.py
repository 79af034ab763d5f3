"""Tokens that are no strings are refused in words that say what to pass."""

import pytest
import torch

import regard

EMBED = torch.nn.Embedding(9, 8)
LAYER = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
MODEL = torch.nn.Sequential(EMBED, LAYER)
IDS = torch.tensor([[3, 1, 3]])


def test_ids_as_tokens_are_refused_with_the_call_that_works():
    with (
        pytest.raises(TypeError, match=r"must be strings.*got int.*tokens=str"),
        regard.record(MODEL, tokens=[3, 1, 3]),
    ):
        MODEL(IDS)


def test_str_turns_ids_into_tokens():
    with torch.no_grad(), regard.record(MODEL, tokens=str) as seen:
        MODEL(IDS)
    assert list(seen[0, 0].tokens[0]) == ["3", "1", "3"]


@pytest.mark.parametrize("text", ["a b a", b"a b a", bytearray(b"x")])
def test_a_text_as_tokens_is_refused_with_the_call_that_works(text):
    with (
        pytest.raises(TypeError, match=rf"got {type(text).__name__}\..*tokens=text\.split\(\)"),
        regard.record(MODEL, tokens=text),
    ):
        MODEL(IDS)
