"""The law of tensors: one that engines cannot read, or a transform that they cannot follow, is refused by name or served right.

Every public way in is tried with every kind of tensor: a kernel that took the address of a tensor without memory would
end the process, and one that ignored a flag of the tensor would answer with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses import FakeTensorMode

import regard
from regard import Dot
from support.judge import draw

B, H, N, D = 1, 2, 6, 4


def plain() -> Tensor:
    return draw(B, H, N, D, dtype=torch.float32)


def fake() -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(plain())


def freed() -> Tensor:
    x = plain()
    x.untyped_storage().resize_(0)
    return x


class Marked(Tensor):
    """A subclass without a dispatch of its own: an ordinary tensor with another name."""


#: Kinds of tensors that engines cannot read, and what an error says about them.
UNREADABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "sparse": (lambda: plain().to_sparse(), r"torch\.sparse_coo.*\.to_dense\(\)"),
    "compressed": (lambda: plain()[0, 0].to_sparse_csr(), r"torch\.sparse_csr.*\.to_dense\(\)"),
    "mkldnn": (lambda: plain().to_mkldnn(), r"torch\._mkldnn.*\.to_dense\(\)"),
    "quantized": (lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.qint8), r"qint8.*\.dequantize\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([plain()[0], plain()[0, :, :3]]), "nested tensor.*to_padded_tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([plain()[0, 0], plain()[0, 0, :3]], layout=torch.jagged),
        "nested tensor.*to_padded_tensor",
    ),
    "fake": (fake, "FakeTensor.*torch.Tensor"),
    "masked": (lambda: torch.masked.masked_tensor(plain(), plain() > 0), r"MaskedTensor.*torch\.Tensor"),
    "freed": (freed, "memory was freed"),
}

#: Every public function and method that takes floating-point tensors.
WAYS: dict[str, Callable[[Tensor], object]] = {
    "weights(q)": lambda x: regard.weights(x).entropy(),
    "weights(q, k)": lambda x: regard.weights(plain(), x).dense(),
    "attend(q)": lambda x: regard.attend(x, mask=regard.window(1, 1)),
    "attend(q, k, v)": lambda x: regard.attend(plain(), plain(), x, engine="blockwise"),
    "W @ v": lambda x: regard.weights(plain()) @ x,
    "u @ W": lambda x: x @ regard.weights(plain()),
    "W.mT @ u": lambda x: regard.weights(plain()).mT @ x,
    "see(values=v)": lambda x: regard.weights(plain()).see("entropy", values=x),
    "bias": lambda x: regard.weights(plain(), score=Dot().bias(x)).entropy(),
    "alibi": lambda x: regard.weights(plain(), score=Dot().alibi(x)).entropy(),
    "sink": lambda x: regard.weights(plain(), score=Dot().sink(x)).entropy(),
    "Bilinear": lambda x: regard.weights(plain(), score=regard.Bilinear(x)).entropy(),
    "Additive": lambda x: regard.weights(plain(), score=regard.Additive(x, x, x)).entropy(),
    "from_dense": lambda x: regard.Weights.from_dense(x).entropy(),
    "mask": lambda x: regard.weights(plain(), mask=x).entropy(),
    "padding": lambda x: regard.weights(plain(), mask=regard.padding(x)).entropy(),
    "documents": lambda x: regard.weights(plain(), mask=regard.documents(x)).entropy(),
    "mass": lambda x: regard.weights(plain()).mass(x),
}


@pytest.mark.filterwarnings("ignore")  # nested, quantized and masked tensors are prototypes, and say so
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_without_dense_memory_is_refused_by_name(way: str, kind: str) -> None:
    make, text = UNREADABLE[kind]
    x = make()
    if way == "u @ W" and kind == "jagged":
        pytest.skip("torch's own @ of jagged tensors refuses before it asks the other side")
    with pytest.raises(TypeError, match=text):
        WAYS[way](x)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_refuses_them_too() -> None:
    layer = regard.nn.SelfAttention(D, H, causal=False, bias=False, score="cosine")
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(B, N, D))
    with pytest.raises((TypeError, AssertionError), match="FakeTensor"):
        layer(x)


def test_the_meta_device_is_refused_where_numbers_are_computed_and_served_by_torch() -> None:
    q = plain().to("meta")
    for ask in (lambda: regard.weights(q), lambda: regard.attend(q, mask=regard.window(1, 1))):
        with pytest.raises(NotImplementedError, match="q is on the meta device, which holds shapes and no numbers"):
            ask()
    assert regard.attend(q).shape == q.shape


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of PyTorch 2.6, on a mesh of CPUs
def test_a_distributed_tensor_among_local_ones_is_refused_with_its_local_part(mesh) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x = plain()
    q = distribute_tensor(x, mesh, [Shard(1)])
    for way in ("weights(q, k)", "W @ v", "W.mT @ u", "from_dense", "mask"):
        with pytest.raises(TypeError, match=r"DTensor.*full_tensor\(\).*to_local\(\)"):
            WAYS[way](q)
    torch.testing.assert_close(regard.weights(q.to_local()).entropy(), regard.weights(x).entropy())


# Served as they are.


@pytest.mark.parametrize(
    "way", ["weights(q)", "weights(q, k)", "attend(q)", "attend(q, k, v)", "W @ v", "W.mT @ u", "bias"]
)
@pytest.mark.parametrize("kind", ["negated", "zeros", "subclass", "parameter"])
def test_a_tensor_that_is_read_as_torch_reads_it_is_served(kind: str, way: str) -> None:
    shape = (B, H, N, N) if way == "bias" else (B, H, N, D)
    x = draw(*shape, dtype=torch.float32)
    lazy, ordinary = {
        "negated": lambda: (torch._neg_view(x), -x),
        "zeros": lambda: (torch._efficientzerotensor(shape), torch.zeros(shape)),
        "subclass": lambda: (x.as_subclass(Marked), x),
        "parameter": lambda: (torch.nn.Parameter(x), x),
    }[kind]()
    torch.manual_seed(1)
    got = WAYS[way](lazy)
    torch.manual_seed(1)
    want = WAYS[way](ordinary)
    torch.testing.assert_close(got.detach().as_subclass(Tensor), want, rtol=1e-5, atol=1e-6)


def test_attend_of_lazy_zeros_is_zero() -> None:
    zeros = torch._efficientzerotensor((B, H, N, D))
    assert torch.equal(regard.attend(zeros, zeros, zeros), torch.zeros(B, H, N, D))


def test_a_lazily_negated_gradient_is_read_as_torch_reads_it() -> None:
    q = plain().requires_grad_()
    y = regard.weights(q).entropy()
    (got,) = torch.autograd.grad(y, q, torch._neg_view(torch.ones_like(y)))
    (want,) = torch.autograd.grad(regard.weights(q).entropy(), q, -torch.ones_like(y))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("mask", [None, regard.window(1, 1)], ids=repr)
def test_eight_bit_floats_are_attended_by_our_engines(mask: regard.Mask | None) -> None:
    x = plain().to(torch.float8_e4m3fn)
    want = regard.attend(x.float(), mask=mask)
    torch.testing.assert_close(regard.attend(x, mask=mask).float(), want, rtol=2**-3, atol=2**-4)


# Transforms.

TRACED: dict[str, Callable[[Tensor], Tensor]] = {
    "see": lambda q: regard.weights(q, mask=regard.causal()).see("entropy", values=q).y,
    "entropy": lambda q: regard.weights(q).entropy(),
    "dense": lambda q: regard.weights(q).dense(),
    "row": lambda q: regard.weights(q).row(3),
    "cell": lambda q: regard.weights(q)[0, 0, 1, 1],
    "W.mT @ u": lambda q: regard.weights(q).mT @ q,
    "attend": lambda q: regard.attend(q),
    "attend causally": lambda q: regard.attend(q, mask=regard.causal()),
    "attend in a window": lambda q: regard.attend(q, mask=regard.window(1, 1)),
    "from_dense": lambda q: regard.Weights.from_dense(q).entropy(),
    "reference": lambda q: regard.weights(q, engine="reference").entropy(),
}


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated, and warns of every size that it takes for a constant
@pytest.mark.parametrize("name", TRACED)
def test_torch_jit_trace_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot follow.*torch\.compile or torch\.export"):
        torch.jit.trace(TRACED[name], (plain(),), check_trace=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ask", ["entropy", "cell"])
def test_torch_jit_trace_is_refused_for_a_matrix_from_before(ask: str) -> None:
    W = regard.weights(plain())
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: x * (W.entropy() if ask == "entropy" else W[0, 0, 1, 1]).sum(), (plain(),))


@pytest.mark.filterwarnings("ignore")
def test_torch_jit_trace_of_a_layer_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace"):
        torch.jit.trace(regard.nn.SelfAttention(8, 2), (torch.randn(1, 5, 8),))


@pytest.mark.parametrize("ask", [regard.Weights.entropy, lambda W: W[0, 0, 1, 1], regard.Weights.received], ids=["entropy", "cell", "received"])  # fmt: skip
def test_forward_mode_is_refused_where_a_tangent_would_be_dropped(ask: Callable) -> None:
    q, t = plain(), plain()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, t)
        with pytest.raises(NotImplementedError, match=r"forward_ad.*reference.*torch\.func\.jvp"):
            ask(regard.weights(dual))
        tangent = forward_ad.unpack_dual(ask(regard.weights(dual, engine="reference"))).tangent
    _, followed = torch.func.jvp(lambda q: ask(regard.weights(q)), (q,), (t,))
    torch.testing.assert_close(followed, tangent, rtol=1e-4, atol=1e-5)


def test_functionalize_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"functionalize.*torch\.compile"):
        torch.func.functionalize(lambda q: regard.weights(q, mask=regard.window(1, 1)).entropy())(plain())


BATCHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": lambda q, m: regard.weights(q).entropy(),
    "tiles": lambda q, m: regard.weights(q, mask=regard.causal())[:, 1:3, 0:2],
    "received": lambda q, m: regard.weights(q, mask=regard.window(1, 0)).received(),
    "attend with padding": lambda q, m: regard.attend(q, mask=regard.padding(4)),
    "a mask of its own": lambda q, m: regard.weights(q, mask=m).entropy(),
    "attend with a mask of its own": lambda q, m: regard.attend(q, mask=m),
    "complete rows": lambda q, m: regard.weights(q, mask=m).recall(regard.causal()),
    "maxima of blocks": lambda q, m: regard.weights(q, mask=m).pool(2, 2, by="max"),
    "keys of each row": lambda q, m: regard.weights(q).gather(torch.arange(N).unsqueeze(1)),
    "heads together": lambda q, m: regard.weights(q).reduce_heads("mean").entropy(),
    "the largest of heads together": lambda q, m: regard.weights(q).reduce_heads("max").topk(2).values,
    "two matrices": lambda q, m: regard.weights(q[:, :1].expand_as(q).detach()).js(regard.weights(q, mask=regard.causal())),
    "two matrices of which the second has the batch": lambda q, m: regard.weights(torch.ones(H, N, D)).kl(regard.weights(q)),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_is_the_stack_of_single_calls(name: str) -> None:
    q, m = draw(3, H, N, D, dtype=torch.float32), torch.rand(3, N, N) < 0.6
    want = torch.stack([BATCHED[name](*each) for each in zip(q, m, strict=True)])
    torch.testing.assert_close(torch.vmap(BATCHED[name])(q, m), want, rtol=1e-5, atol=1e-6)
