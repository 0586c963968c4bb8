"""Tests of the op first; only if they pass, `headcode bench ops` with the arguments given here.

Example: python benchmarks/ops.py --out bench --methods hyla softmax linear softmax_hyla
"""

import subprocess
import sys
from pathlib import Path

from headcode.cli import main

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", str(ROOT / "tests" / "ops")]
    if subprocess.run(tests, check=False).returncode:
        sys.exit("The op's tests fail: nothing is timed.")
    main(["bench", "ops", *sys.argv[1:]])
