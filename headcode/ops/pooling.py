"""What pooling divides the sum over keys by, as fused backends need it: a number for each query, without Tq×Tk.

`mean` divides by the number of keys that a query sees, `sqrt` by its root. A sum of n contributions that have nothing
to do with each other grows with the root of n: `sqrt` keeps its scale, `mean` lets it shrink.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headcode.ops import reference
from headcode.ops.options import AttentionInputs, AttentionOptions


def divisor(inputs: AttentionInputs, options: AttentionOptions) -> Tensor | None:
    """Broadcastable to (B, H, Tq, Dv), in float64 for float64 and else in float32; None if nothing is divided."""
    q, k, mask = inputs.q, inputs.k, inputs.mask
    like = torch.empty(0, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
    if mask is not None and mask.shape[2] > 1:
        visible = reference.visible_pairs(inputs, options)
        return reference.pooling_divisor(options.pooling, visible, k.shape[2], like)
    return divisor_of_keys(options, q.shape[2], k.shape[2], mask, like)


def divisor_of_keys(
    options: AttentionOptions, num_queries: int, num_keys: int, mask: Tensor | None, like: Tensor
) -> Tensor | None:
    """The same where the mask (B or 1, 1, 1, Tk) is one of keys; of like's dtype and on its device."""
    if options.pooling not in reference.DIVISORS:
        return None
    if not options.causal and options.window is None:
        return reference.pooling_divisor(options.pooling, mask, num_keys, like)
    positions = torch.arange(num_queries, device=like.device) + options.query_offset
    reach = 1 if options.causal or options.window is None else options.window
    end = (positions + reach).clamp(0, num_keys)
    start = torch.zeros_like(end) if options.window is None else (positions - options.window + 1).clamp(0, num_keys)
    if mask is None:
        count = end - start  # (Tq,)
    else:
        up_to = F.pad(mask.expand(-1, -1, -1, num_keys).cumsum(-1), (1, 0))[:, :, 0]
        count = up_to[:, :, end] - up_to[:, :, start]  # (B or 1, 1, Tq)
    return reference.DIVISORS[options.pooling](count.clamp(min=1).to(like)[..., None])
