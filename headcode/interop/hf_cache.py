"""What decoding keeps between tokens, as the library sees it: our caches behind its interface, and its behind ours."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from headcode.nn import DecodingCache, FastWeightState, KeyValueCache, ModelConfig, Transformer
from headcode.nn.cache import LayerCache
from headcode.nn.config import can_recur


class HeadcodeCacheLayer(CacheLayerMixin):
    """One layer of a `HeadcodeCache`."""

    supports_early_init = False

    def __init__(self, held: LayerCache) -> None:
        self.held = held

    @property
    def keys(self) -> Tensor | None:
        """(B, H, T, D) so far; None if nothing is kept, or a state in their place."""
        return self._filled("keys")

    @property
    def values(self) -> Tensor | None:
        return self._filled("values")

    def _filled(self, name: str) -> Tensor | None:
        buffer = getattr(self.held, name, None)
        return None if buffer is None else buffer[:, :, : self.held.length]

    @property
    def is_initialized(self) -> bool:
        return self.held.length > 0

    @property
    def is_croppable(self) -> bool:
        return not isinstance(self.held, FastWeightState)

    @property
    def batch_size(self) -> int:
        return self.held.batch_size or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are made when they are first written to."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if isinstance(self.held, FastWeightState):
            raise ValueError("This cache holds the state of linear attention, and no keys and values to add to.")
        return self.held.append(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.held.length

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in earlier versions of the library

    def reset(self) -> None:
        self.held.__init__()  # type: ignore[misc]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, whose number is given as a negative one.

        A positive number is how many are kept, as in earlier versions of the library.
        """
        kept = self.held.length + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        if kept >= self.held.length:
            return
        if isinstance(self.held, FastWeightState):
            raise ValueError(
                "The state of linear attention cannot go back; use HeadcodeCache(model, recurrent=False), which keeps "
                "keys and values."
            )
        self.held.restore(max(kept, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.held.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.held.reorder(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.held.reorder(torch.arange(self.held.batch_size or 0).repeat_interleave(repeats))


class HeadcodeCache(Cache):
    """What `generate` hands from token to token: our own cache behind the library's interface.

    `recurrent` (by default wherever the model can) keeps a state of constant size in place of keys and values.
    """

    max_cache_len = -1
    """No end; peft asks by this name."""
    is_compileable = False

    def __init__(self, model: nn.Module, recurrent: bool | None = None) -> None:
        transformer: Any = model if isinstance(model, Transformer) else model.transformer
        self.decoding: DecodingCache = transformer.new_cache(
            recurrent=can_recur(transformer.config) if recurrent is None else recurrent
        )
        super().__init__(layers=[HeadcodeCacheLayer(layer) for layer in self.decoding.layers])

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        return self.decoding.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """An empty cache that may have to go back keeps keys and values."""
        if self.decoding.length == 0:
            self.decoding.layers = [KeyValueCache() for _ in self.decoding.layers]
            self.layers = [HeadcodeCacheLayer(layer) for layer in self.decoding.layers]


class LibraryLayer(KeyValueCache):
    """One layer of a cache of the library's own (dynamic, static, quantized, …), for our attention to write to."""

    def __init__(self, cache: Cache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.length = int(cache.get_seq_length(index))

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._cache.update(k, v, self._index)
        self.length += k.shape[2]
        return keys[:, :, : self.length], values[:, :, : self.length]

    def restore(self, snapshot: int) -> None:
        """After an error the library's caches stay as they are, with its own models too."""


def as_decoding_cache(cache: Any, config: ModelConfig) -> DecodingCache | None:
    """What our layers write to, for a cache of either kind."""
    if cache is None:
        return None
    if torch.compiler.is_exporting():
        raise ValueError("An exported graph of a headcode model keeps no cache: export it with use_cache=False.")
    if isinstance(cache, HeadcodeCache):
        return cache.decoding
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        raise ValueError(
            f"past_key_values must be a HeadcodeCache or a cache of the library's such as DynamicCache, "
            f"got {type(cache).__name__}."
        )
    if any(cache.is_sliding):
        raise ValueError(f"A {type(cache).__name__} with a sliding window loses keys that these models attend to.")
    return DecodingCache([LibraryLayer(cache, index) for index in range(config.num_layers)])
