"""Arithmetic of a forward pass, counted from the config: 2 for every multiply-add of a matrix product.

Norms, activations, biases and softmax are left out, as is usual. A causal model is charged for the pairs it sees.
"""

from typing import TYPE_CHECKING

from headcode.nn.checks import check_answers, resolve_method
from headcode.nn.config import ModelConfig
from headcode.ops import VALUE_NETS
from headcode.ops.recurrent import CHUNK
from headcode.ops.registry import ValueNet

if TYPE_CHECKING:
    from headcode.nn.encoder_decoder import EncoderDecoderConfig


def forward_flops(config: ModelConfig, length: int, queries: slice | None = None) -> int:
    """FLOPs of one instance of `length` tokens, of a model of any kind; with `queries`, of those outputs alone."""
    return config.forward_flops(length, queries)


def transformer_flops(config: ModelConfig, length: int, queries: slice | None = None) -> int:
    """Those of one sequence; with `queries`, the last block computes only these outputs.

    With `cross_layers` the first layers see the context alone, and the last ones read it for the answers alone.
    """
    value_dim = _value_dim(config)
    feedforward = {"gelu": 2, "swiglu": 3}[config.feedforward] * config.dim * config.mlp_dim
    if config.num_experts > 1:
        feedforward = config.experts_per_token * feedforward + config.num_experts * config.dim
    positions = range(length)
    total = 0 if config.input_dim is None else length * config.input_dim * config.dim
    answers = check_answers(queries, length) if config.cross_layers else 0
    keys = positions[: length - answers]
    for layer in range(config.num_layers):
        read = positions if queries is None or layer < config.num_layers - 1 else positions[queries]
        if config.cross_layers:
            read = keys if layer < config.num_layers - config.cross_layers else positions[-answers:]
        pairs = len(read) * (read[0] + read[-1] + 2) // 2 if config.causal else len(read) * len(keys)
        total += len(keys) * config.dim * (config.qk_dim + value_dim)  # keys and values
        total += len(read) * config.dim * config.qk_dim  # queries
        if config.recurrent:
            total += _recurrent_products(config, length)
        else:
            total += pairs * _pair_products(config)
        total += len(read) * (config.v_dim * config.dim + feedforward)
    read = positions if queries is None else positions[queries]
    total += len(read) * config.dim * (config.output_dim or config.vocab_size or 0)
    return 2 * total


def _value_dim(config: ModelConfig) -> int:
    return 2 * config.v_dim if _value_net(config).gated else config.v_dim


def _value_net(config: ModelConfig) -> ValueNet:
    return VALUE_NETS[resolve_method(config.method, config.norm, config.value_net)[1]]


def _pair_products(config: ModelConfig) -> int:
    """Multiply-adds of one (query, key) pair: its scores, and what its code does with the key's values."""
    net, width = _value_net(config), config.v_dim // config.num_heads
    total = config.qk_dim + config.v_dim + (0 if net.activation is None else _value_dim(config))
    if net.middle:  # to generate a layer of a head's width, bias included, and to apply it
        total += (config.num_heads + 1) * width * (width + 1)
    return total


def encoder_decoder_flops(config: "EncoderDecoderConfig", length: int) -> int:
    """The encoder without logits, the decoder, and its cross-attention."""
    source, target = config.source_length, length - config.source_length
    crossing = source * config.dim * (config.qk_dim + _value_dim(config)) + target * source * _pair_products(config)
    crossing += target * config.dim * (config.qk_dim + config.v_dim)
    encoder = transformer_flops(config.encoder, source) - 2 * source * config.dim * (config.vocab_size or 0)
    return encoder + transformer_flops(config.decoder, target) + 2 * config.decoder_layers * crossing


def _recurrent_products(config: ModelConfig, length: int) -> int:
    """Multiply-adds of the fast-weight form: a square per chunk, and a state read and written by every token."""
    within = (length // CHUNK * CHUNK**2 + (length % CHUNK) ** 2) * (config.qk_dim + config.v_dim)
    return within + 2 * length * config.qk_dim * config.v_dim // config.num_heads


def flops_per_token(config: ModelConfig, length: int | None = None) -> float:
    """FLOPs of a forward pass divided by its tokens, at the model's full length unless given."""
    length = config.max_length if length is None else length
    return forward_flops(config, length) / length
