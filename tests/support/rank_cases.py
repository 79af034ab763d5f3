"""What the processes of a `RankPool` compute: configurations of the bound, split over ranks in every way."""

from __future__ import annotations

import copy
import importlib
import pickle
import random
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard import Gaussian
from regard.distributed import RankError, Shards, sharded, shards, transport, zigzag
from regard.distributed.transport import Ranks
from support.configurations import Configuration, ConfigurationCase, configurations
from support.judge import SMOOTH, Truth, library_answers_at_once

SPLITS = ("contiguous", "uneven", "empty", "zigzag")
#: Answers that stay with rows, and those that come back with keys; the others are the same on every rank.
OF_ROWS = ("y", "lse", "entropy", "mean_distance", "mass", "top", "top index", "peak", "peak index", "max_score")
OF_KEYS = ("z", "received")


def positions(length: int, world: int, kind: str, chance: random.Random) -> list[list[range]]:
    """The positions of every rank."""
    if kind == "zigzag":
        return zigzag(length, world)
    if kind == "contiguous":
        cuts = [rank * length // world for rank in range(1, world)]
    else:
        cuts = sorted(chance.randrange(length + 1) for _ in range(world - 1))
        if kind == "empty" and world > 1:
            cuts[chance.randrange(world - 1)] = cuts[0]
            cuts[0] = 0
            cuts.sort()
    ends = [0, *cuts, length]
    return [[range(a, b)] if a < b else [] for a, b in pairwise(ends)]


def index_of(runs: list[range]) -> Tensor:
    return torch.tensor([n for run in runs for n in run], dtype=torch.int64)


def drawn(seed: int, dtype: torch.dtype | None) -> Configuration:
    about = next(islice(configurations(10_000 + seed, 1), 1))
    # Equal keys tie for the largest, and the gradient of a tie is that of either.
    return Configuration(**{**vars(about), "dtype": dtype, "kind": "randn"}) if dtype else about


class ShardedCase(ConfigurationCase):
    """A configuration, and the part of it that one rank has."""

    def __init__(self, seed: int, world: int, split: str, dtype: torch.dtype | None = None) -> None:
        torch.manual_seed(seed)
        super().__init__(drawn(seed, dtype))
        chance = random.Random(seed)
        n = self.about.n
        self.rows = positions(n.i, world, split, chance)
        self.keys = self.rows if n.i == n.j else positions(n.j, world, split, chance)
        self.exchange = chance.choice(("ring", "gather"))
        self.smallest = chance.choice((1, 4, 2048))
        self.rows_at_once = chance.choice((3, 2**15))

    def over_ranks(self, group: Any, rank: int, grad: bool = False) -> tuple[regard.Weights, list[Tensor]]:
        shards.SHORTEST_PIECE, sharded.ROWS = self.smallest, self.rows_at_once
        about, rows, keys = self.about, index_of(self.rows[rank]), index_of(self.keys[rank])
        local = [self.q[:, :, rows], self.k[:, :, keys], self.v[:, :, keys], self.u[:, :, rows], *self.parameters]
        local = [t.detach().clone().requires_grad_(grad) for t in local]
        W = regard.weights(
            local[0], local[1], score=about.score.make(*local[4:]), mask=about.mask.make(about.n), align=about.align,
            engine="blockwise", mesh=Shards(group, self.rows[rank], self.keys[rank], self.exchange, timeout=100),
        )  # fmt: skip
        return W, local

    def joined(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The global answers, from those of all ranks."""
        total = {}
        for name, first in parts[0].items():
            if name not in (*OF_ROWS, *OF_KEYS):
                assert all(torch.equal(first, part[name]) for part in parts), f"{name} differs between ranks"
                total[name] = first
                continue
            places = torch.cat([index_of(runs) for runs in (self.rows if name in OF_ROWS else self.keys)])
            values = torch.cat([part[name] for part in parts], 2)
            total[name] = torch.empty_like(values).index_copy_(2, places, values)
        return total


def answers(group: Any, rank: int, world: int, seed: int, split: str) -> dict[str, Tensor]:
    case = ShardedCase(seed, world, split)
    W, local = case.over_ranks(group, rank)
    return library_answers_at_once(W, local[2]) | {"z": W.mT @ local[3], "dense": W.dense()}


def _coefficients(seed: int, like: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(like[name].shape, dtype=torch.float64) for name in SMOOTH}


def _loss(answers: dict[str, Tensor], coefficients: dict[str, Tensor]) -> Tensor:
    """Everything together. The log-sum-exp of a row without keys is −inf, and has no gradient."""
    finite = {name: torch.where(answers[name] == -torch.inf, 0, answers[name]) for name in SMOOTH}
    return sum(((finite[name] * coefficients[name]).sum() for name in SMOOTH), torch.zeros((), dtype=torch.float64))


def gradients(group: Any, rank: int, world: int, seed: int, split: str) -> dict[str, Tensor]:
    case = ShardedCase(seed, world, split, torch.float64)
    W, local = case.over_ranks(group, rank, grad=True)
    got = library_answers_at_once(W, local[2]) | {"z": W.mT @ local[3], "dense": W.dense()}
    rows, keys = index_of(case.rows[rank]), index_of(case.keys[rank])
    full = _coefficients(seed, case.truth().answers(case.v, case.u))
    own = {
        name: c[:, :, rows] if name in OF_ROWS else c[:, :, keys] if name in OF_KEYS else c for name, c in full.items()
    }
    _loss(got, own).backward()
    return dict(zip(("q", "k", "v", "u", *range(len(local) - 4)), (t.grad for t in local), strict=True))


def true_gradients(case: ShardedCase, seed: int) -> list[Tensor]:
    leaves = [t.requires_grad_() for t in case.leaves]
    truth = Truth.of(case.about.score, case.about.mask, case.about.n, *leaves[:2], leaves[4:], case.offset)
    want = truth.answers(*leaves[2:4])
    _loss(want, _coefficients(seed, want)).backward()
    return [t.grad for t in leaves]


def disagree(group: Any, rank: int, world: int, difference: str) -> str:
    """The text of the error that a difference of rank 1 makes; afterwards the ranks still work together."""
    odd = rank == 1
    torch.manual_seed(3 if odd and difference == "another seed" else 2)
    q, v = torch.randn(2, 4, 5), torch.randn(2, 4, 5)
    slopes = torch.rand(2)
    options: dict[str, Any] = {"mask": regard.causal(), "score": regard.ScaledDot().alibi(slopes)}
    placed: dict[str, Any] = {}
    module = importlib.import_module("regard.distributed.build")
    version = module.__version__
    if difference == "another function":
        options["mask"] = lambda i, j: j <= i
    if difference in ("a gap", "positions that do not fit", "positions that are not whole"):
        placed["rows"] = [range(4 * rank, 4 * rank + 4)]
    if odd:
        if difference == "nan":
            q[0, 2] = torch.nan
        elif difference == "nan in values":
            v[0, 1, 0] = torch.nan
        elif difference == "another version":
            module.__version__ = "0.0.9"
        elif difference == "another mask":
            options["mask"] = regard.window(2, 0)
        elif difference == "another function":
            options["mask"] = lambda i, j: j < i
        elif difference == "a wrong dtype":
            q = q.double()
        elif difference == "fewer heads":
            q = q[:1, :, :4]
        elif difference == "the reference engine":
            options["engine"] = "reference"
        elif difference == "no tensor":
            q = q.tolist()
        elif difference == "requires a gradient":
            q.requires_grad_()
        elif difference == "a gap":
            q, placed["rows"] = q[:, 1:], [range(4, 5), range(6, 8)]
        elif difference == "positions that do not fit":
            placed["rows"] = [range(4, 7)]
        elif difference == "positions that are not whole":
            placed["rows"] = [4.0, 5.0, 6.0, 7.5]
        elif difference == "a device without numbers":
            q = q.to("meta")
        elif difference == "values of another type":
            v = v.double()
        elif difference == "values of another size":
            v = v[..., :3]
        elif difference == "no values":
            v = None
        elif difference == "fewer values":
            v = v[:, :3]
        elif difference == "a mask of its own rows":
            options["mask"] = torch.ones(4, 4, dtype=torch.bool)
    try:
        W = regard.weights(q, mesh=Shards(group, timeout=60, **placed), **options)
        if difference == "another row":
            _ = W[..., rank, 0]
        elif difference == "a row that is not there":
            _ = W[..., 99 if odd else 1, 0]
        elif difference == "a score that is not there":
            _ = W.scores[..., 99 if odd else 1, 0]
        elif difference == "another head":
            _ = W[1 if odd else 0].lse()
        elif difference in ("no number of keys", "an unknown statistic"):
            _ = W.topk(0 if odd else 2) if difference == "no number of keys" else W.see("lsee" if odd else "lse")
        elif difference == "another statistic":
            _ = W.entropy() if odd else W.received()
        else:
            _ = W.lse() if odd and difference == "another request" else W @ v
        return "no error"
    except RankError as error:
        text = str(error)
    finally:
        module.__version__ = version
    assert regard.weights(torch.randn(3, 2), mesh=group).lse().shape == (3,)
    return text


class _Scattered(torch.autograd.Function):
    """This rank's rows of a tensor that every rank has; the gradient is that of all ranks' rows."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, index: Tensor, ranks: Ranks) -> Tensor:
        ctx.index, ctx.ranks, ctx.shape = index, ranks, full.shape
        return full[:, :, index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.sum(g.new_zeros(ctx.shape).index_copy_(2, ctx.index, g)), None, None


class _Gathered(torch.autograd.Function):
    """All ranks' rows, on every rank; each takes the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, index: Tensor, length: int, ranks: Ranks) -> Tensor:
        ctx.index = index
        full = own.new_zeros(*own.shape[:2], length, *own.shape[3:]).index_copy_(2, index, own)
        return ranks.sum(full)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g[:, :, ctx.index], None, None, None


def gradcheck(group: Any, rank: int, world: int, name: str) -> bool:
    """Finite differences of global inputs: all ranks move the same number, and compute its effect together."""
    ranks, n = Ranks(group, 100.0), 5
    index = index_of(zigzag(n, world)[rank])
    shards.SHORTEST_PIECE = 1
    q, k, v = (torch.randn(1, heads, n, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1))
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def answer(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        own = [_Scattered.apply(t, index, ranks) for t in (q, k, v)]
        mesh = Shards(group, zigzag(n, world)[rank], exchange="ring", timeout=100)
        score = regard.ScaledDot().alibi(slopes).sink(slopes)
        W = regard.weights(*own[:2], score=score, mask=regard.causal(), mesh=mesh)
        if name == "pool":
            return W.pool(2, 3)
        own_answer = W @ own[2] if name == "values" else getattr(W, name)()
        return _Gathered.apply(own_answer, index, n, ranks)

    return torch.autograd.gradcheck(answer, (q, k, v, slopes))


def entire_matrices(group: Any, rank: int, world: int) -> list[str]:
    """What is said of answers about all rows or keys, where some of them are on another rank."""
    W = regard.weights(torch.randn(2, 4, 5), mask=regard.causal(), mesh=Shards(group, timeout=100))
    texts = []
    for ask in (
        lambda: regard.kv.snapkv(W, 2),
        lambda: regard.kv.update(torch.zeros(2, 8), W),
        lambda: regard.chains.gradient_relevance(W, torch.randn(2, 8, 3), torch.randn(2, 8, 3), torch.eye(8)),
        lambda: regard.walk(W, head=0),
        lambda: str(W.show()),
    ):
        try:
            ask()
        except NotImplementedError as error:
            texts.append(str(error))
    assert W._repr_html_().count("<") < 5  # its description alone
    return texts


def other_methods(group: Any, rank: int, world: int) -> dict[str, Any]:
    """What is asked of a matrix beside its numbers; each rank has four of the positions."""
    q = torch.randn(2, 4, 5, requires_grad=True)
    W = regard.weights(q, mask=regard.causal(), mesh=Shards(group, timeout=100))
    words = [f"w{n}" for n in range(4 * world)]
    labelled, double = W.label(words), W.to(torch.float64)
    before = W._plan.ranks.bytes_sent
    W.entropy()
    sent = W._plan.ranks.bytes_sent - before
    W.detach().entropy()
    again = W.detach()
    twin = copy.deepcopy(again)
    copied = twin._plan.ranks is W._plan.ranks and torch.equal(twin.max_score(), again.max_score())
    try:
        pickled = bool(pickle.dumps(W))
    except TypeError as error:
        pickled = str(error)
    before = again._plan.ranks.bytes_sent
    first, first_sent = again.lse(), again._plan.ranks.bytes_sent - before
    quiet = torch.equal(first, again.lse()) and again._plan.ranks.bytes_sent - before - first_sent
    return {
        "repr": repr(W), "explained": W.explain("entropy", "received", topk=2), "shape": tuple(W.shape),
        "word": torch.equal(labelled["w1", "w0"], W[..., 1, 0]), "double": double.entropy().dtype,
        "head": torch.equal(W[1].entropy(), W.entropy()[1]), "detached": W.detach().entropy().requires_grad,
        "cached": quiet, "sent": sent, "copied": copied, "pickled": pickled,
    }  # fmt: skip


def functions_of_positions(group: Any, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Weights of scores and masks that read positions themselves, over ranks and in one process."""
    x = torch.randn(2, 5 * world, 3, dtype=torch.float64)
    own = x[:, 5 * rank : 5 * rank + 5]
    pairs = []
    for score, mask in (
        (regard.Dot().modify(lambda s, i, j: s + 0.1 * i * (j % 3)), None),
        (regard.Dot(), lambda i, j: (i * 3 + j) % 4 != 1),
    ):
        W = regard.weights(own, score=score, mask=mask, mesh=Shards(group, timeout=100))
        pairs.append((W.dense(), regard.weights(x, score=score, mask=mask).dense()))
    return pairs


def scores_of_cells(group: Any, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Scores before softmax and their gradients, over ranks and in one process; positions in zig-zag."""
    x = torch.randn(2, 5 * world, 3, dtype=torch.float64)
    own, index = zigzag(5 * world, world)[rank], index_of(zigzag(5 * world, world)[rank])
    options: dict[str, Any] = {"score": regard.ScaledDot().alibi(torch.tensor([0.5, 0.2])), "mask": regard.causal()}
    here, everywhere = x[:, index].requires_grad_(), x.clone().requires_grad_()
    S = regard.weights(here, mesh=Shards(group, own, timeout=100), **options).scores
    alone = regard.weights(everywhere, **options).scores
    assert S.shape == alone.shape
    S[..., 3:, 2].exp().sum().backward()
    alone[..., 3:, 2].exp().sum().backward()
    pairs = [(S.dense(), alone.dense()), (S.row(4), alone.row(4)), (S[1, 3:, [0, 2]], alone[1, 3:, [0, 2]])]
    pairs += [(S.float().column(1).double(), alone.column(1)), (S[1].detach().dense(), alone[1].dense())]
    return [(a.detach(), b.detach()) for a, b in (*pairs, (here.grad, everywhere.grad[:, index]))]


def pooled_alone(group: Any, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
    """Pooled maps, where nothing else is requested: over ranks and in one process."""
    x = torch.randn(2, 200 * world, 8)
    own = x[:, 200 * rank : 200 * rank + 200]
    options = {"mask": regard.causal()}
    parts = ((8, 8), (3, 7, slice(90, 310), slice(30, 290)), (4, 4, slice(0, 50), slice(0, 50)), (500, 2))
    W, alone = regard.weights(own, mesh=Shards(group, timeout=100), **options), regard.weights(x, **options)
    return [(W.pool(*part), alone.pool(*part)) for part in parts]


def received_bytes(group: Any, rank: int, world: int, mask: str, what: str) -> int:
    """Bytes that this rank receives for one request beside the handshakes, in the split that the cost model assumes."""
    from distributed.test_cost import MASKS

    shards.SHORTEST_PIECE, sharded.ROWS = 16, 2**15
    n = 4000
    rows = zigzag(n, world)[rank] if mask == "causal" else [range(rank * n // world, (rank + 1) * n // world)]
    q, k, v = (torch.randn(2, h, sum(map(len, rows)), 8, requires_grad=what == "backward") for h in (4, 2, 2))
    W = regard.weights(q, k, mask=MASKS[mask], mesh=Shards(group, rows, timeout=100))
    ranks, handshakes = W._plan.ranks, 0
    gather_text = ranks.gather_text

    def counted(text: str) -> list[str]:
        nonlocal handshakes
        before = ranks.bytes_received
        texts = gather_text(text)
        handshakes += ranks.bytes_received - before
        return texts

    ranks.gather_text = counted
    before = ranks.bytes_received
    if what == "statistics":
        W.entropy()
    elif what == "second pass":
        W.received()
    elif what == "values":
        W @ v
    else:
        (W @ v).sum().backward()
    return ranks.bytes_received - before - handshakes


def tensor_bytes(
    group: Any, rank: int, world: int, mask: str, what: str, piece: int = 4096, dtype: torch.dtype = torch.float32
) -> int:
    """The most bytes of tensors that this rank holds at once during one request, inputs and results included."""
    from distributed.test_cost import MASKS
    from support.live_tensors import LiveTensors

    shards.SHORTEST_PIECE, sharded.ROWS = piece, 256
    n = 4096 * world
    rows = zigzag(n, world)[rank] if mask == "causal" else [range(rank * n // world, (rank + 1) * n // world)]
    q, k, v = (torch.randn(1, h, sum(map(len, rows)), 64, dtype=dtype) for h in (2, 1, 1))
    counting = LiveTensors()
    counting.count(q, k, *([v] if what in ("values", "backward") else []))
    with counting:
        if what == "backward":
            q, k, v = (t.requires_grad_() for t in (q, k, v))
        W = regard.weights(q, k, mask=MASKS[mask], mesh=Shards(group, rows, timeout=100))
        if what == "backward":
            y = W @ v
            y.backward(torch.randn(y.shape, dtype=dtype))
        elif what == "values":
            W @ v
        else:
            second = {"pool": (8, 8)} if what == "second pass" else {}
            W.see("lse", "max_score", "peak", "entropy", "mean_distance", topk=8, **second)
    return counting.peak


def _distance_answer(what: str, s: Tensor, v: Tensor) -> Tensor:
    """One number a row, from dense scores."""
    log_w = s.log_softmax(-1)
    w = log_w.exp()
    if what == "y":
        return (w @ v)[..., 0]
    if what == "entropy":
        return -(w * log_w).sum(-1)
    if what == "kl":
        return (w * (log_w - s.detach().flip(-1).log_softmax(-1))).sum(-1)
    return s.amax(-1) if what == "max_score" else w.topk(2).values.sum(-1)


def distance_gradients(group: Any, rank: int, world: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Squares of float32 gradients through Gaussian scores: errors over ranks, in plain PyTorch, and the gradients.

    The points lie in clusters, 30 from the origin, 60 in units of sigma.
    """
    numbers, score, size = torch.Generator().manual_seed(seed), Gaussian(0.5), 16
    draws = [torch.randn(2, n, size, generator=numbers) for n in (8, 8 * world, 12 * world)]
    q, k = ((30 * draws[0])[:, torch.arange(x.shape[1]) % 8] + x / size**0.5 for x in draws[1:])
    runs = [[range(n * rank // world, n * (rank + 1) // world)] for n in (8 * world, 12 * world)]
    (rows, keys), here = map(index_of, runs), Shards(group, *runs, timeout=100)
    v, g = torch.linspace(-1, 1, 12 * world).expand(2, -1).unsqueeze(-1), torch.linspace(-2, 1, 8 * world)

    def of_dense(what: str, dtype: torch.dtype) -> list[Tensor]:
        a, b = (x.to(dtype).requires_grad_() for x in (q, k))
        answer = _distance_answer(what, score.similarity(a, b), v.to(dtype))
        dq, dk = torch.autograd.grad((answer * g.to(dtype)).sum(), (a, b))
        return [dq[:, rows], dk[:, keys]]

    def over_ranks(what: str) -> tuple[Tensor, ...]:
        own = [q[:, rows].requires_grad_(), k[:, keys].requires_grad_()]
        W = regard.weights(*own, score=score, align="start", mesh=here)
        other = regard.weights(q[:, rows], k.flip(1)[:, keys], score=score, align="start", mesh=here)
        answer = {
            "y": lambda: (W @ v[:, keys])[..., 0], "entropy": W.entropy, "kl": lambda: W.kl(other),
            "max_score": W.max_score, "top": lambda: W.topk(2).values.sum(-1),
        }[what]()  # fmt: skip
        return torch.autograd.grad((answer * g[rows]).sum(), own)

    errors = {}
    for what in ("y", "entropy", "max_score", "top", "kl"):
        grads = (of_dense(what, torch.float64), over_ranks(what), of_dense(what, torch.float32))
        for name, exact, ours, plain in zip(("dq", "dk"), *grads, strict=True):
            parts = (ours - exact, plain - exact, exact)
            errors[f"{name} of {what}"] = tuple(x.double().square().sum().item() for x in parts)
    return errors


def named_backends(group: Any, rank: int, world: int) -> list[float]:
    """How far the entropy is from that of one process over groups whose backends are named for each kind of device."""
    x = torch.randn(2, 3 * world, 4)
    want = regard.weights(x).entropy()[:, 3 * rank : 3 * rank + 3]
    far = []
    for names in ("cpu:gloo", "cpu:gloo,cuda:gloo"):
        mesh = dist.new_group(list(range(world)), backend=names)
        far.append(float((regard.weights(x[:, 3 * rank : 3 * rank + 3], mesh=mesh).entropy() - want).abs().max()))
    return far


def after_its_group(group: Any, rank: int, world: int) -> list[str]:
    """What is said of a matrix whose process group is gone, of a request and of a backward pass."""
    own = dist.new_group(list(range(world)))
    W = regard.weights(torch.randn(2, 3, 4, requires_grad=True), mesh=Shards(own, timeout=20))
    entropy = W.entropy()
    dist.destroy_process_group(own)
    texts = []
    for ask in (W.lse, lambda: entropy.sum().backward(), lambda: W.offset_mass(1), lambda: W[..., 0, 0]):
        try:
            ask()
            texts.append("no error")
        except RankError as error:
            texts.append(str(error))
    return texts


def shared_gpu(group: Any, rank: int, world: int) -> str:
    """The error where NCCL refuses ranks on one GPU: its text, here from a message that is not sent."""

    def refuse(messages: Any) -> None:
        raise dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, invalid usage.\nDuplicate GPU detected : rank 0")

    ranks = Ranks(dist.new_group(list(range(world))), 20)
    send, transport.dist.batch_isend_irecv = dist.batch_isend_irecv, refuse
    try:
        with ranks.together("weights()"):
            ranks.gather_text("a")
    except RankError as error:
        return str(error)
    finally:
        transport.dist.batch_isend_irecv = send
    return "nothing"
