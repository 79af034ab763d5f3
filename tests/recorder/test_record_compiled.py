"""Attention inside code that torch.compile made of a function: named wherever it runs, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.recorder import RefusedWarning


@torch.compile
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@torch.compile
def experts(x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    return torch.relu(x @ inner) @ outer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.qkv(x).chunk(3, -1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.randn(2, 8, 5)), nn.Parameter(torch.randn(2, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return experts(x, self.inner, self.outer)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@torch.no_grad()
def test_code_that_another_module_had_compiled_is_named_in_every_module_that_runs_it() -> None:
    """The compiler is at work once; later modules and blocks only run its code, of whose softmax no operator is left."""
    x = torch.randn(2, 6, 8)
    for model, names in ((nn.Sequential(Block(), Block()), ["0", "1"]), (Block(), [""])):
        plain = model(x)
        with pytest.warns(RefusedWarning, match=r"torch\.compile"), regard.record(model) as seen:
            assert torch.equal(model(x), plain)
        assert [name for name, _ in seen.refused] == names


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "error::regard.recorder.RefusedWarning")
@torch.no_grad()
def test_compiled_experts_are_no_attention() -> None:
    """Two products and an activation between them, as in attention; but with parameters."""
    model, x = Experts(), torch.randn(2, 6, 8)
    model(x)
    with regard.record(model) as seen:
        model(x)
    assert not seen.layers
    assert seen.refused == []


@pytest.mark.filterwarnings("error::regard.recorder.RefusedWarning")
def test_a_model_that_ran_plainly_is_not_called_compiled() -> None:
    """Another object of its class was compiled; what ran in the block was Python."""
    model, x = Doubled(), torch.randn(2, 6, 8)
    torch.compile(Doubled(), backend="eager")(x)
    with regard.record(model) as seen:
        model(x)
    assert seen.refused == []


def test_a_model_whose_plain_forward_never_ran_is_named() -> None:
    model, x = Doubled(), torch.randn(2, 6, 8)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with pytest.warns(RefusedWarning, match=r"not called in the block, or only as code of torch\.compile"):  # noqa: SIM117
        with regard.record(model) as seen:
            compiled(x)
    assert not seen.layers


@torch.compile(backend="aot_eager")
def angles(positions: Tensor) -> Tensor:
    return (torch.ones(1, 8, 1) @ positions).cos()


class Angles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * angles(torch.arange(6.0).expand(1, 1, 6)).mT


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "error::regard.recorder.RefusedWarning")
@torch.no_grad()
def test_a_product_that_is_compiled_in_the_block_is_no_sign_of_attention() -> None:
    model = nn.Sequential(Angles(), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval())
    with regard.record(model) as seen:
        model(torch.randn(2, 6, 8))
    assert [layer.name for layer in seen.layers] == ["1.self_attn"]


class Between(nn.Module):
    """Weights that are gated after compiled code has run."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.compiled = nn.Linear(8, 24), torch.compile(Doubled(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        w = (q @ k.mT).softmax(-1)
        return (w * self.compiled(w).sum(-1, keepdim=True).sigmoid()) @ v


@torch.no_grad()
def test_weights_are_followed_on_after_compiled_code() -> None:
    model, x = Between(), torch.randn(2, 6, 8)
    q, k, _ = model.qkv(x).chunk(3, -1)
    expected = (q @ k.mT).softmax(-1) * torch.tensor(2.0).sigmoid()
    with pytest.warns(RefusedWarning, match="captured"), regard.record(model) as seen:
        model(x)
    torch.testing.assert_close(seen.layers[0].weights[:, 0].dense(), expected)
