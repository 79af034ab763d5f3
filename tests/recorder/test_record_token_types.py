"""Tokens that are no strings are refused in words that say what to pass."""

import warnings

import pytest
import torch

import regard
from regard.recorder import RefusedWarning

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


def test_ids_that_count_up_are_tokens_where_there_is_one_table():
    with torch.no_grad(), regard.record(MODEL, tokens=str) as seen:
        MODEL(torch.tensor([[1, 2, 3]]))
    assert list(seen[0, 0].tokens[0]) == ["1", "2", "3"]


class WithPositions(torch.nn.Module):
    """Its table of positions is the larger one."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.layer = torch.nn.Embedding(9, 8), torch.nn.Embedding(20, 8), LAYER

    def forward(self, ids):
        return self.layer(self.words(ids) + self.positions(torch.arange(ids.shape[1])[None]))


def test_positions_are_not_taken_for_ids():
    model = WithPositions().eval()
    for ids, expected in (([5, 1, 3], ["5", "1", "3"]), ([1, 2, 3], None)):
        with torch.no_grad(), warnings.catch_warnings(), regard.record(model, tokens=str) as seen:
            warnings.simplefilter("ignore", RefusedWarning)
            model(torch.tensor([ids]))
        assert seen.layers[0].tokens[0] == (None if expected is None else [expected])
        assert bool(seen.refused) == (expected is None)


def test_a_tokenizer_that_raises_is_named_and_costs_no_recording():
    raised = pytest.warns(RefusedWarning, match=r"the tokenizer raised KeyError\(1\)")
    with raised, torch.no_grad(), regard.record(MODEL, tokens={3: "a"}.__getitem__) as seen:
        MODEL(IDS)
    assert seen[0].dense().shape == (1, 2, 3, 3)
    assert [name for name, _ in seen.refused] == ["tokens"]


@pytest.mark.parametrize("text", ["a b a", b"a b a", bytearray(b"x")])
def test_a_text_as_tokens_is_refused_with_the_call_that_works(text):
    with (
        pytest.raises(TypeError, match=rf"got {type(text).__name__}\..*tokens=text\.split\(\)"),
        regard.record(MODEL, tokens=text),
    ):
        MODEL(IDS)


@pytest.mark.parametrize("tokens", [IDS, 3, {"a", "b"}])
def test_what_is_no_tokens_is_refused_before_the_model_runs(tokens):
    with pytest.raises(TypeError, match=rf"got {type(tokens).__name__}\..*tokens=tokenizer"):
        regard.record(MODEL, tokens=tokens)


def test_a_tokenizer_without_ids_is_named():
    recording = regard.record(LAYER, tokens=str)
    seen = recording.__enter__()
    LAYER(torch.randn(1, 3, 8))  # no embedding is called: nobody can know the ids
    with pytest.warns(RefusedWarning, match="no embedding looked up ids.*pass the list"):
        recording.__exit__(None, None, None)
    assert [name for name, _ in seen.refused] == ["tokens"]


@pytest.mark.filterwarnings("ignore:regard.record.model. recorded nothing")
def test_a_recording_that_is_no_block_says_so():
    recording = regard.record(MODEL)
    for wrong in (lambda: recording(IDS), lambda: recording[0]):
        with pytest.raises(TypeError, match=r"is a block: `with regard\.record\(model\) as seen:`"):
            wrong()
    with pytest.raises(AttributeError, match="is a block"):
        recording.layers  # noqa: B018


def test_a_callback_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"called with \(numbers, step\); got int"):
        regard.watch(MODEL, callback=3)
