"""Dispatch modes, and tensors that cannot be read, beside attention: the model runs, and is recorded all the same.

While weights wait for their values, every operator is intercepted. What else runs there (a FLOP counter, a compiler's
fake tensors, a tensor subclass, nested and sparse tensors) must not notice, and is no attention.
"""

import warnings

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


# Tensors that cannot be read, and operators that are no attention.


def nested(x):
    return torch.nested.nested_tensor([x[0], x[1, :2]])


def jagged(x):
    return torch.nested.nested_tensor([x[0], x[1, :2]], layout=torch.jagged)


def halves(x):
    """Its derivative divides by a number, which is a wrapped tensor inside torch.func.grad."""
    return ((x @ x.mT) / 2.0).tanh().sum() / 3.0


UNREADABLE = {
    "nested, added": lambda x: nested(x) + nested(x),
    "nested, joined": lambda x: torch.cat([nested(x), nested(x)]),
    "nested, activated": lambda x: torch.nn.functional.gelu(nested(x).relu()),
    "nested, projected": lambda x: torch.nn.functional.linear(nested(x), torch.ones(3, 8)),
    "jagged, projected": lambda x: torch.nn.functional.linear(jagged(x), torch.ones(3, 8)).exp().sum(-1),
    "jagged, averaged": lambda x: (jagged(x) + 1).mean(1),
    "sparse, added": lambda x: x.to_sparse() + x.to_sparse(),
    "sparse, summed": lambda x: x.to_sparse().sum(-1),
    "sparse, times dense": lambda x: x[0].to_sparse_csr() @ x[0].mT,
    "sparse rows, added": lambda x: x[0].to_sparse_csr() + x[0].to_sparse_csr(),
    "several layers by vmap": lambda x: torch.vmap(torch.nn.functional.linear, (None, 0))(x, torch.ones(2, 3, 8)).exp(),
    "products by vmap": lambda x: torch.vmap(lambda t: t @ t.mT)(x).exp(),
    "a Jacobian": lambda x: torch.vmap(torch.func.jacrev(lambda t: (t * t).sum()))(x),
    "a Jacobian of halves": lambda x: torch.func.jacrev(halves)(x),
    "a gradient of halves": lambda x: torch.func.grad(halves)(x),
    "gradients of each sequence": lambda x: torch.vmap(torch.func.grad(halves))(x),
    "a gradient of a gradient": lambda x: torch.func.grad(lambda t: torch.func.grad(halves)(t).sum())(x),
    "a Hessian": lambda x: torch.func.hessian(halves)(x[:1, :2]),
    "a pullback": lambda x: torch.func.vjp(halves, x)[1](torch.ones(())),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore:(Sparse CSR|The PyTorch API of nested)")
@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("name", UNREADABLE)
def test_tensors_that_cannot_be_read_are_no_attention(name, attends):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    other = UNREADABLE[name]
    net = Between(other) if attends else nn.Sequential(Between(other))
    if not attends:
        net[0].forward = lambda x: (other(x), x)[1]
    with torch.no_grad(), regard.record(net) as seen:
        net(x)
    assert seen.refused == []
    assert len(seen) == attends


def inside_gradient(w, x):
    return torch.func.grad(lambda t: ((0.5 * w) @ t / 2.0).sum())(x)


LOST = {
    "values inside vmap": lambda x: torch.vmap(torch.matmul)((x @ x.mT).softmax(-1), x),
    "all inside vmap": lambda x: torch.vmap(lambda t: (t @ t.mT).softmax(-1) @ t)(x),
    "all inside a gradient": lambda x: torch.func.grad(lambda t: ((t @ t.mT / 2.0).softmax(-1) @ t).sum() / 3.0)(x),
    "values inside a gradient": lambda x: inside_gradient((x @ x.mT / 2.0).softmax(-1), x),
    "sparse weights": lambda x: torch.sparse.mm((x[0] @ x[0].mT).softmax(-1).to_sparse(), x[0]),
}


@pytest.mark.parametrize("name", LOST)
def test_weights_that_cannot_be_read_are_named(name):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(Between(None))
    net[0].forward = LOST[name]
    with warnings.catch_warnings(), torch.no_grad(), regard.record(net) as seen:
        warnings.simplefilter("ignore", RefusedWarning)
        net(x)
    assert len(seen.refused) == 1
    assert len(seen) == 0


def test_scores_by_vmap_are_followed():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(Between(None))
    net[0].forward = lambda x: torch.vmap(lambda t: t @ t.mT)(x).softmax(-1) @ x
    with torch.no_grad(), regard.record(net) as seen:
        net(x)
    torch.testing.assert_close(seen[0].dense()[:, 0], (x @ x.mT).softmax(-1))
