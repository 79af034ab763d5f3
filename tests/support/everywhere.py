"""Run the suite under every setting that changes the rounding or the code path of a CPU: `make test-everywhere`.

    python -m support.everywhere                     all settings, about 12 minutes each on 2 cores
    python -m support.everywhere --only COMPATIBLE   the settings whose names contain this word
    python -m support.everywhere --parts core        one part of the suite

The results go to bench/results/everywhere.json, from which `python -m bench.tables` makes the table of docs/install.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from support import suite

#: In a setting's variables: MKL takes this CPU for one of Intel's. Not a variable of the environment.
AS_ON_INTEL = "mkl_as_on_intel"

#: Name of a setting: its environment variables. MKL, ATen, threads and numba round independently of each other, so one run has a
#: value of each of them, and every value is in one run; what fails there is told apart by setting the variables one by one.
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "MKL_CBWR=COMPATIBLE, ATen default, 2 threads": {
        "MKL_CBWR": "COMPATIBLE",
        "ATEN_CPU_CAPABILITY": "default",
        "OMP_NUM_THREADS": "2",
    },
    "MKL_CBWR=AVX2, ATen avx2, 4 threads": {
        "MKL_CBWR": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "OMP_NUM_THREADS": "4",
    },
    "MKL_CBWR=AVX512, numba for a generic CPU, 1 thread": {
        "MKL_CBWR": "AVX512",
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "OMP_NUM_THREADS": "1",
    },
    "MKL as on Intel": {AS_ON_INTEL: "1"},
    "no MKL, no GOMP": {"REGARD_BLAS": "torch"},
    "without numba": {"REGARD_HIDE": "numba"},
    "without numba and numpy": {"REGARD_HIDE": "numba,numpy"},
    "OPENBLAS_CORETYPE=Haswell": {"OPENBLAS_CORETYPE": "Haswell"},
    "OPENBLAS_CORETYPE=Nehalem": {"OPENBLAS_CORETYPE": "Nehalem"},
}

#: OpenBLAS multiplies for numpy alone: the interpreter of Triton's kernels.
WITH_OPENBLAS = ("engines",)

#: Without numpy the packages that tests of models, pages and Triton's interpreter need cannot be imported.
WITHOUT_NUMPY = ("core", "nn")


def kernel_caches(name: str) -> dict[str, str]:
    """Folders of compiled kernels of its own for a setting: those of one CPU are wrong for another.

    Inductor takes vector code of another setting from its cache, and cannot compile it without these instructions.
    """
    folder = suite.ROOT / ".cache" / "everywhere" / name.replace(" ", "-")
    return {"NUMBA_CACHE_DIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def run(name: str, options: argparse.Namespace) -> int:
    """Run the suite under one setting; the number of failures."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MKL_CBWR", "ATEN_CPU_CAPABILITY")}
    paths = [str(suite.ROOT / "src"), str(suite.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = dict(SETTINGS[name])
    if variables.pop(AS_ON_INTEL, None):
        variables["LD_PRELOAD"] = mkl_as_on_intel()
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **kernel_caches(name), **variables}
    only = WITHOUT_NUMPY if "numpy" in variables.get("REGARD_HIDE", "") else ()
    only = WITH_OPENBLAS if "OPENBLAS_CORETYPE" in variables else only
    if only:
        parts = [part for part in only if part in options.parts or "all" in options.parts]
        options = argparse.Namespace(**{**vars(options), "parts": parts})
    return suite.run(name, sys.executable, environment, options, plugins=["-p", "support.hidden"])


def mkl_as_on_intel() -> str:
    """The library that makes MKL choose as on a CPU of Intel, compiled here."""
    source = Path(__file__).with_name("mkl_as_on_intel.c")
    library = suite.ROOT / ".cache" / "everywhere" / "mkl_as_on_intel.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return str(library)


def main(arguments: list[str]) -> int:
    """Run the suite under the chosen settings; 1 if a test failed."""
    parser = suite.parser(__doc__, suite.ROOT / "bench" / "results" / "everywhere.json")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="settings whose names contain a word")
    parser.add_argument("--list", action="store_true", help="print the names of the settings")
    options = parser.parse_args(arguments)
    names = [name for name in SETTINGS if any(word in name for word in options.only)]
    if options.list:
        print("\n".join(names))
        return 0
    with suite.collected(options):
        failures = {name: run(name, options) for name in names}
    print("\n".join(f"{'FAILED' if failed else 'passed'}  {name}" for name, failed in failures.items()))
    return any(failures.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
