"""The seams on a GPU: every backend of scaled_dot_product_attention, the C++ paths, and backward in threads of its own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import regard

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Attention(nn.Module):
    def __init__(self, backend, causal=False):
        super().__init__()
        self.qkv, self.backend, self.causal = nn.Linear(64, 192), backend, causal

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(self.backend):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + y.transpose(1, 2).flatten(2)

    def by_hand(self, x):
        q, k, _ = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        s = q.float() @ k.float().mT / math.sqrt(32)
        if self.causal:
            s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
        return s.softmax(-1)


BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_backend_is_recorded_and_unchanged(backend, causal):
    torch.manual_seed(0)
    net = nn.Sequential(Attention(backend, causal), Attention(backend, causal)).cuda().bfloat16()
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16)
    recordings = []
    for recorded in (False, True):
        net.zero_grad()
        if recorded:
            with regard.record(net) as seen:
                y = net(x)
                y.float().square().sum().backward()
        else:
            y = net(x)
            y.float().square().sum().backward()
        recordings.append([y.detach(), *(p.grad.clone() for p in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*recordings, strict=True)), "recording changed a bit"
    assert len(seen.passes) == 1
    torch.testing.assert_close(seen[0].dense(), net[0].by_hand(x).detach(), atol=2e-2, rtol=0)


def test_autocast_is_followed():
    net = Attention(SDPBackend.FLASH_ATTENTION).cuda()
    x = torch.randn(1, 64, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), regard.record(net) as seen:
        net(x)
    assert seen.layers[0].saved.q.dtype == torch.bfloat16
    torch.testing.assert_close(seen[0].dense(), net.by_hand(x).detach().float(), atol=2e-2, rtol=0)


def test_a_checkpoint_that_computes_again_in_backward_is_no_second_pass():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention(SDPBackend.FLASH_ATTENTION)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    net = Checkpointed().cuda().half()
    x = torch.randn(1, 64, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    with regard.record(net) as seen:
        net(x).sum().backward()
    assert [len(p.layers) for p in seen.passes] == [1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:.*nested.*")
@pytest.mark.parametrize("padded", [False, True])
def test_the_encoder_keeps_its_fast_path(padded):
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 2).cuda().half().eval()
    x = torch.randn(2, 32, 64, device="cuda", dtype=torch.float16)
    pad = torch.zeros(2, 32, dtype=torch.bool, device="cuda")
    if padded:
        pad[1, 20:] = True
    arguments = {"src_key_padding_mask": pad} if padded else {}
    with torch.no_grad():
        plain = net(x, **arguments)
        with regard.record(net) as seen:
            assert torch.equal(net(x, **arguments), plain)
    assert len(seen) == 2
    assert torch.allclose(seen[0, 0, 1].dense().sum(-1), torch.ones(20 if padded else 32, device="cuda"), atol=1e-3)


def test_to_cpu_frees_the_gpu(tmp_path):
    net = Attention(SDPBackend.FLASH_ATTENTION).cuda().half()
    x = torch.randn(1, 64, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad(), regard.record(net, device="cpu") as seen:
        net(x)
    assert seen.layers[0].saved.q.device.type == "cpu"
    seen.save(tmp_path / "a.regard")
    assert regard.load(tmp_path / "a.regard")[0].shape == (1, 2, 64, 64)
