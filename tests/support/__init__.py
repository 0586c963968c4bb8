"""What tests of several rooms share: small runs and models, processes to kill, browsers, hostile input.

Tests import it as `tests.support`, and so do the processes that they start (with ROOT on their path).
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"
