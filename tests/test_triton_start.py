"""Kept launches: the second call of a form gives the kernel what the first would have been given, at the new addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from regard.engines.triton import start as room


class Group(NamedTuple):
    ptr: Any
    stride: int


class Descriptor:
    """As Triton's: what the copy engine is told of a tensor."""

    def __init__(self, base, shape):
        self.base, self.shape = base, shape


class Kernel:
    """Stands for a kernel of Triton's: notes what it is started with."""

    __name__ = "kernel"
    arg_names = ("x", "out", "pair", "desc", "n", "FLAG")

    def __init__(self):
        self.prepared, self.replayed = [], []

    def __getitem__(self, grid):
        if len(grid) == 3:  # the compiled one
            return lambda *arguments: self.replayed.append((grid, arguments))

        def first(**arguments):
            self.prepared.append((grid, arguments))
            return self

        return first


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(room, "KEPT", {})
    monkeypatch.setattr(room, "INTERPRETED", False)
    return Kernel()


def ask(kernel, x, y, key="key", n=3):
    out = torch.empty(4)

    def arguments():
        pair = (x, Group(y, 7), 5)
        return n, {"x": Group(x, 1), "out": out, "pair": pair, "desc": Descriptor(y, [2]), "n": n, "FLAG": True, "num_warps": 4}  # fmt: skip

    room.start(kernel, key, [x, y, None, out], arguments)
    return out


def test_the_second_call_is_given_the_new_addresses(kernel):
    x, y = torch.randn(4, 8), torch.randn(8)
    ask(kernel, x, y)
    assert len(kernel.prepared) == 1
    assert not kernel.replayed
    x2, y2 = torch.randn(4, 8), torch.randn(8)
    out = ask(kernel, x2, y2)
    assert len(kernel.prepared) == 1
    ((grid, (group, where, pair, desc, n, flag)),) = kernel.replayed
    assert grid == (3, 1, 1)
    assert group == (x2.data_ptr(), 1)
    assert where == out.data_ptr()
    assert pair == (x2.data_ptr(), (y2.data_ptr(), 7), 5)
    assert type(desc) is Descriptor
    assert desc.base.data_ptr() == y2.data_ptr()
    assert desc.shape == [2]
    assert (n, flag) == (3, True)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x.half(), y),
        lambda x, y: (x.new_empty(8, 4).T, y),
        lambda x, y: (torch.randn(5, 8), y),
        lambda x, y: (torch.randn(33)[1:].view(4, 8), y),  # not aligned any more
        lambda x, y: (x, x[0]),  # two tensors at one address
    ],
)
def test_another_form_is_prepared_anew(kernel, change):
    x, y = torch.randn(4, 8), torch.randn(8)
    ask(kernel, x, y)
    ask(kernel, *change(x, y))
    assert len(kernel.prepared) == 2
    assert not kernel.replayed


def test_another_key_or_none_is_prepared_anew(kernel):
    x, y = torch.randn(4, 8), torch.randn(8)
    for key in ("one", "other", None, None):
        ask(kernel, x, y, key)
    assert len(kernel.prepared) == 4
    assert not kernel.replayed


def test_a_kept_launch_keeps_no_tensor_alive(kernel):
    import gc
    import weakref

    x = torch.randn(4, 8)
    gone = weakref.ref(x)
    ask(kernel, x, torch.randn(8))
    kernel.prepared.clear()
    del x
    gc.collect()
    assert gone() is None


def test_a_tensor_that_was_not_named_is_an_error(kernel):
    x = torch.randn(4)
    hidden = torch.randn(4)
    with pytest.raises(KeyError):
        room.start(kernel, "key", [x], lambda: (1, dict.fromkeys(kernel.arg_names, hidden)))


def test_growing_lengths_do_not_keep_launches_for_ever(kernel, monkeypatch):
    monkeypatch.setattr(room, "MOST", 3)
    for n in range(1, 9):
        ask(kernel, torch.randn(n, 8), torch.randn(8))
    assert len(room.KEPT) <= 3
