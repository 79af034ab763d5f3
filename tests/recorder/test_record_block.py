"""The block of a recording: what it leaves behind (nothing), whom it disturbs (nobody), what it can be asked to keep."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.recorder import RefusedWarning
from regard.recorder.hooks import tap
from support.toy_models import hooks_of


class Attention(nn.Module):
    num_heads = 2

    def __init__(self, size=8):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def model(layers=3):
    return nn.Sequential(*[Attention() for _ in range(layers)])


def listening():
    key = torch._C._dispatch_key_parse(tap.RECORD_KEY)
    return torch._C._dispatch_tls_is_dispatch_key_included(key)


@pytest.fixture
def x():
    return torch.randn(2, 5, 8)


def test_everything_is_gone_after_the_block(x):
    net = model()
    with regard.record(net):
        assert listening()
        net(x)
    assert not listening()
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse(tap.FOLLOW_KEY))
    assert hooks_of(net) == 0
    assert tap.listeners() == []


def test_everything_is_gone_when_the_model_raises(x):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = Attention()

        def forward(self, x):
            self.first(x)
            raise RuntimeError("the model's own error")

    net = Raises()
    recording = regard.record(net)
    with pytest.raises(RuntimeError, match="the model's own error"), recording as seen:
        net(x)
    assert not listening()
    assert hooks_of(net) == 0
    assert [layer.name for layer in seen.layers] == ["first"]  # what was seen before stays


def test_another_thread_is_recorded_and_not_changed(x):
    net = model()
    expected = net(x)
    inside, done, results = threading.Event(), threading.Event(), {}

    def other():
        torch.set_num_threads(1)  # as the main thread has: by two, BLAS adds up in another order
        inside.wait()
        results["listening"] = listening()
        results["y"] = net(x)
        with regard.record(net) as own:
            net(x)
        results["own"] = len(own)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with regard.record(net) as seen:
        net(x)
        inside.set()
        done.wait()
        net(x)
    thread.join()
    assert results["listening"] is False
    assert torch.equal(results["y"], expected)
    assert results["own"] == 3
    assert len(seen.passes) == 3  # the thread's own recording is its own


def _run(thread):
    thread.start()
    thread.join()


def test_the_fast_path_of_an_encoder_stays_on_in_other_threads():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 8)
    results = {}

    def other():
        torch.set_num_threads(1)  # as the main thread has: by two, BLAS adds up in another order
        with torch.no_grad():
            results["y"] = encoder(x)

    with torch.no_grad():
        expected = encoder(x)
        thread = threading.Thread(target=other)
        recording = regard.record(encoder)
        with recording as seen:
            _run(thread)
    assert torch.equal(results["y"], expected)
    assert [layer.name for layer in seen.layers] == ["layers.0.self_attn", "layers.1.self_attn"]


def test_many_threads_record_one_model_at_once():
    net, recordings, errors = model(), {}, []

    def work(n):
        try:
            x = torch.randn(1, 3 + n, 8, generator=torch.Generator().manual_seed(n))
            for _ in range(5):
                with torch.no_grad(), regard.record(net) as seen:
                    net(x)
                recordings.setdefault(n, []).append([tuple(layer.shape) for layer in seen.layers])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(runs == [[(1, 2, 3 + n, 3 + n)] * 3] * 5 for n, runs in recordings.items())
    assert hooks_of(net) == 0


def test_nested_and_repeated_recordings(x):
    net = model()
    with regard.record(net) as outer:
        net(x)
        with regard.record(net[1]) as inner:
            net(x)
        net(x)
    assert len(outer.passes) == 3
    assert [len(p.layers) for p in outer.passes] == [3, 3, 3]
    assert len(inner.passes) == 1
    assert len(inner) == 1
    with regard.record(net) as again:
        net(x)
    assert len(again) == 3


def test_only_the_given_model_is_recorded(x):
    net, other = model(), model()
    with regard.record(net) as seen:
        other(x)
        net(x)
    assert len(seen.passes) == 1
    with regard.record(None) as everything:
        other(x)
        net(x)
    assert sum(len(p.layers) for p in everything.passes) == 6


def test_passes_are_told_apart_and_the_last_one_is_meant(x):
    net = model()
    with regard.record(net) as seen:
        net(x)
        net(x[:, :3])
    assert [p.layers[0].shape[-1] for p in seen.passes] == [5, 3]
    assert seen[0].shape[-1] == 3


def test_one_module_called_twice_in_a_pass_is_two_layers(x):
    shared = Attention()
    net = nn.Sequential(shared, shared)
    with regard.record(net) as seen:
        net(x)
        net(x)
    assert [len(p.layers) for p in seen.passes] == [2, 2]


def test_parts_called_outside_forward_make_passes_too(x):
    net = model()
    with regard.record(net) as seen:
        for _ in range(2):
            net[1](net[0](x))
    assert [len(p.layers) for p in seen.passes] == [2, 2]


def test_memory_is_freed_with_the_recording(x):
    net = model()
    with regard.record(net) as seen:
        net(x)
    references = [weakref.ref(layer.saved) for layer in seen.layers]
    root = weakref.ref(net)
    del net
    gc.collect()
    assert root() is None, "a recording keeps its model alive"
    assert references[0]() is not None
    del seen
    gc.collect()
    assert all(ref() is None for ref in references)


def test_factors_are_detached(x):
    net = model()
    with regard.record(net, values=True) as seen:
        net(x)
    for layer in seen.layers:
        assert not layer.saved.q.requires_grad
        assert not layer.saved.k.requires_grad
        assert not layer.values.requires_grad


def test_buffers_that_the_model_writes_over_are_copied(x):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 2, 8, 4))

        def forward(self, q):
            self.cache[:, :, :5].copy_(q)
            return F.scaled_dot_product_attention(q, self.cache[:, :, :5], q)

    net, q = Cached(), torch.randn(2, 2, 5, 4)
    with regard.record(net) as seen:
        net(q)
    before = seen[0].dense()
    net(q * 3)
    with regard.record(net) as later:
        net(q)
    torch.testing.assert_close(seen.layers[0].saved.weights().dense(), before)
    torch.testing.assert_close(later[0].dense(), before)


def test_what_is_written_over_unforeseen_is_refused_not_wrong():
    class Rude(nn.Module):
        def forward(self, q):
            q = q * 1
            y = F.scaled_dot_product_attention(q, q, q)
            q.zero_()
            return y

    net = Rude()
    with pytest.warns(RefusedWarning, match="in place"), regard.record(net) as seen:
        net(torch.randn(1, 2, 5, 4))
    assert len(seen) == 0


@pytest.mark.parametrize(
    ("layers", "expected"), [([0, 2], ["0", "2"]), ("1", ["1"]), (["[12]"], ["1", "2"]), (1, ["1"])]
)
def test_a_part_of_the_layers(x, layers, expected):
    net = model()
    with regard.record(net, layers=layers) as seen:
        net(x)
    assert [layer.name for layer in seen.layers] == expected


def test_statistics_are_numbers_of_every_pass(x):
    net = model()
    with regard.record(net) as full:
        net(x)
    with regard.record(net, keep="statistics") as seen:
        net(x)
        net(x)
    assert len(seen.passes) == 2
    for layer, other in zip(seen.layers, full.layers, strict=True):
        assert layer.saved is None
        torch.testing.assert_close(layer.statistics["entropy"], other.weights.entropy())
        torch.testing.assert_close(layer.statistics["received"], other.weights.received())
        torch.testing.assert_close(layer.statistics["max_score"], other.weights.max_score())
    with pytest.raises(ValueError, match='keep="factors"'):
        seen[0]
    assert len(seen.heads("entropy")) == 6


def test_values_are_kept_on_request(x):
    net = model()
    with regard.record(net, values=True) as seen:
        net(x)
    layer = seen.layers[0]
    q, k, v = net[0].qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(layer.values, v)
    torch.testing.assert_close(layer.weights @ layer.values, F.scaled_dot_product_attention(q, k, v))
    expected = layer.weights[0].dense() * v[0].norm(dim=-1).unsqueeze(-2)
    torch.testing.assert_close(layer.norm_weighted(0), expected)


def test_path_writes_the_file(x, tmp_path):
    net = model()
    with regard.record(net, path=tmp_path / "run.regard") as seen:
        net(x)
    again = regard.load(tmp_path / "run.regard")
    torch.testing.assert_close(again[1].dense(), seen[1].dense())


def test_path_keeps_one_layer_in_memory_at_a_time(x, tmp_path):
    net = model()
    with torch.no_grad(), regard.record(net, values=True) as expected:
        net(x)
    with torch.no_grad(), regard.record(net, values=True, path=tmp_path / "run.regard") as seen:
        net(x)
        net(x)
    assert all(layer.saved.q is None for p in seen.passes for layer in p.layers)
    for layer, other in zip(seen.layers, expected.layers, strict=True):
        assert torch.equal(layer.weights.dense(), other.weights.dense())
        assert torch.equal(layer.values, other.values)
    assert "factors" in repr(seen)
    again = regard.load(tmp_path / "run.regard")
    assert len(again.passes) == 2
    assert torch.equal(again.layers[1].weights.dense(), expected.layers[1].weights.dense())
    del seen, layer
    gc.collect()
    assert [p.name for p in tmp_path.iterdir()] == ["run.regard"]


def test_a_dense_mask_is_recognised():
    t = 64
    at = torch.arange(t)
    lengths = torch.tensor([64, 40])
    causal = (at[None] <= at[:, None])[None, None]
    right = (at[None] < lengths[:, None])[:, None, None]
    left = (at[None] >= 64 - lengths[:, None])[:, None, None]
    window = ((at[:, None] - at[None]) < 9)[None, None]
    cases = {
        "causal()": causal,
        "padding": right,
        "(causal() & padding": causal & right,
        "(causal() & ~padding": causal & left,
        "window(8, 0)": causal & window,
        "(window(8, 0) & padding": causal & window & right,
        "~padding": left,
        "window(3, 3)": ((at[:, None] - at[None]).abs() < 4)[None, None],
    }
    q = torch.randn(2, 2, t, 4)

    class Net(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, mask)

    for text, mask in cases.items():
        added = torch.where(mask, 0.0, torch.finfo(torch.float32).min).expand(2, -1, t, t)
        # A row that has the smallest number added to all its keys still has weights: such a sum is no mask.
        no_empty_row = bool(mask.any(-1).all())
        for form in (mask.expand(2, 2, t, t), added)[: 1 + no_empty_row]:
            net = Net()
            with regard.record(net) as seen:
                net(q, form)
            assert repr(seen.layers[0].saved.mask).startswith(text), (text, seen.layers[0].saved.mask)
            expected = (q @ q.mT / 2).masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1)
            torch.testing.assert_close(seen[0].dense(), expected * mask.any(-1, keepdim=True), atol=1e-6, rtol=1e-5)


def test_a_row_wiped_by_a_finite_number_keeps_the_weights_it_has():
    q = torch.randn(1, 1, 3, 4)
    added = torch.zeros(1, 1, 3, 3)
    added[..., 1, :] = torch.finfo(torch.float32).min
    net = type("Net", (nn.Module,), {"forward": lambda self, q: F.scaled_dot_product_attention(q, q, q, added)})()
    with regard.record(net) as seen:
        net(q)
    torch.testing.assert_close(seen[0].dense()[0, 0, 1], torch.full((3,), 1 / 3))


def test_a_16k_causal_mask_is_not_stored():
    t = 4096
    mask = torch.ones(t, t, dtype=torch.bool).tril()
    net = type("Net", (nn.Module,), {"forward": lambda self, q: F.scaled_dot_product_attention(q, q, q, mask)})()
    with torch.no_grad(), regard.record(net) as seen:
        net(torch.randn(1, 1, t, 8))
    assert repr(seen.layers[0].saved.mask) == "causal()"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": "bert"}, TypeError, "nn.Module"),
        ({"keep": "all"}, ValueError, "factors"),
        ({"path": 3}, TypeError, "takes the path of a file.*got int"),
        ({"path": "."}, IsADirectoryError, "is a folder"),
        ({"path": "no such folder/a.regard"}, FileNotFoundError, "there is no such folder; make it first"),
        ({"device": "meta"}, ValueError, "must hold tensors on this machine.*got 'meta'"),
        ({"values": "yes"}, TypeError, "values is True or False; got 'yes'"),
        ({"grad": 1}, TypeError, "grad is True or False; got 1"),
        ({"layers": 2.5}, TypeError, "numbers in the order"),
        ({"layers": {0: 1}}, TypeError, "numbers in the order"),
        ({"layers": -1}, ValueError, r"counted from 0.*got -1"),
        ({"layers": []}, ValueError, r"one at least is requested; got \[\]"),
        ({"tokens": 5}, TypeError, "tokenizer"),
        ({"tokens": ["a", ["b"]]}, TypeError, "got both in one list"),
        ({"tokens": [["a", 1]]}, TypeError, "strings.*got int"),
    ],
)
def test_bad_arguments_are_told_before_the_model_runs(arguments, error, text):
    net = nn.Sequential(nn.Embedding(9, 8), Attention())
    with pytest.raises(error, match=text):
        regard.record(**{"model": net, **arguments})


@pytest.mark.parametrize("layers", [iter([1]), torch.tensor([1]), torch.tensor(1), range(1, 2), {"1"}])
def test_layers_are_any_numbers_or_names(layers, x):
    net = nn.Sequential(Attention(), Attention())
    with regard.record(net, layers=layers) as seen:
        net(x)
    assert [layer.name for layer in seen.layers] == ["1"]


def test_a_block_ends_once(x):
    block = regard.record(net := Attention())
    with block:
        net(x)
    with pytest.raises(RuntimeError, match="ends once"):
        block.__exit__(None, None, None)


def test_importing_regard_stays_light():
    import subprocess
    import sys

    heavy = "{'transformers', 'safetensors', 'pandas', 'regard.recorder'}"
    code = f"import sys, regard; assert not {heavy} & set(sys.modules); regard.record"
    subprocess.run([sys.executable, "-c", code], check=True)
