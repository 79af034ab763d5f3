"""Random attention programs written out in PyTorch, of which each knows its true weights.

A program is a module that composes: the order and memory of the axes of q, k and v, the way of each product, what is
done to the scores, the softmax, what is done to the weights, and the mode it runs in. `judge` records one and says what
came of it. Axes are letters: b batch, h heads, i queries, j keys, d and e features, n batch and heads in one.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.recorder import RefusedWarning

__all__ = ["Program", "judge"]


def put(x: Tensor, have: str, want: str) -> Tensor:
    """The axes of x in another order; a letter that x lacks is an axis of 1."""
    x = x.permute([have.index(letter) for letter in want if letter in have])
    for at, letter in enumerate(want):
        if letter not in have:
            x = x.unsqueeze(at)
    return x


class Program(nn.Module):
    """One program: what it does is drawn at its first call, by the seed, and the same at every other.

    Args:
        seed: Of all choices.
        **fixed: Choices by their names, for a program of a certain kind.
    """

    def __init__(self, seed: int, **fixed: Any) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.choices: dict[str, Any] = dict(fixed)
        self.tells = False
        self.truth: Tensor | None = None  # b h i j : the weights that the last call multiplied the values by
        torch.manual_seed(seed)
        self.b, self.h = self.pick("batch", [1, 2, 3, 4]), self.pick("heads", [1, 2, 3, 4])
        self.i, self.size = self.pick("length", [4, 5, 6, 7]), self.pick("size", [2, 5])
        self.j = self.i if self.pick("keys", ["self", "self", "cross"]) == "self" else 8
        width = self.h * self.size
        self.width = width
        self.q, self.k, self.v = (nn.Linear(9, width) for _ in range(3))
        self.table = nn.Parameter(torch.randn(self.h, 2 * 8 + 1))
        self.act = nn.Softmax(-1)
        self.drop = nn.Dropout(0.3)
        if self.pick("names its heads", [True, True, False]):
            self.num_heads = self.h
        self.product_module, self.softmax_module = Calls(contract), Calls(softmax)

    def pick(self, name: str, options: list[Any]) -> Any:
        if name not in self.choices:
            self.choices[name] = self.random.choice(options)
        return self.choices[name]

    def inputs(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.b, self.i, 9, generator=generator)
        return x, x if self.j == self.i else torch.randn(self.b, self.j, 9, generator=generator)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, of_q = self.project("q", self.q(x), "i", "d")
        k, of_k = self.project("k", self.k(context), "j", "d")
        v, of_v = self.project("v", self.v(context), "j", "e")
        if self.pick("scale of q", [False, True]):
            q = q * self.size**-0.5
        multiply = self.product_module if self.pick("product in a module", [False] * 5 + [True]) else contract
        s, of_s = multiply(self, "scores", q, of_q, k, of_k, "d")
        s, of_s = self.change(s, of_s)
        normalise = self.softmax_module if self.pick("softmax in a module", [False] * 5 + [True]) else softmax
        w = normalise(self, s, of_s)
        w, of_w = self.after(w, of_s)
        y, of_y = multiply(self, "values", w, of_w, v, of_v, "j")
        if "n" in of_y:
            y = y.unflatten(of_y.index("n"), (self.b, self.h) if self.fold == "bh" else (self.h, self.b))
            of_y = of_y.replace("n", self.fold)
        return put(y, of_y, "bihe").flatten(2)

    @property
    def fold(self) -> str:
        return self.pick("axes", ["4", "4", "4", "4", "bh", "hb", "without"])

    def project(self, name: str, x: Tensor, rows: str, size: str) -> tuple[Tensor, str]:
        """(b, rows, width) with heads of its own, in an order and memory of its own."""
        have, fold = "b" + rows + "h" + size, self.fold
        x = x.unflatten(-1, (self.h, self.size))
        if fold in ("bh", "hb"):
            x = put(x, have, fold + rows + size).flatten(0, 1)
            have = "n" + rows + size
        elif fold == "without":  # axes of one are left out
            have = "".join(letter for letter in have if getattr(self, letter, 2) > 1 or letter not in "bh")
            x = x.reshape([{"b": self.b, "h": self.h}.get(a, x.shape[1] if a == rows else self.size) for a in have])
        usual = [n for n in (fold if fold in ("bh",) else "bh") if n in have] if "n" not in have else ["n"]
        letters = list(have)
        self.random.shuffle(letters)
        order = self.pick(f"order of {name}", ["".join(usual) + rows + size] * 2 + ["".join(letters), have])
        x = put(x, have, order)
        memory = self.pick(f"memory of {name}", ["view", "view", "contiguous", "shuffled"])
        if memory == "contiguous":
            x = x.contiguous()
        elif memory == "shuffled":
            self.random.shuffle(letters)
            way = self.pick(f"strides of {name}", ["".join(letters)])
            x = put(put(x, order, way).contiguous(), way, order)
        return x, order

    # Between scores and softmax.

    def change(self, s: Tensor, of_s: str) -> tuple[Tensor, str]:
        count = self.pick("changes", [0, 1, 1, 2, 3])
        for n in range(count):
            s, of_s = CHANGES[self.pick(f"change {n}", list(CHANGES))](self, s, of_s)
        return s, of_s

    def shaped(self, x: Tensor, of_s: str) -> Tensor:
        """(b|1, h|1, i, j) as scores have their axes."""
        if "n" in of_s:
            x = put(x.expand(self.b, self.h, -1, -1), "bhij", self.fold + "ij").flatten(0, 1)
            return put(x, "nij", of_s)
        x = put(x, "bhij", "".join(a for a in "bh" if a not in of_s) + of_s)
        return x[(0,) * sum(a not in of_s for a in "bh")]

    def visible(self) -> Tensor:
        at = torch.arange(self.i)[:, None] + self.j - self.i >= torch.arange(self.j)
        return at[None, None]

    def bias(self) -> Tensor:
        distance = torch.arange(self.i)[:, None] - torch.arange(self.j) + 8
        return self.table[:, distance][None]

    # Between softmax and values.

    def after(self, w: Tensor, of_w: str) -> tuple[Tensor, str]:
        count = self.pick("steps after", [0, 0, 0, 1, 1, 2, 3])
        self.tell(w, of_w)
        for n in range(count):
            name = self.pick(f"after {n}", list(AFTER))
            w, of_w = AFTER[name](self, w, of_w)
            self.tell(w, of_w)
        return w, of_w

    def tell(self, w: Tensor, of_w: str) -> None:
        if not self.tells:
            return
        w = w.detach().clone()
        if "n" in of_w:
            w = w.unflatten(of_w.index("n"), (self.b, self.h) if self.fold == "bh" else (self.h, self.b))
            of_w = of_w.replace("n", self.fold)
        self.truth = put(w, of_w, "bhij")


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, program: Program, *args: Any) -> Any:
        return self.function[0](program, *args)


# Products.


def contract(p: Program, name: str, x: Tensor, of_x: str, y: Tensor, of_y: str, over: str) -> tuple[Tensor, str]:
    """The sum of x · y over an axis, in a way and with a result of its own."""
    shared = [a for a in of_x if a in of_y and a != over]
    p.random.shuffle(shared)
    batch = p.pick(f"{name}: batch axes", ["".join(shared), "".join(a for a in "bhn" if a in shared)])
    own_x, own_y = (next((a for a in of if a not in batch + over), "") for of in (of_x, of_y))
    x, y = x.to(torch.promote_types(x.dtype, y.dtype)), y.to(torch.promote_types(x.dtype, y.dtype))
    return WAYS[p.pick(f"{name}: way", list(WAYS))](p, name, x, of_x, y, of_y, over, batch, own_x, own_y)


def by_matmul(p, name, x, of_x, y, of_y, over, batch, own_x, own_y):
    left, right = put(x, of_x, batch + own_x + over), put(y, of_y, batch + over + own_y)
    if p.pick(f"{name}: turned", [False, False, True]):
        return right.mT @ left.mT, batch + own_y + own_x
    return left @ right, batch + own_x + own_y


def by_bmm(p, name, x, of_x, y, of_y, over, batch, own_x, own_y, multiply=torch.bmm):
    left, right = put(x, of_x, batch + own_x + over), put(y, of_y, batch + over + own_y)
    shape = left.shape[: len(batch)]
    left, right = (z.reshape(-1, *z.shape[len(batch) :]) for z in (left, right))
    if p.pick(f"{name}: turned", [False, False, True]):
        out, ends = multiply(right.mT, left.mT), own_y + own_x
    else:
        out, ends = multiply(left, right), own_x + own_y
    return out.view(*shape, *out.shape[1:]), batch + ends


def by_baddbmm(*args):
    def multiply(x, y):
        return torch.baddbmm(x.new_zeros(1), x, y, beta=0)

    return by_bmm(*args, multiply=multiply)


def by_einsum(p, name, x, of_x, y, of_y, over, batch, own_x, own_y):
    letters = list(batch + own_x + own_y)
    p.random.shuffle(letters)
    out = p.pick(f"{name}: einsum gives", ["".join(letters), batch + own_x + own_y])
    if p.pick(f"{name}: turned", [False, False, True]):
        return torch.einsum(f"{of_y},{of_x}->{out}", y, x), out
    return torch.einsum(f"{of_x},{of_y}->{out}", x, y), out


def by_broadcast(p, name, x, of_x, y, of_y, over, batch, own_x, own_y):
    letters = list(batch + own_x + own_y + over)
    p.random.shuffle(letters)
    order = p.pick(f"{name}: broadcast", ["".join(letters), batch + own_x + own_y + over])
    both = put(x, of_x, order), put(y, of_y, order)
    if p.pick(f"{name}: turned", [False, False, True]):
        both = both[::-1]
    return (both[0] * both[1]).sum(order.index(over)), order.replace(over, "")


def one_by_one(multiply):
    """A loop over every batch axis with a product of matrices in it."""

    def way(p, name, x, of_x, y, of_y, over, batch, own_x, own_y):
        left, right = put(x, of_x, batch + own_x + over), put(y, of_y, batch + over + own_y)

        def loop(left, right, axes):
            if not axes:
                return multiply(left, right)
            return torch.stack([loop(a, b, axes[1:]) for a, b in zip(left, right, strict=True)])

        return loop(left, right, batch), batch + own_x + own_y

    return way


def outer_loop(p, name, x, of_x, y, of_y, over, batch, own_x, own_y):
    """A list comprehension over the first batch axis."""
    left, right = put(x, of_x, batch + own_x + over), put(y, of_y, batch + over + own_y)
    return torch.stack([a @ b for a, b in zip(left, right, strict=True)]), batch + own_x + own_y


def by_grouped_conv(p, name, x, of_x, y, of_y, over, batch, own_x, own_y):
    left, right = put(x, of_x, batch + over + own_x), put(y, of_y, batch + own_y + over)
    shape = left.shape[: len(batch)]
    groups = math.prod(shape)
    rows = left.reshape(1, groups * left.shape[-2], left.shape[-1])
    kernel = right.reshape(-1, right.shape[-1], 1)
    out = F.conv1d(rows, kernel, groups=groups)  # 1, groups own_y, own_x
    return out.view(*shape, -1, out.shape[-1]), batch + own_y + own_x


def conv(a, b):
    return F.conv1d(a.T[None], b.T[:, :, None])[0].T


WAYS: dict[str, Any] = {
    "matmul": by_matmul,
    "torch.matmul": by_matmul,
    "bmm": by_bmm,
    "baddbmm": by_baddbmm,
    "einsum": by_einsum,
    "einsum 2": by_einsum,
    "broadcast": by_broadcast,
    "loop of @": one_by_one(lambda a, b: a @ b),
    "loop of linear": one_by_one(lambda a, b: F.linear(a, b.T)),
    "loop of tensordot": one_by_one(lambda a, b: torch.tensordot(a, b, 1)),
    "loop of conv1d": one_by_one(conv),
    "loop of addmm": one_by_one(lambda a, b: torch.addmm(a.new_zeros(1), a, b, beta=0)),
    "loop of inner": one_by_one(lambda a, b: torch.inner(a, b.T)),
    "loop of mv": one_by_one(lambda a, b: torch.stack([torch.mv(b.T, row) for row in a])),
    "loop of chain": one_by_one(lambda a, b: torch.linalg.multi_dot([a, b])),
    "grouped conv1d": by_grouped_conv,
}


# Scores.


def mask_by_add(value):
    def change(p, s, of_s):
        return s + torch.where(p.shaped(p.visible(), of_s), 0.0, value).to(s.dtype), of_s

    return change


def with_sink(p, s, of_s):
    return s, of_s


def permuted(p, s, of_s):
    letters = list(of_s)
    p.random.shuffle(letters)
    order = p.pick("order of scores", ["".join(letters)])
    s = put(s, of_s, order)
    return s.contiguous() if p.pick("scores copied", [False, True]) else s, order


def gathered_bias(p, s, of_s):
    """Relative positions: the product with every distance, gathered."""
    distance = (torch.arange(p.i)[:, None] - torch.arange(p.j) + 8).expand(1, p.h, -1, -1)
    rows = p.table[None, :, None, :].expand(1, p.h, p.i, -1)
    return s + p.shaped(rows.gather(-1, distance), of_s).to(s.dtype), of_s


def into_buffer(p, s, of_s):
    buffer = torch.empty_like(s)
    buffer.copy_(s)
    return buffer, of_s


def rows_in_chunks(p, s, of_s):
    at = of_s.index("i")
    return torch.cat([part * 1.0 for part in s.split(2, at)], at), of_s


CHANGES: dict[str, Callable[[Program, Tensor, str], tuple[Tensor, str]]] = {
    "scaled": lambda p, s, of: (s * 0.7, of),
    "divided": lambda p, s, of: (s / math.sqrt(p.size), of),
    "divided in place": lambda p, s, of: (s.clone().div_(2), of),
    "add -inf": mask_by_add(-math.inf),
    "add -1e4": mask_by_add(-1e4),
    "masked_fill": lambda p, s, of: (s.masked_fill(~p.shaped(p.visible(), of), -math.inf), of),
    "masked_fill_": lambda p, s, of: (s.clone().masked_fill_(~p.shaped(p.visible(), of), -1e4), of),
    "where": lambda p, s, of: (torch.where(p.shaped(p.visible(), of), s, -1e4), of),
    "bias": lambda p, s, of: (s + p.shaped(p.bias(), of).to(s.dtype), of),
    "gathered bias": gathered_bias,
    "softcap": lambda p, s, of: (torch.tanh(s / 3) * 3, of),
    "permuted": permuted,
    "float": lambda p, s, of: (s.float(), of),
    "double": lambda p, s, of: (s.double(), of),
    "less its maximum": lambda p, s, of: (s - s.amax(of.index("j"), keepdim=True), of),
    "less its mean": lambda p, s, of: (s - s.mean(of.index("j"), keepdim=True), of),
    "clamped": lambda p, s, of: (s.clamp(-2, 2), of),
    "clamped above": lambda p, s, of: (s.clamp(max=1.5), of),
    "squared": lambda p, s, of: (s * s.abs(), of),
    "log of relu": lambda p, s, of: ((s.relu() + 0.1).log(), of),
    "into a buffer": into_buffer,
    "rows in chunks": rows_in_chunks,
    "set rows": lambda p, s, of: (s.index_fill(of.index("j"), torch.tensor([0]), -1.0), of),
    "added to another": lambda p, s, of: (torch.add(s, s, alpha=0.5), of),
    "addcmul": lambda p, s, of: (torch.addcmul(p.shaped(p.bias(), of).to(s.dtype), s, torch.ones_like(s)), of),
    "unsqueezed": lambda p, s, of: (s.unsqueeze(0).squeeze(0), of),
    "roundtrip": lambda p, s, of: (s.reshape(-1).view(s.shape), of),
    "cloned": lambda p, s, of: (s.clone(), of),
    "indexed": lambda p, s, of: (s[torch.arange(s.shape[0])], of),
    "normed": lambda p, s, of: (F.layer_norm(s, s.shape[-1:]), of),
    "checked": lambda p, s, of: (torch.nan_to_num(s), of),
}


# Softmax.


def softmax(p: Program, s: Tensor, of_s: str) -> Tensor:
    """One of the ways of a softmax over the keys; perhaps with a column of sinks, or rows in chunks."""
    axis = of_s.index("j")
    if p.pick("axis from the end", [False, True]):
        axis -= s.ndim
    form = p.pick("softmax of", ["all", "all", "all", "all", "with a sink", "chunks of rows", "heads one by one"])
    way = SOFTMAX[p.pick("softmax", list(SOFTMAX))]
    if form == "with a sink":
        shape = list(s.shape)
        shape[axis] = 1
        s = torch.cat([s, s.new_zeros(shape)], axis)
        return way(p, s, axis).narrow(axis, 0, p.j)
    if form == "chunks of rows":
        at = of_s.index("i")
        return torch.cat([way(p, part, axis) for part in s.split(3, at)], at)
    if form == "heads one by one" and "h" in of_s:
        at = of_s.index("h")
        inner = axis if axis < 0 and at - s.ndim < axis else axis - (at < axis) if axis >= 0 else axis + 1
        if axis < 0:
            inner = axis + s.ndim
            inner = inner - (at < inner)
        return torch.stack([way(p, part, inner) for part in s.unbind(at)], at)
    return way(p, s, axis)


def exp_sum(p, s, axis):
    e = s.exp()
    return e / e.sum(axis, keepdim=True)


def shifted(p, s, axis):
    e = torch.exp(s - s.max(axis, keepdim=True).values)
    return e / e.sum(axis, keepdim=True)


def in_place(p, s, axis):
    s = s - s.amax(axis, keepdim=True)
    s.exp_()
    s /= s.sum(axis, keepdim=True)
    return s


def reciprocal(p, s, axis):
    e = s.exp()
    return e * (1 / e.sum(axis, keepdim=True))


def by_einsum_sum(p, s, axis):
    e = s.exp()
    return e / torch.sum(e, dim=axis).unsqueeze(axis)


def by_logsumexp(p, s, axis):
    return (s - s.logsumexp(axis, keepdim=True)).exp()


def in_float(p, s, axis):
    return F.softmax(s, axis, dtype=torch.float32).to(s.dtype)


def cast(p, s, axis):
    return s.float().softmax(axis).type_as(s)


def out_of_place(p, s, axis):
    out = torch.empty_like(s)
    torch.softmax(s, axis, out=out) if not s.requires_grad else out.copy_(s.softmax(axis))
    return out


SOFTMAX: dict[str, Callable[[Program, Tensor, int], Tensor]] = {
    "F.softmax": lambda p, s, axis: F.softmax(s, axis),
    "torch.softmax": lambda p, s, axis: torch.softmax(s, dim=axis),
    "method": lambda p, s, axis: s.softmax(axis),
    "special": lambda p, s, axis: torch.special.softmax(s, axis),
    "module": lambda p, s, axis: nn.Softmax(dim=axis)(s),
    "softmin": lambda p, s, axis: F.softmin(-s, axis),
    "_softmax": lambda p, s, axis: torch._softmax(s, axis, False),
    "in float": in_float,
    "cast": cast,
    "log_softmax": lambda p, s, axis: s.log_softmax(axis).exp(),
    "logsumexp": by_logsumexp,
    "exp over sum": exp_sum,
    "shifted exp": shifted,
    "in place": in_place,
    "by reciprocal": reciprocal,
    "sum unsqueezed": by_einsum_sum,
    "normalize": lambda p, s, axis: F.normalize(s.exp(), p=1, dim=axis),
    "exp2": lambda p, s, axis: (e := torch.exp2(s)) / e.sum(axis, keepdim=True),
    "out=": out_of_place,
    "transposed": lambda p, s, axis: s.transpose(axis, -1).softmax(-1).transpose(axis, -1),
    "moved": lambda p, s, axis: s.movedim(axis, 0).softmax(0).movedim(0, axis),
    "sigmoid over sum": lambda p, s, axis: (e := s.sigmoid()) / e.sum(axis, keepdim=True),
}


# Weights.


def weights_permuted(p, w, of_w):
    letters = list(of_w)
    p.random.shuffle(letters)
    order = p.pick("order of weights", ["".join(letters)])
    w = put(w, of_w, order)
    return w.contiguous() if p.pick("weights copied", [False, True]) else w, order


def renormalised(p, w, of_w):
    w = w * p.shaped(p.visible(), of_w)
    return w / (w.sum(of_w.index("j"), keepdim=True) + 1e-9), of_w


def dropout(p, w, of_w):
    return F.dropout(w, 0.3, not p.tells), of_w  # recorded are the weights before dropout


def copied_into(p, w, of_w):
    buffer = w.new_zeros(w.shape)
    buffer[:] = w
    return buffer, of_w


def rows_joined(p, w, of_w):
    at = of_w.index("i")
    return torch.cat(w.split(2, at), at), of_w


def heads_joined(p, w, of_w):
    at = p.random.randrange(len(of_w)) if "n" in of_w or "h" not in of_w else of_w.index("h")
    return (w, of_w) if of_w[at] == "j" else (torch.stack(w.unbind(at), at), of_w)


def head_mask(p, w, of_w):
    if "h" not in of_w:
        return w, of_w
    gate = torch.linspace(0.5, 1, p.h).to(w.dtype)
    return w * put(gate, "h", of_w), of_w


AFTER: dict[str, Callable[[Program, Tensor, str], tuple[Tensor, str]]] = {
    "dropout module": lambda p, w, of: (p.drop(w), of),  # in eval
    "dropout": dropout,
    "cast": lambda p, w, of: (w.double(), of),
    "contiguous": lambda p, w, of: (w.contiguous(), of),
    "clone": lambda p, w, of: (w.clone(), of),
    "permuted": weights_permuted,
    "transposed copy": lambda p, w, of: (w.mT.contiguous().mT, of),
    "masked": lambda p, w, of: (w.masked_fill(~p.shaped(p.visible(), of), 0.0), of),
    "renormalised": renormalised,
    "nan_to_num": lambda p, w, of: (w.nan_to_num(0.0), of),
    "gated heads": head_mask,
    "reshaped": lambda p, w, of: (w.reshape(-1).view(w.shape), of),
    "unsqueezed": lambda p, w, of: (w[None].squeeze(0), of),
    "indexed": lambda p, w, of: (w[torch.arange(w.shape[0])] if of[0] != "j" else w, of),
    "copied into": copied_into,
    "where": lambda p, w, of: (torch.where(p.shaped(p.visible(), of), w, 0.0), of),
    "rows joined": rows_joined,
    "heads joined": heads_joined,
    "halved": lambda p, w, of: (w * 0.5, of),
    "plus zero": lambda p, w, of: (w + 0.0, of),
    "times one": lambda p, w, of: (torch.mul(w, torch.ones(())), of),
    "lerp": lambda p, w, of: (torch.lerp(w, w, 0.5), of),
    "index_select": lambda p, w, of: (w.index_select(of.index("i"), torch.arange(p.i)), of),
    "pow 1": lambda p, w, of: (w.pow(1.0), of),
    "detached": lambda p, w, of: (w.detach(), of),
    "addcmul": lambda p, w, of: (torch.addcmul(torch.zeros_like(w), w, torch.ones_like(w)), of),
    "identity": lambda p, w, of: (nn.Identity()(w), of),
    "numpy": lambda p, w, of: (torch.from_numpy(w.detach().double().numpy()), of),
    "take_along": lambda p, w, of: (w.take_along_dim(torch.arange(w.numel())).view(w.shape), of),
    "clamped": lambda p, w, of: (w.clamp(0, 1), of),
    "sparsified": lambda p, w, of: (F.threshold(w, 0.05, 0.0), of),
    "log and exp": lambda p, w, of: ((w + 1e-9).log().exp(), of),
}


# Modes.


def in_thread(call: Callable[[], Any]) -> Any:
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(call())
        except Exception as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


@contextlib.contextmanager
def both(*managers: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "plain": lambda call: call(),
    "no_grad": lambda call: torch.no_grad()(call)(),
    "inference": lambda call: torch.inference_mode()(call)(),
    "autocast": lambda call: torch.autocast("cpu", torch.bfloat16)(call)(),
    "thread": in_thread,
    "thread, inference": lambda call: in_thread(torch.inference_mode()(call)),
}


class Model(nn.Module):
    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any) -> Any:
        return self.step(*args)


def judge(program: Program) -> tuple[str, str]:
    """What came of recording a program, in a word, and the details."""
    model = Model(program).eval()
    dtype = program.pick("dtype", [torch.float32] * 4 + [torch.float64, torch.bfloat16])
    model.to(dtype)
    inputs = [x.to(dtype) for x in program.inputs()]
    run = MODES[program.pick("mode", ["plain"] * 4 + list(MODES))]

    def call() -> Tensor:
        torch.manual_seed(0)
        return model(*inputs)

    program.tells = True
    try:
        run(call)
    except Exception:
        return "INVALID", traceback.format_exc(limit=-2)
    program.tells = False
    plain = run(call)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RefusedWarning)
            with regard.record(model) as seen:
                y = run(call)
    except Exception:
        return "RAISED", traceback.format_exc(limit=-3)
    if not torch.equal(y, plain) and not (torch.isnan(plain) == torch.isnan(y)).all():
        return "CHANGED", ""
    half = torch.bfloat16 in (dtype, plain.dtype) or program.choices["mode"] == "autocast"
    return classify(seen, program.truth, 2e-2 if half else 1e-5)


def classify(seen: regard.Recording, truth: Tensor, tolerance: float) -> tuple[str, str]:
    failed = [why for _, why in seen.refused if "recording it failed" in why]
    covered = torch.zeros(truth.shape, dtype=torch.bool)
    for one in seen.passes:
        for layer in one.layers:
            w = layer.weights.dense()
            if not is_part(w, truth, covered, tolerance):
                if (
                    w.ndim == 4
                    and w.shape[0] == w.shape[1] > 1
                    and is_part(w.transpose(0, 1), truth, covered, tolerance)
                ):
                    return "TWINS", ""  # as many heads as sequences, in memory of either order
                return "WRONG", f"{tuple(w.shape)} of {tuple(truth.shape)}; refused {seen.refused}"
    if failed:
        return "RAISED", failed[0]
    if bool(covered.all()):
        return ("RIGHT", "") if not seen.refused else ("RIGHT, NAMED", str(seen.refused))
    if seen.refused:
        return "NAMED", str(sorted({why for _, why in seen.refused}))
    return "SILENT", f"{int(covered.sum())} of {covered.numel()} cells"


def is_part(w: Tensor, truth: Tensor, covered: Tensor, tolerance: float) -> bool:
    """Whether recorded weights are a block of the true ones; marks its cells."""
    if w.ndim != 4 or any(a > b for a, b in zip(w.shape, truth.shape, strict=True)):
        return False
    windows = truth.double()
    for axis, size in enumerate(w.shape):
        windows = windows.unfold(axis, size, 1)
    close = torch.isclose(windows, w.double()[None, None, None, None], atol=tolerance, rtol=tolerance, equal_nan=True)
    places = close.flatten(4).all(-1).nonzero().tolist()
    for place in places:
        covered[tuple(slice(at, at + size) for at, size in zip(place, w.shape, strict=True))] = True
    return bool(places)
