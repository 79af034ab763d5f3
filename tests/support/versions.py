"""Run the suite with several versions of PyTorch, each in an environment of its own: `make test-versions`.

    python tests/support/versions.py FOLDER             every version, into FOLDER/<version>
    python tests/support/versions.py FOLDER 2.6.0       one of them

An environment is built once and used again; one of a CUDA build takes 6 GB. The results go to bench/results/versions.json,
from which the table of the README is made. Arguments after `--` go to pytest.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "versions.json"

#: The floor of pyproject.toml, one between, the pinned one and the newest.
VERSIONS = ("2.6.0", "2.8.0", "2.13.0", "2.15.0")

#: Packages of the tests, besides those that PyTorch brings (Triton among them).
PACKAGES = [
    "numpy", "numba", "pytest", "pytest-xdist", "hypothesis", "expecttest", "safetensors", "tokenizers", "sacrebleu",
    "rich", "pandas", "playwright", "PyYAML", "transformers>=5",
]  # fmt: skip


def build(folder: Path, version: str) -> Path:
    """The Python of an environment with this version of PyTorch."""
    python = folder / version / "bin" / "python"
    if not (folder / version / ".ready").exists():
        venv.create(folder / version, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        subprocess.run([*pip, f"torch=={version}", *PACKAGES], check=True)
        (folder / version / ".ready").touch()
    return python


def test(python: Path, folder: Path, arguments: list[str]) -> dict[str, str]:
    """What pytest says with this Python, and the versions that it ran with."""
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "NUMBA_CACHE_DIR": str(folder / "numba")}
    command = ["-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", "not slow", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(
        ["env", *(f"{name}={value}" for name, value in environment.items()), str(python), *command],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        last = ""
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)", line) else last
    code = "import torch, sys, importlib.metadata as m; print(sys.version.split()[0], torch.__version__, m.version('triton'))"
    versions = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    counts = {kind: count for count, kind in re.findall(r"(\d+) (passed|failed|errors?)", last)}
    return {
        **dict(zip(("python", "torch", "triton"), versions, strict=True)),
        **counts,
        "status": str(process.returncode),
    }


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    (folder_name, *chosen), more = arguments[:end], arguments[end + 1 :]
    folder = Path(folder_name).resolve()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = 0
    for version in chosen or VERSIONS:
        print(f"== torch {version}", flush=True)
        results[version] = test(build(folder, version), folder / version, more)
        failed += results[version]["status"] != "0"
        if not more:  # a part of the suite is no result
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
        print(f"== torch {version}: {results[version]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
