"""Public names, lazily: `import regard` is light, a module is imported when one of its names is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_getattr", "publish"]


def lazy_getattr(
    package: str, names_by_module: Mapping[str, tuple[str, ...]], submodules: tuple[str, ...] = ()
) -> Callable[[str], Any]:
    """The `__getattr__` of a package; its `__dir__` is set as well.

    Args:
        package: Full name of the package.
        names_by_module: For each module below the package, the public names that it defines. Submodules are
            attributes of the package, too.
        submodules: Public submodules, which `dir` shows beside the names.

    Returns:
        A function that imports the module of a name, and binds the name in the package.
    """
    module_by_name = {name: module for module, names in names_by_module.items() for name in names}
    # Without it `dir` and completion would show what the package imports, and none of its names.
    module = vars(sys.modules[package])
    module["__dir__"] = lambda: sorted([*module_by_name, *submodules, *(x for x in module if x.startswith("__"))])

    def getattribute(name: str) -> Any:
        if name in module_by_name:
            value = getattr(import_module(f"{package}.{module_by_name[name]}"), name)
            _publish(package, names_by_module)
        elif name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            try:
                value = import_module(f"{package}.{name}")
            except ModuleNotFoundError as missing:
                if missing.name != f"{package}.{name}":  # the module exists, and misses a dependency
                    raise
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        setattr(sys.modules[package], name, value)
        return value

    return getattribute


def publish(package: str) -> None:
    """Let the objects that a package exports name it as their home; those of `regard` itself say `regard`.

    For a package that imports its names: call it last in its `__init__`.
    """
    module = sys.modules[package]
    for name in module.__all__:
        value = getattr(module, name)
        if value.__module__ != package.partition(".")[0]:
            value.__module__ = package


def _publish(package: str, names_by_module: Mapping[str, tuple[str, ...]]) -> None:
    """Let public objects of every imported module name the package as their home, as `help` and `pickle` show it.

    All imported modules, not only that of the name just used: `regard.weights(...)` returns a `Weights`.
    """
    for module, names in names_by_module.items():
        if (imported := sys.modules.get(f"{package}.{module}")) is not None:
            for name in names:
                if (value := getattr(imported, name, None)) is not None:  # None: its module is still being imported
                    value.__module__ = package
