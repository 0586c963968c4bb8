"""headcode: attention as a hypernetwork, in PyTorch."""

from headcode.nn import HyperAttention, ModelConfig, Transformer, capture_codes
from headcode.ops import METHODS, attention_codes, hyper_attention
from headcode.train.checkpoint import load
from headcode.version import __version__

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
