"""Cached launches: the second call of a signature passes the kernel the same arguments at the new addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton", minversion="3.5", reason="the kernels need Triton 3.5, and so does their launcher")

from regard.engines.triton import launcher as launcher_module


class Group(NamedTuple):
    ptr: Any
    stride: int


class Descriptor:
    """Stands for Triton's TMA descriptor."""

    def __init__(self, base, shape):
        self.base, self.shape = base, shape


class Kernel:
    """Stands for a Triton kernel: records the arguments of its launches."""

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
    monkeypatch.setattr(launcher_module, "LAUNCHES", {})
    monkeypatch.setattr(launcher_module, "INTERPRETED", False)
    monkeypatch.setattr(launcher_module, "direct_launcher", lambda *_: None)
    return Kernel()


def ask(kernel, x, y, key="key", n=3):
    out = torch.empty(4)

    def arguments():
        pair = (x, Group(y, 7), 5)
        return n, {"x": Group(x, 1), "out": out, "pair": pair, "desc": Descriptor(y, [2]), "n": n, "FLAG": True, "num_warps": 4}  # fmt: skip

    launcher_module.launch(kernel, key, [x, y, None, out], arguments)
    return out


def test_the_second_launch_takes_the_new_addresses(kernel):
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
def test_another_signature_is_prepared_again(kernel, change):
    x, y = torch.randn(4, 8), torch.randn(8)
    ask(kernel, x, y)
    ask(kernel, *change(x, y))
    assert len(kernel.prepared) == 2
    assert not kernel.replayed


def test_another_key_or_none_is_prepared_again(kernel):
    x, y = torch.randn(4, 8), torch.randn(8)
    for key in ("one", "other", None, None):
        ask(kernel, x, y, key)
    assert len(kernel.prepared) == 4
    assert not kernel.replayed


def test_a_cached_launch_keeps_no_tensor_alive(kernel):
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
        launcher_module.launch(kernel, "key", [x], lambda: (1, dict.fromkeys(kernel.arg_names, hidden)))


class FakeLauncher:
    """As in Triton 3.6: the C launcher is in the closure of the function that encodes TMA descriptors."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, started):
        def launcher(*arguments):
            started.append(arguments)

        def inner(*arguments):
            launcher("the long way", *arguments)

        self.launch = inner


class FakeCompiled:
    """A compiled kernel of five arguments, the fourth a TMA descriptor."""

    packed_metadata, function = "packed", "function"

    def __init__(self, scratch=0):
        self.started, self.long = [], []
        self.run = FakeLauncher(self.started)
        self.run.global_scratch_size = scratch
        kinds = {"x": "*fp32", "out": "*fp32", "pair": ("*fp32", "i32"), "desc": "tensordesc<fp32[2]>", "n": "i32"}
        self.src = type("Source", (), {"signature": kinds})
        self.metadata = type("Metadata", (), {"tensordesc_meta": ["meta"]})

    def __getitem__(self, grid):
        return lambda *arguments: self.long.append((grid, arguments))


@pytest.fixture
def triton_3_6(monkeypatch):
    """The private parts of Triton that `DirectLauncher` uses, as in that version."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.6.9")
    monkeypatch.setattr(launcher_module, "PACKED_ARGS", {})
    written = []
    inside = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(inside, "make_tensordesc_arg", lambda x, meta: written.append(x) or [("map", x.base, meta), *x.shape])  # fmt: skip
    active = type("Driver", (), {"get_current_stream": staticmethod(lambda device: f"stream of {device}"), "get_current_device": staticmethod(lambda: 3)})  # fmt: skip
    monkeypatch.setattr(triton.runtime, "driver", type("Drivers", (), {"active": active}))
    hook = type("Hooks", (), {"calls": []})
    monkeypatch.setattr(triton.knobs, "runtime", type("Runtime", (), {"launch_enter_hook": hook, "launch_exit_hook": hook}))  # fmt: skip
    return written, hook


def launched(compiled, x, y):
    return launcher_module.Launch(compiled, 7, [x, y, Group(x, 1), Descriptor(y, [2]), 5], [x, y])


def test_the_direct_launcher_encodes_a_descriptor_once_for_each_address(triton_3_6):
    written, _ = triton_3_6
    compiled, x, y = FakeCompiled(), torch.randn(4), torch.randn(4)
    launch = launched(compiled, x, y)
    addresses = ((16, 32), (16, 32), (48, 32), (48, 64), (16, 32), (16, 64))
    for at in addresses:
        launch([*at])
    fixed = (7, 1, 1, "stream of 3", "function", False, True, None, None, "packed", None, None, None)
    assert compiled.started == [(*fixed, a, b, (a, 1), ("map", b, "meta"), 2, 5) for a, b in addresses]  # fmt: skip
    assert [int(descriptor.base) for descriptor in written] == [32, 64]
    assert not compiled.long


def test_with_launch_hooks_tritons_own_launcher_is_used(triton_3_6):
    _, hook = triton_3_6
    compiled, x, y = FakeCompiled(), torch.randn(4), torch.randn(4)
    launch = launched(compiled, x, y)
    hook.calls.append(print)
    launch([16, 32])
    assert not compiled.started
    ((grid, (a, b, group, desc, n)),) = compiled.long
    assert (grid, a, b, group, desc.base, n) == ((7, 1, 1), 16, 32, (16, 1), 32, 5)


def test_a_kernel_that_needs_scratch_takes_tritons_own_launcher(triton_3_6):
    compiled, x, y = FakeCompiled(scratch=128), torch.randn(4), torch.randn(4)
    launched(compiled, x, y)([16, 32])
    assert not compiled.started
    assert len(compiled.long) == 1


def test_the_switch_selects_tritons_own_launcher(triton_3_6, monkeypatch):
    monkeypatch.setattr(launcher_module, "DIRECT_LAUNCH", False)  # REGARD_DIRECT_LAUNCH=0
    compiled, x, y = FakeCompiled(), torch.randn(4), torch.randn(4)
    launched(compiled, x, y)([16, 32])
    assert not compiled.started
    assert len(compiled.long) == 1


def test_the_cache_of_packed_arguments_is_bounded(triton_3_6, monkeypatch):
    monkeypatch.setattr(launcher_module, "MAX_PACKED_ARGS", 10)
    compiled, x, y = FakeCompiled(), torch.randn(4), torch.randn(4)
    launch = launched(compiled, x, y)
    for n in range(50):
        launch([16 * n, 32])
    assert len(launcher_module.PACKED_ARGS) <= 10
    assert len(compiled.started) == 50


@pytest.fixture
def triton_since_3_7(monkeypatch):
    """The launcher of the Triton that is installed, on a driver that notes down what it is handed."""
    inside = pytest.importorskip("triton.backends.nvidia.driver")
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6."):
        pytest.skip("3.6 has a launcher of its own, tested above and on a GPU")
    monkeypatch.setattr(launcher_module, "PACKED_ARGS", {})
    handed, written = [], []

    def write(address, *rest):
        written.append(address)
        return ("map", address, *map(str, rest))

    utils = type("Utils", (), {"launch": staticmethod(lambda *call: handed.append(call)), "fill_tma_descriptor_tiled": staticmethod(write)})  # fmt: skip
    active = type("Driver", (), {"utils": utils, "get_current_stream": staticmethod(lambda device: 11), "get_current_device": staticmethod(lambda: 0)})  # fmt: skip
    monkeypatch.setattr(triton.runtime, "driver", type("Drivers", (), {"active": active}))
    monkeypatch.setattr(inside, "annotate_arguments", lambda signature: ("annotations", tuple(signature)))
    monkeypatch.setattr(inside, "make_kernel_signature", lambda signature: ("signature", tuple(signature)))
    hook = type("Hooks", (), {"calls": []})
    monkeypatch.setattr(triton.knobs, "runtime", type("Runtime", (), {"launch_enter_hook": hook, "launch_exit_hook": hook}))  # fmt: skip
    return inside.CudaLauncher, handed, written


def test_since_3_7_the_direct_launcher_passes_what_tritons_launcher_passes(triton_since_3_7):
    launcher, handed, written = triton_since_3_7
    described = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    fields = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align", "launch_cooperative_grid", "launch_pdl")  # fmt: skip
    compiled = type("Compiled", (), {"function": 5, "packed_metadata": "packed"})
    compiled.src = type("Source", (), {"signature": {"x": "*bf16", "desc": "tensordesc<bf16[64, 64],nvmma>", "n": "i32"}, "constants": {}})  # fmt: skip
    compiled.metadata = type("Metadata", (), {**dict.fromkeys(fields, 0), "tensordesc_meta": [described], "num_ctas": 1, "instrumentation_mode": ""})  # fmt: skip
    compiled.run = launcher(compiled.src, compiled.metadata)
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    desc = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor(x, [64, 64], [64, 1], [64, 64])
    way = launcher_module.direct_launcher(compiled, 7)
    assert type(way) is launcher_module.DirectLauncherSince37
    packed = way.packed_args([x, desc, 3])
    for _ in range(3):
        way.run(packed)
    assert len(written) == 1, "what the copy engine is told is written once"
    compiled.run(7, 1, 1, 11, 5, "packed", None, None, None, x, desc, 3)
    *ours, theirs = [(*call[:-1], list(call[-1])) for call in handed]
    assert ours == [theirs] * 3


def test_the_cache_of_launches_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launcher_module, "MAX_LAUNCHES", 3)
    for n in range(1, 9):
        ask(kernel, torch.randn(n, 8), torch.randn(8))
    assert len(launcher_module.LAUNCHES) <= 3
