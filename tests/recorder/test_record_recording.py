"""Questions to a recording equal the same questions asked of dense matrices."""

import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard

WORDS = ["the", "cat", "walks", "on", "the", "street"]


class Attention(nn.Module):
    def __init__(self, size=12, heads=3, causal=False):
        super().__init__()
        self.qkv, self.heads, self.causal = nn.Linear(size, 3 * size), heads, causal

    def forward(self, x):
        q, k, v = self.qkv(x * 3).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)


@pytest.fixture
def seen():
    torch.manual_seed(0)
    net = nn.Sequential(Attention(), Attention(causal=True), Attention())
    with torch.no_grad(), regard.record(net, tokens=WORDS, values=True) as seen:
        net(torch.randn(1, 6, 12))
    return seen


def dense(seen):
    return [layer.weights[0].dense() for layer in seen.layers]


def test_indexing(seen):
    w = dense(seen)
    assert seen[1].shape == (1, 3, 6, 6)
    assert seen[1, 2].shape == (6, 6)
    torch.testing.assert_close(seen[1, 2].dense(), w[1][2])
    torch.testing.assert_close(seen[1, 2]["cat", "street"], w[1][2, 1, 5])
    torch.testing.assert_close(seen["1", 0].dense(), w[1][0])
    torch.testing.assert_close(seen[-1, 0, 0].dense(), w[2][0])
    torch.testing.assert_close(seen[0, 0][seen[0, 0].at("the", 2), "cat"], w[0][0, 4, 1])
    assert [layer.index for layer in seen] == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "error", "text"),
    [
        (7, IndexError, "layers 0 to 2 were recorded; got layer 7"),
        ("block.9", KeyError, "no layer"),
        ((0, 1, 2, 3), IndexError, "seen\\[layer, head"),
        ((0, 0, 5), IndexError, "batch has 1"),
    ],
)
def test_bad_indices_are_told(seen, key, error, text):
    with pytest.raises(error, match=text):
        seen[key]


def test_an_empty_recording_says_what_to_do():
    with regard.record(nn.Linear(2, 2)) as seen:
        pass
    assert repr(seen) == "Recording: nothing recorded"
    with pytest.raises(IndexError, match="Run the model inside the block"):
        seen[0]


def test_a_recording_that_is_asked_inside_its_block_says_when_to_ask():
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    with torch.no_grad(), regard.record(model) as seen:
        model(x, x, x)
        with pytest.raises(IndexError, match="and ask after its end"):
            seen[0]
    assert seen[0].shape == (1, 2, 3, 3)


def test_find_names_the_best_heads_first(seen):
    w = torch.stack(dense(seen))
    table = seen.find("cat", "walks")
    assert table.columns == ("layer", "head", "weight")
    flat = sorted(
        ((layer, head, w[layer, head, 1, 2].item()) for layer in range(3) for head in range(3)), key=lambda row: -row[2]
    )
    assert [row[:2] for row in table] == [row[:2] for row in flat]
    assert table[0][2] == pytest.approx(flat[0][2], abs=1e-6)
    alone = seen.find("cat")
    best = max((w[a, h, 1].max().item(), WORDS[int(w[a, h, 1].argmax())], a, h) for a in range(3) for h in range(3))
    assert alone[0][:3] == (best[2], best[3], best[1])
    with pytest.raises(KeyError, match="no layer has the token 'dog'"):
        seen.find("dog")
    with pytest.raises(KeyError, match="occurs 2 times"):
        seen.find("the", "cat")


def test_find_and_rollout_take_one_of_several_equal_words_by_its_number(seen):
    first, second = (n for n, word in enumerate(WORDS) if word == "the")
    for name, place in (("the:1", first), ("the:2", second), (seen[0, 0].at("the", 2), second)):
        assert seen.find(name, "cat") == seen.find(place, "cat")
        assert seen.find("cat", name) == seen.find("cat", place)
        assert torch.equal(seen.rollout(name), seen.rollout(place))
    with pytest.raises(KeyError, match="no layer has the token 'the:3'"):
        seen.find("the:3", "cat")
    with pytest.raises(TypeError, match=r"one token, or its position, is needed; got \['the', 'cat'\]"):
        seen.find(["the", "cat"], "cat")


def test_indices_of_a_recording_say_what_they_are(seen):
    for wrong, text in (
        (lambda: seen[:, 0], "a layer is a number or the name of a module; got slice"),
        (lambda: seen[1.5], "a layer is a number or the name of a module; got 1.5"),
        (lambda: seen[1, :, "cat"], r'number of a sequence; got .cat.. .*seen\[3, 1\]\["it", "animal"\]'),
        (lambda: seen[1, 0, 0, 0], "4 indices. The indices are"),
        (lambda: seen[0, 9], "layer 0 has heads 0 to 2; got head 9"),
    ):
        with pytest.raises(IndexError, match=text):
            wrong()


def test_heads_by_every_measure(seen):
    for by in ("entropy", "entropy_without_sink", "mean_distance_without_sink", "sink", "previous", "induction"):
        table = seen.heads(by)
        assert len(table) == 9
        for index, head, _, value in table:
            w = dense(seen)[index].double()
            sink = int(w.sum((0, 1)).argmax())
            w = w[head]
            rest = w.clone()
            rest[:, sink] = 0
            share = rest.sum(-1)  # rows count as much as they give to other keys than the sink
            rest = rest / share.unsqueeze(-1).clamp(min=1e-12)
            at = torch.arange(6)
            expected = {
                "entropy": -(w * w.clamp(min=1e-30).log()).sum(-1).mean(),
                "entropy_without_sink": -((rest * rest.clamp(min=1e-30).log()).sum(-1) * share).sum() / share.sum(),
                "mean_distance_without_sink": ((rest * (at[:, None] - at).abs()).sum(-1) * share).sum() / share.sum(),
                "sink": w[:, sink].mean(),
                "previous": w[at[1:], at[:-1]].mean(),
                "induction": w[4, 1],
            }[by]
            assert value == pytest.approx(expected.item(), abs=1e-4), by
    with pytest.raises(ValueError, match="unknown measure 'size'"):
        seen.heads("size")
    shares = {(row.layer, row.head): row.sink for row in seen.summary()}
    assert shares == {(row.layer, row.head): pytest.approx(row.value, abs=1e-5) for row in seen.heads("sink")}


def test_rollout_is_the_product_of_all_layers(seen):
    flow = torch.eye(6)
    for w in dense(seen):
        flow = (torch.eye(6) + w.mean(0)) / 2 @ flow
    torch.testing.assert_close(seen.rollout("cat"), flow[1])
    torch.testing.assert_close(seen.rollout(-1), flow[-1])
    assert seen.rollout("cat").sum().item() == pytest.approx(1, abs=1e-5)


def test_numpy_and_pandas(seen):
    assert isinstance(seen.layers[0].numpy(), np.ndarray)
    np.testing.assert_allclose(seen.layers[0].numpy(), seen[0].dense().numpy())
    table = seen.find("cat", "walks")
    assert table.numpy()["weight"][0] == table[0][2]
    pandas = pytest.importorskip("pandas")
    frame = seen.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 9
    row = frame[(frame.layer == 1) & (frame["head"] == 2)].iloc[0]
    assert row.entropy == pytest.approx(seen[1].entropy()[0, 2].mean().item(), abs=1e-6)


def test_a_missing_pandas_is_named(seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="needs pandas: pip install pandas"):
        seen.to_pandas()


def test_norm_weighted(seen):
    layer = seen.layers[1]
    expected = layer.weights[0].dense() * layer.values[0].norm(dim=-1).unsqueeze(-2)
    torch.testing.assert_close(layer.norm_weighted(), expected)


def test_a_batch_needs_to_be_told_which_sequence():
    net = nn.Sequential(Attention())
    with torch.no_grad(), regard.record(net, tokens=[WORDS, WORDS]) as seen:
        net(torch.randn(2, 6, 12))
    assert seen[0, 1].shape == (2, 6, 6)
    assert seen[0, 1, 1].tokens == (tuple(WORDS), tuple(WORDS))
    with pytest.raises(ValueError, match="item=0"):
        seen.find("cat", "walks")
    assert len(seen.find("cat", "walks", item=1)) == 3


def test_the_table_reads(seen):
    text = repr(seen)
    assert text.splitlines()[0] == "3 layers × 3 heads × 6 tokens"
    assert "causal()" in text
    assert repr(seen.find("cat", "walks")).splitlines()[0].split() == ["layer", "head", "weight"]


def test_one_of_a_kind_is_written_in_the_singular():
    layer = torch.nn.MultiheadAttention(4, 1, batch_first=True).eval()
    x = torch.randn(1, 1, 4)
    with torch.no_grad(), regard.record(layer) as seen:
        layer(x, x, x)
    assert repr(seen).splitlines()[0] == "1 layer × 1 head × 1 token"


def test_a_pass_answers_what_a_recording_does():
    torch.manual_seed(0)
    net = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    inputs = [torch.randn(1, 3, 8) for _ in range(2)]
    with regard.record(net, tokens=["the", "cat", "sat"]) as seen:
        for x in inputs:
            net(x, x, x)
    alone = []
    for x in inputs:
        with regard.record(net, tokens=["the", "cat", "sat"]) as one:
            net(x, x, x)
        alone.append(one)
    assert seen.find("cat", "the") == seen.passes[1].find("cat", "the")
    for one, expected in zip(seen.passes, alone, strict=True):
        assert one.find("cat", "the") == expected.find("cat", "the")
        assert one.heads("previous") == expected.heads("previous")
        assert one.summary() == expected.summary()
        assert torch.equal(one.rollout("cat"), expected.rollout("cat"))
        assert torch.equal(one[0, 1].dense(), expected[0, 1].dense())
        assert str(one.show("cat", layer=0, head=1)) == str(expected.show("cat", layer=0, head=1))
    with pytest.raises(IndexError, match="nothing was recorded"):
        regard.recorder.recording.Pass().layer(0)


def test_a_selection_has_one_numbering():
    torch.manual_seed(0)
    net = torch.nn.Transformer(8, 2, 1, 2, 16, 0.0, batch_first=True).eval()
    source, target = torch.randn(1, 5, 8), torch.randn(1, 4, 8)
    with torch.no_grad(), regard.record(net, tokens=(list("abcde"), list("wxyz"))) as seen:
        net(source, target)
    numbers = [layer.index for layer in seen.layers if layer.kind == "cross"]
    assert numbers == [2, 4]
    part = seen.select(kind="cross")
    assert torch.equal(part[4, 1].dense(), seen[4, 1].dense())
    assert {row.layer for row in part.find("x", "c")} == set(numbers)
    assert [line.split()[0] for line in repr(part).splitlines()[1:]] == ["2", "4"]
    assert str(part.show("x", layer=4, head=1)) == str(seen.show("x", layer=4, head=1))
    with pytest.raises(IndexError, match=r"\[2, 4\]"):
        part[0]


def test_a_layer_is_in_a_recording_by_its_number_and_name(seen):
    assert all(which in seen and which in seen.passes[0] for which in (0, "2", seen.layers[1], np.int64(1)))
    assert not any(which in seen for which in (3, "9", -1, None, seen))


@pytest.mark.parametrize(
    ("ask", "error", "text"),
    [
        (lambda seen: seen.find("cat", item="a"), TypeError, "asked for by its number in the batch.*'a'"),
        (lambda seen: seen.layer(0).sequence(None), TypeError, "asked for by its number in the batch.*None"),
        (lambda seen: seen.heads(by=["sink"]), ValueError, "unknown measure \\['sink'\\]"),
    ],
)
def test_a_question_of_the_wrong_kind_says_what_must_hold(ask, error, text, seen):
    with pytest.raises(error, match=text):
        ask(seen)


@pytest.mark.parametrize(
    "ask", [lambda s: s.find("cat"), lambda s: s.heads(), lambda s: s.rollout("cat"), lambda s: s[0]]
)
def test_a_question_to_an_empty_recording_says_that_nothing_was_recorded(ask):
    with regard.record(nn.Linear(2, 2), tokens=WORDS) as nothing:
        pass
    with pytest.raises(IndexError, match="nothing was recorded"):
        ask(nothing)


def test_a_model_that_was_refused_itself_is_named_as_the_model():
    """Its name is empty, as that of every root module: the error read "Refused: : captured by torch.compile"."""
    seen = regard.Recording([], [("", "captured by torch.compile")])
    with pytest.raises(IndexError, match=r"Refused: \(the model\): captured by torch.compile\."):
        seen[0]
    assert "refused  (the model): captured" in repr(seen)
