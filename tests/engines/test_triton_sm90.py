"""The Hopper kernels compile for sm_90 under every supported Triton, without a GPU: what each takes is stored in sm90.json."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.engines.triton import tile_config

pytest.importorskip("triton", minversion="3.6", reason="the tables begin with Triton 3.6")

SUPPORT = Path(__file__).parents[1] / "support"
TABLES: dict[str, dict[str, dict[str, int]]] = json.loads((SUPPORT / "sm90.json").read_text())
#: Bytes of stack by which a later compiler may exceed 3.6: a few spills outside of loops. Beyond, the loop itself spills.
MORE_STACK = 64


def compile_for_hopper(*requests: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUPPORT / "sm90.py"), *requests]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def requests(table: dict[str, dict[str, int]]) -> set[str]:
    return {kernel.split(":")[0] for kernel in table}


def test_every_supported_version_has_a_table() -> None:
    assert {f"{version}." for version in TABLES} == {*tile_config.GLUON_VERSIONS}


@pytest.mark.parametrize("version", sorted(TABLES))
def test_no_version_takes_more_than_the_measured_one(version: str) -> None:
    measured = TABLES["3.6"]
    assert requests(TABLES[version]) == requests(measured)
    for kernel in TABLES[version].keys() - measured.keys():  # those of a version that does not use another one
        assert any(
            kernel.startswith(f"gradients, d {d}")
            for (_, d), where in tile_config.SPILLING.items()
            if f"{version}." in where
        )
    for kernel in TABLES[version].keys() & measured.keys():
        usage = TABLES[version][kernel]
        assert usage["shared"] == measured[kernel]["shared"], kernel
        assert usage["stack"] <= measured[kernel]["stack"] + MORE_STACK, kernel
        assert usage["registers"] <= 255, kernel


def test_the_installed_version_compiles_one_kernel_as_stored() -> None:
    done = compile_for_hopper("columns, d 64")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_the_installed_version_compiles_every_kernel_as_stored() -> None:
    done = compile_for_hopper()
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
