"""Every way attention passes is recorded, and equals the weights computed by hand; what cannot be is named."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_early

import regard
from regard.recorder import RefusedWarning
from regard.recorder.hooks import tap
from support.toy_models import Calls

B, H, T, D = 2, 3, 7, 5


def by_hand(q, k, mask=None, scale=None, bias=None):
    s = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return s.softmax(-1)


def close(a, b, tolerance=1e-6):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def seen_in(function, *args):
    model = Calls(function)
    plain = function(*args)
    with regard.record(model) as seen:
        y = model(*args)
    assert torch.equal(y, plain)
    return seen


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(B, H, T, D)


causal = torch.ones(T, T, dtype=torch.bool).tril()
odd = torch.rand(T, T, generator=torch.Generator().manual_seed(3)) > 0.4
odd.fill_diagonal_(True)

ROUTES = {
    "F.name": (lambda x: F.scaled_dot_product_attention(x, x, x), {}),
    "imported before": (lambda x: imported_early(x, x, x), {}),
    "torch._C._nn": (lambda x: torch._C._nn.scaled_dot_product_attention(x, x, x), {}),
    "torch.ops.aten": (lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x), {}),
    "functools.partial": (functools.partial(lambda f, x: f(x, x, x), imported_early), {}),
    "keywords": (lambda x: imported_early(query=x, key=x, value=x, is_causal=True), {"mask": causal}),
    "positional mask": (lambda x: imported_early(x, x, x, odd), {"mask": odd}),
    "scale": (lambda x: imported_early(x, x, x, scale=0.7), {"scale": 0.7}),
    "float mask": (lambda x: imported_early(x, x, x, torch.where(causal, 0.0, -torch.inf)), {"mask": causal}),
    "bias": (
        lambda x: imported_early(x, x, x, torch.linspace(-2, 2, T * T).view(T, T)),
        {"bias": torch.linspace(-2, 2, T * T).view(T, T)},
    ),
    "smallest number": (
        lambda x: imported_early(x, x, x, torch.where(causal, 0.0, torch.finfo(torch.float32).min)),
        {"mask": causal},
    ),
}


@pytest.mark.parametrize("route", ROUTES)
def test_every_way_to_call_sdpa_is_recorded(route, x):
    function, arguments = ROUTES[route]
    seen = seen_in(function, x)
    assert [layer.kind for layer in seen.layers] == ["self"]
    close(seen[0].dense(), by_hand(x, x, **arguments))


@pytest.mark.parametrize("mask", [None, odd])
def test_one_head_of_one_sequence_needs_no_other_axes(mask, x):
    q, k = x[0, 0], x[0, 1]
    seen = seen_in(lambda q: F.scaled_dot_product_attention(q, k, k, attn_mask=mask), q)
    close(seen[0].dense(), by_hand(q, k, mask).expand(1, 1, T, T))


def test_grouped_heads_keep_their_few_keys(x):
    k = torch.randn(B, 1, T, D)
    seen = seen_in(lambda q: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), x)
    assert seen.layers[0].saved.k.shape == k.shape
    close(seen[0].dense(), by_hand(x, k.expand(-1, H, -1, -1)))


def test_dropout_does_not_show_in_the_weights(x):
    model = Calls(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with regard.record(model) as seen:
        y = model(x)
    assert torch.equal(y, plain)
    close(seen[0].dense(), by_hand(x, x))


@pytest.mark.parametrize("backend", ["MATH", "FLASH_ATTENTION"])
def test_the_chosen_kernel_does_not_matter(backend, x):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def function(q):
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, q, q)

    close(seen_in(function, x)[0].dense(), by_hand(x, x))


def test_a_fused_kernel_called_directly(x):
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen = seen_in(lambda q: kernel(q, q, q, 0.0, True)[0], x)
    close(seen[0].dense(), by_hand(x, x, causal))


def test_sdpa_inside_torchscript(x):
    class Inner(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.jit.script(Inner())

        def forward(self, q):
            return self.inner(q)

    model = Outer()
    with regard.record(model) as seen:
        model(x)
    close(seen[0].dense(), by_hand(x, x))


class TwoLayers(nn.Module):
    def forward(self, q):
        q = F.scaled_dot_product_attention(q, q, q)
        return torch.softmax(q @ q.mT, -1) @ q


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(B, H, T, D))])
def test_a_model_that_is_torchscript(scripted, x):
    model = scripted(TwoLayers())
    with regard.record(model) as seen:
        model(x)
        model(x)
    assert [len(one) for one in seen.passes] == [2, 2]
    close(seen[0].dense(), by_hand(x, x))
    close(seen[1].dense(), by_hand(by_hand(x, x) @ x, by_hand(x, x) @ x, scale=1.0))
    assert not torch.nn.modules.module._global_forward_hooks
    with pytest.raises(ValueError, match="TorchScript modules take no hooks"):
        regard.watch(model)


def test_tracing_is_named(x):
    with pytest.warns(RefusedWarning, match=r"called by torch.jit.trace"), regard.record(model := TwoLayers()) as seen:
        torch.jit.trace(model, x, check_trace=False)
    assert len(seen) == 0


def test_a_model_without_numbers_is_named(x):
    model = nn.MultiheadAttention(8, 2, device="meta")
    with pytest.warns(RefusedWarning, match="meta device"), regard.record(model):
        model(*[torch.empty(2, 3, 8, device="meta")] * 3)


HAND = {
    "matmul": lambda x: torch.softmax(x @ x.mT / math.sqrt(D), -1) @ x,
    "F.softmax, dropout of nothing": lambda x: F.dropout(F.softmax(x @ x.mT / math.sqrt(D), dim=-1), 0.1, False) @ x,
    "method, type and back": lambda x: (x @ x.mT / math.sqrt(D)).softmax(3, dtype=torch.float32).to(x.dtype) @ x,
    "einsum": lambda x: torch.einsum(
        "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", x, x) / math.sqrt(D)).softmax(-1), x
    ),
    "nn.Softmax": lambda x: torch.matmul(nn.Softmax(-1)(x @ x.mT / math.sqrt(D)), x),
    "other order": lambda x: torch.einsum("bhjd,bhij->bhid", x, (x @ x.mT / math.sqrt(D)).softmax(-1)),
}


@pytest.mark.parametrize("way", HAND)
def test_softmax_by_hand_is_kept_as_the_model_wrote_it(way, x):
    seen = seen_in(HAND[way], x)
    assert len(seen) == 1
    assert seen.layers[0].saved.w is not None
    close(seen[0].dense(), by_hand(x, x))


def test_softmax_by_hand_with_dropout_shows_the_weights_before_it(x):
    model = Calls(lambda x: F.dropout((x @ x.mT / math.sqrt(D)).softmax(-1), 0.5, True) @ x)
    with regard.record(model) as seen:
        model(x)
    close(seen[0].dense(), by_hand(x, x))


def test_dropout_in_place_is_refused_not_wrong(x):
    model = Calls(lambda x: F.dropout((x @ x.mT / math.sqrt(D)).softmax(-1), 0.5, True, inplace=True) @ x)
    with pytest.warns(RefusedWarning, match="in place"), regard.record(model) as seen:
        model(x)
    assert len(seen) == 0
    model = Calls(lambda x: F.dropout((x @ x.mT / math.sqrt(D)).softmax(-1), 0.5, False, inplace=True) @ x)
    with regard.record(model) as seen:
        model(x)
    close(seen[0].dense(), by_hand(x, x))


def test_weights_that_are_masked_after_softmax_are_those_that_were_used(x):
    mask = torch.tensor([1.0, 0.0, 1.0]).view(1, 3, 1, 1)
    for function in (
        lambda x: (mask * (x @ x.mT / math.sqrt(D)).softmax(-1)) @ x,
        lambda x: ((x @ x.mT / math.sqrt(D)).softmax(-1) * mask) @ x,
    ):
        close(seen_in(function, x)[0].dense(), by_hand(x, x) * mask)


def test_additive_attention_by_hand_is_recorded():
    class AdditiveAttention(nn.Module):
        """Bahdanau's: scores are no product."""

        def __init__(self):
            super().__init__()
            self.a, self.b, self.v = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 1)

        def scores(self, q, k):
            return self.v(torch.tanh(self.a(q).unsqueeze(2) + self.b(k).unsqueeze(1))).squeeze(-1)

        def forward(self, q, k):
            return torch.bmm(self.scores(q, k).softmax(-1), k)

    model, q, k = AdditiveAttention(), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    with regard.record(model) as seen:
        model(q, k)
    assert seen.layers[0].kind == "cross"
    close(seen[0].dense().squeeze(1), model.scores(q, k).softmax(-1).detach())


def test_a_softmax_that_mixes_nothing_is_not_attention(x):
    model = Calls(lambda x: (x.softmax(-1) * 2).sum() + (x @ x.mT).sum())
    with regard.record(model) as seen:
        model(x)
    assert len(seen) == 0
    assert seen.refused == []


def test_batch_and_heads_in_one_axis_are_refused_unless_their_order_is_known(x):
    class Merged(nn.Module):
        num_heads = H

        def forward(self, x):
            flat = x.flatten(0, 1)
            return torch.bmm((torch.bmm(flat, flat.mT) / math.sqrt(D)).softmax(-1), flat)

    model = Merged()
    with pytest.warns(RefusedWarning, match="share one axis"), regard.record(model) as seen:
        model(x)
    assert len(seen) == 0
    with regard.record(model) as seen:
        model(x[:1])
    close(seen[0].dense(), by_hand(x[:1], x[:1]))


# PyTorch's own modules.


def mha_by_hand(mha, q, k, mask=None):
    d, h = mha.embed_dim, mha.num_heads
    w, b = mha.in_proj_weight, mha.in_proj_bias
    queries = F.linear(q, w[:d], b[:d]).unflatten(-1, (h, -1)).transpose(1, 2)
    keys = F.linear(k, w[d : 2 * d], b[d : 2 * d]).unflatten(-1, (h, -1)).transpose(1, 2)
    return by_hand(queries, keys, mask)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_multihead_attention_in_every_path(need_weights, training, grad):
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(12, 3, batch_first=True).train(training)
    x = torch.randn(2, 7, 12)
    pad = torch.zeros(2, 7, dtype=torch.bool)
    pad[1, -2:] = True
    with torch.set_grad_enabled(grad):
        for mask in (None, pad):
            plain = mha(x, x, x, key_padding_mask=mask, need_weights=need_weights)
            with regard.record(mha) as seen:
                out = mha(x, x, x, key_padding_mask=mask, need_weights=need_weights)
            assert torch.equal(out[0], plain[0])
            visible = None if mask is None else ~mask[:, None, None, :]
            close(seen[0].dense().detach(), mha_by_hand(mha, x, x, visible).detach())
            if need_weights:
                close(seen[0].dense().mean(1).detach(), out[1].detach())


def encoder(norm_first=False, layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 4, 24, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first).eval()


def fast_path_runs(model, *args, **kwargs):
    """Whether the C++ path ran: it is one operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        fast = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.fast += "encoder_layer_fwd" in str(func) or "native_multi_head" in str(func)
            return func(*args, **(kwargs or {}))

    with Count():
        model(*args, **kwargs)
    return Count.fast > 0


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_transformer_encoder_keeps_its_fast_path_and_is_recorded(norm_first, mode):
    model = encoder(norm_first)
    x = torch.randn(2, 7, 12)
    with mode():
        plain = model(x)
        with regard.record(model) as seen:
            y = model(x)
            fast = fast_path_runs(model, x)
    assert torch.equal(plain, y)
    assert fast == (mode is not torch.enable_grad)
    assert [layer.name for layer in seen.passes[0].layers] == ["layers.0.self_attn", "layers.1.self_attn"]
    first = seen.passes[0].layers[0].weights.dense()
    with torch.no_grad():
        entered = model.layers[0].norm1(x) if norm_first else x
        close(first.detach(), mha_by_hand(model.layers[0].self_attn, entered, entered))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_transformer_encoder_with_padding_runs_nested_and_is_recorded():
    model, x = encoder(), torch.randn(2, 7, 12)
    pad = torch.zeros(2, 7, dtype=torch.bool)
    pad[1, -3:] = True
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=pad)
        with regard.record(model) as seen:
            y = model(x, src_key_padding_mask=pad)
        assert torch.equal(plain, y)
        expected = mha_by_hand(model.layers[0].self_attn, x, x, ~pad[:, None, None, :])
    close(seen[0].dense()[0], expected[0])
    close(seen[0].dense()[1, :, :4], expected[1, :, :4])
    assert seen[0, 1, 1].shape == (4, 4)


def test_transformer_encoder_with_a_causal_mask():
    model, x = encoder(), torch.randn(2, 7, 12)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    with torch.no_grad(), regard.record(model) as seen:
        model(x, mask=mask, is_causal=True)
    assert "causal" in repr(seen[0])
    with torch.no_grad():
        close(seen[0].dense(), mha_by_hand(model.layers[0].self_attn, x, x, mask == 0))


def test_transformer_decoder_tells_self_from_cross():
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, 24, batch_first=True), 2).eval()
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    with torch.no_grad():
        plain = model(x, memory)
        with regard.record(model, tokens=(list("abcdefg"), list("vwxyz"))) as seen:
            assert torch.equal(model(x, memory), plain)
        assert [layer.kind for layer in seen.layers] == ["self", "cross"] * 2
        close(seen[0].dense(), mha_by_hand(model.layers[0].self_attn, x, x))
    assert seen[1].shape == (2, 3, 5, 7)
    assert seen.layers[1].tokens == ([list("vwxyz")] * 2, [list("abcdefg")] * 2)
    assert len(seen.select(kind="cross")) == 2


# Others' code.


class TimmAttention(nn.Module):
    """timm's vision_transformer.Attention, as it is written there; timm itself needs torchvision."""

    def __init__(self, dim=12, num_heads=3, fused_attn=True):
        super().__init__()
        self.num_heads, self.head_dim, self.fused_attn = num_heads, dim // num_heads, fused_attn
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.Identity()
        self.attn_drop, self.proj = nn.Dropout(0.0), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Blocks(nn.Module):
    def __init__(self, make, n=2):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(n))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_timm_attention_fused_and_written_out_agree():
    torch.manual_seed(0)
    model, x = Blocks(TimmAttention), torch.randn(2, 9, 12)
    recorded = []
    for fused in (True, False):
        for block in model.blocks:
            block.fused_attn = fused
        with torch.no_grad():
            plain = model(x)
            with regard.record(model) as seen:
                assert torch.equal(model(x), plain)
        assert [layer.name for layer in seen.layers] == ["blocks.0", "blocks.1"]
        recorded.append([seen[0].dense(), seen[1].dense()])
    close(recorded[0][0], recorded[1][0])
    close(recorded[0][1], recorded[1][1])


class Processor:
    """diffusers' AttnProcessor2_0: a plain object that is handed the module."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None):
        other = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(other), attn.to_v(other)
        q, k, v = (x.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class DiffusersAttention(nn.Module):
    heads = 3

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.processor = Processor()

    def forward(self, hidden_states, encoder_hidden_states=None):
        return self.processor(self, hidden_states, encoder_hidden_states)


class UNetBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = DiffusersAttention(), DiffusersAttention()

    def forward(self, x, text):
        x = x + self.attn1(x)
        return x + self.attn2(x, encoder_hidden_states=text)


def test_diffusers_processors_self_and_cross():
    model = UNetBlock()
    with regard.record(model) as seen:
        model(torch.randn(1, 16, 12), torch.randn(1, 16, 12))  # equal lengths: only the argument tells
    assert [(layer.name, layer.kind) for layer in seen.layers] == [("attn1", "self"), ("attn2", "cross")]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flex_attention_called_directly():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    q = torch.randn(1, 2, 128, 16)
    visible = torch.ones(128, 128, dtype=torch.bool).tril()
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    seen = seen_in(lambda q: flex_attention(q, q, q, block_mask=block_mask), q)
    assert "causal" in repr(seen[0])
    close(seen[0].dense(), by_hand(q, q, visible))
    seen = seen_in(lambda q: flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - (i - j).abs()), q)
    distance = (torch.arange(128)[:, None] - torch.arange(128)).abs()
    close(seen[0].dense(), by_hand(q, q, bias=-distance.float()))


# What cannot be recorded is named.


class LinearAttention(nn.Module):
    def forward(self, x):
        q, k = x.softmax(-1), x.softmax(-2)
        return q @ (k.mT @ x)


def test_linear_attention_is_refused_by_name():
    model = Blocks(LinearAttention)
    with pytest.warns(RefusedWarning, match=r"blocks\.0.*linear attention"), regard.record(model) as seen:
        model(torch.randn(2, 5, 4))
    assert [name for name, _ in seen.refused] == ["blocks.0", "blocks.1"]
    assert len(seen) == 0


def test_attention_that_did_not_run_is_not_refused():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = TimmAttention(), LinearAttention()

        def forward(self, x):
            return self.used(x)

    model = Lazy()
    with regard.record(model) as seen:
        model(torch.randn(1, 5, 12))
    assert seen.refused == []


def test_a_compiled_model_is_refused_by_name_and_not_compiled_again():
    model, x = Blocks(TimmAttention), torch.randn(1, 5, 12)
    count = []

    def backend(graph, inputs):
        count.append(1)
        return graph

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        plain = compiled(x)
        n = len(count)
        with pytest.warns(RefusedWarning, match=r"torch\.compile"), regard.record(compiled) as seen:
            y = compiled(x)
        assert torch.equal(plain, y)
        assert len(count) == n
        model.blocks[1] = torch.compile(model.blocks[1], backend=backend)
        plain = model(x)
        n = len(count)
        with pytest.warns(RefusedWarning, match=r"blocks\.1.*torch\.compile"), regard.record(model) as seen:
            y = model(x)
        assert torch.equal(plain, y)
        assert len(count) == n
    assert [layer.name for layer in seen.layers] == ["blocks.0"]


def test_vmapped_attention_is_refused_by_name(x):
    model = Calls(lambda x: torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(x))
    with pytest.warns(RefusedWarning, match=r"torch\.func"), regard.record(model) as seen:
        y = model(x)
    assert torch.equal(y, model(x))
    assert len(seen) == 0


def test_flash_attention_as_an_operator(x):
    """The flash_attn package registers such an operator; here one of the same name and schema stands in for it."""
    library = torch.library.Library("flash_attn", "FRAGMENT")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left, int window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> Tensor"
    )

    def kernel(q, k, v, dropout_p, softmax_scale, causal, left, right, softcap, alibi_slopes, return_softmax):
        heads_first = [t.transpose(1, 2) for t in (q, k, v)]
        return F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    library.impl("_flash_attn_forward", kernel, "CompositeExplicitAutograd")
    y = x.transpose(1, 2)
    seen = seen_in(
        lambda q: torch.ops.flash_attn._flash_attn_forward(q, q, q, 0.0, 0.5, True, -1, -1, 0.0, None, False), y
    )
    close(seen[0].dense(), by_hand(x, x, causal, scale=0.5))


@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::regard.recorder.RefusedWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "forgetful"])
def test_a_compiled_function_inside_is_recorded_or_named_every_time(backend, x):
    """Compiled code may still call PyTorch's kernels, which are heard; a backend that has its own is named."""

    def forgetful(graph, inputs):
        # Attention by ways that are not heard: what a fused kernel of its own would be.
        def attend(q):
            with tap.suspended():
                return [F.scaled_dot_product_attention(q, q, q)]

        return attend

    attend = torch.compile(
        lambda q: F.scaled_dot_product_attention(q, q, q), backend=forgetful if backend == "forgetful" else backend
    )

    class Plain(nn.Module):
        def forward(self, q):
            return attend(q)

    model = nn.Sequential(Plain())
    plain = model(x)
    for _ in range(2):
        with regard.record(model) as seen:
            assert torch.equal(model(x), plain)
        if backend == "forgetful":
            assert [name for name, _ in seen.refused] == ["0"]
            assert "torch.compile" in seen.refused[0][1]
        else:
            close(seen[0].dense(), by_hand(x, x))
            assert seen.refused == []
