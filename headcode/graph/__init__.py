"""Attention as a hypernetwork on graphs: the code of an edge configures the function that turns a node into a message.

conv.py       HyperConv, a layer for PyTorch Geometric
edges.py      scores, codes and dropout of edges
config.py     GraphConfig: the sizes and choices of a GraphNetwork
network.py    GraphNetwork, the model of tasks on graphs: blocks of such a layer, or of a peer, and a feed-forward
peers.py      PyTorch Geometric's own attention layers with the interface of HyperConv

The layers need PyTorch Geometric (`pip install "headcode[graph]"`); configurations can be read without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headcode.graph.config import GraphConfig
    from headcode.graph.conv import HyperConv
    from headcode.graph.network import GraphNetwork

__all__ = ["GraphConfig", "GraphNetwork", "HyperConv"]
_MODULES = {"HyperConv": "conv", "GraphConfig": "config", "GraphNetwork": "network"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
