"""The CPU room: the attention op and the fused transformer block, as kernels in Numba. A map.

    Python                                          kernels (compiled at first use, found by `library`)
    attention.py   the op's CPU backend  ──┐
                                           ├─> attention_plan.py ──> attention_forward.py, attention_backward.py,
    block.py       a whole block as one    │                         attention_delta.py over attention_stages.py
                   autograd function     ──┤                         (softmax, scores, factors), packing.py (layouts)
                                           └─> block_plan.py ──────> block_forward.py, block_backward.py over
                                                                     block_stages.py (LayerNorm, activation, rotary
                                                                     positions), gemm.py (products) over
                                                                     factors.py (float32 or bf16)
    logits.py      the end of a language model ────────────────────> block_forward.py, logits_backward.py
    all plan a launch.Program and run it            all over activations.py, kernel.py (variants) and
    on team.py (torch's threads) or threads.py      simd.py, simd_math.py, simd_shuffles.py

    decode_plan.py  new tokens through a whole ───> decode.py over decode_stages.py (products with few tokens,
                    model with a cache              attention over the cache) and block_stages.py

A *record* (`records.py`) is a row of 64-bit words: all that a kernel is told about one launch. A plan is made once per
shape and holds the records with their addresses left open; each call binds it to its tensors and runs the launches by
name. A kernel gets the address of its record, takes tasks from the record's counter until none is left, and works on
each in buffers of its own thread. Tasks are cut by the shapes alone and summed in a fixed order (`gemm.sum_tasks`), so
that results are bitwise the same for any number of threads.

Memory of the op: q, k, v and out (B, H, T, D) with any strides. `saved` (B, H, Tq), the log of the softmax's sums, is
filled forward and read backward; `scratch` holds Δ and the partial gradients during a backward pass.

Memory of a block: `kept`, filled forward and read backward, has the projections (q, k, v side by side), the LayerNorms'
statistics, the heads' outputs, the middle of the residual stream, the hidden layer, the padded band and the weights in
panels; without a backward pass to come, less of it, and for a moment. `scratch`, during a backward pass, has the
gradients of these and the partial sums of each task; `sums` the gradients of the parameters. Parameters are named as in
the block's state_dict, from there to the record.

Decoding copies nothing: its record has the addresses of the model's weights and of the cache, and `nn.decoding` sees to
it that they are the model's still.

Nothing here imports Numba before a kernel is needed: kernel modules are imported by `library` alone. Where to
change what: docs/kernels.md.
"""

from headcode.ops.cpu.attention import NO_KERNELS, backward, forward, unsupported, why_no_bf16
from headcode.ops.cpu.attention_plan import prefers_torch, saved_shape
from headcode.ops.cpu.records import NET_CODES, NORM_CODES

__all__ = [
    "NET_CODES",
    "NORM_CODES",
    "NO_KERNELS",
    "backward",
    "forward",
    "prefers_torch",
    "saved_shape",
    "unsupported",
    "why_no_bf16",
]
