"""An encoder-decoder of the same layers: the decoder reads its own past, and the encoded source by cross-attention.

    encoder    a Transformer over the source
    decoder    x + self-attention(LN(x)), causal; x + cross-attention(LN(x), encoded); x + feedforward(LN(x))

Source and target are one tensor of tokens, as a task gives them: the first `source_length` ones are the source, padded
on the right, and the rest is what the decoder reads. `greedy_decode` writes the target instead, token by token.
"""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headcode.config import Config
from headcode.nn.attention import HyperAttention
from headcode.nn.cache import DecoderLayerCache, DecodingCache, unchanged_on_error
from headcode.nn.checks import check_queries, check_sizes
from headcode.nn.config import ModelConfig
from headcode.nn.transformer import NORM_EPSILON, Transformer, TransformerBlock, layer_seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """The sizes and choices of an EncoderDecoder: those of a ModelConfig count for both halves, and three more."""

    kind: ClassVar[str] = "encoder_decoder"

    source_length: int
    """How many of the max_length tokens are the source."""
    decoder_layers: int = 2
    """Layers of the decoder; num_layers are those of the encoder."""
    padding_token: int = 0
    """The token of the source that nothing attends to."""

    def __post_init__(self) -> None:
        Config.__post_init__(self)  # the types alone: what follows is checked before the two halves are made of it
        if self.vocab_size is None:
            raise ValueError("An encoder-decoder reads tokens: give vocab_size, and no input_dim.")
        names = ("vocab_size", "max_length", "source_length", "decoder_layers")
        check_sizes({name: getattr(self, name) for name in names})
        if self.source_length >= self.max_length:
            raise ValueError(
                f"source_length must be below max_length, so that there is a target, "
                f"got {self.source_length} and {self.max_length}."
            )
        if not 0 <= self.padding_token < self.vocab_size:
            raise ValueError(f"padding_token must lie in 0..{self.vocab_size - 1}, got {self.padding_token}.")
        for name in ("causal", "cross_layers", "auxiliary_dims", "recurrent"):
            if value := getattr(self, name):
                raise ValueError(f"{name} is not for an encoder-decoder: leave it out, got {value!r}.")
        super().__post_init__()

    @property
    def target_length(self) -> int:
        """The most tokens that the decoder reads."""
        return self.max_length - self.source_length

    @property
    def encoder(self) -> ModelConfig:
        """That of the Transformer over the source."""
        return ModelConfig(**self._shared(), output_dim=None, max_length=self.source_length)

    @property
    def decoder(self) -> ModelConfig:
        """That of the decoder, which has cross-attention beside."""
        sizes = {"num_layers": self.decoder_layers, "max_length": self.target_length, "causal": True}
        return ModelConfig(**{**self._shared(), **sizes}, output_dim=self.output_dim, logit_scale=self.logit_scale)

    def _shared(self) -> dict[str, Any]:
        own = {"source_length", "decoder_layers", "padding_token", "output_dim", "max_length", "logit_scale"}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in own}

    @property
    def num_parameters(self) -> int:
        """How many numbers the model learns."""
        blocks = 1 if self.share_layers else self.decoder_layers
        crossing = blocks * (self.attention_parameters() + 2 * self.dim)
        return self.encoder.num_parameters + self.decoder.num_parameters + crossing

    def forward_flops(self, length: int, queries: slice | None = None) -> int:
        """FLOPs of one source and what remains of `length` tokens as its target, all of whose outputs are computed."""
        from headcode.nn.flops import encoder_decoder_flops

        return encoder_decoder_flops(self, length)

    @property
    def attention_layers(self) -> int:
        return self.num_layers + 2 * self.decoder_layers

    @property
    def crossing_layers(self) -> int:
        return self.decoder_layers

    def code_positions(self, layer: int) -> tuple[slice, slice]:
        source, target = slice(0, self.source_length), slice(self.source_length, self.max_length)
        if layer < self.num_layers:
            return source, source
        return (target, target) if layer < self.num_layers + self.decoder_layers else (target, source)


class DecoderBlock(TransformerBlock):
    """x + attention(LN(x)), x + cross-attention(LN(x), encoded), then x + feedforward(LN(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cross_norm = nn.LayerNorm(config.dim, eps=NORM_EPSILON)
        names = ("method", "norm", "value_net", "pooling", "qk_dim", "v_dim", "qk_norm", "backend")
        options = {name: getattr(config, name) for name in names}
        self.cross_attention = HyperAttention(config.dim, config.num_heads, dropout=config.attention_dropout, **options)
        self.num_layers = config.num_layers

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        encoded: Tensor,
        padding: Tensor,
        cache: DecoderLayerCache | None = None,
        dropout_seed: int | None = None,
        use: int = 0,
        **unused: Any,
    ) -> Tensor:
        """x (B, T, dim) continues what `cache` has; `encoded` (B, S, dim), where `padding` (B, S) is ignored."""
        x = x + self.attention(self.attention_norm(x), cache=cache, dropout_seed=dropout_seed, use=use)
        past = cache.length - x.shape[1] if cache is not None else 0
        context = None if cache is None else cache.context
        x = x + self.cross_attention(
            self.cross_norm(x),
            encoded if context is None or context.length == 0 else None,
            key_padding_mask=padding,
            cache=context,
            # The target follows the source, for those who ask for codes by position.
            query_offset=encoded.shape[1] + past,
            dropout_seed=layer_seed(dropout_seed, self.num_layers),
            use=use,
        )
        return x + self.feedforward(self.feedforward_norm(x))


class Decoder(Transformer):
    """A causal Transformer whose blocks also read an encoded source."""

    block_class = DecoderBlock

    def new_cache(self, *, recurrent: bool | None = None) -> DecodingCache:
        return DecodingCache([DecoderLayerCache() for _ in range(self.config.num_layers)])


class EncoderDecoder(nn.Module):
    """From source and target tokens (B, max_length) to logits (B, target, output_dim) of what follows each target one.

    Example:
        >>> config = EncoderDecoderConfig(vocab_size=7, output_dim=7, max_length=9, source_length=4)
        >>> model = EncoderDecoder(config)
        >>> model(torch.randint(1, 7, (3, 9))).shape
        torch.Size([3, 5, 7])
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        if not isinstance(config, EncoderDecoderConfig):
            raise TypeError(f"EncoderDecoder is made from an EncoderDecoderConfig, got {type(config).__name__}.")
        self.config = config
        self.encoder = Transformer(config.encoder)
        self.decoder = Decoder(config.decoder)

    @property
    def blocks(self) -> list[nn.Module]:
        """Those of the encoder, then those of the decoder."""
        return [*self.encoder.blocks, *self.decoder.blocks]

    def reset_parameters(self) -> None:
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()

    def layer_blocks(self) -> list[nn.Module]:
        """The block of each attention layer: the encoder's, the decoder's self-attention, its cross-attention."""
        return [*self.encoder.layers(), *self.decoder.layers(), *self.decoder.layers()]

    def attention_layers(self) -> list[HyperAttention]:
        """The attention of each layer, in that order."""
        crossing = [block.cross_attention for block in self.decoder.layers() if isinstance(block, DecoderBlock)]
        return [*self.encoder.attention_layers(), *self.decoder.attention_layers(), *crossing]

    def forward(self, x: Tensor, *, queries: slice | None = None, dropout_seed: int | None = None) -> Tensor:
        """Logits of every target token, or of the positions of x in `queries`, which are target tokens."""
        self.check_input(x)
        source, target = x[:, : self.config.source_length], x[:, self.config.source_length :]
        encoded, padding = self.encode(source, dropout_seed=dropout_seed)
        seed = layer_seed(dropout_seed, self.config.num_layers)
        logits = self.decode(target, encoded, padding, dropout_seed=seed)
        if queries is None:
            return logits
        check_queries(queries, x.shape[1])
        start, stop, _ = queries.indices(x.shape[1])
        if start < self.config.source_length:
            raise ValueError(f"queries must be target tokens, from {self.config.source_length} on, got {queries!r}.")
        return logits[:, start - self.config.source_length : stop - self.config.source_length]

    def encode(self, source: Tensor, *, dropout_seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Source tokens (B, S) as (B, S, dim), and which of them are padding."""
        self.encoder.check_input(source)
        padding = source == self.config.padding_token
        hidden = self.encoder.embed(source)
        hidden = self.encoder.run_layers(hidden, key_padding_mask=padding, dropout_seed=dropout_seed)
        return self.encoder.final_norm(hidden), padding

    def decode(
        self,
        target: Tensor,
        encoded: Tensor,
        padding: Tensor,
        *,
        cache: DecodingCache | None = None,
        dropout_seed: int | None = None,
    ) -> Tensor:
        """Logits (B, T, output_dim) of what follows each target token; with a `cache`, of those that continue it."""
        self.decoder.check_input(target)
        hidden = self.decoder.embed(target, 0 if cache is None else cache.length)
        options: dict[str, Any] = {"encoded": encoded, "padding": padding, "dropout_seed": dropout_seed}
        if cache is None:
            return self.decoder.read(self.decoder.run_layers(hidden, **options))
        with unchanged_on_error(cache.layers):
            return self.decoder.read(self.decoder.run_layers(hidden, cache=cache, **options))

    def new_cache(self) -> DecodingCache:
        """An empty cache for `decode`, of one source: keys and values of the target so far, and those of the source."""
        return self.decoder.new_cache()

    def check_input(self, x: Tensor) -> None:
        """Raise unless `forward` can take x."""
        if not isinstance(x, Tensor):
            raise TypeError(f"The input must be a torch.Tensor, got {type(x).__name__}.")
        least, most = self.config.source_length + 1, self.config.max_length
        if x.dim() != 2 or not least <= x.shape[1] <= most:
            raise ValueError(
                f"The input must be tokens of shape (batch, length), {self.config.source_length} of the source and up "
                f"to {self.config.target_length} of the target, got {tuple(x.shape)}."
            )


@torch.no_grad()
def greedy_decode(
    model: EncoderDecoder,
    source: Tensor,
    *,
    start_token: int,
    end_token: int,
    max_tokens: int | None = None,
    cache: bool = True,
) -> Tensor:
    """The most probable next token again and again: (B, T), with end_token and then padding where a target is shorter.

    Args:
        source: tokens (B, S), padded on the right.
        max_tokens: how many at most, the end included; as many as the model has positions for unless given.
        cache: keep the past of the target and the projected source; False computes everything anew for every token.
    """
    most = model.config.target_length
    if max_tokens is not None and not 1 <= max_tokens <= most:
        raise ValueError(f"max_tokens must lie in 1..{most}, the model's positions, got {max_tokens}.")
    training = model.training
    model.eval()
    try:
        encoded, padding = model.encode(source)
        past = model.new_cache() if cache else None
        target = torch.full((len(source), 1), start_token, dtype=source.dtype, device=source.device)
        ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for _ in range(most if max_tokens is None else max_tokens):
            new = target if past is None else target[:, -1:]
            token = model.decode(new, encoded, padding, cache=past)[:, -1].argmax(-1).to(source.dtype)
            target = torch.cat((target, token.masked_fill(ended, model.config.padding_token)[:, None]), 1)
            ended |= token == end_token
            if ended.all():
                break
        return target[:, 1:]
    finally:
        model.train(training)
