"""What heads do, in a word: heads made for one pattern get its name, and shares are those of dense weights."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import Tensor

import regard
import regard.look
import regard.patterns
from regard.core.rows.complete_rows import induction_targets

T = 40
AT = torch.arange(T)
TOKENS = torch.randint(6, (T,), generator=torch.Generator().manual_seed(1))


def asking_for(targets: Tensor, mask: regard.Mask | None) -> regard.Weights:
    """A head whose row i looks at key targets[i]."""
    keys = torch.eye(T)
    return regard.weights(12 * keys[targets.clamp(0, T - 1)], keys, score="dot", mask=mask)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("itself", AT), ("previous", AT - 1), ("first", AT * 0), ("offset 3", AT - 3), ("offset 8", AT - 8),
        ("induction", induction_targets(TOKENS, AT)),
    ],
)  # fmt: skip
def test_a_head_made_for_a_pattern_has_its_name(name: str, targets: Tensor) -> None:
    patterns = regard.patterns.classify(asking_for(targets, regard.causal()), TOKENS)
    assert patterns.names == ((name,),)
    assert patterns.share(0, 0) > 0.95


def test_heads_that_look_ahead_everywhere_nearby_or_anywhere_are_told_apart() -> None:
    torch.manual_seed(0)
    near = regard.weights(torch.zeros(T, 4), mask=regard.causal() & regard.window(3, 0))
    mixed = regard.weights(6 * torch.randn(T, 8), 6 * torch.randn(T, 8), mask=regard.causal(), score=regard.ScaledDot())
    assert regard.patterns.classify(asking_for(AT + 1, None)).names == (("next",),)
    assert regard.patterns.classify(regard.weights(torch.zeros(T, 4))).names == (("even",),)
    assert regard.patterns.classify(regard.weights(torch.zeros(T, 4), mask=regard.causal())).names == (("even",),)
    assert regard.patterns.classify(near).names == (("even",),)  # of the keys that it sees
    alibi = regard.weights(torch.zeros(T, 4), mask=regard.causal(), score=regard.Dot().alibi(torch.tensor([0.35])))
    assert regard.patterns.classify(alibi).names == (("near",),)
    assert regard.patterns.classify(mixed).names == (("mixed",),)


def test_shares_are_means_over_rows_of_dense_weights() -> None:
    torch.manual_seed(0)
    W = regard.weights(torch.randn(2, 3, T, 8).double(), mask=regard.causal())
    patterns, w = regard.patterns.classify(W, TOKENS), W.dense()
    assert patterns.shares.shape == (1, 3, 14)
    shares = dict(zip(patterns.kinds, patterns.shares[0].mT, strict=True))
    rows = range(1, T)  # the first row sees one key alone

    def mean(values: list[Tensor]) -> Tensor:
        return torch.stack(values).mean(0).mean(0)  # over rows, over sequences: heads are left

    torch.testing.assert_close(shares["previous"], mean([w[..., i, i - 1] for i in rows]))
    torch.testing.assert_close(shares["first"], mean([w[..., i, 0] for i in rows]))
    torch.testing.assert_close(shares["offset 5"], mean([w[..., i, i - 5] for i in rows if i >= 5]))
    targets = induction_targets(TOKENS, AT).tolist()
    torch.testing.assert_close(shares["induction"], mean([w[..., i, targets[i]] for i in rows if targets[i] >= 0]))
    torch.testing.assert_close(shares["near"], mean([w[..., i, max(0, i - 4) : i + 1].sum(-1) for i in rows]))
    entropy = torch.special.entr(w).sum(-1)
    torch.testing.assert_close(shares["even"], mean([entropy[..., i] / math.log(i + 1) for i in rows]))


def test_the_picture_names_every_head() -> None:
    layers = [asking_for(AT - 1, regard.causal()), asking_for(AT, regard.causal())]
    patterns = regard.patterns.classify(layers)
    root = ET.fromstring(regard.look.draw_patterns(patterns, title="<heads>"))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "previous" in texts
    assert "itself" in texts
    assert "<heads>" in texts
    assert "Heads by pattern: previous 1, itself 1." in (root.find("{http://www.w3.org/2000/svg}desc").text or "")


def test_errors_say_what_must_hold() -> None:
    with pytest.raises(ValueError, match=r"between 0 and 1; got 0"):
        regard.patterns.classify(regard.weights(torch.zeros(4, 2)), threshold=0)
    with pytest.raises(ValueError, match=r"as many heads; got \[1, 2\]"):
        regard.patterns.classify([regard.weights(torch.zeros(4, 2)), regard.weights(torch.zeros(2, 4, 2))])
    with pytest.raises(ValueError, match="at least one layer; got none"):
        regard.patterns.classify([])
    with pytest.raises(ValueError, match="between 0 and 1; got 'a'"):
        regard.patterns.classify(regard.weights(torch.zeros(4, 2)), threshold="a")
    for nothing in (None, torch.zeros(1, 4, 4), [torch.zeros(4, 4)]):
        with pytest.raises(TypeError, match=r"classify\(weights\) takes a Weights, .*; got"):
            regard.patterns.classify(nothing)
