"""headcode: attention as a hypernetwork, in PyTorch.

Names are imported when they are first used: `headcode --help` needs no torch.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from headcode.version import __version__

if TYPE_CHECKING:
    from headcode.nn import HyperAttention, ModelConfig, Transformer, capture_codes
    from headcode.ops import METHODS, attention_codes, hyper_attention
    from headcode.train.checkpoint import load

__all__ = [
    "METHODS",
    "HyperAttention",
    "ModelConfig",
    "Transformer",
    "__version__",
    "attention_codes",
    "capture_codes",
    "hyper_attention",
    "load",
]

_ROOMS = {
    "METHODS": "ops",
    "HyperAttention": "nn",
    "ModelConfig": "nn",
    "Transformer": "nn",
    "attention_codes": "ops",
    "capture_codes": "nn",
    "hyper_attention": "ops",
    "load": "train.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        value = getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
    elif name.isidentifier() and not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        value = importlib.import_module(f"{__name__}.{name}")  # headcode.tasks, without an import of its own
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
