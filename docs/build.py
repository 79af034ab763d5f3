"""Build the site: `python docs/build.py` writes it into site/, and fails on every warning.

Zensical's `--strict` fails on broken links. The docstring parser only prints its warnings (a parameter that the
signature does not have, a return value without a type), so what is printed counts too. A page that would load anything
from a network fails as well, and a table of parameters, whose last column, what they mean, a phone does not show.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: What Zensical prints when all is well.
QUIET = re.compile(r"Build started|Build finished.*|No issues found|\s*")
#: Scripts, pictures, frames and styles from elsewhere; links that a reader may click are no requests.
REQUEST = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon))[^>]*\bhref=["']?(?:https?:)?//[^>]*>"""
)
#: The title of parameters before a table.
PARAMETER_TABLE = re.compile(r"Parameters:</span>\s*</p>\s*<table")


def main() -> int:
    """Build, print the warnings, and return 1 if there are any."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = built.stdout.removesuffix("\n")
    if output.endswith("RuntimeError: Aborted because --strict flag is set"):
        output = output.partition("Traceback")[0]  # the warnings say it better
    problems = [line for line in output.splitlines() if not QUIET.fullmatch(line)]
    pages = sorted((ROOT / "site").rglob("*.html"))
    problems += [f"{page.name} loads {tag}" for page in pages for tag in REQUEST.findall(page.read_text())]
    problems += [f"{page.name} has parameters in a table" for page in pages if PARAMETER_TABLE.search(page.read_text())]
    print("\n".join(problems) or f"{len(pages)} pages in site/, no warnings")
    return 1 if problems or built.returncode or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
