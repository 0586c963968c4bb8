"""Layers, the transformer, and the view inside: codes and the networks they generate."""

from headcode.nn.attention import HyperAttention
from headcode.nn.cache import DecodingCache, FastWeightState, KeyValueCache
from headcode.nn.capture import capture_codes
from headcode.nn.config import ModelConfig
from headcode.nn.decoding import why_decoded_op_by_op
from headcode.nn.edit import edit_codes
from headcode.nn.experts import MixtureOfExperts, Routing, capture_routing
from headcode.nn.feedforward import GeluFeedForward, SwigluFeedForward
from headcode.nn.flops import flops_per_token, forward_flops
from headcode.nn.fused import why_op_by_op
from headcode.nn.generation import generate
from headcode.nn.hypernetwork import ValueNetwork, value_network
from headcode.nn.models import MODELS, make_model, model_config
from headcode.nn.position import RelativeBias
from headcode.nn.storage import load_model, save_model
from headcode.nn.transformer import Transformer, TransformerBlock

__all__ = [
    "MODELS",
    "DecodingCache",
    "FastWeightState",
    "GeluFeedForward",
    "HyperAttention",
    "KeyValueCache",
    "MixtureOfExperts",
    "ModelConfig",
    "RelativeBias",
    "Routing",
    "SwigluFeedForward",
    "Transformer",
    "TransformerBlock",
    "ValueNetwork",
    "capture_codes",
    "capture_routing",
    "edit_codes",
    "flops_per_token",
    "forward_flops",
    "generate",
    "load_model",
    "make_model",
    "model_config",
    "save_model",
    "value_network",
    "why_decoded_op_by_op",
    "why_op_by_op",
]
