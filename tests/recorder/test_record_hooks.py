"""A model is as it was after a block, however the block ends: Ctrl-C at any line, exceptions, `del`, and in copies."""

import copy
import gc
import io
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.recorder import RefusedWarning
from regard.recorder.hooks import tap


class Attention(nn.Module):
    def forward(self, x):
        return x + F.scaled_dot_product_attention(x, x, x)


def model():
    return nn.Sequential(Attention(), Attention())


def hooks_of(net):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


@pytest.fixture
def x():
    return torch.randn(1, 2, 3, 4, requires_grad=True)


class Interrupt:
    """KeyboardInterrupt at the n-th line that Python executes in a file of the recorder."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, argument):
        if "/regard/recorder/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(run, line):
    """Whether `run` ended by Ctrl-C at that line; False if it has fewer lines."""
    before = sys.gettrace()
    try:
        sys.settrace(Interrupt(line))
        run()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


def record_a_pass(net, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusedWarning)
        with regard.record(net):
            net(x)


def watch_a_pass(net, x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RefusedWarning)
        with regard.watch(net, every=1):
            net(x)


@pytest.mark.parametrize("run", [record_a_pass, watch_a_pass])
def test_ctrl_c_at_any_line_leaves_no_hook(run, x):
    net = model().train()
    plain = net(x)
    with torch.no_grad():
        run(net, x)
    line, step = 1, 1
    while interrupted(lambda: run(net, x), line):
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(net(x), plain), line  # a hook that lost its owner removes itself here
        assert hooks_of(net) == 0, line
        assert tap.listeners() == [], line
        assert not torch._C._dispatch_tls_is_dispatch_key_included(tap._key(tap.RECORD_KEY)), line
        step = max(1, line // 12)  # the first lines one by one, then ever fewer of the repeating ones
        line += step
    assert line > 100
    exits = 40
    total = line
    for last in range(max(1, total - step - exits), total):  # the lines of the end, one by one
        if interrupted(lambda: run(net, x), last):
            gc.collect()
            net(x)
            assert hooks_of(net) == 0, last
            assert tap.listeners() == [], last


def test_an_exception_in_the_block_leaves_no_hook(x):
    net = model()
    for block in (regard.record(net), regard.watch(net, every=1)):
        with pytest.raises(ZeroDivisionError), block:
            net(x)
            raise ZeroDivisionError
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
        gc.collect()


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
