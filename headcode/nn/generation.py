"""Tokens one by one from a causal Transformer: cached, and with constant memory where the method allows it."""

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headcode.nn.config import ModelConfig, can_recur
from headcode.nn.decoding import decode_next
from headcode.nn.transformer import Transformer

BOUNDED_POSITIONS = ("relative", "learned", "relative_learned")
"""Kinds of position that end at max_length tokens; the others have no end."""


def longest_sequence(config: ModelConfig) -> int | None:
    """How many tokens, prompt included, a model has positions for; None if there is no end."""
    return config.max_length if config.position in BOUNDED_POSITIONS else None


def generate(
    model: Transformer,
    prompt: Sequence[int] | Tensor,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    end_token: int | None = None,
    cache: bool = True,
    recurrent: bool | None = None,
) -> Iterator[int]:
    """New tokens after the prompt, each yielded as soon as it is computed.

    Args:
        prompt: at least one token.
        max_tokens: how many new tokens at most; fewer where the model's positions end.
        temperature: divides the logits; 0 takes the most probable token each time.
        top_k: draw from that many of the most probable tokens; from all of them unless given.
        top_p: draw from the most probable tokens that together have this probability, of those that top_k leaves.
        seed: of the draws.
        end_token: stop before this token.
        cache: keep keys and values (or a state) of the past; False computes everything anew for every token.
        recurrent: keep a state of constant size in place of keys and values; by default wherever it is possible.

    Example:
        >>> config = ModelConfig(vocab_size=11, max_length=8, method="linear", position="rotary", causal=True)
        >>> model = Transformer(config)
        >>> len(list(generate(model, [1, 2, 3], 5, temperature=0)))
        5
    """
    _check(model.config, prompt, max_tokens, temperature, top_k, top_p)
    recurrent = cache and can_recur(model.config) if recurrent is None else recurrent
    past = model.new_cache(recurrent=recurrent) if cache else None
    device = next(model.parameters()).device
    if device.type == "meta":  # offloaded weights come when a layer is called, and the tokens are moved to them
        device = torch.device("cpu")
    generator = torch.Generator().manual_seed(seed % 2**63)
    pick = functools.partial(choose, temperature=temperature, top_p=top_p, generator=generator, top_k=top_k)
    return _tokens(model, prompt, max_tokens, pick, end_token, past, device)


def _tokens(model, prompt, max_tokens, pick, end_token, past, device):  # type: ignore[no-untyped-def]
    """The loop of `generate`, which checks the arguments before the first token is asked for."""
    tokens = [int(token) for token in prompt]
    limit = longest_sequence(model.config)
    count = max_tokens if limit is None else min(max_tokens, limit - len(tokens))
    training = model.training
    if any(part.training for part in model.modules()):
        model.eval()
    try:
        for number in range(count):
            logits = decode_next(model, tokens[-1], past) if number and past is not None else None
            if logits is None:
                with torch.no_grad():
                    x = torch.tensor([tokens[-1:] if number and past is not None else tokens], device=device)
                    logits = model(x, queries=slice(-1, None), cache=past)[0, -1]
            token = pick(logits)
            if token == end_token:
                return
            tokens.append(token)
            yield token
    finally:
        if training:
            model.train()


def choose(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator, top_k: int | None = None
) -> int:
    """One token from logits (vocab,): drawn on the CPU in float64, so that the device does not matter."""
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.double().cpu()
    probabilities = torch.softmax((scaled - scaled.max()) / temperature, -1)
    if top_p < 1 or top_k is not None:
        ordered, order = probabilities.sort(descending=True, stable=True)
        kept = ordered[:top_k].clone()
        before = kept.cumsum(0) - kept
        kept[before >= top_p * kept.sum()] = 0.0  # the most probable one stays, whatever top_p is
        probabilities = torch.zeros_like(probabilities).scatter(0, order[:top_k], kept)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _check(
    config: ModelConfig,
    prompt: Sequence[int] | Tensor,
    max_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> None:
    if config.vocab_size is None or not config.causal:
        raise ValueError("Text is generated by causal models of tokens; this model is not one.")
    if len(prompt) == 0:
        raise ValueError("The prompt has no tokens; give at least one.")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens must be a whole number, 1 or more, got {max_tokens!r}.")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 or more, got {temperature}.")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):
        raise ValueError(f"top_k must be a whole number, 1 or more, got {top_k!r}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}.")
    limit = longest_sequence(config)
    if limit is not None and len(prompt) >= limit:
        raise ValueError(
            f"The prompt has {len(prompt)} tokens, and this model (position {config.position!r}) has places for "
            f"{limit} in all; shorten the prompt to at most {limit - 1} tokens."
        )
