"""The public face, counted: every public name says what it takes and returns, with an example, and without `Any`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch

from regard import engines
from regard.core.types import EngineName
from regard.core.weights import Weights
from regard.learn import settings
from regard.learn.settings import LMChoices, LMSettings, TranslateChoices, TranslateSettings
from regard.look.options import ViewChanges, ViewChoices, ViewOptions
from regard.nn import Block, Encoder, LanguageModel, SelfAttention, Translator, block, positions
from regard.nn.options import ActivationName, AttentionOptions, BlockOptions, ModelOptions, NormName, SeeOptions
from regard.nn.positions import PositionsName
from regard.recorder import head_metrics
from regard.recorder.head_metrics import HeadMeasure

PACKAGES = (
    "regard",
    "regard.nn",
    "regard.learn",
    "regard.look",
    "regard.recorder",
    "regard.integrations.transformers",
    "regard.corpora",
    "regard.distributed",
    "regard.chains",
    "regard.kv",
    "regard.losses",
    "regard.patterns",
)

#: Where `Any` stands in a public signature, and why.
ANY = {"View.widget return": "an anywidget, whose class exists only where the optional package is installed"}

#: Methods of Python's that are part of the face.
SPECIAL = ("__init__", "__call__", "__getitem__", "__iter__", "__matmul__", "__rmatmul__")


class Name(NamedTuple):
    name: str
    kind: str  # class, function, method, property
    value: Any
    doc: str  # of an override without one: that of the method it overrides


def names() -> Iterator[Name]:
    """Every public class, function, method and property, once."""
    seen: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if not inspect.isclass(value):
                yield Name(name, "function", value, value.__doc__ or "")
                continue
            yield Name(name, "class", value, value.__doc__ or "")
            yield from members(value)


def members(cls: type) -> Iterator[Name]:
    """Public members that the package defines; those that PyTorch or Python name and document are theirs."""
    for base in cls.__mro__:
        if not base.__module__.startswith("regard"):
            continue
        for name, value in vars(base).items():
            foreign = any(name in vars(c) for c in cls.__mro__ if not c.__module__.startswith("regard"))
            if (name.startswith("_") or foreign) and name not in (*SPECIAL, "forward"):
                continue
            value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(value, property):
                yield Name(f"{cls.__name__}.{name}", "property", value.fget, inspect.getdoc(getattr(cls, name)) or "")
            elif inspect.isfunction(value):
                yield Name(f"{cls.__name__}.{name}", "method", value, inspect.getdoc(getattr(cls, name)) or "")


NAMES = list(names())


def missing(name: Name) -> list[str]:
    """What a docstring leaves out."""
    out = [] if name.doc else ["a docstring"]
    if name.name.rpartition(".")[2] in SPECIAL:
        return []  # the class says it
    out += [] if ">>>" in name.doc else ["an example"]
    if name.kind in ("function", "method"):
        signature = inspect.signature(name.value)
        parameters = [p for p in signature.parameters if p not in ("self", "cls")]
        out += [p for p in parameters if not re.search(rf"^ *\*{{0,2}}{p}: ", name.doc, flags=re.M)]
        if signature.return_annotation not in (None, "None") and "Returns:" not in name.doc:
            out.append("Returns")
    return out


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.name)
def test_every_public_name_says_what_it_takes_and_returns(name: Name) -> None:
    assert not missing(name)


def methods() -> Iterator[tuple[type, str, Any]]:
    """Every public method of every public class, as the class has it."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for cls in filter(inspect.isclass, (getattr(module, name) for name in module.__all__)):
            for name, value in inspect.getmembers_static(cls):
                value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if inspect.isfunction(value) and not name.startswith("_") and value.__module__.startswith("regard."):
                    yield cls, name, value


def test_a_wrong_call_names_a_public_class() -> None:
    public = {cls.__name__ for cls, _, _ in methods()}
    strangers = {value.__qualname__ for _, _, value in methods() if value.__qualname__.partition(".")[0] not in public}
    assert strangers <= {"_Attention.extra_repr", "Settings.json"}  # neither is called with arguments by a user
    with pytest.raises(TypeError, match=r"^Weights\.cover\(\) missing 3"):
        Weights.from_dense(torch.eye(2)).cover()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^HeadReduction\.kl\(\) missing 1"):
        Weights.from_dense(torch.ones(2, 1, 1)).reduce_heads().kl()  # type: ignore[call-arg]


def test_the_walk_finds_the_public_names() -> None:
    walked = {name.name for name in NAMES}
    assert {"weights", "Weights.topk", "Score.bias", "Mask.draw", "SelfAttention.forward", "Trained.run"} <= walked
    assert len(walked) > 150
    bare = Name("f", "function", lambda x: x, "")
    assert missing(bare) == ["a docstring", "an example", "x", "Returns"]


def test_no_public_signature_says_any() -> None:
    with_any: set[str] = set()
    for name in NAMES:
        if name.kind == "class":
            hints = {
                field: hint for field, hint in vars(name.value).get("__annotations__", {}).items() if field[0] != "_"
            }
        else:
            hints = dict(name.value.__annotations__)
        with_any |= {f"{name.name} {field}" for field, hint in hints.items() if says_any(hint)}
    assert with_any == set(ANY)


def test_every_public_object_says_what_it_is() -> None:
    assert not [name.name for name in names() if name.kind == "class" and name.value.__repr__ is object.__repr__]


def test_a_parameter_of_one_letter_is_one_of_the_vocabulary() -> None:
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    section = text.partition("## Vocabulary")[2].partition("\n## ")[0]
    letters = set(re.findall(r"(?<=`)[a-z](?=`)", section))
    used = {
        parameter
        for name in NAMES
        if name.kind in ("function", "method")
        for parameter in inspect.signature(name.value).parameters
        if len(parameter) == 1
    }
    assert {"q", "k", "v"} <= used <= letters


def test_words_of_signatures_are_those_of_the_tables() -> None:
    assert set(get_args(HeadMeasure)) == set(head_metrics.BY)
    assert set(get_args(ActivationName)) == {*block.ACTIVATIONS, "swiglu"}
    assert set(get_args(EngineName)) == {"auto", *engines.ENGINES}
    assert settings.PositionsName == PositionsName
    for name in get_args(PositionsName):
        assert isinstance(positions.as_positions(name, 8), positions.Positions)
    for name in get_args(NormName):
        assert isinstance(block.make_norm(name, 8, bias=True), torch.nn.Module)


def test_public_objects_name_the_package_that_exports_them() -> None:
    """In a process of its own, where nothing was used before; `regard` exports some of them itself."""
    code = f"""
import importlib, pickle
for package in {PACKAGES[::-1]!r}:
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert value.__module__ in (package, "regard"), (package, name, value.__module__)
        assert pickle.loads(pickle.dumps(value)) is value, name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def says_any(hint: object) -> bool:
    text = hint if isinstance(hint, str) else repr(hint)
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text, mode="eval")))


@pytest.mark.parametrize(
    ("keywords", "settings"),
    [(LMChoices, LMSettings), (TranslateChoices, TranslateSettings), (ViewChanges, ViewOptions)],
)
def test_keywords_are_the_fields_they_set(keywords: type, settings: type) -> None:
    assert set(keywords.__annotations__) == {field.name for field in fields(settings)}


def test_keywords_that_layers_hand_down_exist() -> None:
    def parameters(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert set(AttentionOptions.__annotations__) < parameters(SelfAttention)
    assert set(BlockOptions.__annotations__) <= parameters(Block) | set(AttentionOptions.__annotations__)
    assert parameters(Block) - {"dim", "heads", "attention"} <= set(BlockOptions.__annotations__)
    for model in (LanguageModel, Translator, Encoder):
        assert not set(ModelOptions.__annotations__) & parameters(model)
    assert set(ModelOptions.__annotations__) < set(BlockOptions.__annotations__)
    assert set(SeeOptions.__annotations__) < parameters(Weights.see)
    assert set(ViewChanges.__annotations__) - set(ViewChoices.__annotations__) == {"word"}
