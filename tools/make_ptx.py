"""Make h2d_patch/copies/swap_bulk.ptx from swap_bulk.cu beside it. Needs CUDA's nvcc and ptxas.

    python tools/make_ptx.py           write it
    python tools/make_ptx.py --check   exit status 1 if what is there is not what the source and this compiler give

Its first line names the compiler and the source, by its hash: a test without nvcc sees what is out of date.
The PTX is for Hopper and everything later, and says the oldest version of PTX that has all it uses, so that the driver
of an older CUDA 12 takes it too; ptxas is asked whether that is so.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "h2d_patch" / "copies" / "swap_bulk.cu"
TARGET = SOURCE.with_suffix(".ptx")
OLDEST = "8.0"
ARCHITECTURES = ("sm_90", "sm_100", "sm_120")


def first_line(compiler: str) -> str:
    return f"// {SOURCE.name} {hashlib.sha256(SOURCE.read_bytes()).hexdigest()}, nvcc {compiler}"


def compiler() -> str:
    """The version of nvcc. Raises FileNotFoundError."""
    said = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV([\d.]+)", said)
    return found[1] if found else "unknown"


def make() -> str:
    """The PTX. Raises FileNotFoundError without nvcc, CalledProcessError where it or ptxas refuses."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.ptx"
        subprocess.run(["nvcc", "-ptx", "-O3", "-arch=compute_90", "-o", made, SOURCE], check=True)
        lines = [line for line in made.read_text().splitlines() if not line.startswith("//")]  # they name the compiler
        text = re.sub(r"^\.version .*$", f".version {OLDEST}", "\n".join(lines).strip(), flags=re.M)
        text = f"{first_line(compiler())}\n{text}\n"
        made.write_text(text)
        known = subprocess.run(["ptxas", "--help"], capture_output=True, text=True, check=True).stdout
        for architecture in ARCHITECTURES:
            if f"'{architecture}'" in known:
                command = ["ptxas", f"-arch={architecture}", "-o", Path(folder) / "made.cubin", made]
                subprocess.run(command, check=True)
    return text


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = make()
    if options.check:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
