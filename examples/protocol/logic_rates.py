"""Table A1 on fuzzy logic, first part: the learning rate of each method (docs/protocol.md).

    headcode sweep examples/protocol/logic_rates.py --jobs 2 --threads 1

Runs of 8,000 steps with seed 0. Those at 3e-3 were made before and are in docs/results/records; these are at 1e-3.
"""

from headcode.ops import METHODS
from headcode.presets import override, preset
from headcode.sweep import grid


def sweep():
    base = override(preset("logic-paper"), steps=8000, eval_every=2000, eval_size=4096, seed=0)
    methods = [name for name, method in METHODS.items() if method.authors_name]  # the others: logic_rates_2.py
    yield from grid(base, method=methods, learning_rate=[1e-3])
