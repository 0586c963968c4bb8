import pytest

from headcode.presets import override, preset
from headcode.train import Runtime, Trainer


def small_config(**changes):
    """A run of a second: prime sizes, dropout on, everything that a run does."""
    settings = {
        "backend": "reference",  # no kernels to compile
        "num_points": 7,
        "dim": 10,
        "num_heads": 2,
        "qk_dim": 6,
        "v_dim": 6,
        "mlp_dim": 11,
        "steps": 30,
        "batch_size": 6,
        "log_every": 7,
        "eval_every": 10,
        "eval_size": 23,
        "eval_batch_size": 5,
        "checkpoint_every": 6,
        "warmup_steps": 3,
    }
    return override(preset("logic"), **(settings | changes))


def train(config, out=None, **options):
    return Trainer(config, out, runtime=Runtime(device="cpu", threads=1), **options).run()


@pytest.fixture
def config():
    return small_config()
