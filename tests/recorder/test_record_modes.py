"""Dispatch modes and tensor subclasses between a softmax and its values: the model runs, and is recorded all the same.

While weights wait for their values, every operator is intercepted. What else runs there (a FLOP counter, a compiler's
fake tensors, a tensor subclass) must not notice.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.recorder import RefusedWarning


class Between(nn.Module):
    """Attention, and something else between its softmax and its values."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, x):
        w = (x @ x.mT).softmax(-1)
        self.other(x)
        return w @ x


class Logging(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, as DTensor or a quantized weight."""

    @staticmethod
    def __new__(cls, inner):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = tree_map(lambda x: x.inner if isinstance(x, Wrapper) else x, args)
        return tree_map(lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x, function(*args, **(kwargs or {})))


def in_mode(mode):
    def function(x):
        with mode():
            return x.log1p() @ x.mT, x.new_empty([2]), torch.ones(3)

    return function


def fake(x):
    with FakeTensorMode() as mode:
        return mode.from_tensor(x).log1p().new_empty([2])


OTHERS = {
    "a mode": in_mode(Logging),
    "a FLOP counter": in_mode(lambda: FlopCounterMode(display=False)),
    "fake tensors": fake,
    "a tracer": lambda x: make_fx(lambda t: t.log1p().new_empty([2]), tracing_mode="symbolic")(x),
    "a compiler": lambda x: torch.compile(lambda t: t.log1p() + t.new_empty([]), backend="eager", fullgraph=True)(x),
    "an export": lambda x: torch.export.export(nn.Linear(8, 3), (x,)),
    "a wrapper": lambda x: Wrapper(x).log1p(),
    "a jagged tensor": lambda x: torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged).sin(),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_modes_and_subclasses_run_between_a_softmax_and_its_values(name):
    torch._dynamo.reset()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    net = Between(OTHERS[name])
    with torch.no_grad():
        plain = net(x)
        with regard.record(net) as seen:
            assert torch.equal(net(x), plain)
    torch.testing.assert_close(seen[0].dense()[:, 0], (x @ x.mT).softmax(-1))


def test_an_operator_that_was_defined_after_the_first_recording_is_named():
    with regard.record(None):
        pass
    with torch.library._scoped_library("regard_tests_later", "DEF") as library:
        library.define("weighted_sum(Tensor w, Tensor v) -> Tensor")
        library.impl("weighted_sum", lambda w, v: w @ v, "CPU")
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        net = nn.Sequential(Between(lambda x: None))
        net[0].forward = lambda x: torch.ops.regard_tests_later.weighted_sum((x @ x.mT).softmax(-1), x)
        with pytest.warns(RefusedWarning, match="regard_tests_later::weighted_sum"), regard.record(net):
            net(x)
