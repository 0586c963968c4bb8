"""What two runs must have in common to count as the same, byte for byte."""

import json
from pathlib import Path


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
