"""The gradients of `logits`: of the tokens, a stretch of them at a time, and of the table, a stretch of its rows.

A task of the second has all tokens: no copies of the table's gradient have to be added up.
"""

import numpy as np

from headcode.ops.cpu.block_stages import PADDING, copy_rows, normalise, normalise_backward, task_tokens
from headcode.ops.cpu.factors import MOST_DEPTH, product_space
from headcode.ops.cpu.gemm import add_outer, add_product
from headcode.ops.cpu.kernel import BLOCK_PART, SINGLE, WORDS, array_at, fetch_add, product_kernels


@product_kernels
def tokens_backward_kernels(address, factors):  # type: ignore[no-untyped-def]
    """From grad_projected (tokens, width) to grad_x (tokens, dim). A part: gradients of norm weight and norm bias."""
    p, counter = array_at(address, BLOCK_PART)[0], array_at(address, WORDS)
    chunk = p.chunk
    x, grad_x, weight = array_at(p.x, SINGLE), array_at(p.grad_x, SINGLE), array_at(p.weight, factors)
    given, parts = array_at(p.grad_projected, SINGLE), array_at(p.parts, SINGLE)
    dim, width = p.dim, p.width
    zeros, space = np.zeros(dim, SINGLE.dtype), product_space(factors, chunk, MOST_DEPTH)
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        for_norm = task * p.part_size
        parts[for_norm : for_norm + 2 * dim] = 0
        first, end = task_tokens(p, task)
        for begin in range(first, end, chunk):
            count = min(chunk, end - begin)
            grads = (grad_x, begin * dim, dim)
            add_product(grads, (zeros, 0, 0), (given, begin * width, width), weight, count, dim, width, space)
            for token in range(begin, begin + count):
                normalise_backward(grad_x, token * dim, x, token * dim, p, token, parts, for_norm)


@product_kernels
def table_backward_kernels(address, factors):  # type: ignore[no-untyped-def]
    """The table's gradient (width, dim), into `parts`: `task_tokens` of its rows to a task, from all tokens."""
    p, counter = array_at(address, BLOCK_PART)[0], array_at(address, WORDS)
    chunk = p.chunk
    x, total, grad_projected = array_at(p.x, SINGLE), array_at(p.parts, SINGLE), array_at(p.grad_projected, SINGLE)
    dim, width, tokens = p.dim, p.width, p.tokens
    row, given_row = dim + PADDING, p.task_tokens + PADDING
    normed, given = np.empty(chunk * row, SINGLE.dtype), np.empty(chunk * given_row, SINGLE.dtype)
    zeros, space = np.zeros(dim, SINGLE.dtype), product_space(factors, chunk, max(dim, p.task_tokens))
    while True:
        task = fetch_add(counter)
        if task >= p.tasks:
            return
        first = task * p.task_tokens
        rows = min(p.task_tokens, width - first)
        for begin in range(0, tokens, chunk):
            count = min(chunk, tokens - begin)
            copy_rows(given, given_row, grad_projected, begin * width + first, width, count, rows)
            for t in range(count):
                normalise(normed, t * row, x, (begin + t) * dim, p, begin + t)
            add_outer(total, first * dim, begin > 0, zeros, given, given_row, normed, row, rows, dim, count, space)
