"""Table A1 on fuzzy logic at the paper's length (docs/protocol.md): 50,000 steps, three to eight seeds a method.

    headcode sweep examples/protocol/logic_table_a1.py --jobs 2 --threads 1

Each run takes about half an hour of one core. Evaluated on 16,000 sequences of each split, every 2,500 steps.
"""

from headcode.presets import override, preset
from headcode.sweep import grid

# By R² on `iid` after 8,000 steps with seed 0, of 1e-3 (logic_rates.py) and 3e-3 (in docs/results/records).
RATES = {
    "hyla": 3e-3,  # 0.846, against 0.787 at 1e-3
    "softmax": 3e-3,  # 0.953, 0.927
    "linear": 3e-3,  # 0.875, 0.856
    "hyla_deep_linear": 3e-3,  # 0.871, 0.777
    "linear_rms": 3e-3,  # 0.898, 0.816
    "hyla_unnormed": 3e-3,  # 0.818, 0.779
    "hyla_deep_linear_unnormed": 3e-3,  # 0.812, 0.762
    "softmax_hyla": 3e-3,  # 0.969, 0.933
}
MORE_SEEDS = {"hyla": 8, "softmax": 8, "linear": 5, "hyla_deep_linear": 5}


def sweep():
    base = override(preset("logic-paper"), eval_every=2500, eval_size=16_000)
    for seed in range(8):
        for method, rate in RATES.items():
            if seed < MORE_SEEDS.get(method, 3):
                yield from grid(base, method=[method], seed=[seed], learning_rate=[rate])
