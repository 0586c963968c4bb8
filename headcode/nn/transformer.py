"""The paper's transformer: pre-norm blocks, HyperAttention inside, outputs only where they are read."""

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headcode.nn.attention import HyperAttention
from headcode.nn.cache import DecodingCache, FastWeightState, KeyValueCache, LayerCache, unchanged_on_error
from headcode.nn.checks import check_answers, check_padding, check_queries, resolve_method, why_not_recurrent
from headcode.nn.config import ModelConfig
from headcode.nn.decoding import decode_compiled
from headcode.nn.experts import MixtureOfExperts
from headcode.nn.feedforward import FEEDFORWARDS
from headcode.nn.fused import run_fused, run_fused_logits
from headcode.nn.initialisation import reset_linear
from headcode.nn.plain import own_weight
from headcode.nn.position import sinusoidal_positions, sinusoids

NORM_EPSILON = 1e-6
# Distinct layers need distinct dropout streams; the dropout hash mixes whatever seed it gets.
_LAYER_SEED_STRIDE = 0x9E3779B9
_SAME_NAMES = ("method", "norm", "value_net", "pooling", "qk_dim", "v_dim", "causal", "qk_norm", "recurrent", "backend")
"""Fields of a ModelConfig that are arguments of HyperAttention under the same name."""


class TransformerBlock(nn.Module):
    """x + attention(LN(x)), then x + feedforward(LN(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        options = {name: getattr(config, name) for name in _SAME_NAMES}
        options |= {"position": config.attention_position, "num_buckets": config.max_length}
        self.attention = HyperAttention(config.dim, config.num_heads, dropout=config.attention_dropout, **options)
        self.feedforward_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        kind = FEEDFORWARDS[config.feedforward]
        networks: list[nn.Module] = [
            kind(config.dim, config.mlp_dim, config.backend) for _ in range(config.num_experts)
        ]
        self.feedforward = networks[0]
        if config.num_experts > 1:
            self.feedforward = MixtureOfExperts(networks, config.dim, config.experts_per_token)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        queries: slice | None = None,
        cache: LayerCache | None = None,
        dropout_seed: int | None = None,
        use: int = 0,
        context: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """With `context` the tokens x, which follow it, attend to it by cross-attention, and not to one another.

        `options` are further ones of the attention, such as a mask; they take the block out of the fused kernels.
        """
        if cache is None and context is None and not options:
            out = run_fused(self, x, queries, dropout_seed, key_padding_mask)
            if out is not None:
                return out
        return self.run_op_by_op(x, queries, dropout_seed, context, key_padding_mask, cache=cache, use=use, **options)

    def run_op_by_op(
        self,
        x: Tensor,
        queries: slice | None,
        dropout_seed: int | None,
        context: Tensor | None = None,
        padding: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """`forward` without the fused kernels; `options` are further ones of the attention."""
        attended = self.attention(
            self.attention_norm(x),
            None if context is None else self.attention_norm(context),
            key_padding_mask=padding,
            queries=queries,
            dropout_seed=dropout_seed,
            query_offset=None if context is None else context.shape[1],
            **options,
        )
        x = attended + (x if queries is None else x[:, queries])
        return x + self.feedforward(self.feedforward_norm(x))


class Transformer(nn.Module):
    """Encoder or causal decoder from a `ModelConfig`.

    Shapes: continuous inputs (B, T, input_dim) or tokens (B, T) to (B, T, output_dim).

    Example:
        >>> config = ModelConfig(input_dim=5, output_dim=1, max_length=16, method="hyla")
        >>> model = Transformer(config)
        >>> model(torch.randn(3, 16, 5), queries=slice(-1, None)).shape
        torch.Size([3, 1, 1])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise TypeError(f"Transformer is made from a ModelConfig, got {type(config).__name__}.")
        self.config = config
        self.embedding: nn.Linear | nn.Embedding
        if config.vocab_size is None:
            assert config.input_dim is not None
            self.embedding = nn.Linear(config.input_dim, config.dim)
        else:
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
        places = min(config.position_period or config.max_length, config.max_length)
        self.positions = nn.Parameter(torch.empty(places, config.dim)) if config.learns_positions else None
        distinct = 1 if config.share_layers else config.num_layers
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(distinct))
        self.final_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        self.output_proj = None if config.output_dim is None else nn.Linear(config.dim, config.output_dim)
        # The heads of the auxiliary targets, under the name that checkpoints have always had.
        self.hint_projs = nn.ModuleList(nn.Linear(config.dim, size) for size in config.auxiliary_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.embedding, nn.Embedding):
            nn.init.normal_(self.embedding.weight, std=math.sqrt(1 / self.config.dim))
        else:
            reset_linear(self.embedding)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)
        if self.output_proj is not None:
            reset_linear(self.output_proj)
        self.final_norm.reset_parameters()
        for block in self.blocks:
            for part in block.children():
                part.reset_parameters()  # type: ignore[operator]
        for proj in self.hint_projs:
            assert isinstance(proj, nn.Linear)
            reset_linear(proj)

    def layers(self) -> list[TransformerBlock]:
        """The block of each layer, in order; one block many times when layers are shared."""
        blocks: list[TransformerBlock] = [block for block in self.blocks if isinstance(block, TransformerBlock)]
        return blocks * self.config.num_layers if self.config.share_layers else blocks

    def attention_layers(self) -> list[HyperAttention]:
        """The attention of each layer, in order of use."""
        return [block.attention for block in self.layers()]

    def forward(
        self,
        x: Tensor,
        *,
        queries: slice | None = None,
        key_padding_mask: Tensor | None = None,
        cache: DecodingCache | None = None,
        dropout_seed: int | None = None,
        auxiliary: bool = False,
        hints: bool | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Outputs (B, T, output_dim), or of the positions in `queries` alone.

        Args:
            queries: a contiguous range of positions, for example slice(-4, None). Exact: the last block computes only
                these, the earlier ones everything that they depend on. With `cross_layers` they are the second
                sequence, and must be given and be the last positions.
            key_padding_mask: boolean (B, T), True where a token is padding; with a cache, of all tokens so far (of the
                new ones if the cache is recurrent).
            cache: from `new_cache`; `x` then continues the tokens seen so far.
            dropout_seed: decides attention dropout in training; each layer derives its own.
            auxiliary: give (outputs, list), where the list has the outputs (B, T, size) of each head in
                `auxiliary_dims`. `hints` is its former name.
        """
        if hints is not None:
            warnings.warn("hints is called auxiliary now.", DeprecationWarning, stacklevel=2)
            auxiliary = hints
        if auxiliary and not self.config.auxiliary_dims:
            raise ValueError("This model has no heads for auxiliary targets: make it with auxiliary_dims.")
        if cache is not None:
            if not isinstance(cache, DecodingCache) or len(cache.layers) != self.config.num_layers:
                raise ValueError("cache must come from this model's new_cache().")
            logits = None if auxiliary else decode_compiled(self, x, queries, key_padding_mask, cache)
            if logits is not None:
                return logits
        self.check_input(x)
        check_queries(queries, x.shape[1])
        with nullcontext() if cache is None else unchanged_on_error(cache.layers):
            if self.config.cross_layers:
                hidden = self._run_crossing_blocks(x, queries, key_padding_mask, dropout_seed)
            else:
                states: list[Tensor] | None = [] if self.hint_projs else None
                hidden = self.run_layers(
                    self.embed(x, 0 if cache is None else cache.length),
                    queries=queries,
                    key_padding_mask=key_padding_mask,
                    cache=cache,
                    dropout_seed=dropout_seed,
                    states=states,
                )
                earlier = states[-len(self.hint_projs) :] if states else []
        outputs = self.read(hidden)
        if not auxiliary:
            return outputs
        return outputs, [
            proj(F.layer_norm(tokens, (self.config.dim,)))
            for proj, tokens in zip(self.hint_projs, reversed(earlier), strict=True)
        ]

    def run_layers(
        self,
        hidden: Tensor,
        *,
        queries: slice | None = None,
        key_padding_mask: Tensor | None = None,
        cache: DecodingCache | None = None,
        dropout_seed: int | None = None,
        states: list[Tensor] | None = None,
        call: Callable[..., Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """Embedded tokens (B, T, dim) after the last layer and before the last norm, for `read`.

        Args:
            queries, key_padding_mask, cache, dropout_seed: as in `forward`.
            states: a list that gets the tokens before each layer.
            call: calls a block with its arguments, in place of the block itself: where activations are recomputed.
            options: further ones of every attention layer: mask, causal, positions.
        """
        layers = self.layers()
        for index, block in enumerate(layers):
            if states is not None:
                states.append(hidden)
            arguments = {
                "key_padding_mask": key_padding_mask,
                "queries": queries if index == len(layers) - 1 else None,
                "cache": None if cache is None else cache.layers[index],
                "dropout_seed": layer_seed(dropout_seed, index),
                "use": index if self.config.share_layers else 0,
                **options,
            }
            hidden = block(hidden, **arguments) if call is None else call(block, hidden, **arguments)
        return hidden

    def read(self, hidden: Tensor) -> Tensor:
        """The outputs of what `run_layers` gives."""
        return self._logits(hidden) if self.output_proj is None else self.output_proj(self.final_norm(hidden))

    def _run_crossing_blocks(
        self, x: Tensor, queries: slice | None, key_padding_mask: Tensor | None, dropout_seed: int | None
    ) -> Tensor:
        """Self-attention layers on the context alone, then cross-attention layers from the answers to it."""
        length = x.shape[1]
        context_length = length - check_answers(queries, length)
        check_padding(key_padding_mask, x.shape[0], length)
        padding = None if key_padding_mask is None else key_padding_mask[:, :context_length]
        context, answers = self.embed(x).split([context_length, length - context_length], 1)
        for index, block in enumerate(self.layers()):
            seed, use = layer_seed(dropout_seed, index), index if self.config.share_layers else 0
            if index < self.config.num_layers - self.config.cross_layers:
                context = block(context, key_padding_mask=padding, dropout_seed=seed, use=use)
            else:
                answers = block(answers, key_padding_mask=padding, dropout_seed=seed, use=use, context=context)
        return answers

    def new_cache(self, *, recurrent: bool | None = None) -> DecodingCache:
        """An empty cache for decoding token by token. `recurrent` (for the method `linear`) keeps fast weights, of
        constant size, in place of keys and values."""
        config = self.config
        if not config.causal:
            raise ValueError("Decoding with a cache needs a causal model; set causal=True in its ModelConfig.")
        recurrent = config.recurrent if recurrent is None else recurrent
        norm, value_net = resolve_method(config.method, config.norm, config.value_net)
        reason = why_not_recurrent(norm, value_net, config.pooling, config.causal, config.attention_position, 0.0)
        if recurrent and reason:
            raise ValueError(f"recurrent=True is not possible: {reason}.")
        return DecodingCache([FastWeightState() if recurrent else KeyValueCache() for _ in range(config.num_layers)])

    def embed(self, x: Tensor, first_position: int = 0) -> Tensor:
        """Inputs as vectors (B, T, dim), with their positions where these are added to tokens."""
        return self.add_positions(self._embed_each(x), first_position)

    def add_positions(self, hidden: Tensor, positions: int | Tensor = 0) -> Tensor:
        """Embedded tokens (B, T, dim) with what is added for their positions: from a first one on, or (B or 1, T)."""
        length, device = hidden.shape[1], hidden.device
        if self.config.position == "sinusoidal":
            if isinstance(positions, Tensor):
                return hidden + sinusoids(positions, self.config.dim).to(hidden.dtype)
            return hidden + sinusoidal_positions(length, self.config.dim, positions, device).to(hidden.dtype)
        if self.positions is None:
            return hidden
        if isinstance(positions, Tensor):
            if not torch.compiler.is_compiling() and int(positions.max()) >= self.config.max_length:
                raise ValueError(
                    f"Learned positions reach {self.config.max_length} tokens, got position {int(positions.max())}."
                )
            return hidden + self.positions[positions % len(self.positions)]
        end = positions + length
        if end > self.config.max_length:
            raise ValueError(
                f"Learned positions reach {self.config.max_length} tokens, got {end}; "
                f"shorten the input or make the model with a larger max_length."
            )
        places = self.positions.repeat(-(-end // len(self.positions)), 1)
        return hidden + places[positions:end]

    def _embed_each(self, x: Tensor) -> Tensor:
        """Without positions. On a CPU the residual stream begins in float32 under autocast too, as with tokens."""
        weight = own_weight(self.embedding, nn.Linear)
        if weight is None or x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return self.embedding(x)
        with torch.autocast("cpu", enabled=False):
            return self.embedding(x.to(weight.dtype))

    def _logits(self, hidden: Tensor) -> Tensor:
        """The products of the normalised tokens with the table, times the scale of logits."""
        table, divisor = self._token_table(hidden.device), self.config.logit_divisor
        logits = run_fused_logits(self.final_norm, hidden, table, 1 / divisor)
        if logits is None:
            logits = (self.final_norm(hidden) / divisor) @ table.T
        return logits

    def _token_table(self, device: torch.device) -> Tensor:
        """The embeddings (vocab_size, dim) of all tokens, whose products with the output are the logits."""
        weight = own_weight(self.embedding, nn.Embedding)
        if weight is not None:
            return weight
        assert self.config.vocab_size is not None
        return self.embedding(torch.arange(self.config.vocab_size, device=device))

    def check_input(self, x: Tensor) -> None:
        """Raise unless `forward` can take x."""
        if not isinstance(x, Tensor):
            raise TypeError(f"The input must be a torch.Tensor, got {type(x).__name__}.")
        if self.config.vocab_size is None:
            if x.dim() != 3 or x.shape[2] != self.config.input_dim:
                raise ValueError(
                    f"The input must have shape (batch, length, {self.config.input_dim}), got {tuple(x.shape)}."
                )
            weight = own_weight(self.embedding, nn.Linear)  # another kind of layer knows itself what it takes
            if weight is not None and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
                dtype = weight.dtype
                raise TypeError(f"The input must have the model's dtype {dtype}, got {x.dtype}; use .to({dtype}).")
        elif x.dim() != 2 or x.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"The input must be integer tokens of shape (batch, length), got {x.dtype} {tuple(x.shape)}."
            )
        elif x.device.type == "cpu" and x.numel() and not torch.compiler.is_compiling():
            low, high = x.aminmax()
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"Tokens must lie in 0..{self.config.vocab_size - 1}, got {low}..{high}.")


def layer_seed(dropout_seed: int | None, layer: int) -> int | None:
    """The seed of a layer's own dropout."""
    return None if dropout_seed is None else (dropout_seed + layer * _LAYER_SEED_STRIDE) % 2**63
