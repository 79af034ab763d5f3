"""A corpus run over models of transformers, whatever computes their attention."""

from __future__ import annotations

import pytest
import torch

import regard


def test_a_model_whose_attention_is_regard_is_counted_as_any_other():
    transformers = pytest.importorskip("transformers")
    from regard.integrations.transformers import register

    register()
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    documents = [torch.randint(30, (n,)).tolist() for n in (9, 20, 20)]
    tables = []
    for name in ("regard", "sdpa"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**shape, **heads, attn_implementation=name)
        tables.append(regard.corpus(transformers.LlamaForCausalLM(config), documents, length=16).heads)
    assert len(tables[0]) == 8
    for own, other in zip(*tables, strict=True):
        assert own[3:] == pytest.approx(other[3:], rel=1e-4, abs=1e-6)


def test_attention_by_regard_and_its_statistics_come_from_one_pass(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from regard.engines import blockwise, numba
    from regard.integrations.transformers import register

    if not numba.enabled or numba.load() is None:
        pytest.skip("needs compiled tiles")
    register()
    passes: list[tuple[str, ...]] = []
    compute = blockwise.Blockwise.compute

    def counted(self, problem, request, names, cached):
        passes.append(names)
        return compute(self, problem, request, names, cached)

    monkeypatch.setattr(blockwise.Blockwise, "compute", counted)
    shape = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    free = {"norm", "lse", "entropy", "max_score"}
    for name, names in (("regard", {"y", *free}), ("sdpa", free)):
        config = transformers.LlamaConfig(**shape, num_attention_heads=4, attn_implementation=name)
        passes.clear()
        regard.corpus(transformers.LlamaForCausalLM(config), [torch.randint(30, (16,)).tolist()])
        assert [set(wanted) for wanted in passes] == [names] * 3  # one for each layer
