"""A corpus run: its numbers are those of dense weights, and no split, order, kill or rank changes a bit of them."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import random
import re
import signal
import time
import traceback
from fractions import Fraction

import pytest
import torch

import regard
from regard import cli
from regard.core.rows import strips
from regard.corpora import documents as reading
from regard.corpora import exact
from regard.corpora.profile import BINS, EDGES, SUMS, HeadProfile, bin_of, profile, targets_of
from regard.corpora.run import _tallies
from regard.corpora.tally import Tally, Tie, strongest
from regard.engines import numba
from regard.look import loading

# Every number of every head.


def dense_numbers(w: torch.Tensor, ids: list[int]) -> dict[str, torch.Tensor]:
    """Sums over the rows of one sequence, by the definitions, from dense float64 weights (h, t, t)."""
    h, t, _ = w.shape
    out = {name: torch.zeros(h, dtype=torch.float64) for name in SUMS}
    bins, received = torch.zeros(h, BINS, dtype=torch.float64), torch.zeros(h, BINS, dtype=torch.float64)
    for n, i in itertools.product(range(h), range(t)):
        row = w[n, i]
        entropy = -sum(float(x) * math.log(x) for x in row if x > 0)
        out["entropy"][n] += entropy
        out["entropy²"][n] += entropy**2
        out["peak"][n] += row.max()
        out["peak²"][n] += row.max() ** 2
        before = [j for j in range(i) if ids[j] == ids[i]]
        out["induction"][n] += row[before[-1] + 1] if before else 0
        if i:
            out["previous"][n] += row[i - 1]
            out["first"][n] += row[0]
        for j in range(t):
            out["weight"][n] += row[j]
            out["distance"][n] += row[j] * abs(i - j)
            out["distance²"][n] += row[j] * abs(i - j) ** 2
            bins[n, next(b for b in range(BINS) if EDGES[b] <= abs(i - j) < EDGES[b + 1])] += row[j]
            received[n, next(b for b in range(BINS) if EDGES[b] <= j < EDGES[b + 1])] += row[j]
    return out | {"bins": bins, "received": received}


@pytest.mark.parametrize("mask", [None, regard.causal(), regard.window(3, 1), regard.causal() & regard.window(2, 0)])
@pytest.mark.parametrize("strip", [16, 2**19, None], ids=["low strips", "strips", "kernels"])
def test_every_sum_is_that_of_the_dense_weights(mask, strip, monkeypatch):
    if strip is None and numba.load() is None:
        pytest.skip("needs the compiled tiles")
    monkeypatch.setattr(strips, "STRIP_NUMBERS", strip)
    monkeypatch.setattr(numba, "enabled", strip is None)
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 11, 4, dtype=torch.float64) * 3, torch.randn(2, 3, 11, 4, dtype=torch.float64)
    ids = torch.randint(4, (2, 11))
    weights = regard.weights(q, k, mask=mask)
    measured = profile(weights, targets_of(ids))
    for n in range(2):
        dense = weights[n].dense()
        truth = dense_numbers(dense, ids[n].tolist())
        for at, name in enumerate(SUMS):
            torch.testing.assert_close(measured.sums[n, :, at], truth[name], msg=name)
        torch.testing.assert_close(measured.sums[n, :, len(SUMS) : len(SUMS) + BINS], truth["bins"])
        torch.testing.assert_close(measured.sums[n, :, len(SUMS) + BINS :], truth["received"])
        others = dense.clone()
        others[:, :, 0] = 0
        others.diagonal(dim1=-2, dim2=-1).zero_()
        for h in range(3):
            assert others[h].max() == pytest.approx(float(measured.tie[n, h]))
            assert others[h, measured.query[n, h], measured.key[n, h]] == others[h].max()


def assert_equal_profiles(profiles, **bounds):
    torch.testing.assert_close(profiles[0].sums, profiles[1].sums, **bounds)
    torch.testing.assert_close(profiles[0].tie.double(), profiles[1].tie.double(), **bounds)
    assert torch.equal(profiles[0].query, profiles[1].query)
    assert torch.equal(profiles[0].key, profiles[1].key)


SCORES = {
    "product": lambda h: regard.ScaledDot(),
    "alibi": lambda h: regard.ScaledDot().alibi(torch.linspace(0.01, 0.5, h, dtype=torch.float64)),
    "softcap and bias": lambda h: regard.ScaledDot().softcap(2.0).bias(torch.linspace(-1, 1, 601, dtype=torch.float64)),
    "sink": lambda h: regard.ScaledDot().sink(torch.linspace(-1, 3, h, dtype=torch.float64)),
}
MASKS = {
    "none": None,
    "causal": regard.causal(),
    "window": regard.window(70, 5),
    "cells": torch.rand(601, 601, generator=torch.Generator().manual_seed(0)) < 0.6,
}


@pytest.mark.parametrize(
    ("score", "mask", "threads"),
    [("product", "causal", 1), ("alibi", "none", 3), ("softcap and bias", "window", 1), ("sink", "cells", 3)],
)
def test_tiles_of_many_sizes_sum_as_complete_rows_do(score, mask, threads, monkeypatch):
    """601 rows and keys end in the middle of a tile either way; with 3 threads the rows of a head are cut into chunks."""
    torch.manual_seed(2)
    q, k = torch.randn(1, 2, 601, 8, dtype=torch.float64) * 2, torch.randn(1, 1, 601, 8, dtype=torch.float64)
    targets = targets_of(torch.randint(40, (1, 601)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    def measured(dtype, compiled):
        monkeypatch.setattr(numba, "enabled", compiled)
        return profile(regard.weights(q.to(dtype), k.to(dtype), score=SCORES[score](2), mask=MASKS[mask]), targets)

    truth = measured(torch.float64, False)
    assert_equal_profiles([measured(torch.float64, True), truth], rtol=1e-11, atol=1e-11)
    assert_equal_profiles([measured(torch.float32, True), truth], rtol=2e-6, atol=1e-5)


def test_a_walk_over_strips_answers_as_the_textbook_does(monkeypatch):
    monkeypatch.setattr(strips, "STRIP_NUMBERS", 64)
    torch.manual_seed(1)
    q = torch.randn(1, 2, 9, 4, dtype=torch.float64)
    targets = targets_of(torch.tensor([[1, 2, 1, 1, 3, 2, 2, 5, 3]]))
    score = regard.ScaledDot().sink(torch.zeros(2, dtype=torch.float64))
    answers = [
        regard.weights(q, score=score, mask=regard.causal(), engine=engine)._ask_rows(HeadProfile(targets))
        for engine in ("blockwise", "reference")
    ]
    for walked, textbook in zip(*answers, strict=True):
        torch.testing.assert_close(walked, textbook)


def test_one_token_and_weights_that_the_model_made_itself():
    one = profile(regard.weights(torch.zeros(1, 1, 1, 2)), targets_of(torch.tensor([[3]])))
    assert one.sums[0, 0, SUMS.index("peak")] == 1
    assert one.sums[0, 0, SUMS.index("previous")] == 0
    w = torch.tensor([[[[1.0, 0, 0], [0.25, 0.75, 0], [0, 0.5, 0.5]]]])
    measured = profile(regard.Weights.from_dense(w), targets_of(torch.tensor([[1, 1, 1]])))
    assert measured.sums[0, 0, SUMS.index("previous")] == 0.75
    assert measured.sums[0, 0, SUMS.index("induction")] == 0.75 + 0.5
    assert (measured.query.item(), measured.key.item(), measured.tie.item()) == (2, 1, 0.5)


def test_bins_are_the_powers_of_two():
    assert [int(n) for n in bin_of(9).argmax(-1)] == [0, 1, 2, 2, 3, 3, 3, 3, 4]


# Sums without rounding.


def test_exact_sums_depend_on_no_order_and_no_split():
    rng = random.Random(0)
    numbers = [rng.random() * 2.0 ** rng.randint(-40, 60) for _ in range(300)] + [2.0**-96, 0.0, 2.0**94]
    total_of_all = sum((Fraction(x) for x in numbers), Fraction(0))
    totals = set()
    for seed in range(4):
        random.Random(seed).shuffle(numbers)
        cut = seed * 60
        halves = []
        for part in (numbers[:cut], numbers[cut:]):
            total = torch.zeros(exact.DIGITS, dtype=torch.int64)
            for x in part:
                total = exact.add(total, exact.as_digits(torch.tensor(x, dtype=torch.float64)))
            halves.append(total)
        totals.add(tuple(exact.as_integers(exact.add(*halves))))
    assert len(totals) == 1
    (total,) = totals.pop()
    below = Fraction(len(numbers), exact.UNIT)  # each term loses less than one unit
    assert 0 <= total_of_all - Fraction(total, exact.UNIT) < below
    assert exact.as_integers(exact.from_integers([total, 7], (2,))) == [total, 7]


def test_a_carry_reaches_every_digit():
    ones = exact.from_integers([2**160 - 1], ())
    assert exact.as_integers(exact.add(ones, exact.from_integers([1], ()))) == [2**160]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, 2.0**96])
def test_numbers_that_cannot_be_added_are_refused(bad):
    with pytest.raises(ValueError, match="must be >= 0"):
        exact.as_digits(torch.tensor([1.0, bad], dtype=torch.float64))


# Runs.


VOCABULARY = 13


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return regard.nn.LanguageModel(VOCABULARY, dim=8, layers=2, heads=2)


@pytest.fixture(scope="module")
def texts():
    rng = random.Random(3)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 5, 12, 12, 30)))] for _ in range(14)]


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_DOCUMENTS", 2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def run(model, texts, out=None, **options):
    return regard.corpus(model, texts, out, length=12, examples=3, **options)


def start_child(work) -> int:
    """The id of a forked process that does the work; an exception never leaves it, so the test runner stays with its parent."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def in_child(work) -> int:
    """The wait status of a forked process that does the work."""
    return os.waitpid(start_child(work), 0)[1]


def test_a_model_that_is_not_a_number_somewhere_is_named_with_its_place():
    class Model(torch.nn.Module):
        def forward(self, ids):
            q = torch.eye(9)[ids].unsqueeze(1).expand(-1, 2, -1, -1).clone()
            q[:, 1][(ids == 7).nonzero(as_tuple=True)] = math.nan
            return torch.nn.functional.scaled_dot_product_attention(q, q, q)

    assert len(regard.corpus(Model(), [[1, 2, 3], [4, 5]]).heads) == 2
    with pytest.raises(ValueError, match=r"weights that are not numbers: head 1, document 1 .*from token 0 on"):
        regard.corpus(Model(), [[1, 2, 3], [4, 7, 5]])


def test_functions_that_a_run_is_passed_are_checked():
    model = regard.nn.LanguageModel(9, dim=8, layers=1, heads=2)
    with pytest.raises(TypeError, match=r"progress must be a function of a CorpusProgress; got 5"):
        regard.corpus(model, [[1, 2]], progress=5)
    with pytest.raises(TypeError, match=r"tokenizer must make a list of token ids of a text; got None"):
        regard.corpus(model, ["abc"], tokenizer=lambda text: None)


def test_tables_say_what_the_weights_say(model, texts):
    seen = run(model, texts)
    rows, distance, previous = [], [], []
    for text in texts:
        for start in range(0, len(text), 12):
            with regard.record(model) as recording, torch.no_grad():
                model(torch.tensor([text[start : start + 12]]))
            w = recording.layers[1].weights[0, 1].dense().double()
            at = torch.arange(len(w))
            rows += torch.special.entr(w).sum(-1).tolist()
            distance += (w * (at[:, None] - at).abs()).sum(-1).tolist()
            previous += w.diagonal(-1).tolist()
    head = seen.heads[3]
    assert (head.layer, head.head, seen.tokens) == (1, 1, len(rows))
    mean = sum(rows) / len(rows)
    assert head.entropy == pytest.approx(mean, rel=1e-6)
    assert head.entropy_std == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in rows) / len(rows)), rel=1e-5)
    assert head.distance == pytest.approx(sum(distance) / len(rows), rel=1e-6)
    assert head.previous == pytest.approx(sum(previous) / len(previous), rel=1e-6)
    assert sum(d.share for d in seen.distances if d[:2] == (1, 1)) == pytest.approx(1)
    received = [r for r in seen.received if r[:2] == (1, 1)]
    assert sum(r.received * n for r, n in zip(received, seen.tally.keys, strict=False)) == pytest.approx(len(rows))
    assert set(seen.heads.to_pandas().columns) == set(seen.heads.columns)


def test_any_split_and_any_order_merge_to_the_same_bits(model, texts, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_DOCUMENTS", 1)
    seen = run(model, texts, batch=1)
    reader = regard.corpora.models.as_corpus_model(model, None, None)
    settings = {"length": 12, "batch": 1, "examples": 3, "redact": False}
    parts = [tally for _, tally in _tallies(reader, reading.open_documents(texts, "text").chunks(), settings)]
    for seed in range(3):
        shuffled = random.Random(seed).sample(parts, len(parts))
        while len(shuffled) > 1:  # merge pairs in a random tree
            at = random.Random(seed + len(shuffled)).randrange(len(shuffled) - 1)
            shuffled[at : at + 2] = [shuffled[at].merge(shuffled[at + 1])]
        assert shuffled[0].to_json() == seen.tally.to_json()
    assert Tally(3).merge(seen.tally).to_json() == seen.tally.to_json()


def test_examples_are_the_strongest_of_different_documents(model, texts):
    few, all_of_them = run(model, texts), regard.corpus(model, texts, length=12, examples=99)
    best = [e for e in all_of_them.examples if e[:2] == (0, 1)]
    assert [e for e in few.examples if e[:2] == (0, 1)] == best[:3]
    assert len({e.document for e in best}) == len(best)
    assert sorted((e.weight for e in best), reverse=True) == [e.weight for e in best]
    text = texts[best[0].document]
    assert (best[0].query_token, best[0].key_token) == (str(text[best[0].query]), str(text[best[0].key]))
    assert best[0].query_token in best[0].text.split()


def test_a_document_gives_its_strongest_tie_in_any_order():
    ties = [Tie(weight, document, 0, 2, 1, "", ()) for weight, document in ((0.5, 0), (0.9, 0), (0.7, 0), (0.6, 1))]
    for order in itertools.permutations(ties):
        assert [(tie.weight, tie.document) for tie in strongest(order, 2)] == [(0.9, 0), (0.6, 1)]


def test_a_run_killed_in_the_middle_of_a_write_continues_to_the_same_bytes(model, texts, tmp_path, monkeypatch):
    run(model, texts, tmp_path / "plain")
    expected = (tmp_path / "plain" / "corpus.json").read_bytes()
    for fatal in (2, 4, 8):  # the second part, the fourth, the result
        out = tmp_path / f"killed{fatal}"

        def killed(out=out, fatal=fatal):
            calls = itertools.count(1)
            sync = os.fsync

            def fsync(handle):
                if next(calls) == 2 * fatal:  # each file is synced, then its folder
                    os.kill(os.getpid(), signal.SIGKILL)
                sync(handle)

            os.fsync = fsync
            run(model, texts, out)

        assert os.WTERMSIG(in_child(killed)) == signal.SIGKILL
        assert not (out / "corpus.json").exists() or fatal == 8
        chunks: list[int] = []
        run(model, texts, out, progress=lambda p, chunks=chunks: chunks.append(p.done))
        assert len(chunks) < 7
        assert (out / "corpus.json").read_bytes() == expected
        assert sorted(file.name for file in out.iterdir()) == ["corpus.json", "run.json"]


def test_an_interrupted_run_continues(model, texts, tmp_path):
    def interrupt(progress):
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, texts, tmp_path, progress=interrupt)
    with pytest.raises(FileNotFoundError, match="not complete: run the same command again"):
        regard.load_corpus(tmp_path)
    done: list[int] = []
    seen = run(model, texts, tmp_path, progress=lambda p: done.append(p.done))
    assert done == [4, 5, 6, 7]
    assert seen.tally.to_json() == run(model, texts).tally.to_json()
    assert run(model, texts, tmp_path, progress=lambda p: done.append(-1)).tokens == seen.tokens
    assert -1 not in done


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_write_the_same_file_as_one_process(model, texts, tmp_path, ranks, monkeypatch):
    run(model, texts, tmp_path / "one")
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    out = tmp_path / "several"

    def one_rank(rank):
        os.environ["RANK"] = str(rank)
        assert run(model, texts, out, timeout=60).documents == len(texts)

    children = [start_child(functools.partial(one_rank, rank)) for rank in range(ranks)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * ranks
    assert (out / "corpus.json").read_bytes() == (tmp_path / "one" / "corpus.json").read_bytes()


def test_a_rank_that_never_comes_is_named(model, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        TimeoutError, match=r"3 files of other ranks did not come within 0\.3 s, the first is part-000001"
    ):
        run(model, texts, tmp_path, timeout=0.3)
    with pytest.raises(ValueError, match="needs a folder that all of them see"):
        run(model, texts)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        TimeoutError, match=r"1 files of other ranks did not come within 0\.3 s, the first is run\.json"
    ):
        run(model, texts, tmp_path / "new", timeout=0.3)
    with pytest.raises(TimeoutError, match=r"0\.3 s, the first is corpus\.json"):
        run(model, texts, tmp_path, timeout=0.3)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_may_begin_long_after_the_other(model, texts, tmp_path, monkeypatch, late):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def one_rank(rank):
        os.environ["RANK"] = str(rank)
        time.sleep(0.5 * (rank == late))
        assert run(model, texts, tmp_path, timeout=60).documents == len(texts)

    children = [start_child(functools.partial(one_rank, rank)) for rank in range(2)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0]
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {"run.json", "corpus.json"}


def test_documents_without_tokens_count_as_documents(model, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_DOCUMENTS", 1)  # a chunk of its own

    def letters(text: str) -> list[int]:
        return [1 + ord(letter) % 9 for letter in text if letter.isalpha()]

    seen = regard.corpus(model, ["...", "abcabc"], tokenizer=letters)
    assert (seen.documents, seen.sequences, seen.tokens) == (2, 1, 6)
    assert [tuple(row)[3:] for row in seen.heads] == [
        tuple(row)[3:] for row in regard.corpus(model, ["abcabc"], tokenizer=letters).heads
    ]


def test_a_full_disk_is_said_with_the_file(model, texts, tmp_path, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("regard._io.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*run\.json"):
        regard.corpus(model, texts, tmp_path / "run")
    assert list((tmp_path / "run").glob("*.json")) == []


def test_dropout_and_the_training_flag_change_nothing(texts):
    torch.manual_seed(0)
    model = regard.nn.LanguageModel(VOCABULARY, dim=8, layers=1, heads=2, dropout=0.5).train()
    assert run(model, texts).tally.to_json() == run(model, texts).tally.to_json()
    assert model.training


# Texts, and files with mistakes in them.


def letters(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


def test_lines_objects_files_and_lists_are_the_same_documents(model, tmp_path):
    texts = ["a first text", "second", "é third\ttext"]
    (tmp_path / "a.txt").write_bytes("\ufeffa first text\r\n\nsecond\n   \né third\ttext".encode())
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"n": 1, "text": text}) for text in texts))
    (tmp_path / "folder").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "folder" / f"{n}.txt").write_text(text)
    (tmp_path / "folder" / "no file.txt").mkdir()
    results = [
        regard.corpus(model, data, tokenizer=letters).tally.to_json()
        for data in (texts, tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "folder")
    ]
    for result in results:
        for layer in result["layers"]:
            layer["ties"] = [[tie._replace(source="") for tie in head] for head in layer["ties"]]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "does not exist"),
        ("blank.txt", b" \n\n", "at least one document; all of it is blank"),
        ("latin.txt", b"fine\n\xe9t\xe9\n", "line 2 of .*latin.txt is not UTF-8"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2 of .*broken.jsonl must be a JSON object"),
        ("other.jsonl", b'{"body": "a"}', "an object with a text under 'text'; got 'body'"),
        ("list.jsonl", b"[1]", "an object with a text under 'text'; got list"),
        ("number.jsonl", b'{"text": 3}', "an object with a text under 'text'; got int there"),
        (
            "half.jsonl",
            b'{"text": "a"}\n{"text": "b\\ud83d"}',
            r"line 2 of half.jsonl must be Unicode text; its character 1 is '\\ud83d'",
        ),
        ("all.json", b'[{"text": "a"}]', "got a file that ends in .json. Unpack or convert it"),
        ("packed.txt.gz", b"\x1f\x8b\x08", "got a file that ends in .gz. Unpack or convert it"),
    ],
)
def test_mistakes_in_files_are_named(model, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        regard.corpus(model, tmp_path / name, tmp_path / "out", tokenizer=letters)
    assert not (tmp_path / "out").exists()


def test_a_pipe_is_no_file_of_documents(model, tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(FileNotFoundError, match="documents are read twice, which a pipe cannot be: save them first"):
        regard.corpus(model, tmp_path / "pipe.txt", tokenizer=letters)


def test_mistakes_in_arguments_are_named(model, texts, tmp_path):
    with pytest.raises(ValueError, match=r"length must be a whole number >= 2; got 1"):
        regard.corpus(model, texts, length=1)
    with pytest.raises(ValueError, match="texts need a tokenizer"):
        regard.corpus(model, ["a text"])
    with pytest.raises(TypeError, match=r"got item 1: 1\.5"):
        regard.corpus(model, ["a", 1.5])
    for data, kind in ((None, "NoneType"), ({"a": "text"}, "dict"), (b"text", "bytes")):
        with pytest.raises(TypeError, match=f"data must be a path, a list of texts .*; got {kind}"):
            regard.corpus(model, data, tokenizer=letters)
    with pytest.raises(ValueError, match=r"must hold \.txt files"):
        regard.corpus(model, tmp_path)
    with pytest.raises(ValueError, match="has no attention that can be counted"):
        regard.corpus(torch.nn.Embedding(VOCABULARY, 4), texts)
    with pytest.raises(TypeError, match="tokenizer must have encode and decode"):
        regard.corpus(model, ["a"], tokenizer=3)


def test_a_folder_holds_one_run(model, texts, tmp_path):
    run(model, texts, tmp_path / "run")
    for changed, name in (
        (lambda out: regard.corpus(model, texts, out, length=11, examples=3), "length: 12, got 11"),
        (lambda out: run(model, texts[1:], out), "checksum"),
        (lambda out: run(regard.nn.LanguageModel(VOCABULARY, dim=8, layers=2, heads=2), texts, out), "parameters"),
    ):
        with pytest.raises(ValueError, match=f"was begun with another {name}"):
            changed(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match="must be empty or hold a corpus run"):
        run(model, texts, tmp_path / "other")
    with pytest.raises(ValueError, match=r"thesis.txt is a file, and --out names the folder of a run"):
        run(model, texts, tmp_path / "other" / "thesis.txt")


def test_a_damaged_file_is_refused(model, texts, tmp_path):
    run(model, texts, tmp_path)
    file = tmp_path / "corpus.json"
    text = file.read_text()
    file.write_text(text.replace('"rows": ', '"rows": 1', 1))
    with pytest.raises(ValueError, match="its checksum differs"):
        regard.load_corpus(tmp_path)
    file.write_text(text[:-40])
    with pytest.raises(ValueError, match="is damaged"):
        regard.load_corpus(tmp_path)
    file.write_text("{}")
    with pytest.raises(ValueError, match="must be a file of the format"):
        regard.load_corpus(tmp_path)


# Pictures and the command line.


class Letters(loading.LoadedModel):
    """A model whose tokens are letters."""

    name, limit = "tiny<b>", 8

    def __init__(self, model):
        self.model = model

    def _ids(self, text):
        return torch.tensor([letters(text)])

    def tokens(self, ids):
        return [f"<i>{n}" for n in ids[0].tolist()]


def test_the_command_line_runs_and_look_shows_the_folder(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "as_loaded", lambda name: Letters(model))
    (tmp_path / "a.txt").write_text("some text here\nand some more of it\n")
    out = tmp_path / "run"
    assert cli.main(["corpus", "tiny", str(tmp_path / "a.txt"), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "tiny<b> over 2 documents, 5 sequences" in shown.out  # of 8 tokens at most
    assert "1 of 1 parts" in shown.err
    assert cli.main(["look", str(out)]) == 0
    assert "induction" in capsys.readouterr().out
    assert cli.main(["look", str(out), "--out", str(tmp_path / "atlas.html")]) == 0
    page = (tmp_path / "atlas.html").read_text()
    assert re.findall(r'<section class="head" id="(\w+)"', page) == ["l0h0", "l0h1", "l1h0", "l1h1"]
    assert "&lt;i&gt;" in page
    assert "<i>" not in page
    assert "tiny<b>" not in page
    assert "<script" not in page
    assert cli.main(["look", str(out), "--word", "it"]) == 2
    assert "is a corpus run: leave out --word" in capsys.readouterr().err
    assert cli.main(["corpus", "tiny", str(tmp_path / "none.txt"), "--out", str(out)]) == 2


def test_numbers_of_a_run_are_printed_for_machines(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loading, "as_loaded", lambda name: Letters(model))
    (tmp_path / "a.txt").write_text("abcd\n")
    out = str(tmp_path / "run")
    assert cli.main(["corpus", "tiny", str(tmp_path / "a.txt"), "--out", out, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    seen = regard.load_corpus(out)
    assert printed["settings"]["length"] == 8
    assert printed["tokens"] == seen.tokens == 4
    assert printed["heads"][3]["entropy"] == seen.heads[3].entropy
    assert printed["heads"][0]["induction"] is None, "no letter occurs twice"
    for name in ("distances", "received", "examples"):
        assert [list(row.values()) for row in printed[name]] == [list(row) for row in getattr(seen, name)], name
    assert cli.main(["look", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == printed
    assert cli.main(["look", out, "--json", "--out", str(tmp_path / "atlas.html")]) == 2
    assert "leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:99", ""])
def test_a_device_that_is_not_here_is_named(model, name):
    with pytest.raises(ValueError, match=f"must be one that is here, such as cpu, cuda or cuda:1; got '{name}'"):
        regard.corpus(model, [[1, 2]], device=name)


def test_ranks_take_the_gpus_of_a_machine_in_turn(model, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "97")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 50)  # more than there are, so that the number is seen
    with pytest.raises(ValueError, match="got 'cuda:47'"):
        regard.corpus(model, [[1, 2]], device="cuda")


def test_a_redacted_run_stores_no_text(model, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "as_loaded", lambda name: Letters(model))
    seen = regard.corpus("tiny", ["some text here", "more"], tmp_path, redact=True)
    assert seen.examples[0].query_token == seen.examples[0].text == ""
    assert seen.examples[0].query != seen.examples[0].key
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"<i>" not in stored
    assert b"some text" not in stored
    assert b"<i>" in json.dumps(regard.corpus("tiny", ["some text here"]).tally.to_json()).encode()
    assert re.search(r"item \d, token \d+ to \d+", seen.html())
