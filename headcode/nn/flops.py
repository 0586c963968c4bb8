"""Arithmetic of a forward pass, counted from the config: 2 for every multiply-add of a matrix product.

Norms, activations, biases and softmax are left out, as is usual. A causal model is charged for the pairs it sees.
"""

from headcode.nn.checks import check_answers, resolve_method
from headcode.nn.config import ModelConfig
from headcode.ops import VALUE_NETS
from headcode.ops.recurrent import CHUNK


def forward_flops(config: ModelConfig, length: int, queries: slice | None = None) -> int:
    """FLOPs of one sequence of `length` tokens; with `queries`, the last block computes only those outputs.

    With `cross_layers` the first layers see the context alone, and the last ones read it for the answers alone.
    """
    _, value_net = resolve_method(config.method, config.norm, config.value_net)
    net = VALUE_NETS[value_net]
    value_dim = 2 * config.v_dim if net.gated else config.v_dim
    feedforward = {"gelu": 2, "swiglu": 3}[config.feedforward] * config.dim * config.mlp_dim
    if config.num_experts > 1:
        feedforward = config.experts_per_token * feedforward + config.num_experts * config.dim
    positions, width = range(length), config.v_dim // config.num_heads
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
            total += pairs * config.qk_dim  # scores
            total += pairs * config.v_dim if net.activation is None else pairs * (value_dim + config.v_dim)
            if net.middle:  # to generate a layer of a head's width, bias included, and to apply it
                total += pairs * (config.num_heads + 1) * width * (width + 1)
        total += len(read) * (config.v_dim * config.dim + feedforward)
    read = positions if queries is None else positions[queries]
    total += len(read) * config.dim * (config.output_dim or config.vocab_size or 0)
    return 2 * total


def _recurrent_products(config: ModelConfig, length: int) -> int:
    """Multiply-adds of the fast-weight form: a square per chunk, and a state read and written by every token."""
    within = (length // CHUNK * CHUNK**2 + (length % CHUNK) ** 2) * (config.qk_dim + config.v_dim)
    return within + 2 * length * config.qk_dim * config.v_dim // config.num_heads


def flops_per_token(config: ModelConfig, length: int | None = None) -> float:
    """FLOPs of a forward pass divided by its tokens, at the model's full length unless given."""
    length = config.max_length if length is None else length
    return forward_flops(config, length) / length
