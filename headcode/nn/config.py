"""`ModelConfig`: everything that makes a Transformer, checked when it is made."""

import dataclasses
import math
from typing import Any, ClassVar

from headcode.config import Config, renamed
from headcode.nn.checks import (
    BACKEND_NAMES,
    check_auxiliary,
    check_cross,
    check_experts,
    check_rotary,
    check_sizes,
    resolve_method,
    why_not_recurrent,
)
from headcode.nn.feedforward import FEEDFORWARDS
from headcode.nn.position import POSITIONS
from headcode.ops import POOLINGS, VALUE_NETS
from headcode.ops.options import check_choice, check_dropout

MOST_LAYERS = 4096
MOST_PARAMETERS = 10**12
"""A bound that no real model reaches: a configuration beyond it is a slip, or comes from a damaged or hostile file."""


@renamed(hint_dims="auxiliary_dims")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """The sizes and choices of a Transformer. Widths are totals over the heads, as in the paper.

    Input is continuous (`input_dim`) or tokens (`vocab_size`). With tokens and no `output_dim` the logits are read
    with the transposed embedding.
    """

    kind: ClassVar[str] = "transformer"
    """The word for this kind of model; see `headcode.nn.models`."""
    poolings: ClassVar[tuple[str, ...]] = POOLINGS
    """What `pooling` can be."""

    input_dim: int | None = None
    """Width of continuous inputs; give this or vocab_size."""
    vocab_size: int | None = None
    """Number of tokens; give this or input_dim."""
    output_dim: int | None = None
    """Width of the outputs; for tokens, None reads the logits with the embedding."""
    max_length: int
    """Sequence length N: the number of buckets of the relative bias, and of learned positions."""
    method: str = "hyla"
    """A named pair of norm and value net: softmax, linear, linear_rms, hyla, …"""
    norm: str | None = None
    """Overrides the method's norm."""
    value_net: str | None = None
    """Overrides the method's value net."""
    pooling: str = "sum"
    """Over keys: sum (the paper's), mean, sqrt (a sum divided by the root of the number of visible keys) or max."""
    dim: int = 128
    """Width of a token between the layers."""
    num_layers: int = 2
    """Blocks of attention and feed-forward."""
    num_heads: int = 8
    """Heads of attention, the length of a code."""
    qk_dim: int = 16
    """Width of queries and keys, all heads together."""
    v_dim: int = 16
    """Width of values, all heads together."""
    mlp_dim: int = 256
    """Width inside the feed-forward layers."""
    feedforward: str = "gelu"
    """gelu (with biases) or swiglu (without)."""
    num_experts: int = 1
    """Feed-forward networks of each layer, all of them mlp_dim wide. With 2 or more a router chooses among them, token
    by token: a mixture of experts."""
    experts_per_token: int = 2
    """How many of several experts each token uses."""
    position: str = "relative"
    """relative (T5 band), rotary, sinusoidal, learned, relative_learned (both of these) or none."""
    position_period: int | None = None
    """Learned positions repeat after so many tokens, such as a row of a grid; None: each token has its own."""
    causal: bool = False
    """A token sees itself and those before it alone."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head, with learned scales."""
    share_layers: bool = False
    """One block applied num_layers times."""
    cross_layers: int = 0
    """Number of cross-attention layers at the end, in which the positions that are read (`queries`) attend to all the
    others; the self-attention layers before them see only the others. 0: one sequence, self-attention throughout."""
    auxiliary_dims: tuple[int, ...] = ()
    """Outputs of further heads for a task's auxiliary targets (`auxiliary_weight` of a run): the first one reads every
    token before the last layer, the second before the last two, and so on."""
    attention_dropout: float = 0.0
    """Share of (query, key) pairs dropped in training. The paper's runs use 0.1."""
    recurrent: bool = False
    """Compute the method `linear` as a fast-weight programmer, without T×T."""
    logit_scale: float | None = None
    """What logits that are read with the embedding are multiplied by; None: 1/sqrt(dim), the paper's."""
    backend: str = "auto"
    """What computes the attention: auto, cpu, triton, chunked or reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.input_dim is None) == (self.vocab_size is None):
            raise ValueError(
                f"ModelConfig needs input_dim (continuous inputs) or vocab_size (tokens), one of the two; "
                f"got input_dim={self.input_dim} and vocab_size={self.vocab_size}."
            )
        if self.input_dim is not None and self.output_dim is None:
            raise ValueError("ModelConfig needs output_dim when the inputs are continuous.")
        names = ("dim", "num_layers", "num_heads", "qk_dim", "v_dim", "mlp_dim", "max_length", "num_experts")
        optional = ("input_dim", "vocab_size", "output_dim", "position_period")
        given = [name for name in optional if getattr(self, name) is not None]
        check_sizes({name: getattr(self, name) for name in (*names, *given)})
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"num_layers must be at most {MOST_LAYERS:,}, got {self.num_layers:,}.")
        if self.num_layers * self.num_experts > MOST_LAYERS:
            raise ValueError(
                f"num_layers times num_experts must be at most {MOST_LAYERS:,}, "
                f"got {self.num_layers:,} and {self.num_experts:,}."
            )
        check_experts(self.num_experts, self.experts_per_token)
        norm, value_net = resolve_method(self.method, self.norm, self.value_net)
        check_choice("pooling", self.pooling, self.poolings)
        check_choice("feedforward", self.feedforward, FEEDFORWARDS)
        check_choice("position", self.position, POSITIONS)
        if self.position_period is not None and not self.learns_positions:
            raise ValueError(
                f"position_period={self.position_period} is for learned positions, and position is {self.position!r}: "
                f"use learned or relative_learned, or position_period=None."
            )
        check_rotary(self.position, self.qk_dim, self.num_heads)
        check_cross(self.cross_layers, self.num_layers, self.causal)
        check_auxiliary(self.auxiliary_dims, self.num_layers, self.cross_layers)
        check_dropout("attention_dropout", self.attention_dropout)
        check_choice("backend", self.backend, BACKEND_NAMES)
        if self.logit_scale is not None and not (math.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ValueError(f"logit_scale must be a number above 0, got {self.logit_scale}.")
        if self.logit_scale is not None and (self.vocab_size is None or self.output_dim is not None):
            raise ValueError(
                "logit_scale is for logits that are read with the embedding: it needs vocab_size, and no output_dim."
            )
        if self.recurrent and (
            reason := why_not_recurrent(
                norm, value_net, self.pooling, self.causal, self.attention_position, self.attention_dropout
            )
        ):
            raise ValueError(f"recurrent=True is not possible: {reason}.")
        if self.num_parameters > MOST_PARAMETERS:
            widths = ", ".join(f"{name}={getattr(self, name):,}" for name in (*names, *given))
            raise ValueError(
                f"A model has at most {MOST_PARAMETERS:,} parameters, and this one would have {self.num_parameters:,}: "
                f"make one of its sizes smaller ({widths})."
            )

    def to_dict(self) -> dict[str, Any]:
        # Files of transformers are older than the other kinds, and do not name theirs.
        return {**({} if self.kind == "transformer" else {"kind": self.kind}), **super().to_dict()}

    @property
    def num_parameters(self) -> int:
        """How many numbers the model learns.

        >>> ModelConfig(input_dim=5, output_dim=1, max_length=16).num_parameters
        151009
        """
        attention = self.attention_parameters()
        if self.attention_position == "relative":
            attention += self.num_heads * self.max_length
        feedforward = (3 if self.feedforward == "swiglu" else 2) * self.dim * self.mlp_dim
        if self.feedforward == "gelu":
            feedforward += self.dim + self.mlp_dim
        if self.num_experts > 1:
            feedforward = self.num_experts * (feedforward + self.dim)
        blocks = (1 if self.share_layers else self.num_layers) * (attention + feedforward + 4 * self.dim)
        inputs = self.dim * (self.vocab_size or (self.input_dim or 0) + 1)
        if self.learns_positions:
            inputs += self.dim * min(self.position_period or self.max_length, self.max_length)
        outputs = 2 * self.dim + sum((self.dim + 1) * size for size in (self.output_dim or 0, *self.auxiliary_dims))
        return inputs + blocks + outputs

    def attention_parameters(self) -> int:
        """Those of one attention layer, its relative bias not counted."""
        _, value_net = resolve_method(self.method, self.norm, self.value_net)
        values = 2 * self.v_dim if VALUE_NETS[value_net].gated else self.v_dim
        attention = (self.dim + 1) * (2 * self.qk_dim + values) + (self.v_dim + 1) * self.dim
        if VALUE_NETS[value_net].middle:
            attention += self.v_dim * (self.v_dim // self.num_heads + 1)
        if self.qk_norm:
            attention += 2 * self.qk_dim // self.num_heads
        return attention

    @property
    def attention_layers(self) -> int:
        """How many layers have codes, as `capture_codes` numbers them."""
        return self.num_layers

    @property
    def crossing_layers(self) -> int:
        """How many of these, at the end, read the tokens before the answers and not the answers themselves."""
        return self.cross_layers

    def code_positions(self, layer: int) -> tuple[slice, slice]:
        """Where in the input the queries and the keys of a layer stand."""
        return slice(None), slice(None)

    def forward_flops(self, length: int, queries: slice | None = None) -> int:
        """FLOPs of a forward pass over one instance of `length` tokens; see `headcode.nn.flops`."""
        from headcode.nn.flops import transformer_flops

        return transformer_flops(self, length, queries)

    @property
    def logit_divisor(self) -> float:
        """What logits that are read with the embedding are divided by."""
        return math.sqrt(self.dim) if self.logit_scale is None else 1 / self.logit_scale

    @property
    def learns_positions(self) -> bool:
        """Whether a learned vector for its position is added to each token."""
        return self.position in ("learned", "relative_learned")

    @property
    def attention_position(self) -> str:
        """What the attention layers themselves know of positions: relative, rotary or none."""
        by_layer = {"relative": "relative", "relative_learned": "relative", "rotary": "rotary"}
        return by_layer.get(self.position, "none")


def can_recur(config: ModelConfig) -> bool:
    """Whether this model can decode with a state of constant size in place of all past keys and values."""
    norm, value_net = resolve_method(config.method, config.norm, config.value_net)
    # Dropout is left out: it plays no part in decoding.
    return why_not_recurrent(norm, value_net, config.pooling, config.causal, config.attention_position, 0.0) is None
