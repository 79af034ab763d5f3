"""`make test-everywhere`: a setting is what it says, and finds no kernels that another one compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from support import everywhere, suite

#: What the suite is to pass under: each value in one of the runs, at least; None is a variable that is not set.
VALUES: dict[str, set[str | None]] = {
    "MKL_CBWR": {None, "COMPATIBLE", "AVX2", "AVX512"},
    "ATEN_CPU_CAPABILITY": {None, "avx2", "default"},
    "OMP_NUM_THREADS": {"1", "2", "4"},
    "NUMBA_CPU_NAME": {None, "generic"},
    "REGARD_HIDE": {None, "numba", "numba,numpy"},
    "REGARD_BLAS": {None, "torch"},
    "OPENBLAS_CORETYPE": {"Haswell", "Nehalem"},
}


def test_no_setting_finds_kernels_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's kernels with wide vectors do not compile for a CPU that is to have none."""
    environments: dict[str, dict[str, str]] = {}

    def run(name: str, python: str, environment: dict[str, str], options: Any, plugins: list[str]) -> int:
        environments[name] = environment
        return 0

    monkeypatch.setattr(suite, "run", run)
    monkeypatch.setattr(everywhere, "mkl_as_on_intel", lambda: "mkl_as_on_intel.so")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    options = suite.parser("", suite.ROOT / "results.json").parse_args([])
    assert not any(everywhere.run(name, options) for name in everywhere.SETTINGS)
    for cache in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        folders = [environment[cache] for environment in environments.values()]
        assert len({*folders}) == len(everywhere.SETTINGS), cache
        assert all(str(suite.ROOT) in folder for folder in folders), cache
    assert "MKL_CBWR" not in environments["as it is"]
    for variable, values in VALUES.items():
        assert values <= {environment.get(variable) for environment in environments.values()}, variable


def test_a_hidden_package_is_one_that_is_not_installed() -> None:
    """PyTorch's warning that numpy is missing, an error here, ended pytest before its first test."""
    code = """
import importlib.util, sys
import support.hidden, torch, regard
assert importlib.util.find_spec("numpy") is None and "numpy" not in sys.modules
try:
    import numpy.random
except ModuleNotFoundError as error:
    assert error.name == "numpy"
"""
    environment = {**os.environ, "REGARD_HIDE": "numba,numpy", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)
