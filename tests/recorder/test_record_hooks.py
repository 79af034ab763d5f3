"""A model is as it was after a block, however the block ends: Ctrl-C at any line, exceptions, `del`, and in copies."""

import copy
import gc
import io
import linecache
import os
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.recorder import RefusedWarning
from regard.recorder.hooks import model_hooks, tap
from support.toy_models import hooks_of


class Attention(nn.Module):
    def forward(self, x):
        return x + F.scaled_dot_product_attention(x, x, x)


def model():
    return nn.Sequential(Attention(), Attention())


@pytest.fixture
def x():
    return torch.randn(1, 2, 3, 4, requires_grad=True)


FILES = ("observer.py", "watcher.py", "model_hooks.py")

SKIPPED = ("__del__", "__init__", "_measures", "_visible_keys", "batch_size", "call_site", "is_compiled")


class Interrupt:
    """KeyboardInterrupt at the n-th line that Python executes where hooks and listeners come and go.

    Lines that begin a `with` are left out: Python visits them once more at the end of the block, where no signal is
    delivered. So are `__del__` methods, from which no exception comes out.
    """

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, argument):
        if os.path.basename(frame.f_code.co_filename) not in FILES or frame.f_code.co_name in SKIPPED:
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event == "line" and not text.startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(run, line):
    """Whether Ctrl-C came at that line of `run`; False if it has fewer lines."""
    before, interrupt = sys.gettrace(), Interrupt(line)
    try:
        sys.settrace(interrupt)
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return interrupt.left <= 0


def record_a_pass(net, x):
    with regard.record(net):
        net(x)


def watch_a_pass(net, x):
    with regard.watch(net, every=1):
        net(x)


@pytest.fixture
def quick_collection():
    """`gc.collect` looks at new objects only: all of PyTorch takes it a third of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.filterwarnings(
    "ignore::regard.recorder.RefusedWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",  # in the callback of a finalizer
)
@pytest.mark.parametrize(("run", "step"), [(record_a_pass, 1), (watch_a_pass, 11)])
def test_ctrl_c_at_any_line_leaves_no_hook(run, step, x, quick_collection):
    """PyTorch writes a report of an exception in a hook of `watch`, which is slow: there every eleventh line."""
    net = model().train()
    plain = net(x)
    run(net, x)
    line = 1
    while interrupted(lambda: run(net, x), line):
        gc.collect()
        assert torch.equal(net(x), plain), line  # a hook that lost its owner removes itself here
        assert hooks_of(net) == 0, line
        assert tap.listeners() == [], line
        assert not torch._C._dispatch_tls_is_dispatch_key_included(tap._key(tap.RECORD_KEY)), line
        line += step
    assert line > 60


def test_an_exception_in_the_block_leaves_no_hook(x):
    net = model()
    for block in (regard.record, lambda net: regard.watch(net, every=1)):
        with pytest.raises(ZeroDivisionError), block(net):
            net(x / (0 // len(net) or 1 // 0))
        assert hooks_of(net) == 0


def test_del_leaves_no_hook(x):
    net = model().train()
    watching = regard.watch(net, every=1)
    net(x)
    assert watching.numbers()
    del watching
    assert hooks_of(net) == 0
    recording = regard.record(net)
    recording.__enter__()
    net(x)
    del recording
    gc.collect()
    assert hooks_of(net) == 0
    net(x)
    assert tap.listeners() == []


def test_a_watch_that_nothing_holds_says_so():
    with pytest.warns(RefusedWarning, match="Keep it"):
        regard.watch(model())


def saved(net):
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved], ids=["deepcopy", "torch.save"])
@pytest.mark.parametrize("block", [regard.record, lambda net: regard.watch(net, every=1)], ids=["record", "watch"])
def test_a_copy_made_inside_has_no_hook_after_its_first_call(copied, block, x):
    net = model().train()
    with block(net):
        net(x)
        other = copied(net)
    assert hooks_of(net) == 0
    assert torch.equal(other(x), net(x))
    assert hooks_of(other) == 0


def test_modules_that_do_not_attend_are_hooked_beside_another_thread_alone(x, monkeypatch):
    """Each hook takes as long as an operator, at every step of a generation."""
    monkeypatch.setattr(model_hooks, "is_only_thread", lambda: True)
    net = nn.Sequential(nn.Sequential(Attention()))
    alone, threads = [], []
    for hooked in (alone, threads):
        with regard.record(net) as seen:
            if hooked is threads:
                thread = threading.Thread(target=net[0], args=(x,))
                thread.start()
                thread.join()
            net(x)
            hooked += [len(part._forward_hooks) for part in net.modules()]
        assert [one.layers[0].name for one in seen.passes] == ["0.0"] * (1 if hooked is alone else 2)
    assert (alone, threads) == ([1, 0, 0], [1, 1, 1])
    assert hooks_of(net) == 0


def test_operators_that_act_on_scores_alone_pass_without_python(x):
    """Until there are scores: a model calls activations in every layer."""
    with regard.record(model()):
        kernel_of = torch._C._dispatch_has_kernel_for_dispatch_key
        for name in ("silu", "gelu", "exp", "clamp", "topk", "sigmoid"):
            assert not kernel_of(f"aten::{name}", tap.RECORD_KEY), name
            assert kernel_of(f"aten::{name}", tap.FOLLOW_KEY), name


def test_layers_and_sums_of_equals_are_not_reported(x, monkeypatch):
    reported = []
    monkeypatch.setattr(tap, "unreadable_kind", lambda values, nested=True: reported.append(values))
    net, norm = nn.Linear(4, 4), nn.RMSNorm(4)
    with regard.record(nn.Sequential(net, norm), grad=True):
        for rows in (x, x.transpose(1, 2)):
            (net(rows) + rows + 1e-6) * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
        assert reported == []
        x @ x.mT
    assert len(reported) == 1
