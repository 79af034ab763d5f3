"""A model's modules, and whether they are what they were the last time: names, parts, classes, functions and hooks.

To walk through a model and to look at each module takes as long as several layers do on a GPU, so what was found counts
as long as nothing changed. Modules are held weakly.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Census", "OwnHook", "census_of", "modules_of"]

#: Types of attributes that are functions: another one in their place changes what a module does.
_FUNCTIONS = frozenset({types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type})

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_pre_hooks, _forward_hooks, _parts = map(operator.itemgetter, (*_HOOKS, "_modules"))


class OwnHook:
    """A hook of a recording or a watch, which is none of the model's."""


@dataclass
class Census:
    """The modules of a model as they were found, each known by its number."""

    names: list[str] = field(default_factory=list)
    refs: list[Any] = field(default_factory=list)
    kinds: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # how many attributes they have
    parts: list[tuple[int, list[str], list[int]]] = field(default_factory=list)  # of those with parts; -1 is None
    leaves: list[int] = field(default_factory=list)  # those without
    functions: dict[int, dict[str, Any]] = field(default_factory=dict)  # among their attributes
    hooks: dict[int, list[Any]] = field(default_factory=dict)  # those of the model's own
    forwards: dict[Any, Any] = field(default_factory=dict)  # of their classes
    facts: dict[str, Any] = field(default_factory=dict)  # what follows from all of these; forgotten when they change
    is_regular: bool = True  # whether the model never did something else than it was heard to do

    def modules(self) -> list[nn.Module] | None:
        """The modules; None if one of them is not as it was. Every block comes here: loops are those of C."""
        modules: list[Any] = [ref() for ref in self.refs]
        if not modules or None in modules or [*map(type, modules)] != self.kinds:
            return None
        owns = [module.__dict__ for module in modules]
        if [*map(len, owns)] != self.sizes or any(map(_parts, [owns[n] for n in self.leaves])):
            return None
        modules.append(None)
        for n, names, numbers in self.parts:
            parts = owns[n]["_modules"]
            if [*parts] != names or [*parts.values()] != [modules[part] for part in numbers]:
                return None
        modules.pop()
        if (self.hooks or any(map(_pre_hooks, owns)) or any(map(_forward_hooks, owns))) and _own_hooks(
            owns
        ) != self.hooks:
            return None
        for n, functions in self.functions.items():
            if any(owns[n].get(name) is not ref() for name, ref in functions.items()):
                return None
        return modules if all(kind.forward is ref() for kind, ref in self.forwards.items()) else None

    def take(self, named: list[tuple[str, nn.Module]]) -> None:
        """Note the modules as they are; none of them where a model cannot be known again."""
        self.facts, self.refs = {}, []
        if any(isinstance(module, torch.jit.ScriptModule) for _, module in named):
            self.is_regular = False  # TorchScript runs other operators once it has optimised a graph
            return
        modules = [module for _, module in named]
        owns = [module.__dict__ for module in modules]
        numbers = {id(module): n for n, module in enumerate(modules)} | {id(None): -1}
        every = [(n, own["_modules"]) for n, own in enumerate(owns)]
        self.names, self.kinds, self.sizes = [name for name, _ in named], [*map(type, modules)], [*map(len, owns)]
        self.parts = [(n, [*parts], [numbers[id(part)] for part in parts.values()]) for n, parts in every if parts]
        self.leaves = [n for n, parts in every if not parts]
        try:
            every_function = {
                n: {key: weakref.ref(x) for key, x in own.items() if type(x) in _FUNCTIONS}
                for n, own in enumerate(owns)
            }
            self.functions = {n: functions for n, functions in every_function.items() if functions}
            self.hooks = _own_hooks(owns)
            self.forwards = {kind: weakref.ref(kind.forward) for kind in dict.fromkeys(self.kinds)}
        except TypeError:  # a function that cannot be referred to
            return
        self.refs = [weakref.ref(module) for module in modules]


_censuses: weakref.WeakKeyDictionary[nn.Module, Census] = weakref.WeakKeyDictionary()


def census_of(model: nn.Module) -> tuple[Census, list[tuple[str, nn.Module]]]:
    """The census of a model, taken anew where anything changed, and its modules by name."""
    census = _censuses.get(model)
    if census is None:
        census = _censuses[model] = Census()
    if (modules := census.modules()) is not None:
        return census, [*zip(census.names, modules, strict=True)]
    named = modules_of(model)
    census.take(named)
    return census, named


def _own_hooks(owns: list[dict[str, Any]]) -> dict[int, list[Any]]:
    """The hooks of modules, by their number, that no recording has set."""
    every: dict[int, list[Any]] = {}
    for n, own in enumerate(owns):
        for name in _HOOKS:
            if own[name]:
                every[n] = every.get(n, []) + [weakref.ref(x) for x in own[name].values() if not isinstance(x, OwnHook)]
    return {n: hooks for n, hooks in every.items() if hooks}


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """`model.named_modules()`, in its order, in a fifth of the time."""
    every: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        every.append((name, module))
        if module._modules:
            inside = f"{name}." if name else ""
            parts = [(inside + part, child) for part, child in module._modules.items() if child is not None]
            stack += parts[::-1]
    return every
