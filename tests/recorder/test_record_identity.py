"""Recording changes nothing: outputs and gradients are bit-identical with and without it, 12 families × 8 modes."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import regard

transformers = pytest.importorskip("transformers")

from support import zoo  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
transformers.logging.set_verbosity_error()


class ByHand(nn.Module):
    """Plain research code: softmax(q kᵀ) v written out, with dropout."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(16, 48), nn.Linear(16, 16), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        w = self.drop((q @ k.mT / 2).softmax(-1))
        return x + self.out((w @ v).transpose(1, 2).flatten(2))


class Fused(ByHand):
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class CrossDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, batch_first=True), 2)

    def forward(self, x):
        return self.decoder(x, x.flip(1))


class Tensors(nn.Module):
    """A transformers model as a function of one tensor."""

    def __init__(self, name):
        super().__init__()
        self.model, self.inputs = zoo.build(name)

    def forward(self, _):
        return self.model(**self.inputs)[0]


def own(make):
    return lambda: (make(), torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)))


FAMILIES = {
    "nn.TransformerEncoder": own(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), 2)
    ),
    "nn.TransformerDecoder": own(CrossDecoder),
    "sdpa": own(lambda: nn.Sequential(Fused(), Fused())),
    "by hand": own(lambda: nn.Sequential(ByHand(), ByHand())),
    **{
        name: (lambda name=name: (Tensors(name), torch.zeros(2, 1)))
        for name in ("bert", "gpt2", "llama", "t5, bias", "bart", "vit", "gemma2, soft cap, window", "deberta-v2")
    },
}


def no_grad(model, x, record):
    with torch.no_grad(), record(model):
        return model.eval()(x), []


def inference(model, x, record):
    with torch.inference_mode(), record(model):
        return model.eval()(x), []


def training(model, x, record):
    """Dropout on, gradients of every parameter; backward inside the block."""
    model.train()
    with record(model):
        y = model(x)
        y.float().square().mean().backward()
    return y.detach(), [p.grad for p in model.parameters()]


def backward_outside(model, x, record):
    model.train()
    with record(model):
        y = model(x)
    y.float().square().mean().backward()
    return y.detach(), [p.grad for p in model.parameters()]


def autocast(model, x, record):
    # oneDNN's bfloat16 dies with an illegal instruction on some virtual machines; PyTorch's own does not.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        return training(model, x, record)


def checkpointed(model, x, record):
    inner = getattr(model, "model", None)
    if hasattr(inner, "gradient_checkpointing_enable") and inner.supports_gradient_checkpointing:
        inner.gradient_checkpointing_enable()
        return training(model, x, record)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    return training(Checkpointed(), x, record)


def data_parallel(model, x, record):
    return training(nn.DataParallel(model), x, record)


def distributed(model, x, record):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return training(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), x, record)
    finally:  # other tests of this process begin without a group
        dist.destroy_process_group()


MODES = [no_grad, inference, training, backward_outside, autocast, checkpointed, data_parallel, distributed]


def run(family, mode, record):
    torch.manual_seed(5)
    model, x = FAMILIES[family]()
    torch.manual_seed(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mode(model, x, record)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_bit_identical(family, mode):
    plain, gradients = run(family, mode, lambda model: contextlib.nullcontext())
    seen = []

    @contextlib.contextmanager
    def record(model):
        with regard.record(model) as one:
            yield
        seen.append(one)

    recorded, again = run(family, mode, record)
    assert torch.equal(plain, recorded)
    assert len(gradients) == len(again)
    for a, b in zip(gradients, again, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert len(seen[0].passes) == 1  # what a checkpoint computes again is not another pass
    assert len(seen[0]) >= 2
    assert seen[0].refused == []
    for layer in seen[0].layers:
        total = layer.weights.dense().sum(-1)
        assert torch.all((total - 1).abs().lt(2e-2) | (total == 0))


def test_there_are_12_families_and_8_modes():
    assert len(FAMILIES) >= 12
    assert len(MODES) >= 8


def test_the_comparison_can_fail():
    """A recorder that changes one bit is caught."""

    @contextlib.contextmanager
    def meddling(model):
        hook = model.register_forward_hook(lambda m, a, y: torch.nextafter(y, y + 1))
        yield
        hook.remove()

    plain, _ = run("sdpa", no_grad, lambda model: contextlib.nullcontext())
    changed, _ = run("sdpa", no_grad, meddling)
    assert not torch.equal(plain, changed)
