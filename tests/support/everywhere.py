"""Run the suite under every setting that changes the rounding or the code path of a CPU: `make test-everywhere`.

    python tests/support/everywhere.py              all settings, about 15 minutes each on 2 cores
    python tests/support/everywhere.py --list
    python tests/support/everywhere.py COMPATIBLE   the settings whose names contain this word

Arguments after `--` go to pytest. The exit status is the number of settings that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: Name of a setting: its environment variables.
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "MKL_CBWR=AVX2": {"MKL_CBWR": "AVX2"},
    "MKL_CBWR=AVX512": {"MKL_CBWR": "AVX512"},
    "ATEN_CPU_CAPABILITY=avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default"},
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads": {"OMP_NUM_THREADS": "2"},
    "4 threads": {"OMP_NUM_THREADS": "4"},
    "numba for a generic CPU": {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "no MKL, no GOMP": {"REGARD_BLAS": "torch"},
    "without numba": {"REGARD_HIDE": "numba"},
    "without numba and numpy": {"REGARD_HIDE": "numba,numpy"},
}

#: Without numpy the packages that tests of models, pages and Triton's interpreter need cannot be imported.
WITHOUT_NUMPY = ["tests/core", "tests/nn"]


def run(name: str, arguments: list[str]) -> bool:
    """Run pytest under one setting; True if it passed."""
    hidden = SETTINGS[name].get("REGARD_HIDE", "")
    environment = {key: value for key, value in os.environ.items() if key not in ("MKL_CBWR", "ATEN_CPU_CAPABILITY")}
    # Compiled kernels of one CPU are wrong for another: a cache of its own for each setting.
    environment |= {"NUMBA_CACHE_DIR": str(ROOT / ".cache" / "everywhere" / name.replace(" ", "-")), **SETTINGS[name]}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "support.hidden",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not slow",
    ]
    if "numpy" in hidden:
        command += WITHOUT_NUMPY
    start = time.perf_counter()
    print(f"== {name}", flush=True)
    status = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode
    print(f"== {name}: {'passed' if status == 0 else 'FAILED'} in {time.perf_counter() - start:.0f} s", flush=True)
    return status == 0


def main(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words, more = arguments[:end], arguments[end + 1 :]
    names = [name for name in SETTINGS if not words or any(word in name for word in words)]
    if words == ["--list"]:
        print("\n".join(SETTINGS))
        return 0
    failed = [name for name in names if not run(name, more)]
    print(
        f"{len(names) - len(failed)} of {len(names)} settings passed" + "".join(f"\nfailed: {name}" for name in failed)
    )
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
