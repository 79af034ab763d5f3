"""Models on several ranks for a `RankPool`: under FSDP2 and DistributedDataParallel, beside the same model in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regard
from support.rank_dtensors import mesh_of

VOCABULARY = 11


def built(kind: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and its input, the same on every rank; grouped heads, every kind of attention layer."""
    torch.manual_seed(3)
    ids, other = torch.randint(1, VOCABULARY, (4, 7)), torch.randint(1, VOCABULARY, (4, 5))
    if kind == "lm":
        return regard.nn.LanguageModel(VOCABULARY, dim=8, heads=4, kv_heads=2, layers=2), (ids,)
    if kind == "translator":
        return regard.nn.Translator(VOCABULARY, dim=8, heads=2, layers=1), (ids, other)
    return regard.nn.Encoder(8, 2, 2, norm="rms"), (torch.randn(4, 7, 8),)


def wrapped(how: str, kind: str, group: Any, world: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, inputs = built(kind)
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group), inputs
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(group, world)
    for part in model.modules():
        if isinstance(part, regard.nn.Block):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, inputs


def gradients(group: Any, rank: int, world: int, how: str, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Output and gradients of ranks that have half of the batch each, and of one process with all of it."""
    single, inputs = built(kind)
    want = single(*inputs)
    want.sin().mean().backward()
    model, _ = wrapped(how, kind, group, world)
    part = tuple(t.chunk(world)[rank] for t in inputs)
    got = model(*part)
    got.sin().mean().backward()
    pairs = {"output": (got.detach(), want.detach().chunk(world)[rank])}
    names = dict(single.named_parameters())
    added_up = _times_added_up(group, world) if how == "fsdp" else 1.0
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() / added_up if hasattr(p.grad, "full_tensor") else p.grad
        pairs[name] = (grad, names[name.removeprefix("module.")].grad)
    return pairs


def _times_added_up(group: Any, world: int) -> float:
    """1 where FSDP2 averages gradients over ranks; PyTorch 2.8 adds them up on gloo."""
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(2, 2, bias=False)
    fully_shard(layer, mesh=mesh_of(group, world))
    layer(torch.ones(1, 2)).sum().backward()
    return layer.weight.grad.full_tensor().mean().item()


def recorded(group: Any, rank: int, world: int, how: str, folder: str) -> dict[str, Any]:
    """What `record` and `watch` see of a wrapped model, and what they report on this rank."""
    model, (ids,) = wrapped(how, "lm", group, world)
    single, _ = built("lm")
    calls: list[int] = []
    path = Path(folder) / "seen.regard"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with regard.watch(model, every=1, callback=lambda numbers, step: calls.append(step), collapse=2.0) as watching:
            model(ids).sum().backward()
        model.eval()
        with torch.no_grad():
            with regard.record(model, path=str(path)) as seen:
                model(ids)
            with regard.record(single.eval()) as alone:
                single(ids)
    dist.barrier(group)
    same = [torch.equal(a.weights.dense(), b.weights.dense()) for a, b in zip(seen.layers, alone.layers, strict=True)]
    return {
        "names": [layer.name.removeprefix("module.") for layer in seen.layers] == [x.name for x in alone.layers],
        "same": same,
        "watched": len(watching.layers),
        "calls": calls,
        "warnings": len(caught),
        "files": [file.name for file in Path(folder).iterdir() if not file.name.startswith(".")],
        "readable": len(regard.load(path)),
    }


def recorded_dtensors(group: Any, rank: int, world: int, dim: int, padded: bool = False) -> dict[str, Any]:
    """What is recorded of a layer that runs on DTensors, sharded on batch (0) or length (1)."""
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    torch.manual_seed(3)
    layer, x, mesh = (
        regard.nn.SelfAttention(8, heads=2, causal=True).eval(),
        torch.randn(4, 6, 8),
        mesh_of(group, world),
    )
    mask = regard.padding(torch.tensor([6, 5, 4, 3])) if padded else None
    with torch.no_grad():
        want = layer.weights(x, mask=mask)
        dense, entropy = want.dense().chunk(world)[rank], want.entropy()
        layer, part = distribute_module(layer, mesh), distribute_tensor(x, mesh, [Shard(dim)])
        answered = layer.weights(part, mask=mask).entropy().full_tensor()
        with warnings.catch_warnings(), regard.record(layer, values=True) as seen:
            warnings.simplefilter("ignore")
            layer(part, mask=mask)
    return {
        "answered": torch.allclose(answered, entropy, atol=1e-5),
        "refused": [reason for _, reason in seen.refused],
        "same": [torch.allclose(one.weights.dense(), dense, atol=1e-6) for one in seen.layers],
        "shapes": [(one.shape, tuple(one.weights.shape), tuple(one.values.shape)) for one in seen.layers],
    }


def trained(group: Any, rank: int, world: int, kind: str, folder: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The losses and the weights of a run of `regard.learn`, on every rank that takes part."""
    place = Path(folder)
    for settings in runs:
        if kind == "lm":
            result = regard.learn.lm(place / "text", place / "run", **settings)
        else:
            result = regard.learn.translate(place / "en", place / "de", place / "run", **settings)
    dist.barrier(group)
    return losses_of(place / "run") | {"step": result.step, "best": result.best}


def losses_of(folder: Path) -> dict[str, Any]:
    """Losses of every step that was reported, and the weights at the end."""
    from regard.learn import checkpoint

    rows = checkpoint.read_history(folder)
    tensors, _ = checkpoint.read_tensors(folder / checkpoint.LAST)
    return {
        "loss": [(row["step"], row["loss"]) for row in rows if "loss" in row],
        "val_loss": [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row],
        "weights": {name: t for name, t in tensors.items() if name.startswith("weights/")},
    }
