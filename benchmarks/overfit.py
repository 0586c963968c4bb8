"""How fast small models overfit, by the scale of their logits: a Llama of the library's beside ours.

    python benchmarks/overfit.py                      # seconds

The task is that of the library's own tests: one text of 64 tokens, 19 of them over and over, in a batch of 2; 300
steps of Adam at a rate of 1e-3 with gradients clipped at 1; two layers of width 32 with 4 heads. Printed is by how much
the loss and the norm of the gradients have fallen, which those tests want to be at least 90 %.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headcode.interop import HeadcodeConfig, HeadcodeForCausalLM

SIZES = {"vocab_size": 53, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
STEPS, RATE = 300, 1e-3


def fallen(model: torch.nn.Module) -> tuple[float, float]:
    """By which share loss and gradient norm have fallen."""
    ids = (torch.arange(64) % 19 + 1).expand(2, -1)
    optimizer = torch.optim.Adam(model.parameters(), RATE)
    seen = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        seen.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    first, last = seen[0], seen[-1]
    return 1 - last[0] / first[0], 1 - last[1] / first[1]


def main() -> None:
    print("| model | table of the logits | scale | loss | gradients |\n| --- | --- | --- | --- | --- |")
    for method in ("Llama", "softmax", "linear", "hyla"):
        for scale in (None,) if method == "Llama" else (None, 1.0):
            for tied in (True, False):
                torch.manual_seed(0)
                settings = {**SIZES, "max_position_embeddings": 64, "tie_word_embeddings": tied}
                if method == "Llama":
                    model = LlamaForCausalLM(LlamaConfig(**settings))
                else:
                    settings |= {"qk_dim": 32, "v_dim": 32, "position": "rotary", "logit_scale": scale}
                    model = HeadcodeForCausalLM(HeadcodeConfig(method=method, backend="reference", **settings))
                loss, norm = fallen(model)
                kind = "1" if method == "Llama" or scale else "1/sqrt(dim)"
                print(f"| {method} | {'tied' if tied else 'its own'} | {kind} | {loss:.1%} | {norm:.1%} |", flush=True)


if __name__ == "__main__":
    main()
