"""A corpus run reads nothing from a device while the model runs: the numbers of a pass come by one copy, which nothing waits for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

import regard
from regard.corpora import run
from regard.engines import numba

#: Functions that need a tensor's numbers on the host: on a GPU each waits for all that was launched before it.
READS = (
    "item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "argwhere", "unique", "equal", "allclose",
    "__bool__", "__int__", "__float__", "__index__", "__array__",
)  # fmt: skip


class Reads(TorchFunctionMode):
    """Counts reads of tensors, and choices by flags, whose result has a size that only the numbers tell."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        chosen = args[1] if name == "__getitem__" and len(args) > 1 else ()
        flags = any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in _as_tuple(chosen))
        if name in READS or flags:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def _as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.fixture
def reads(monkeypatch):
    """Reads while passes are measured and their numbers are sent to the host, one counter for each call."""
    counters: dict[str, list[Counter[str]]] = {"_measure": [], "sent_to_host": []}

    def watched(name):
        own = getattr(run, name)

        def call(*args):
            with Reads() as mode:
                result = own(*args)
            counters[name].append(mode.counts)
            return result

        return call

    def targets_of(ids):  # of ids that are on the host
        with torch._C.DisableTorchFunction():
            return own_targets(ids)

    own_targets = run.targets_of
    for name in counters:
        monkeypatch.setattr(run, name, watched(name))
    monkeypatch.setattr(run, "targets_of", targets_of)
    return counters


@pytest.mark.parametrize("attention", ["sdpa", "regard"])
def test_numbers_are_sent_to_the_host_once_a_pass(attention, reads):
    transformers = pytest.importorskip("transformers")
    if not numba.enabled or numba.load() is None:
        pytest.skip("needs compiled tiles")
    from regard.integrations.transformers import register

    register()
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 5}
    config = transformers.LlamaConfig(**shape, num_attention_heads=4, attn_implementation=attention)
    documents = [torch.randint(30, (16,)).tolist() for _ in range(5)]
    regard.corpus(transformers.LlamaForCausalLM(config), documents, batch=2)
    assert reads["_measure"] == [Counter()] * 3
    assert reads["sent_to_host"] == [Counter()] * 6  # of four layers, and of the fifth


def test_the_numbers_of_a_pass_are_added_up_while_the_next_one_runs(monkeypatch):
    """The last pass of a chunk too: a GPU does not stand still between chunks."""
    steps = []

    def noted(name):
        own = getattr(run, name)

        def call(*args):
            steps.append(name)
            return own(*args)

        return call

    for name in ("_measure", "_add"):
        monkeypatch.setattr(run, name, noted(name))
    monkeypatch.setattr("regard.corpora.documents.CHUNK_DOCUMENTS", 2)
    regard.corpus(regard.nn.LanguageModel(9, dim=8, layers=1, heads=2), [[1, 2, 3, 4]] * 5, batch=1)
    assert steps == ["_measure", *["_measure", "_add"] * 4, "_add"]


def test_a_read_is_seen():
    x = torch.tensor([1.0, 2.0])
    with Reads() as mode:
        assert x.sum().item() == 3
        assert bool(x[0] > 0)
        assert len(x[x > 1]) == 1
    assert mode.counts == {"item": 1, "__bool__": 1, "__getitem__": 1}
