"""Table A1 on fuzzy logic at the paper's length (docs/protocol.md), the five models that the authors' repository lacks.

    headcode sweep examples/protocol/logic_table_a1_2.py --jobs 2 --threads 1

Seeds 0, 1, 2. Evaluated on 16,000 sequences of each split, every 2,500 steps, as the others are.
"""

from headcode.presets import override, preset
from headcode.sweep import grid

# By R² on `iid` after 8,000 steps with seed 0, of 1e-3 and 3e-3 (logic_rates_2.py). None: not decided yet.
RATES = {"linear_rms_relu_value": None, "hyla_deeper": None}
RATES_WITH_EXPERTS = {"softmax": None, "linear": None, "hyla": None}
EXPERTS = {"num_experts": [8], "mlp_dim": [128]}


def sweep():
    base = override(preset("logic-paper"), eval_every=2500, eval_size=16_000)
    for seed in range(3):
        for rates, settings in ((RATES, {}), (RATES_WITH_EXPERTS, EXPERTS)):
            for method, rate in rates.items():
                if rate is None:
                    raise ValueError(f"The learning rate of {method} is not chosen yet: logic_rates_2.py decides it.")
                yield from grid(base, method=[method], **settings, seed=[seed], learning_rate=[rate])
