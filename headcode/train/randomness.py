"""Seeds by address, and the state of torch's generators as text."""

import base64
import hashlib

import torch


def seed_of(seed: int, *address: str | int) -> int:
    """A 63-bit hash of a run's seed and a purpose: unrelated for unrelated addresses, the same everywhere.

    >>> seed_of(0, "step", 7) == seed_of(0, "step", 7) != seed_of(0, "step", 8)
    True
    """
    text = "/".join(map(str, (seed, *address))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def random_state(device: torch.device) -> dict[str, str]:
    """The state of torch's generators. Training itself draws nothing from them, but a loss of one's own may."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_random_state(states: dict[str, str], device: torch.device) -> None:
    try:
        tensors = {
            name: torch.frombuffer(bytearray(base64.b64decode(state)), dtype=torch.uint8)
            for name, state in states.items()
        }
        torch.set_rng_state(tensors["cpu"])
        if device.type == "cuda" and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"], device)
    except (ValueError, RuntimeError):
        raise ValueError("The random state of the checkpoint is not one of torch's.") from None
