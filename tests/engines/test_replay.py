"""Replayed steps compute on new tensors what the call itself would; a call that may do something else is not recorded."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch.autograd import forward_ad

import regard
from regard.core.masks.kinds import Documents, Geometry, causal
from regard.engines import numba, replay
from regard.engines.replay import record_launch, replay_or_record


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(replay, "TAPES", {})
    monkeypatch.setattr(replay, "DEVICES", ("cpu",))


class Replayed:
    """Something to compute, and how often it was."""

    def __init__(self, how, key=("key",)):
        self.how, self.key, self.times = how, key, 0

    def __call__(self, *tensors):
        def compute():
            self.times += 1
            return self.how(*tensors)

        return replay_or_record(self.key, list(tensors), compute)


def views(x, y):
    half = x[1:, ::2].transpose(0, 1)
    a, b = (half + 1).split(2)
    return [torch.cat([a, b.clone()]), half.contiguous(), None, x]


def in_place(x, y):
    out = torch.zeros(4, 6)
    out[:, 1:].copy_(x[:, 1:])
    out.view(-1)[3:9].mul_(2).add_(y[:6])
    return {"out": out, "sum": out.sum(-1)}


def several(x, y):
    largest, where = x.max(-1)
    return [where, torch.stack([largest, x.amin(-1)]), y.unflatten(0, (4, 2)).unbind(1)[1]]


def new_memory(x, y):
    transposed = torch.empty_strided((4, 6), (1, 4), dtype=torch.float64).copy_(x)
    plain = torch.empty(8, 2, dtype=torch.float16)
    plain.copy_(y[:, None])
    added = torch.empty(4, 6)
    torch.add(x, x, out=added)
    return [transposed, plain, torch.zeros(3, dtype=torch.int32), torch.empty(0, 5), added]


def same(a, b):
    a, b = (list(x.items()) if isinstance(x, dict) else list(enumerate(x)) for x in (a, b))
    assert [n for n, _ in a] == [n for n, _ in b]
    for (_, p), (_, q) in zip(a, b, strict=True):
        assert (p is None) == (q is None)
        assert p is None or (torch.equal(p, q) and p.stride() == q.stride() and p.dtype == q.dtype)


@pytest.mark.parametrize("how", [views, in_place, several, new_memory])
def test_the_third_call_is_replayed_with_the_results_of_the_first(how):
    replayed = Replayed(how)
    for n in range(5):
        x, y = torch.randn(4, 6), torch.randn(8)
        same(replayed(x, y), how(x, y))
        assert replayed.times == min(n + 1, 2)


def test_a_result_that_is_an_input_is_returned_as_that_input():
    replayed = Replayed(views)
    for _ in range(4):
        x = torch.randn(4, 6)
        assert replayed(x, torch.randn(8))[3] is x


def test_replayed_launches_take_the_new_addresses():
    addresses = []

    def how(x, y):
        out = torch.empty(4, 6)
        record_launch(lambda at: addresses.append(at), [x, None, y[3:], out[1].unsqueeze(0), x.T])
        return [out]

    replayed = Replayed(how)
    for _ in range(2):
        replayed(torch.randn(4, 6), torch.randn(8))
    assert not addresses  # by hand, as the engine does
    x, y = torch.randn(4, 6), torch.randn(8)
    (out,) = replayed(x, y)
    assert addresses == [[x.data_ptr(), 0, y[3:].data_ptr(), out[1].data_ptr(), x.data_ptr()]]


def test_inputs_that_shared_a_storage_may_later_have_their_own():
    """Recorded on slices of one tensor, played on three: each has an address of its own."""
    addresses = []

    def how(q, k):
        record_launch(lambda at: addresses.append(at), [q, k[:, 1:], k])
        return [q + k]

    replayed = Replayed(how)
    storage = torch.randn(4, 2, 8)
    for _ in range(2):
        replayed(storage[:, 0], storage[:, 1])
    q, k = (torch.randn(4, 16)[:, :8] for _ in range(2))
    same(replayed(q, k), [q + k])
    assert replayed.times == 2
    assert addresses == [[q.data_ptr(), k.data_ptr() + 4, k.data_ptr()]]


def test_a_part_of_one_tensor_where_another_lies_is_not_taken_for_it():
    """Keys that are the end of the values: in the next request they may be a tensor of their own."""
    replayed = Replayed(lambda k, v: [v[:, 4:] * 2, k + 1])
    for apart in (False, False, True, True, False, True):
        v = torch.randn(3, 8)
        k = torch.randn(3, 8)[:, 4:] if apart else v[:, 4:]
        same(replayed(k, v), [v[:, 4:] * 2, k + 1])


def test_parts_without_numbers_have_no_address():
    addresses = []
    replayed = Replayed(lambda x: [record_launch(lambda at: addresses.append(at), [x[2:2], x]), x + 1])
    for _ in range(3):
        x = torch.randn(3)
        replayed(x)
    assert addresses == [[0, x.data_ptr()]]


def test_autocast_changes_nothing():
    """What a request is computed in follows from its tensors; not from where it was asked first."""
    replayed = Replayed(lambda x: [x @ x.T])
    for n in range(6):
        x = torch.randn(16, 16)
        with torch.autocast("cpu", torch.bfloat16, enabled=n % 2 == 0):
            answer = replayed(x)
        same(answer, [x @ x.T])
    assert replayed.times == 2


def test_what_functorch_wraps_is_computed():
    replayed = Replayed(lambda x: [x * 2])
    for _ in range(4):
        x = torch.randn(5, 3)
        same([torch.vmap(lambda row: replayed(row)[0])(x)], [x * 2])
    assert not replay.TAPES


elsewhere = torch.randn(4, 6)


@pytest.mark.parametrize(
    "how",
    [
        lambda x, y: [x * x.sum().item()],
        lambda x, y: [x if bool(x.sum() > 0) else -x],
        lambda x, y: [x.flatten()[x.flatten() > 0]],
        lambda x, y: [x.nonzero()],
        lambda x, y: [x + elsewhere],
        lambda x, y: [x + torch.tensor([1.0])],
        lambda x, y: [record_launch(None, [x]), x + 1],
        lambda x, y: [record_launch(print, [elsewhere]), x + 1],
        lambda x, y: [elsewhere],
        lambda x, y: [sum(x + n for n in range(199))],
        lambda x, y: [x.detach()],
        lambda x, y: [y * 2, x.detach()],
        lambda x, y: [x.to_sparse().to_dense()],
    ],
)
def test_work_that_depends_on_more_than_shapes_is_never_replayed(how):
    replayed = Replayed(how)
    for n in range(4):
        x, y = torch.randn(4, 6), torch.randn(8)
        same(replayed(x, y), how(x, y))
        assert replayed.times == n + 1


def test_a_users_function_is_never_replayed():
    replayed = Replayed(lambda x: [x + 1], key=("see", ("Function", lambda x: x)))
    for n in range(4):
        replayed(torch.randn(3))
        assert replayed.times == n + 1
    assert not replay.TAPES


def test_a_tape_that_holds_much_memory_is_not_stored(monkeypatch):
    monkeypatch.setattr(replay, "MAX_BYTES", 1000)
    replayed = Replayed(lambda x: [(x + 1) * 2 - 3])
    for n in range(4):
        replayed(torch.randn(100))
        assert replayed.times == n + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: (x.half(), y),
        lambda x, y: (torch.randn(6, 4).T, y),
        lambda x, y: (torch.randn(5, 6), y),
        lambda x, y: (torch.randn(25)[1:].view(4, 6), y),  # not aligned any more
        lambda x, y: (x, x.flatten()[:8]),  # two tensors at one address
    ],
)
def test_another_signature_is_computed_again(change):
    replayed = Replayed(lambda x, y: [x + 1, y * 2])
    x, y = torch.randn(4, 6), torch.randn(8)
    for _ in range(3):
        replayed(x, y)
    assert replayed.times == 2
    x, y = change(x, y)
    same(replayed(x, y), [x + 1, y * 2])
    assert replayed.times == 3


class Wrapped(torch.Tensor):
    pass


def test_other_kinds_of_tensors_are_left_alone():
    replayed = Replayed(lambda x: [x + 1])
    for n in range(4):
        replayed(torch.randn(3).as_subclass(Wrapped))
        assert replayed.times == n + 1


def test_nothing_stays_alive():
    gone = []

    def how(x):
        middle = x + 1
        out = middle * 2
        gone.extend(weakref.ref(t.untyped_storage()) for t in (middle, out))
        return [out]

    replayed = Replayed(how)
    for _ in range(3):
        x = torch.randn(3)
        gone.append(weakref.ref(x))
        replayed(x)
    del x
    assert all(ref() is None for ref in gone)


def test_what_is_not_needed_any_more_is_freed_at_once(monkeypatch):
    """Of a long chain never more than two links are held."""
    met, most = {}, 0
    ran = replay.OpStep.__call__

    def watched(self, tensors, at):
        nonlocal most
        ran(self, tensors, at)
        met.update((id(t), weakref.ref(t)) for t in tensors if t is not None)
        most = max(most, sum(ref() is not None for ref in met.values()))

    monkeypatch.setattr(replay.OpStep, "__call__", watched)
    replayed = Replayed(lambda x: [((((x + 1) * 2) + 3) * 4) + 5])
    for _ in range(3):
        x = torch.randn(3)
        same(replayed(x), [((((x + 1) * 2) + 3) * 4) + 5])
    assert replayed.times == 2
    assert most <= 4  # two, the first, and the one that is just made


def test_a_question_inside_a_question_belongs_to_the_outer_one():
    inner = Replayed(lambda x: [x * 2], key=("inner",))
    for _ in range(4):
        inner(torch.randn(3))
    outer = Replayed(lambda x: [inner(x + 1)[0] - 1], key=("outer",))
    for _ in range(4):
        x = torch.randn(3)
        same(outer(x), [(x + 1) * 2 - 1])
    assert (inner.times, outer.times) == (3, 2)  # played for the first outer one, computed while the second is noted


def test_a_thread_records_only_its_own_operations():
    ready, done = threading.Event(), threading.Event()

    def slow(x):
        ready.set()
        done.wait(10)
        return [x + 1]

    def other():
        ready.wait(10)
        record_launch(print, [torch.randn(2)])
        torch.randn(3) + torch.randn(3)
        done.set()

    replayed = Replayed(slow)
    for n in range(3):
        ready.clear(), done.clear()
        thread = threading.Thread(target=other)
        thread.start()
        if n == 2:
            ready.set()
        replayed(torch.randn(3))
        thread.join()
    assert replayed.times == 2


def test_lazy_negation_and_conjugation_are_replayed():
    replayed = Replayed(lambda x: [torch._neg_view(x) + 1, x.conj() * 2])
    for _ in range(4):
        x = torch.randn(3, dtype=torch.complex64)
        same(replayed(x), [1 - x, x.conj() * 2])


def test_an_error_leaves_nothing_behind():
    def how(x):
        x = x + 1
        raise RuntimeError("out of memory")

    replayed = Replayed(how)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            replayed(torch.randn(3))
    assert replay.current_recorder() is None
    replayed.how = lambda x: [x + 1]
    for _ in range(3):
        x = torch.randn(3)
        same(replayed(x), [x + 1])


def test_the_cache_of_tapes_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "MAX_TAPES", 5)
    replayed = Replayed(lambda x: [x + 1])
    for n in range(20):
        for _ in range(3):
            replayed(torch.randn(n))
    assert len(replay.TAPES) <= 5


@pytest.mark.parametrize("contiguous", [True, None])
def test_documents_are_replayed_only_if_known_to_be_contiguous(contiguous: bool | None):
    """Else the host has to read whether intervals are exact."""
    geometry = Geometry(5, 5, 0, torch.device("cpu"))

    def how(ids):
        mask = Documents(ids[:, None, :, None], ids[:, None, None, :], contiguous, True)
        intervals = (mask & causal()).intervals(geometry)
        return [intervals.lo, intervals.hi]

    replayed = Replayed(how)
    for n in range(4):
        ids = torch.tensor([[0, 0, n, 4, 4], [n, 3, 3, 3, 3]])
        same(replayed(ids), how(ids))
        assert replayed.times == (min(n + 1, 2) if contiguous else n + 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_question_is_replayed_for_its_own_score_mask_and_statistics(monkeypatch, compiled):
    """Third and fourth turns are replayed: other numbers, and questions of the same shapes between."""
    monkeypatch.setattr(numba, "enabled", compiled)
    questions = [
        ({}, ("lse", "entropy")),
        ({"mask": regard.causal()}, ("lse", "entropy")),
        ({"mask": regard.causal()}, ("entropy", "received")),
        ({"mask": regard.causal(), "score": "dot"}, ("lse", "entropy")),
        ({"score": "cosine"}, ("lse", "entropy")),
        ({"mask": regard.padding(torch.tensor([3, 5]))}, ("lse", "entropy")),
    ]
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 2, 3, 5, 4).unbind(0)
        for options, names in questions:
            ours, right = (
                regard.weights(q, k, engine=engine, **options).see(*names, values=v)
                for engine in ("blockwise", "reference")
            )
            for name in (*names, "y"):
                torch.testing.assert_close(getattr(ours, name), getattr(right, name))
    played = [key[0] for key, tape in replay.TAPES.items() if type(tape) is replay.Tape]
    # Plain tiles read the intervals of a causal mask; those of a mask of tensors are cached with the mask.
    assert sum(key[0] == "question" for key in played) == (10 if compiled else 5)


def test_a_question_that_comes_again_is_not_looked_at_again(monkeypatch):
    """The fourth of tensors of one shape; other names, numbers of keys and tensors between are other questions."""
    monkeypatch.setattr(numba, "enabled", False)
    looked_at = []
    requested = regard.Weights._requested
    monkeypatch.setattr(regard.Weights, "_requested", lambda *a: looked_at.append(a[1:3]) or requested(*a))
    wanted = [(("lse", "entropy"), None), (("lse",), None), (("entropy",), 2), (("entropy",), 3)]
    for seed in range(6):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 2, 3, 5, 4).unbind(0)
        for names, topk in wanted:
            W = regard.weights(q, k, engine="blockwise")
            seen, right = (x.see(*names, topk=topk, values=v) for x in (W, regard.weights(q, k, engine="reference")))
            for name in (*names, "y"):
                torch.testing.assert_close(getattr(seen, name), getattr(right, name))
            if topk is not None:
                torch.testing.assert_close(tuple(seen.topk), tuple(right.topk))
            torch.testing.assert_close(
                W.entropy(), right.entropy if "entropy" in names else W.dense().log().mul(-W.dense()).sum(-1)
            )
    assert (
        looked_at.count((("lse", "entropy"), None)) == 6 + 3
    )  # the reference each time; ours counted, recorded, replayed


def test_a_question_that_is_wrong_is_wrong_again():
    q = torch.randn(1, 2, 5, 4)
    for _ in range(5):
        regard.weights(q, engine="blockwise").see("entropy", topk=1)
    with pytest.raises(ValueError, match="got True"):  # which equals 1
        regard.weights(q, engine="blockwise").see("entropy", topk=True)
    for _ in range(5):
        with pytest.raises(ValueError, match="unknown statistic"):
            regard.weights(q, engine="blockwise").see("entropie")


def test_a_question_that_comes_again_keeps_no_tangent_from_autograd():
    q = torch.randn(1, 2, 5, 4)
    for _ in range(5):
        regard.weights(q, engine="blockwise").see("entropy")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward_ad"):
        regard.weights(forward_ad.make_dual(q, q), engine="blockwise").see("entropy")


def test_a_question_that_comes_again_is_followed_by_autograd_if_it_must_be():
    for turn in range(6):
        q = torch.randn(1, 2, 5, 4, requires_grad=turn > 4)
        entropy = regard.weights(q, engine="blockwise").see("entropy").entropy
        assert entropy.requires_grad == (turn > 4)


CALLS = replay.CALLS_BEFORE_ON_CPU + 3


@pytest.fixture
def as_shipped(monkeypatch):
    """Short questions alone are replayed on a CPU."""
    monkeypatch.setattr(replay, "DEVICES", ("cuda",))


def answers(seed, threads=1, grad=False, shape=(2, 4, 7, 5), names=("lse", "max_score", "entropy"), **options):
    """Answers about new tensors of the same shapes; the seed decides their numbers."""
    generator = torch.Generator().manual_seed(seed)
    b, h, i, d = shape
    q = torch.randn(b, h, i, d, generator=generator, requires_grad=grad)
    k, v = (torch.randn(b, h // 2, i, d, generator=generator) for _ in range(2))
    tensors = torch.randn(h, generator=generator), torch.randn(b, h, i, i, generator=generator)
    score = options.pop("score", lambda *_: regard.ScaledDot())(*tensors)
    seen = regard.weights(q, k, score=score, mask=options.pop("mask", None)).see(*names, values=v, **options)
    return {**{name: getattr(seen, name) for name in names}, **{n: x for n, x in vars(seen).items() if n not in names}}


def flat(results):
    return [x.detach() for part in results.values() for x in (part if isinstance(part, tuple) else [part])]


def tapes():
    """One for each recorded call, which may be known by two keys."""
    return list(dict.fromkeys(tape for tape in replay.TAPES.values() if type(tape) is replay.Tape))


QUESTIONS = {
    "plain": {},
    "causal": {"mask": regard.causal()},
    "window": {"mask": regard.causal() & regard.window(2, 0)},
    "bias": {"score": lambda slopes, bias: regard.ScaledDot().bias(bias), "mask": regard.causal()},
    "bias of rows, alibi, soft cap, sink": {
        "score": lambda s, b: regard.Dot().bias(b[..., :1]).alibi(s.abs()).softcap(5.0).sink(s),
    },
    "cosine": {"score": lambda *_: regard.Cosine()},
    "Gaussian": {"score": lambda *_: regard.Gaussian(2.0), "mask": regard.causal()},
    "Gaussian of short vectors": {"score": lambda *_: regard.Gaussian(2.0), "shape": (1, 2, 6, 3)},
    "columns": {"names": ("received", "mean_distance"), "pool": (2, 3), "mask": regard.causal()},
    "largest": {"names": ("peak",), "topk": 3, "mass": [0, 2]},
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_short_questions_are_replayed_on_a_cpu_to_the_last_bit(question, as_shipped, monkeypatch):
    for seed in range(CALLS):
        ours = flat(answers(seed, **QUESTIONS[question]))
        with monkeypatch.context() as patch:
            patch.setattr(replay, "enabled", False)
            right = flat(answers(seed, **QUESTIONS[question]))
        for a, b in zip(ours, right, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert len(tapes()) == 1


@pytest.mark.parametrize(
    "question",
    [
        {"mask": regard.padding(torch.tensor([3, 5]))},
        {"mask": torch.rand(7, 7) > 0.2},
        {"mask": ~regard.window(1, 1) | regard.window(0, 0)},
        {"mask": lambda i, j: i >= j},
        {"score": lambda *_: regard.Dot().modify(lambda s, i, j: s * 2)},
        {"grad": True},
        {"shape": (1, 2, 2**10, 2**8)},
    ],
    ids=["padding", "bool tensor", "several intervals", "mask function", "score function", "gradients", "long"],
)
def test_what_depends_on_more_or_takes_long_is_computed_on_a_cpu(question, as_shipped):
    for seed in range(CALLS):
        answers(seed, **question)
    assert not tapes()


def test_a_tape_of_a_cpu_serves_its_own_threads_and_tiles(as_shipped, monkeypatch):
    """Sums of columns are taken in as many parts as there are threads."""
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for seed in range(CALLS):
            answers(seed, shape=(1, 2, 7, 5), names=("received",))
        assert len(tapes()) == threads
    monkeypatch.setattr(numba, "enabled", False)
    monkeypatch.setattr(replay.Tape, "__call__", lambda *_: pytest.fail("replayed"))
    answers(0, shape=(1, 2, 7, 5), names=("received",))


def test_a_question_seldom_asked_is_not_recorded_on_a_cpu(as_shipped, monkeypatch):
    """Recording takes longer than a few replays save: each step of a generation has new lengths."""
    monkeypatch.setattr(replay, "OpRecorder", lambda *_: pytest.fail("recorded"))
    for length in range(1, 6):
        for seed in range(replay.CALLS_BEFORE_ON_CPU):
            answers(seed, shape=(1, 2, length, 4))


def test_scratch_memory_is_not_allocated_twice(as_shipped):
    """A launch of compiled tiles makes its own: of the one that was recorded nothing is left."""
    for seed in range(CALLS):
        answers(seed, mask=regard.causal())
    shapes = [step.make.args[0] for step, _ in tapes()[0].steps if type(step) is replay.AllocStep]
    assert sorted(map(len, shapes)) == [3, 3, 3, 4, 4]  # lse, maximum, entropy; norm, y


def test_a_replayed_question_leaves_tensors_to_their_owner(as_shipped):
    """No tape holds an input, an answer or scratch memory; bands of positions alone."""
    gone = []

    def ask():
        q = torch.randn(1, 2, 7, 5)
        seen = regard.weights(q, mask=regard.causal()).see("lse", values=q)
        gone.extend(weakref.ref(x.untyped_storage()) for x in (q, seen.y, seen.lse))

    for _ in range(CALLS):
        ask()
    assert len(tapes()) == 1
    assert all(ref() is None for ref in gone)


def test_threads_may_ask_at_once(as_shipped):
    """Each launch has its own copy of the arguments."""
    right = {seed: flat(answers(seed, mask=regard.causal())) for seed in range(CALLS)}
    assert len(tapes()) == 1
    wrong = []

    def ask(seed):
        for _ in range(200):
            ours = flat(answers(seed, mask=regard.causal()))
            wrong.extend(seed for a, b in zip(ours, right[seed], strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(numba.load() is None, reason="needs numba and the symbols of PyTorch's library")
@pytest.mark.parametrize("outer", [(1, 4), (2, 3, 4)])
def test_a_recorded_question_about_heads_brings_their_norm_along(outer, monkeypatch):
    """A recorded call reads no cache: it computed the norm again, in every replay."""
    from regard.engines.numba import head_rows

    norms, forward_pass = [], head_rows.forward_pass
    monkeypatch.setattr(head_rows, "forward_pass", lambda *a: (norms.append(a[1]), forward_pass(*a))[1])
    q = torch.randn(*outer, 20, 16)
    W, want = regard.weights(q, mask=causal()), regard.weights(q.double(), mask=causal(), engine="reference")
    for _ in range(4):
        torch.testing.assert_close(
            W.reduce_heads().entropy().double(), want.reduce_heads().entropy(), rtol=0, atol=1e-5
        )
    assert 2 <= len(norms) < 4  # computed and recorded, then replayed
    assert all(norm is not None for norm in norms)
