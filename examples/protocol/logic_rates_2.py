"""Table A1 on fuzzy logic, the five models that the authors' repository lacks: their learning rates (docs/protocol.md).

    headcode sweep examples/protocol/logic_rates_2.py --jobs 2 --threads 1

Runs of 8,000 steps with seed 0, at both rates. The experts are our choice: 8 in each layer, 2 for each token, each half
as wide as the plain feed-forward, so that a token costs as many FLOPs as without experts.
"""

from headcode.presets import override, preset
from headcode.sweep import grid

RATES = (1e-3, 3e-3)


def sweep():
    base = override(preset("logic-paper"), steps=8000, eval_every=2000, eval_size=4096, seed=0)
    yield from grid(base, method=["linear_rms_relu_value", "hyla_deeper"], learning_rate=RATES)
    yield from grid(base, method=["softmax", "linear", "hyla"], num_experts=[8], mlp_dim=[128], learning_rate=RATES)
