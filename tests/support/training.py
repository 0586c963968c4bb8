"""Small runs, and what two runs must have in common to count as the same."""

import hashlib
import json
import signal
from pathlib import Path

from headcode.presets import override, preset
from headcode.train import Runtime, Trainer


class Interrupting:
    """A reporter that sends the process a signal after a step."""

    def __init__(self, step, number=signal.SIGTERM):
        self.step, self.number = step, number

    def start(self, step, steps): ...
    def record(self, record): ...
    def close(self): ...

    def advance(self, step):
        if step == self.step:
            signal.raise_signal(self.number)  # to this thread: os.kill may reach another one first, and later


SIZES = {
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


def small_config(**changes):
    """A run of a second: prime sizes, dropout on, everything that a run does."""
    return override(preset("logic"), **(SIZES | changes))


def train(config, out=None, **options):
    return Trainer(config, out, runtime=Runtime(device="cpu", threads=1), **options).run()


def outcome(run: Path) -> dict[str, bytes]:
    """The final weights, optimiser state and metrics of a run, as bytes."""
    last = max((run / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
    state = json.loads((last / "state.json").read_text())
    return {
        "step": str(state["step"]).encode(),
        "model": (last / "model.safetensors").read_bytes(),
        "optimizer": (last / "optimizer.safetensors").read_bytes(),
        "state": json.dumps(state).encode(),
        "metrics": (run / "metrics.jsonl").read_bytes(),
    }


def assert_same(one: Path, other: Path) -> None:
    first, second = outcome(one), outcome(other)
    for name in first:
        assert first[name] == second[name], f"{name} differs"


def write_sealed(path: Path, state: dict) -> None:
    """Write a checkpoint's state.json with the hash that fits it, as whoever changed it could."""
    content = {key: value for key, value in state.items() if key != "sha256"}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({**content, "sha256": seal}))
