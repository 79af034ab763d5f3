"""The attention matrix as an object: index it, multiply with it, ask for statistics. It is never stored."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, get_args

from torch import Tensor

from .arguments import as_tiling, as_tokens, at_least_one, chosen_keys
from .array_protocol import ArrayProtocol, Scores
from .evaluation import Transposed
from .indexing import Tokens
from .inherited import named_by_class
from .patches import ImageLike, PatchTokens
from .problem import from_weights
from .result_cache import check_cells, format_bytes
from .results import Peak, Statistics, TopK
from .rows.relations import Relations
from .rows.spans import PoolBy
from .tensor_kinds import readable
from .types import KeyLike, KeysLike, PoolLike, StatisticName

if TYPE_CHECKING:
    from ..look import View
    from ..look.options import ViewChoices

__all__ = ["STATISTICS", "Peak", "Statistics", "TopK", "Transposed", "Weights", "need_weights"]

#: Statistics that `see` takes by name; topk, pool, mass and values are keywords.
STATISTICS: tuple[StatisticName, ...] = get_args(StatisticName)


@named_by_class
class Weights(ArrayProtocol, Relations):
    """Attention weights ``(..., h, i, j)``, or ``(i, j)`` for one head; made by `regard.weights`.

    | expression | is |
    |---|---|
    | ``W @ v``, ``W.mT @ u``, ``u @ W`` | linear maps, in linear memory |
    | ``W[0, 3]`` | `Weights`: rows and columns are left alone |
    | ``W[..., 10, 2]``, ``W[3, "it"]`` | a tensor, computed only there |
    | ``W.entropy()``, ``W.topk(8)``, ... | statistics, float32 (float64 for float64 inputs) |

    Results are differentiable, and cached while no factor changes.

    >>> W = regard.weights(torch.eye(3), mask=regard.causal())
    >>> W.shape
    torch.Size([3, 3])
    >>> W[0]
    tensor([1., 0., 0.])
    """

    _multiplies = True
    #: Whether keys may stand for values that were not passed. Those of a recorded model are other vectors.
    _keys_are_values: ClassVar[bool] = True

    @staticmethod
    def from_dense(w: Tensor) -> Weights:
        """Weights that exist already, as the same kind of object.

        Args:
            w: Weights ``(..., h, i, j)`` or ``(i, j)``, floating point.

        Returns:
            `Weights` that answer all but `lse` and `max_score`, which need scores.

        >>> regard.Weights.from_dense(torch.tensor([[0.5, 0.5], [0.0, 1.0]])).entropy()
        tensor([0.6931, 0.0000])
        """
        w = readable(w, "w") if isinstance(w, Tensor) else w
        if not isinstance(w, Tensor) or not w.is_floating_point():
            got = w.dtype if isinstance(w, Tensor) else type(w).__name__
            raise TypeError(f"from_dense(w) takes a floating-point tensor of weights; got {got}.")
        if w.ndim < 2:
            raise ValueError(f"from_dense(w) takes (..., h, i, j) or (i, j); got shape {tuple(w.shape)}.")
        return Weights(from_weights(w), "reference", one_head=w.ndim == 2)

    def label(
        self,
        rows: Sequence[str] | None = None,
        cols: Sequence[str] | None = None,
        *,
        grid: tuple[int, int] | None = None,
        image: ImageLike | None = None,
    ) -> Weights:
        """The same weights with tokens, which then serve as indices.

        Args:
            rows: One token for each query position.
            cols: One token for each key position. Default: `rows`, where the lengths agree.
            grid: Rows and columns of an image's patches. An axis without tokens becomes patches, "0,0" to "13,13";
                what is more than patches comes first, as [CLS] and registers. With `rows` alone the keys are patches.
            image: The image, which `show` draws below the patches: a tensor or an array (h, w, 3), (h, w) or (3, h, w),
                or an image of Pillow.

        Returns:
            `Weights` with `tokens`; cached results stay.

        Raises:
            ValueError: Tokens and positions, or patches and positions, do not fit.

        >>> W = regard.weights(torch.eye(3)).label(["the", "cat", "sat"])
        >>> W["cat", "sat"] == W[1, 2]
        tensor(True)
        """
        i, j = self._sizes
        if grid is not None:
            sides = ((rows, i, "row"), (cols, j, "column"))
            patches = [
                Tokens(PatchTokens.of_grid(n, grid, image)) if named is None else as_tokens(named, n, axis)
                for named, n, axis in sides
            ]
            return self._labelled((patches[0], patches[1]))
        if rows is None:
            raise ValueError(
                "label(rows) takes one token for each query position, or grid=(rows, columns) of patches; got neither."
            )
        if cols is None and i != j:
            raise ValueError(f"{i} rows and {j} columns need tokens apart: label(row_tokens, column_tokens).")
        tokens = as_tokens(rows, i, "row"), as_tokens(rows if cols is None else cols, j, "column")
        return self._labelled(tokens)

    def _labelled(self, tokens: tuple[Tokens, Tokens]) -> Weights:
        labelled = self._with(self._factors, tokens=tokens)
        labelled._cache = self._cache.copy()
        return labelled

    def show(self, word: KeyLike | None = None, **options: Unpack[ViewChoices]) -> View:
        """The picture: a page in a notebook, text in a terminal; ``.save("x.html")`` or ``.save("x.svg")``.

        Args:
            word: The row to show first: its position or token.
            **options: As for `regard.look.View`.

        Returns:
            A `regard.look.View`.

        >>> type(regard.weights(torch.eye(3)).show()).__name__
        'View'
        """
        # Imported by name: `look` is above this module.
        return import_module("regard.look").View(self, word=word, **options)

    def __repr__(self) -> str:
        parts = ["×".join(map(str, self.shape)), repr(self._factors.score)]
        if self._factors.mask is not None:
            parts.append(repr(self._factors.mask))
        dense = format_bytes(self.shape.numel() * self.dtype.itemsize)
        return f"Weights({', '.join(parts)}, {self.dtype}, {self.device}, {self._engine}; dense {dense}, not stored)"

    def _repr_html_(self) -> str:
        return str(import_module("regard.look.notebook").weights_html(self))

    @property
    def scores(self) -> Scores:
        """The scores before softmax, lazy as well: what a row's weights are the softmax of.

        Raises:
            ValueError: Weights that were passed to `from_dense` have no scores.

        >>> W = regard.weights(3 * torch.eye(2), score="dot", mask=regard.causal())
        >>> W.scores.dense()
        tensor([[9., -inf],
                [0., 9.]])
        >>> W.scores[1, 0]
        tensor(0.)
        """
        if self._factors.score.precomputed is not None:
            raise ValueError("weights that were passed to from_dense have no scores; build them with weights(q, k).")
        return Scores(self._factors, self._engine, one_head=self._one_head, tokens=self._tokens)

    # Linear maps.

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.see(values=v).y

    def __rmatmul__(self, u: Tensor) -> Tensor:
        if not isinstance(u, Tensor):
            return NotImplemented
        u = self._checked(lambda: readable(u, "u"))
        transposed = Transposed(self)
        return transposed.__matmul__(u) if u.ndim == 1 else transposed.__matmul__(u.mT).mT

    @property
    def mT(self) -> Transposed:
        """The transposed matrix, for ``W.mT @ u``: what every key collects from the rows that look at it.

        >>> W = regard.weights(torch.eye(3))
        >>> torch.allclose(W.mT @ torch.ones(3), W.received())
        True
        """
        return Transposed(self)

    T = mT

    # Statistics. Each is one request; `see` computes several in the fewest passes.

    def lse(self) -> Tensor:
        """Log-sum-exp of the scores of every row, natural log.

        Returns:
            ``(..., h, i)``; -inf for a row that sees no key.

        >>> regard.weights(torch.zeros(2, 4)).lse()
        tensor([0.6931, 0.6931])
        """
        return self.see("lse").lse

    def max_score(self) -> Tensor:
        """The largest score of every row, before softmax. A sink is no key and does not count.

        Returns:
            ``(..., h, i)``; -inf for a row that sees no key.

        >>> regard.weights(3 * torch.eye(2), score="dot").max_score()
        tensor([9., 9.])
        """
        return self.see("max_score").max_score

    def peak(self) -> Peak:
        """The largest weight of every row and the key it falls on.

        Returns:
            `Peak` with `values` and `indices`, each ``(..., h, i)``.

        >>> regard.weights(torch.eye(3)).peak().indices
        tensor([0, 1, 2])
        """
        return self.see("peak").peak

    def entropy(self) -> Tensor:
        """Entropy -Σ_j w_ij log w_ij of every row in nats; a sink's share counts as one more outcome.

        Returns:
            ``(..., h, i)``; 0 for a row that sees no key.

        >>> regard.weights(torch.zeros(2, 4)).entropy()  # two keys alike: log 2
        tensor([0.6931, 0.6931])
        """
        return self.see("entropy").entropy

    def topk(self, k: int) -> TopK:
        """The k largest weights of every row, largest first, ties to the lower index.

        Args:
            k: How many, at least 1.

        Returns:
            `TopK` with `values` and `indices`, each ``(..., h, i, k)``; (0, -1) where a row sees fewer keys.

        >>> regard.weights(torch.eye(3), mask=regard.causal()).topk(1).indices
        tensor([[0],
                [1],
                [2]])
        """
        return self.see(topk=k).topk

    def received(self) -> Tensor:
        """The weight Σ_i w_ij that each key receives from all rows.

        Returns:
            ``(..., h, j)``, for every query head.

        >>> regard.weights(torch.zeros(2, 4)).received()
        tensor([1., 1.])
        """
        return self.see("received").received

    def pool(self, rows: int, cols: int, i: slice | None = None, j: slice | None = None, by: PoolBy = "sum") -> Tensor:
        """The sum of the weights in each of rows × cols tiles: the matrix at lower resolution.

        Tile r of n positions begins at ⌊r·n/rows⌋ and ends before ⌊(r+1)·n/rows⌋.

        Args:
            rows: Number of tiles along the queries.
            cols: Number of tiles along the keys.
            i: The part of the queries that is pooled, a slice without step; None for all.
            j: The part of the keys that is pooled, a slice without step; None for all.
            by: As for `pool_blocks`: ``"sum"``, ``"mean"``, ``"max"``, ``"lse"``.

        Returns:
            ``(..., h, rows, cols)``.

        >>> regard.weights(torch.zeros(4, 2)).pool(2, 2)
        tensor([[1., 1.],
                [1., 1.]])
        """
        return self.see(pool=(rows, cols, i, j)).pool if by == "sum" else self._pool_by((rows, cols, i, j), by)

    def mean_distance(self) -> Tensor:
        """The mean distance Σ_j w_ij |i - j| of every row, in positions.

        Returns:
            ``(..., h, i)``.

        Raises:
            ValueError: Lengths differ and `align` was not passed to `regard.weights`.

        >>> regard.weights(torch.zeros(3, 2), mask=regard.causal()).mean_distance()
        tensor([0.0000, 0.5000, 1.0000])
        """
        return self.see("mean_distance").mean_distance

    def mass(self, keys: KeysLike) -> Tensor:
        """The weight that every row puts on chosen keys.

        Args:
            keys: A position, a token, a slice, a list of positions or tokens, or one bool a key ``(j,)``.

        Returns:
            ``(..., h, i)``.

        >>> regard.weights(torch.zeros(4, 2)).mass([0, 3])
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
        """
        return self.see(mass=keys).mass

    def see(
        self,
        *names: StatisticName,
        topk: int | None = None,
        pool: PoolLike | None = None,
        mass: KeysLike | None = None,
        values: Tensor | None = None,
    ) -> Statistics:
        """Several statistics at once, in the fewest passes and with one backward.

        Args:
            *names: ``"lse"``, ``"max_score"``, ``"peak"``, ``"entropy"``, ``"received"``, ``"mean_distance"``.
            topk: k of `topk`.
            pool: ``(rows, cols)`` or ``(rows, cols, i, j)`` of `pool`.
            mass: keys of `mass`.
            values: v ``(..., j, e)`` of ``W @ v``, which is the field `y`.

        Returns:
            `Statistics` with a field for each; any other field raises AttributeError.

        Raises:
            ValueError: Nothing was requested, or a name is unknown.

        >>> q, v = torch.randn(8, 5, 4), torch.randn(8, 5, 4)
        >>> seen = regard.weights(q).see("entropy", topk=2, values=v)
        >>> seen.entropy.shape, seen.topk.indices.shape, seen.y.shape
        (torch.Size([8, 5]), torch.Size([8, 5, 2]), torch.Size([8, 5, 4]))
        """
        alias = None if mass is not None else self._question_key(names, topk, pool, values)
        if alias is not None and (statistics := self._replayed_answer(names, topk, alias)) is not None:
            return statistics
        return self._statistics(*self._checked(lambda: self._requested(names, topk, pool, mass, values)), alias)

    def explain(
        self,
        *names: StatisticName,
        topk: int | None = None,
        pool: PoolLike | None = None,
        mass: KeysLike | None = None,
        values: Tensor | None = None,
    ) -> str:
        """Which engine and kernels would serve a request, in how many passes, and why not faster ones.

        Args:
            *names: As for `see`, like the other arguments. Without any: ``"lse"``.
            topk: As for `see`.
            pool: As for `see`.
            mass: As for `see`.
            values: As for `see`.

        Returns:
            A few lines of text. Nothing is computed.

        >>> score = regard.Dot().modify(lambda s, i, j: s.relu())
        >>> print(regard.weights(torch.eye(3), score=score).explain("entropy", "received"))
        engine: blockwise (picked by 'auto')
        kernels: tiles in plain PyTorch
        passes over the keys: 2: rows (entropy), columns (received)
        why not triton: ...
        why not compiled tiles: modify(f) is a Python function, and they take none
        """
        names = names or (() if any(x is not None for x in (topk, pool, mass, values)) else ("lse",))
        return self._explain(self._request(*self._requested(names, topk, pool, mass, values)))

    def _requested(
        self, names: tuple[str, ...], topk: Any, pool: Any, mass: Any, values: Any
    ) -> tuple[list[str], dict[str, Any]]:
        """Statistics and the inputs of their request, checked."""
        for name in names:
            if name not in STATISTICS:
                raise ValueError(
                    f"unknown statistic {name!r}; by name: {', '.join(STATISTICS)}; "
                    "as keywords: topk=k, pool=(rows, cols), mass=keys, values=v."
                )
            if name in ("lse", "max_score") and self._factors.score.precomputed is not None:
                raise ValueError(f"{name} needs scores, and weights that were passed to from_dense have none.")
        if not names and topk is None and pool is None and mass is None and values is None:
            raise ValueError(
                f"see() needs at least one statistic; got none. By name: {', '.join(STATISTICS)}; "
                "as keywords: topk=, pool=, mass=, values=."
            )
        if "mean_distance" in names:
            self._need_positions("mean_distance")
        statistics = list(names)
        inputs: dict[str, Any] = {}
        if topk is not None:
            statistics.append("topk")
            inputs["topk"] = at_least_one(topk, "topk(k)")
            check_cells(self.shape[:-1], inputs["topk"], 12, self.device)  # a weight and the number of its key
        if pool is not None:
            statistics.append("pool")
            inputs["tiling"] = tiling = as_tiling(pool, self._sizes)
            check_cells(self.shape[:-2], tiling.rows * tiling.cols, 8, self.device)  # added up in float64
        if mass is not None:
            statistics.append("mass")
            inputs["keys"] = chosen_keys(mass, self._sizes[1], self._tokens[1], self._factors.q)
        if values is not None:
            statistics.append("values")
            inputs["v"] = values
        return statistics, inputs

    def _need_positions(self, what: str) -> None:
        if self._factors.offset is None:
            i, j = self._sizes
            raise ValueError(
                f"{what} depends on positions, and {i} queries and {j} keys do not say how they correspond: pass "
                'align="start" (query 0 stands at key 0) or align="end" (the last query stands at the last key, as '
                "with a cache) to weights()."
            )


def need_weights(x: Any, what: str, heads: bool = False) -> None:
    """Raise TypeError unless x is a `Weights`; with `heads` ValueError if it has no head axis."""
    if not isinstance(x, Weights):
        raise TypeError(
            f"{what} takes a Weights, of regard.weights(q, k) or seen[layer] of a recording; got {type(x).__name__}. "
            "Weights that exist as a tensor: regard.Weights.from_dense(w)."
        )
    if heads and x._one_head:
        raise ValueError(f"{what} needs a head axis, and this matrix is one head: regard.weights(q[None], k[None]).")
