"""What a page holds, packed: a description in JSON and arrays behind it, deflated as one block of bytes.

For short inputs these are the weights of every head as they are (float32) with queries, keys and values (float16 where
there are many); for long ones a pooled map, statistics of rows and columns and a few exact rows, never t × t. No text
of the subject stands in the page outside this block. Imports `words`, `ranking` and the recorder's tables.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core.block import MatrixBlock
from ...core.indexing import At
from ...core.scores import Dot, Precomputed, ScaledDot
from ...core.weights import Weights
from ..ranking import beyond_habit, beyond_received, unknown_in
from ..spotlight import Spot, place_of, sequence_of, spotlight
from ..token_groups import reading
from ..token_text import is_special, joined, shown, words

__all__ = ["LONG", "Packed", "pack"]

#: Tokens above which a page holds a map of the matrix instead of the matrix.
LONG = 300
#: Bytes, before packing, that a page holds: weights of short inputs, all of long ones, queries, keys and values.
ROOM, ROOM_LONG, VECTORS = 5_000_000, 4_200_000, 2_000_000
#: Bytes of queries, keys and values up to which they are kept in float32.
EXACT = 100_000
#: Coordinates of word vectors that are shown one by one.
COORDINATES = 16

METRICS = ("entropy", "mean_distance", "sink", "previous", "induction")


@dataclass
class Packed:
    """A page's content: its title and one block of bytes."""

    title: str
    data: bytes


@dataclass(eq=False)
class Sheet:
    """One layer of one sequence."""

    name: str
    index: int
    kind: str  # "self" or "cross"
    weights: Weights | None  # h i j; None where only statistics were kept
    values: Tensor | None = None  # g j e
    statistics: dict[str, Tensor] = field(default_factory=dict)
    heads: int = 0

    def __post_init__(self) -> None:
        self.heads = self.weights.shape[0] if self.weights is not None else self.statistics["entropy"].shape[1]

    @property
    def w(self) -> Weights:
        assert self.weights is not None, "sheets without weights are left out before"
        return self.weights

    @property
    def sizes(self) -> tuple[int, int]:
        return self.w.shape[-2], self.w.shape[-1]

    @property
    def same(self) -> bool:
        """Whether rows and columns are one sequence."""
        rows, cols = self.w.tokens
        return self.kind == "self" and self.sizes[0] == self.sizes[1] and rows == cols

    @property
    def long(self) -> bool:
        return max(self.sizes) > LONG

    def pick(self, heads: list[int]) -> Weights:
        """The weights of some heads."""
        return self.w if heads == list(range(self.heads)) else self.w[heads]

    def special(self) -> list[bool]:
        """Which keys are special tokens."""
        cols = self.w.tokens[1]
        return [is_special(token) for token in cols] if cols else [False] * self.sizes[1]


class Packer:
    """Arrays behind one another; what is the same is written once. Bytes of one place of a number stand together:
    they are alike, and deflate finds that."""

    KINDS: ClassVar = {"f4": torch.float32, "f2": torch.float16, "u4": torch.int32, "u1": torch.uint8}

    def __init__(self) -> None:
        self.arrays: list[list[Any]] = []
        self.parts: list[bytes] = []
        self._known: dict[tuple[str, bytes], int] = {}

    def add(self, x: Tensor, kind: str = "f4") -> int:
        """The number under which the page finds this array."""
        flat = x.detach().to("cpu", self.KINDS[kind]).contiguous()
        width = flat.element_size()
        planes = flat.reshape(-1, 1).view(torch.uint8).T if width > 1 else flat
        planes = planes.contiguous()
        raw = ctypes.string_at(planes.data_ptr(), planes.nbytes) if x.numel() else b""
        key = (f"{kind}{tuple(x.shape)}", raw)
        if key not in self._known:
            self._known[key] = len(self.parts)
            self.arrays.append([kind, *x.shape])
            self.parts.append(raw)
        return self._known[key]

    def bytes(self, header: dict[str, Any]) -> bytes:
        """The whole block: length of the header, header, arrays; deflated."""
        text = json.dumps({**header, "arrays": self.arrays}, allow_nan=False, separators=(",", ":")).encode()
        return zlib.compress(struct.pack("<I", len(text)) + text + b"".join(self.parts), 6)


@torch.no_grad()
def pack(
    subject: Any,
    *,
    word: Any = None,
    title: str | None = None,
    layer: int | str | None = None,
    head: int | None = None,
    embedded: Any = None,
    values: Tensor | None = None,
    item: int = 0,
    hide_special: bool = False,
    merge: bool = False,
    to: str | int | None = None,
    notes: Sequence[str] = (),
) -> Packed:
    """Everything a page needs to show this subject."""
    if isinstance(subject, list):
        return _training(subject, title)
    sheets, refused, said = _sheets(subject, values, item)
    there = [sheet for sheet in sheets if sheet.weights is not None]
    if not there:
        raise ValueError(_nothing(subject, refused))
    content = _Content(there, refused, [*said, *notes])
    start = _start(subject, content, word, layer, head, merge)
    if to is not None:
        lit = spotlight(subject, word, to=to, layer=layer, head=head, hide_special=hide_special, merge=merge, item=item)
        start["asked"] = _of_spot(subject, content, lit)
    start |= {"hide": hide_special, "merge": merge}
    content.hold(start)
    header = content.header(start)
    header["metrics"] = _metrics(sheets)
    # Layers of which only statistics were kept stand in the overview as well; they have no place among the others.
    header["all"] = [[s.index, s.name, s.heads, there.index(s) if s.weights is not None else None] for s in sheets]
    header["embedded"] = _embedded(embedded, content)
    header["title"] = title if title is not None else content.title()
    return Packed(header["title"], content.packer.bytes(header))


def _nothing(subject: Any, refused: list[Any]) -> str:
    if isinstance(subject, Weights):
        return f"there is nothing to see in weights of shape {tuple(subject.shape)}."
    if getattr(subject, "layers", None):
        return 'only statistics were kept of this recording; for its weights record with keep="factors".'
    told = f" Refused: {refused[0][0]}: {refused[0][1]}." if refused else ""
    return f"nothing was recorded. Run the model inside the block.{told}"


# Layers of one sequence, whatever the subject is.


def _sheets(subject: Any, values: Tensor | None, item: int) -> tuple[list[Sheet], list[Any], list[str]]:
    if isinstance(subject, Weights):
        return _of_weights(subject, values, item)
    if not (hasattr(subject, "layers") and hasattr(subject, "refused") and hasattr(subject, "passes")):
        raise TypeError(
            "a view shows a Recording, a Weights or a training history (a list of (step, numbers)); "
            f"{type(subject).__name__} came."
        )
    return [_of_layer(layer, item) for layer in subject.layers], list(subject.refused), sequence_of(subject, item)


def _of_layer(layer: Any, item: int) -> Sheet:
    if layer.saved is None:
        return Sheet(layer.name, layer.index, layer.kind, None, statistics=layer.statistics)
    whole, v = layer.weights, layer.values
    if whole.shape[0] == 1:
        return Sheet(layer.name, layer.index, layer.kind, whole[0], None if v is None else v[0])
    from ...recorder.slicing import span_of

    one = layer.sequence(item)
    v = None if v is None else v[item][:, span_of(whole, item % whole.shape[0])]
    return Sheet(layer.name, layer.index, layer.kind, one, v)


def _of_weights(weights: Weights, values: Tensor | None, item: int) -> tuple[list[Sheet], list[Any], list[str]]:
    one = weights.detach()
    if one._one_head:
        one = one._with(one._factors, one_head=False)
    v = None if values is None else one._laid_values(values, one.shape[-1], "values")
    batch = one.shape[:-3]
    for place in place_of(item, batch):
        v = v if v is None or v.ndim < one.ndim else v[place if v.shape[0] > 1 else 0]
        one = one[place]
    if 0 in one.shape:
        return [], [], []
    kind = "self" if one.shape[-1] == one.shape[-2] else "cross"
    return [Sheet("", 0, kind, one, v)], [], sequence_of(weights, item)


# What is held of them.


class _Content:
    """Sheets, their sequences and stacks, and the heads that fit into a page."""

    def __init__(self, sheets: list[Sheet], refused: list[Any], notes: list[str]) -> None:
        self.sheets, self.refused, self.notes = sheets, refused, notes
        self.packer = Packer()
        self.unknown = 0  # held heads with weights that are not numbers
        self.sequences: list[dict[str, Any]] = []
        self._known: dict[Any, int] = {}
        self.stacks: list[dict[str, Any]] = []
        self.stack_of: list[int] = []
        self.held: list[list[int]] = [[] for _ in sheets]  # heads whose weights are in the page
        self.walked: list[list[int]] = [[] for _ in sheets]  # those whose queries, keys and values are, too
        for sheet in sheets:
            rows, cols = (self._sequence(t, n) for t, n in zip(sheet.w.tokens, sheet.sizes, strict=True))
            stack = {"same": sheet.same, "rows": rows, "cols": cols, "long": sheet.long}
            if stack not in self.stacks:
                self.stacks.append(stack)
            self.stack_of.append(self.stacks.index(stack))

    def _sequence(self, tokens: Sequence[str] | None, length: int) -> int:
        key = tuple(tokens) if tokens else length
        if key not in self._known:
            self._known[key] = len(self.sequences)
            self.sequences.append(_sequence(tokens, length))
        return self._known[key]

    def tokens(self, stack: int) -> tuple[str, ...] | None:
        """The words of a stack's rows."""
        return self.sheets[self.stack_of.index(stack)].w.tokens[0]

    def title(self) -> str:
        parts = []
        for tokens in dict.fromkeys(t for sheet in self.sheets for t in reversed(sheet.w.tokens) if t):
            plain = [tokens[n] for n in range(min(len(tokens), 400)) if not is_special(tokens[n])]
            parts.append(shown(" ".join(joined(plain[group]) for group in words(plain)), 160))
        if parts:
            return " → ".join(parts[:2])
        i, j = self.sheets[0].sizes
        return f"Attention of {i:,} words" if i == j else f"Attention of {i:,} words to {j:,}"

    def hold(self, start: dict[str, Any]) -> None:
        """Choose the heads that fit: all of them, or those asked for, then those that matter most for the word."""
        everything = [list(range(sheet.heads)) for sheet in self.sheets]
        room, vectors = self._room_for(everything)
        if min(*room.values(), vectors) >= 0:
            self.held, self.walked = everything, everything
            return
        order = sorted(
            (-strength, place, h) for place in range(len(self.sheets)) for h, strength in self._strengths(place, start)
        )
        for _, place, h in order:
            self.held[place].append(h)
            self.walked[place].append(h)
            room, vectors = self._room_for(self.held)[0], self._room_for(self.walked)[1]
            if room[self.sheets[place].long] < 0 and sum(map(len, self.held)) > 1:
                self.held[place].pop()
                self.walked[place].pop()
            elif vectors < 0:
                self.walked[place].pop()
        self.held, self.walked = ([sorted(heads) for heads in chosen] for chosen in (self.held, self.walked))
        self._say_what_is_left_out(len(order))

    def _room_for(self, heads: list[list[int]]) -> tuple[dict[bool, float], float]:
        """What is left of the room for weights, of short and of long inputs, and of that for vectors."""
        room: dict[bool, float] = {False: ROOM, True: ROOM_LONG}
        vectors: float = VECTORS
        for sheet, chosen in zip(self.sheets, heads, strict=True):
            cost, more = _cost(sheet)
            room[sheet.long] -= cost * len(chosen)
            vectors -= more * len(chosen)
        return room, vectors

    def _say_what_is_left_out(self, total: int) -> None:
        held, walked = (sum(map(len, chosen)) for chosen in (self.held, self.walked))
        other = "show(layer=…, head=…) brings another one."
        if held < total:
            self.notes.append(f"This page holds {held} of {total} heads, those that say most; {other}")
        elif walked < total:
            self.notes.append(
                f"This page holds the weights of all {total} heads, and queries and keys of {walked}; {other}"
            )

    def _strengths(self, place: int, start: dict[str, Any]) -> list[tuple[int, float]]:
        sheet, row = self.sheets[place], start["word"]
        if len(self.sheets) == sheet.heads == 1:
            return [(0, 0.0)]
        asked = [h for p, h in start["asked"] if p == place]
        mine = start["stack"] == self.stack_of[place]
        if sheet.long:
            best = beyond_received(sheet.w, row if mine else 0, sheet.special(), sheet.same)
            strength = best.beyond[:, 0]
        else:
            beyond = beyond_habit(sheet.w.dense(), sheet.special(), sheet.same).beyond
            strength = beyond[:, row] if mine else beyond.amax(-1)
        # Another stack's heads come after this one's, and a head that was asked for before all.
        return [(h, s + 10 * (h in asked) + (0 if mine else -5)) for h, s in enumerate(strength.tolist())]

    def header(self, start: dict[str, Any]) -> dict[str, Any]:
        exact = 2 * (VECTORS - self._room_for(self.walked)[1]) <= EXACT
        layers = [self._layer(n, exact, start) for n in range(len(self.sheets))]
        self.notes += unknown_in(self.unknown, sum(map(len, self.held)))
        return {
            "kind": "attention",
            "sequences": self.sequences,
            "stacks": self.stacks,
            "layers": layers,
            "refused": [[name or "(model)", reason] for name, reason in self.refused],
            "notes": self.notes,
            "start": start,
        }

    def _layer(self, n: int, exact: bool, start: dict[str, Any]) -> dict[str, Any]:
        sheet, held = self.sheets[n], self.held[n]
        layer: dict[str, Any] = {
            "name": sheet.name,
            "index": sheet.index,
            "kind": sheet.kind,
            "heads": sheet.heads,
            "held": held,
            "walked": self.walked[n],
            "stack": self.stack_of[n],
        }
        if held and sheet.long:
            word = start["word"] if start["stack"] == self.stack_of[n] else None
            layer["long"] = _long(sheet.pick(held), word, self)
        elif held:
            layer |= _short(sheet, held, self)
            if self.walked[n]:
                layer |= _vectors(sheet, self.walked[n], exact, self.packer)
        return layer


def _sequence(tokens: Sequence[str] | None, length: int) -> dict[str, Any]:
    if tokens is None:
        return {"length": length, "shown": None, "special": [], "words": None}
    groups = words(tokens)
    merged = None
    if len(groups) < len(tokens):
        merged = [[group.start, group.stop, shown(joined(tokens[group]))] for group in groups]
    return {
        "length": length,
        "shown": [shown(token) for token in tokens],
        "special": [n for n, token in enumerate(tokens) if is_special(token)],
        "words": merged,
    }


def _cost(sheet: Sheet) -> tuple[float, float]:
    """Bytes of one head, before packing: of its weights, and of its vectors."""
    i, j = sheet.sizes
    if sheet.long:
        return 4.0 * math.prod(_tiles(i, j)) + 12 * i + 4 * j + 4 * 4 * j, 0.0
    q, k = sheet.w._factors.q, sheet.w._factors.k
    e = 0 if sheet.values is None else sheet.values.shape[-1]
    return 4.0 * i * j, 2.0 * (i * q.shape[-1] + j * k.shape[-1] + j * e)


# Where to begin.


def _start(subject: Any, content: _Content, word: Any, layer: Any, head: int | None, merge: bool) -> dict[str, Any]:
    """The stack, the row and the heads that are shown first."""
    place = None
    if layer is not None:
        place = _place_of(subject, content, layer)
    elif head is not None and len(content.sheets) > 1:
        raise ValueError(f"head {head} of which layer? show(layer=…, head={head}).")
    elif head is not None:
        place = 0
    if head is not None and place is not None:
        count = content.sheets[place].heads
        if not -count <= head < count:
            raise LookupError(f"head {head} was asked for and the layer has {count}, counted from 0.")
        head %= count
    # Of several sentences the one that is written comes first: its words look into the other.
    stacks = sorted(range(len(content.stacks)), key=lambda n: content.stacks[n]["same"])
    if place is not None:
        stacks = [content.stack_of[place]]
    stack, row = _row(content, stacks, word, merge)
    asked = [] if place is None or head is None else [(place, head)]
    return {"stack": stack, "word": row, "chosen": word is not None, "layer": place, "asked": asked}


def _of_spot(subject: Any, content: _Content, lit: Spot) -> list[tuple[int, int]]:
    """The heads of a spotlight, as the page counts layers."""
    if isinstance(subject, Weights):
        return [(0, one.head) for one in lit.shown]
    place = {sheet.index: n for n, sheet in enumerate(content.sheets)}
    return [(place[subject.layers[one.layer].index], one.head) for one in lit.shown]


def _place_of(subject: Any, content: _Content, layer: Any) -> int:
    if isinstance(subject, Weights):
        if layer not in (0, -1):
            raise LookupError(f"layer {layer!r} was asked for; a Weights is one layer, 0.")
        return 0
    index = subject.layer(layer).index
    for place, sheet in enumerate(content.sheets):
        if sheet.index == index:
            return place
    raise LookupError(f"of layer {layer!r} only statistics were kept.")


def _row(content: _Content, stacks: list[int], word: Any, merge: bool) -> tuple[int, int]:
    """The first stack that knows the word, and its row there; without a word the one that is tied most clearly."""
    if word is None:
        stack = stacks[0]
        return stack, _most_telling(content, stack)
    if isinstance(word, At):
        word = f"{word.word}:{word.nth}"
    wrong: LookupError | None = None
    for stack in stacks:
        tokens = content.tokens(stack)
        rows = content.sequences[content.stacks[stack]["rows"]]["length"]
        if tokens is None and isinstance(word, str) and not word.isdecimal():
            wrong = wrong or LookupError(
                f"{word!r}: these weights have no words. Give them first: W.label(tokens).show(…)."
            )
            continue
        names = tuple(map(str, range(rows))) if tokens is None else tokens
        try:
            # Merged, a word is named as it is read; its first token stands for it.
            read = reading(names, merge=merge)
            return stack, read.groups[read.resolve(word)].start
        except LookupError as error:
            wrong = wrong or error
    assert wrong is not None
    raise wrong


def _most_telling(content: _Content, stack: int) -> int:
    tokens = content.tokens(stack)
    sheets = [s for s, n in zip(content.sheets, content.stack_of, strict=True) if n == stack]
    if content.stacks[stack]["long"]:
        return int(sheets[0].w[0].peak().values.argmax())
    beyond = torch.stack([beyond_habit(s.w.dense(), s.special(), s.same).beyond.amax(0) for s in sheets]).amax(0)
    beyond = beyond.nan_to_num(nan=-9.0)  # a row that is not a number tells nothing
    if tokens:
        beyond = beyond - 2 * torch.tensor([is_special(token) for token in tokens], device=beyond.device)
    return int(beyond.argmax())


# Arrays of short inputs.


def _short(sheet: Sheet, held: list[int], content: _Content) -> dict[str, Any]:
    score = sheet.w._factors.score
    w = sheet.pick(held).dense()
    content.unknown += _without_number(w)
    return {
        "w": content.packer.add(w),
        "score": type(score).__name__,
        "sink": score.sink_logits is not None,
    }


def _without_number(x: Tensor) -> int:
    """How many heads, the first axis, hold something that is not a number."""
    return int(x.isnan().flatten(1).any(1).sum())


def _vectors(sheet: Sheet, heads: list[int], exact: bool, packer: Packer) -> dict[str, Any]:
    """Values, queries, keys, and what turns their products into scores."""
    found: dict[str, Any] = {}
    if sheet.values is not None:
        v = sheet.values.reshape(-1, *sheet.values.shape[-2:])
        found["per_value"] = per = sheet.heads // v.shape[0]  # heads that share a head of values
        found["v"] = packer.add(v[heads] if per == 1 else v, _kind(v, exact))
    factors = sheet.pick(heads)._factors
    if isinstance(factors.score, Precomputed):
        return found
    q, k = factors.q, factors.k
    found["d"] = q.shape[-1]
    if q.shape[-1] == k.shape[-1]:
        found["per_key"] = q.shape[-3] // k.shape[-3]
        found |= {"q": packer.add(q, _kind(q, exact)), "k": packer.add(k, _kind(k, exact))}
    return found | _scores(factors, packer)


def _scores(factors: Any, packer: Packer) -> dict[str, Any]:
    """How scores follow from products: a scale, or written out where more is done to them; and the mask."""
    q, k, score = factors.q, factors.k, factors.score
    problem = factors.problem()
    whole = MatrixBlock(slice(0, q.shape[-2]), slice(0, k.shape[-2]), problem.offset, q.device)
    found: dict[str, Any] = {}
    if isinstance(score, ScaledDot | Dot):
        found["scale"] = score.factor(q.shape[-1]) if isinstance(score, ScaledDot) else 1.0
    if factors.mask is not None:
        visible = factors.mask.visible(whole)
        visible = visible.expand(*visible.shape[:-2], q.shape[-2], k.shape[-2])
        found["visible"] = packer.add(visible.reshape(-1, *visible.shape[-2:]), "u1")
        found["mask_name"] = shown(repr(factors.mask), 80)
    if score.modifiers or "scale" not in found:
        found["s"] = packer.add(problem.at(whole).bare_scores(whole)[0])  # before the mask
        found["score_name"] = shown(repr(score), 80)
    return found


def _kind(x: Tensor, exact: bool) -> str:
    """float16 where it is fine enough; its range is small."""
    most = float(x.abs().max()) if x.numel() else 0.0
    return "f2" if not exact and 1e-2 < most < 6e4 else "f4"


# Arrays of long inputs.


def _tiles(i: int, j: int) -> tuple[int, int]:
    return min(i, max(64, min(192, i // 4))), min(j, max(64, min(192, j // 4)))


def _long(chosen: Weights, word: int | None, content: _Content) -> dict[str, Any]:
    """A map, statistics of rows and columns, and some exact rows; linear in the length."""
    _, i, j = chosen.shape
    rows, cols = _tiles(i, j)
    seen = chosen.see("entropy", "peak", "received", pool=(rows, cols))
    add = content.packer.add
    content.unknown += _without_number(seen.received)
    heads = sum(len(held) for held, sheet in zip(content.held, content.sheets, strict=True) if sheet.long)
    spare = ROOM_LONG / heads - 4 * rows * cols - 12 * i - 4 * j
    count = int(max(1, min(24, spare // (4 * j))))
    exact = _chosen_rows(seen.peak.values, word, count)
    return {
        "tiles": [rows, cols],
        "pool": add(seen.pool),
        "entropy": add(seen.entropy),
        "peak": add(seen.peak.values),
        "peak_at": add(seen.peak.indices, "u4"),
        "received": add(seen.received),
        "rows": exact,
        "exact": add(torch.stack([chosen.row(row) for row in exact], 1)),  # h row j
    }


def _chosen_rows(peak: Tensor, word: int | None, count: int) -> list[int]:
    """The word that was asked for, the rows with the strongest links, and some evenly spread."""
    rows = [] if word is None else [word]
    strongest = peak.amax(0).argsort(descending=True).tolist()[: max(1, count // 2)]
    spread = torch.linspace(0, peak.shape[-1] - 1, count).long().tolist()
    return sorted(list(dict.fromkeys([*rows, *strongest, *spread]))[:count])


# The rest of the page.


def _metrics(sheets: list[Sheet]) -> dict[str, list[Any]]:
    """One number a head by every measure of `Recording.heads`, layer by layer; None where it has no meaning."""
    if sum(sheet.heads for sheet in sheets) == 1:  # there is nothing to compare, and each costs a pass
        return {by: [None] for by in METRICS}
    return {by: [_metric(sheet, by) for sheet in sheets] for by in METRICS}


def _metric(sheet: Sheet, by: str) -> list[float | None] | None:
    from ...recorder.head_metrics import BY

    if by not in ("entropy", "sink") and sheet.kind != "self":
        return None
    try:
        if sheet.weights is None:
            numbers = sheet.statistics["entropy"].float().mean((0, 2)) if by == "entropy" else None
        else:
            numbers = BY[by](sheet.weights)
    except ValueError:  # no word occurs twice, or positions do not correspond
        return None
    if numbers is None:
        return None
    finite = [float(f"{x:.5g}") if math.isfinite(x) else None for x in numbers.tolist()]
    return finite if any(x is not None for x in finite) else None


def _embedded(embedded: Any, content: _Content) -> dict[str, Any] | None:
    """Word vectors x and x·W_q, x·W_k, x·W_v: all their products, and the first coordinates to show one by one."""
    if embedded is None:
        return None
    x, q, k, v = (getattr(embedded, name).detach().float().cpu() for name in "xqkv")
    fits = [
        n
        for n, stack in enumerate(content.stacks)
        if stack["same"] and not stack["long"] and content.sequences[stack["rows"]]["length"] == len(x)
    ]
    if not fits:
        return None
    add = content.packer.add
    few = slice(0, COORDINATES)
    return {
        "stack": fits[0],
        "size": x.shape[-1],
        "dots": add(torch.stack([x @ x.T, q @ x.T, x @ k.T, q @ k.T])),  # which of W_q, W_k is on: 0, q, k, both
        **{name: add(t[:, few]) for name, t in zip("xqkv", (x, q, k, v), strict=True)},
    }


def _training(history: list[tuple[int, dict[str, float]]], title: str | None) -> Packed:
    """Entropy and largest score of every head over the steps, from `regard.watch`."""
    packer = Packer()
    names = sorted({tuple(name.rsplit("/", 2)) for _, numbers in history for name in numbers if name.count("/") >= 2})
    if not names:
        raise ValueError('a training history has numbers named "layer/entropy_share/head", as regard.watch makes them.')
    strips = []
    for what in ("entropy_share", "max_score"):
        heads = [(layer, head) for layer, kind, head in names if kind == what]
        heads.sort(key=lambda pair: (_first_seen(history, pair[0]), int(pair[1]) if pair[1].isdecimal() else 0))
        if heads:
            table = [[float(numbers.get(f"{a}/{what}/{b}", math.nan)) for _, numbers in history] for a, b in heads]
            strips.append({"what": what, "heads": heads, "values": packer.add(torch.tensor(table))})
    if not strips:
        raise ValueError("a training history has entropy_share and max_score; neither was found.")
    header: dict[str, Any] = {
        "kind": "training",
        "title": title if title is not None else "Attention while training",
        "steps": [step for step, _ in history],
        "strips": strips,
        "refused": [],
        "notes": [],
    }
    return Packed(header["title"], packer.bytes(header))


def _first_seen(history: list[tuple[int, dict[str, float]]], layer: str) -> int:
    """The place of a layer in the order in which the model calls them."""
    order = dict.fromkeys(name.rsplit("/", 2)[0] for _, numbers in history for name in numbers)
    return list(order).index(layer)
