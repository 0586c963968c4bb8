"""Small runs that were really trained, for a few steps."""

import pytest

from headcode.presets import override, preset
from headcode.train import Trainer
from tests.support.models import one_thread

SIZES = {"dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 6, "mlp_dim": 8, "num_layers": 2, "backend": "reference"}
SHORT = {"steps": 3, "batch_size": 8, "eval_size": 16, "eval_every": 0, "checkpoint_every": 0}
# Weights stay of the size they start with: the bounds of these tests are absolute.
PACE = {"optimizer": "adamw", "learning_rate": 1e-3}


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    made = {}

    def make(task, **changes):
        key = (task, tuple(sorted(changes.items())))
        if key not in made:
            settings = {"logic": {"num_points": 7, "num_variables": 3}, "sraven": {"num_features": 2}}[task]
            config = override(preset(f"{task}-small"), **{**SIZES, **SHORT, **PACE, **settings, **changes})
            path = tmp_path_factory.mktemp("runs") / f"{task}-{len(made)}"
            Trainer(config, path).run()
            made[key] = path
        return made[key]

    return make


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield
