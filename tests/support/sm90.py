"""Compile the kernels of the triton engine for Hopper without a GPU: registers, bytes of stack and of shared memory of each.

    python tests/support/sm90.py                   compile, and compare with what `sm90.json` has for this Triton
    python tests/support/sm90.py "rows, d 192"     the same for one request
    python tests/support/sm90.py --store           store the table of this Triton

Triton needs a driver to compile. A stand-in names the target, sm_90, and every launch compiles instead of running. What spills
shows up as stack.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import regard
from regard.engines.triton import (
    backward_pass,
    comparison_pass,
    decode_pass,
    forward_pass,
    kernel_inputs,
    profile_pass,
    tile_config,
    topk_pass,
)

TABLE = Path(__file__).with_name("sm90.json")
BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
Usage = dict[str, int]


class Driver:
    """The parts of Triton's driver that compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def rows(d: int, causal: bool) -> None:
    q, k, v = draw(1, 2, 512, d), draw(1, 2, 512, d), draw(1, 2, 512, d)
    mask = regard.causal() if causal else None
    regard.weights(q, k, mask=mask, engine="triton").see("lse", "max_score", "entropy", values=v)


def columns(d: int) -> None:
    problem = regard.weights(draw(1, 2, 512, d), draw(1, 2, 512, d))._factors.problem()
    forward_pass.column_pass(problem, ("received",), torch.zeros(1, 2, 512, 2), None, None)


def rows_alone(d: int, causal: bool) -> None:
    q, mask = draw(1, 2, 512, d), regard.causal() if causal else None
    regard.weights(q, draw(1, 2, 512, d), mask=mask, engine="triton").see("lse", "max_score", "entropy")


def profiles(d: int, causal: bool) -> None:
    mask = regard.causal() if causal else None
    problem = regard.weights(draw(1, 2, 512, d), draw(1, 2, 512, d), mask=mask)._factors.problem()
    rows = {name: torch.zeros(1, 2, 512) for name in ("entropy", "max_score")} | {"norm": torch.zeros(1, 2, 512, 2)}
    profile_pass.profile_pass(problem, rows, torch.zeros(1, 1, 512, 1, dtype=torch.int64))


def gradients(d: int, length: int = 512) -> None:
    q, k, v = (draw(1, 2, length, d, grad=True) for _ in range(3))
    seen = regard.weights(q, k, mask=regard.causal(), engine="triton").see("entropy", values=v)
    (seen.y.float().sum() + seen.entropy.sum()).backward()


def compared(measure: str, gradients_of: str | None = None) -> None:
    """Two matrices: rows, or gradients of their queries or keys."""
    problems = tuple(
        regard.weights(draw(1, 2, 512, 128), draw(1, 2, 512, 128), mask=regard.causal())._factors.problem()
        for _ in range(2)
    )
    if gradients_of is None:
        comparison_pass.forward_pass(problems, measure)
        return
    walk = comparison_pass._over_rows if gradients_of == "queries" else comparison_pass._over_keys
    outputs = tuple(draw(1, 2, 512, 128) for _ in range(2))
    walk(comparison_pass.PairInputs(problems, measure), torch.zeros(comparison_pass.ROW_TERMS, 1, 2, 512), outputs)


#: The Hopper kernels, on the most common sizes.
REQUESTS: dict[str, Callable[[], None]] = {
    "rows, d 128": lambda: rows(128, False),
    "rows, d 128, causal": lambda: rows(128, True),
    "rows, d 192": lambda: rows(192, False),
    "rows, d 256": lambda: rows(256, False),
    "columns, d 64": lambda: columns(64),
    "columns, d 128": lambda: columns(128),
    "rows without values, d 64": lambda: rows_alone(64, False),
    "rows without values, d 64, causal": lambda: rows_alone(64, True),
    "profile, d 64": lambda: profiles(64, False),
    "profile, d 64, causal": lambda: profiles(64, True),
    "profile, d 128, causal": lambda: profiles(128, True),
    "gradients, d 64, causal": lambda: gradients(64),
    "gradients, d 128, causal": lambda: gradients(128, 8192),
    "gradients of few keys or odd lengths, d 64, causal": lambda: gradients(64, 448),
    "gradients of few keys or odd lengths, d 128, causal": lambda: gradients(128, 256),
    "kl, causal": lambda: compared("kl"),
    "js, causal": lambda: compared("js"),
    "kl, gradients of queries, causal": lambda: compared("kl", "queries"),
    "kl, gradients of keys, causal": lambda: compared("kl", "keys"),
}


def compiled(requests: dict[str, Callable[[], None]]) -> dict[str, Usage]:
    """What each Hopper kernel of each request takes."""
    usages: dict[str, Usage] = {}
    request = ""

    def compile_only(
        kernel: Any, key: Any, tensors: list[Any], prepare: Callable[[], tuple[int, dict[str, Any]]]
    ) -> None:
        if not type(kernel).__module__.startswith("triton.experimental.gluon"):
            return
        programs, arguments = prepare()
        binary = kernel.warmup(grid=(programs,), **arguments)
        usages[f"{request}: {kernel.__name__}"] = {**usage(binary.asm["cubin"]), "shared": binary.metadata.shared}

    driver.set_active(Driver())
    modules = (kernel_inputs, forward_pass, decode_pass, topk_pass, backward_pass, profile_pass, comparison_pass)
    for module in modules:
        module.launch = compile_only  # type: ignore[attr-defined]
        if hasattr(module, "num_sms"):
            module.num_sms = lambda device: 132  # of an H200
    tile_config._capability = lambda device: 9
    regard.engines.triton.unsupported_reason = lambda problem, request: None
    for request, ask in requests.items():  # noqa: B007 (read by compile_only)
        ask()
    return usages


def usage(cubin: bytes) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [str(BIN / "cuobjdump"), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {
        name: int(re.findall(rf"{mark}:(\d+)", listing)[-1])
        for name, mark in (("registers", "REG"), ("stack", "STACK"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("request", nargs="*", help=f"any of {', '.join(map(repr, REQUESTS))}; default: all")
    parser.add_argument("--store", action="store_true", help="write the table to sm90.json")
    options = parser.parse_args()
    version = ".".join(triton.__version__.split(".")[:2])
    tables = json.loads(TABLE.read_text())
    table = compiled({name: REQUESTS[name] for name in options.request or REQUESTS})
    if options.store:
        TABLE.write_text(json.dumps({**tables, version: table}, indent=1, sort_keys=True) + "\n")
        return 0
    stored = tables.get(version, {})
    different = {name: f"{here}, stored {stored.get(name)}" for name, here in table.items() if here != stored.get(name)}
    print(f"Triton {triton.__version__}: {len(table)} kernels, {len(different)} differ from sm90.json")
    print("\n".join(f"{name}: {change}" for name, change in different.items()))
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
