"""HyperConv against PyTorch Geometric's attention layers, from a thousand edges to a million, in one run.

    python benchmarks/graphs.py                                   # 1 k, 10 k, 100 k and 1 M edges; some minutes
    python benchmarks/graphs.py --edges 1000 10000 --threads 1

Random graphs with ten edges for each node. All layers have the same widths, features of edges included, and sum their
messages; HyperConv has an output projection more. Layers take turns: a time is the median over the rounds of one pass
forward and backward, a ratio is to TransformerConv. Kept: what the forward pass keeps for the backward one.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATv2Conv, TransformerConv

from headcode.bench.measure import aligned_table, check_repeats, machine, medians, torch_threads
from headcode.graph import HyperConv

DIM, HEADS, EDGE_DIM, EDGES_PER_NODE = 64, 8, 16, 10
EDGES = (1_000, 10_000, 100_000, 1_000_000)
METHODS = ("softmax", "linear", "hyla")
BASELINE = "TransformerConv"


def layers() -> dict[str, nn.Module]:
    peers = {"edge_dim": EDGE_DIM, "heads": HEADS}
    return {
        BASELINE: TransformerConv(DIM, DIM // HEADS, root_weight=False, **peers),
        "GATv2Conv": GATv2Conv(DIM, DIM // HEADS, add_self_loops=False, **peers),
        **{f"HyperConv {method}": HyperConv(DIM, HEADS, method=method, edge_dim=EDGE_DIM) for method in METHODS},
    }


def graph(edges: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features of nodes, edges, and features of edges."""
    torch.manual_seed(0)
    nodes = edges // EDGES_PER_NODE
    return torch.randn(nodes, DIM), torch.randint(nodes, (2, edges)), torch.randn(edges, EDGE_DIM)


def step(layer: nn.Module, inputs: Sequence[Tensor]) -> Callable[[], None]:
    """One pass forward and backward."""

    def run() -> None:
        layer.zero_grad()
        layer(*inputs).sum().backward()

    return run


def kept_megabytes(layer: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Memory of the tensors that autograd keeps of a forward pass, each counted once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = layer(*inputs)
    assert out.requires_grad
    return sum(kept.values()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, nargs="+", default=EDGES, metavar="N")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N")
    arguments = parser.parse_args()
    check_repeats(arguments.repeats)
    if min(arguments.edges) < EDGES_PER_NODE:
        raise ValueError(f"A graph has at least {EDGES_PER_NODE} edges, got {min(arguments.edges)}.")
    with torch_threads(arguments.threads):
        rows = []
        for edges in arguments.edges:
            inputs, tried = graph(edges), layers()
            times = medians({name: step(layer, inputs) for name, layer in tried.items()}, arguments.repeats)
            for name, seconds in times.items():
                memory = kept_megabytes(tried[name], inputs)
                ratio = seconds / times[BASELINE]
                rows.append((f"{edges:,}", name, f"{1e3 * seconds:.1f}", f"{ratio:.2f}", f"{memory:.1f}"))
        print(f"{machine()}; width {DIM}, {HEADS} heads, {EDGE_DIM} features of an edge\n")
        print("\n".join(aligned_table(("edges", "layer", "ms", "× " + BASELINE, "MB kept"), rows, words=2)))


if __name__ == "__main__":
    main()
