"""Where a token stands: T5's relative bias as a band, rotary, sinusoidal and learned positions."""

import math

import torch
from torch import Tensor, nn

from headcode.nn.checks import check_sizes

POSITIONS = ("relative", "rotary", "sinusoidal", "learned", "relative_learned", "none")


def relative_buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """The buckets of keys that lie so far before the query (0 for later keys): exact at first, then logarithmic.

    With N buckets: n for n < N//2; beyond, N//2 + int(log(n/(N//2) + ε) / log(N/(N//2)) · (N - N//2)), at most N-1.

    >>> relative_buckets(torch.tensor([-3, 0, 3, 4, 5, 7, 100]), 8).tolist()
    [0, 0, 3, 4, 5, 7, 7]
    """
    distances, exact = distances.clamp(min=0), num_buckets // 2
    if exact > 0:
        ratio = torch.log(distances.double() / exact + torch.finfo(torch.float32).eps) / math.log(num_buckets / exact)
        distances = torch.where(distances < exact, distances, exact + (ratio * (num_buckets - exact)).long())
    return distances.clamp(max=num_buckets - 1)


class RelativeBias(nn.Module):
    """T5's relative position bias: one table (head, bucket), read out as a band and never as a T×T matrix.

    Unidirectional even without a causal mask: every later key shares bucket 0. The largest exact distance is the
    number of buckets.
    """

    buckets: Tensor

    def __init__(self, num_heads: int, num_buckets: int) -> None:
        super().__init__()
        check_sizes({"num_heads": num_heads, "num_buckets": num_buckets})
        self.num_buckets = num_buckets
        self.table = nn.Parameter(torch.empty(num_heads, num_buckets))
        self.register_buffer("buckets", torch.empty(num_buckets + 1, dtype=torch.int64), persistent=False)
        # The buffer is not in a state dict: a model made on the meta device gets it with its weights.
        self.register_load_state_dict_post_hook(lambda module, keys: module.fill_buckets())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=math.sqrt(1 / self.num_buckets))
        self.fill_buckets()

    def fill_buckets(self) -> None:
        """The bucket of each distance; from num_buckets on, every key falls into the last."""
        distances = torch.arange(self.num_buckets + 1, device=self.buckets.device)
        self.buckets.copy_(relative_buckets(distances, self.num_buckets))

    def forward(self, num_queries: int, num_keys: int, query_offset: int) -> Tensor:
        """The band (H, Tq+Tk-1) that `hyper_attention` takes; query i stands at position `query_offset + i`."""
        return self.table[:, self.places(num_queries, num_keys, query_offset)]

    def places(self, num_queries: int, num_keys: int, query_offset: int) -> Tensor:
        """The bucket of each entry of the band (Tq+Tk-1)."""
        length = max(num_queries + num_keys - 1, 0)
        last = query_offset + num_queries - 1
        distances = last - torch.arange(length, device=self.table.device)
        return self.buckets[distances.clamp(0, self.num_buckets)]


def alibi_band(
    num_heads: int, num_queries: int, num_keys: int, query_offset: int, device: torch.device | None = None
) -> Tensor:
    """ALiBi as a band (H, Tq+Tk-1): a head's score loses a slope for every position between query and key.

    The slopes of H heads are 2^(-8/H), 2^(-16/H), …, 2^-8. Query i stands at position `query_offset + i`.

    >>> alibi_band(2, 1, 3, 2).tolist()
    [[-0.125, -0.0625, -0.0], [-0.0078125, -0.00390625, -0.0]]
    """
    last = query_offset + num_queries - 1
    distances = (torch.arange(max(num_queries + num_keys - 1, 0), device=device) - last).abs()
    slopes = 2.0 ** (-8 / num_heads * torch.arange(1, num_heads + 1, device=device))
    return -slopes[:, None] * distances


ROTARY_BASE = 10_000.0


def rotate(x: Tensor, positions: int | Tensor, base: float = ROTARY_BASE) -> Tensor:
    """Rotary position: channel pairs (i, i + D/2) of (B, H, T, D) turned by position · base**(-2i/D).

    `positions`: the first token's, which the others follow, or of each token (B or 1, T).
    """
    width = x.shape[-1]
    if width % 2:
        raise ValueError(f"rotary position needs an even head width, got {width}; change qk_dim or num_heads.")
    half = width // 2
    # Angles in at least float32: in half precision positions beyond a few hundred would collapse.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    angles = rotary_angles(x.shape[2], half, positions, base, dtype, x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotary_angles(
    length: int, half: int, positions: int | Tensor, base: float, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """(T, D/2), or of positions of each token (B or 1, 1, T, D/2): by how much each channel pair is turned."""
    frequencies = base ** (-torch.arange(half, device=device, dtype=dtype) / half)
    if isinstance(positions, Tensor):
        return positions.to(device, dtype)[:, None, :, None] * frequencies
    return (torch.arange(length, device=device, dtype=dtype) + positions)[:, None] * frequencies


def sinusoidal_positions(length: int, dim: int, first_position: int = 0, device: torch.device | None = None) -> Tensor:
    """(T, dim): `sinusoids` of consecutive positions."""
    return sinusoids(torch.arange(length, device=device, dtype=torch.float32) + first_position, dim)


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """(…, dim): sines in the first half of the channels, cosines in the second, wavelengths from 2π to 10,000·2π."""
    half = dim // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / max(half - 1, 1)
    frequencies = torch.exp(-math.log(10_000.0) * exponent)
    angles = positions[..., None] * frequencies
    table = torch.zeros(*positions.shape, dim, device=positions.device, dtype=torch.float32)
    table[..., :half], table[..., half : 2 * half] = angles.sin(), angles.cos()
    return table
