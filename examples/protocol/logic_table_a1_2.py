"""Table A1 on fuzzy logic at the paper's length (docs/protocol.md), the five models that the authors' repository lacks.

    headcode sweep examples/protocol/logic_table_a1_2.py --jobs 2 --threads 1

Seeds 0, 1, 2. Evaluated on 16,000 sequences of each split, every 2,500 steps, as the others are.
"""

from headcode.presets import override, preset
from headcode.sweep import grid

# (method, experts in each layer): the rate, by R² on `iid` after 8,000 steps with seed 0, of 1e-3 and 3e-3
# (logic_rates_2.py). None: that sweep has not decided yet.
RATES = {
    ("linear_rms_relu_value", 1): None,
    ("hyla_deeper", 1): None,
    ("softmax", 4): None,
    ("linear", 4): None,
    ("hyla", 4): None,
}


def sweep():
    base = override(preset("logic-paper"), eval_every=2500, eval_size=16_000)
    for seed in range(3):
        for (method, num_experts), rate in RATES.items():
            if rate is None:
                raise ValueError(
                    f"The rate of {method} with {num_experts} experts is not chosen: run logic_rates_2.py."
                )
            experts = {"num_experts": [num_experts]} if num_experts > 1 else {}
            yield from grid(base, method=[method], **experts, seed=[seed], learning_rate=[rate])
