"""The fused backend for NVIDIA GPUs: Triton kernels in which all heads of a pair are together, and nothing is Tq×Tk.

What calls what:

    backend.forward, backend.backward       which kernels run, in which order
      └ plan.TritonCall                     one call in the kernels' terms; `run` launches a kernel by name
          ├ tuning.choose                   the tiles of that launch: a guess by shape, or the fastest measured here
          ├ TritonCall.plan → Launch        name of the kernel, number of programs, arguments, constants, tiles
          └ kernels.*_kernel                log_sums, forward, query (and delta), key, band
              ├ tiles                       one tile of pairs: what is visible, scores, codes, back through the norm
              └ value_net                   the value networks of a tile, forward and backward
    checked                                 the same interface, for `auto`: compares with the reference at the first
                                            call of a kind, and passes calls on to `chunked` where the two differ

`backend` is imported with `headcode.ops`; whatever imports Triton itself (`tiles`, `value_net`, `kernels`) only when a
kernel is launched or compiled. `headcode bench kernels` takes the same plans and compiles them without a GPU.

A plan (`Launch`) is all that a launch passes. A tile is BQ queries × BK keys of one batch entry with all heads; a
program holds one tile of queries (or of keys, or one diagonal of tiles) and walks over the tiles that meet it. Heads
narrower than 16, and float32 in full precision, go one dim at a time; wider ones through matrix units, DC or DVC dims
at a time.

Buffers, in the order in which a step writes them:

    saved     (B, H, Tq)  float32, softmax alone: the log of each query's sum of exponentials; by log_sums, before
                          forward. Every later kernel reads it.
    out       (B, H, Tq, Dv)  by forward.
    delta     (B, H, Tq)  float32, softmax alone: Σ over keys of code × its gradient. For the linear value net it is
                          Σ over dims of out × its gradient, by torch; otherwise by delta, before query and key.
    grad_q; grad_k, grad_v    by query; by key. Where one chunk does not hold all dims of a head, `TritonCall.targets`
                          puts zeroed float32 memory in their place, to which a program adds chunk by chunk.
    parts     (groups, diagonals, H, BQ, BQ)  float32, by band: the gradient of the scores, summed over the tiles of a
                          diagonal and a group of batch entries; `plan.sum_band` sums it along diagonals.
"""
