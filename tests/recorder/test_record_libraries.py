"""Real models of timm and diffusers, heard on their own kernels: `make test-libraries` brings these libraries and runs this.

They want torchvision, which has no build for CPUs here: its two operators are declared, so that it imports, and never
called. That is why they are kept out of the ordinary environment, where transformers would stumble over it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard

if importlib.util.find_spec("timm") is None or importlib.util.find_spec("diffusers") is None:
    pytest.skip("timm and diffusers are not here; `make test-libraries` brings them", allow_module_level=True)

OPERATORS = torch.library.Library("torchvision", "DEF")
for operator in ("nms", "qnms"):
    OPERATORS.define(f"{operator}(Tensor a, Tensor b, float c) -> Tensor")

import diffusers  # noqa: E402
import timm  # noqa: E402
from timm.layers import set_fused_attn  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

#: Vision transformers of timm, and how they are made small; all write their weights out when fused attention is off.
VISION = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "vit_tiny_patch16_dinov3_qkvb": {"img_size": 64, "depth": 2},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {"img_size": 56},
    "swinv2_tiny_window8_256": {"img_size": 64},
    "maxvit_rmlp_tiny_rw_256": {"img_size": 64},
    "gcvit_xxtiny": {"img_size": 64},
}


@pytest.mark.parametrize("name", VISION)
def test_weights_of_timm_are_those_it_writes_out_itself(name: str) -> None:
    size = VISION[name]["img_size"]
    x = torch.randn(2, 3, size, size)
    set_fused_attn(False)
    plain, written = timm.create_model(name, pretrained=False, **VISION[name]).eval(), []
    for path, part in plain.named_modules():
        if path.endswith("attn_drop"):  # what it is given are the weights
            part.register_forward_pre_hook(lambda _, args: written.append(args[0].detach()))
    set_fused_attn(True)
    fused = timm.create_model(name, pretrained=False, **VISION[name]).eval()
    fused.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain(x)
        want = fused(x)
        with regard.record(fused) as seen:
            assert torch.equal(fused(x), want)
    assert not seen.refused
    assert len(seen.layers) == len(written) > 0
    for layer, w in zip(seen.layers, written, strict=True):
        torch.testing.assert_close(layer.weights.dense().flatten(), w.flatten(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cait_xxs24_224", "convit_tiny", "coat_tiny"])
def test_what_timm_computes_otherwise_is_named(name: str) -> None:
    """Heads that talk to one another, a gate between two kinds of weights, attention without weights."""
    model = timm.create_model(name, pretrained=False, img_size=64).eval()
    with torch.no_grad(), regard.record(model) as seen:
        model(torch.randn(1, 3, 64, 64))
    assert seen.refused
    assert all(path for path, _ in seen.refused)


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=16, attention_head_dim=4, norm_num_groups=8,
    )  # fmt: skip


def dit() -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )


def sd3() -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


ONE = torch.tensor([1])
DIFFUSION: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], list[str]]] = {
    "unet": (unet, lambda m: m(noise(2, 4, 8, 8), 1, noise(2, 5, 16)).sample, ["self", "cross"] * 4),
    "dit": (dit, lambda m: m(noise(1, 4, 8, 8), ONE, ONE).sample, ["self"] * 2),
    "sd3, both sequences joined": (
        sd3, lambda m: m(noise(1, 4, 8, 8), noise(1, 5, 16), noise(1, 16), ONE).sample, ["self"] * 2,
    ),
    "flux, both sequences joined": (
        flux,
        lambda m: m(noise(1, 16, 4), noise(1, 5, 16), noise(1, 16), ONE.float(), torch.zeros(16, 3), torch.zeros(5, 3)).sample,
        ["self"] * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFUSION)
def test_diffusers_are_heard(name: str) -> None:
    make, call, kinds = DIFFUSION[name]
    model = make().eval()
    with torch.no_grad():
        want = call(model)
        with regard.record(model, values=True) as seen:
            assert torch.equal(call(model), want)
    assert not seen.refused
    assert [layer.kind for layer in seen.layers] == kinds
    for layer in seen.layers:
        w = layer.weights.dense()
        torch.testing.assert_close(w.sum(-1), torch.ones_like(w.sum(-1)))
