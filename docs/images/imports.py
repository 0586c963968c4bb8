"""Draws which room of the package imports which, docs/images/imports.png: python docs/images/imports.py

An arrow that follows from others is left out: nn imports ops and train imports nn, so train → ops is not drawn.
"""

import ast
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parents[1]
PACKAGE = DOCS.parent / "headcode"
GROUND = {"files", "jit", "memory", "private_api", "processes", "suggest", "version"}
"""Small modules that any room may use; drawn as one."""


def room_of(parts):
    name = parts[0].removesuffix(".py")
    return "ground" if name in GROUND else name


def imports():
    """Room to the rooms that it imports."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        if parts[0] in ("__init__.py", "__main__.py"):
            continue
        room = room_of(parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "headcode":
                modules = [node.module] if "." in node.module else [f"headcode.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names if alias.name.startswith("headcode.")]
            else:
                continue
            found.setdefault(room, set()).update(room_of(module.split(".")[1:]) for module in modules)
    rooms = set(found) | set().union(*found.values())
    known = {"ground"} | {path.stem for path in PACKAGE.iterdir()}
    return {room: (found.get(room, set()) & known) - {room} for room in rooms & known}


def rank(graph, room):
    return 1 + max((rank(graph, other) for other in graph[room]), default=-1)


def reachable(graph, room):
    return graph[room].union(*(reachable(graph, other) for other in graph[room]))


def draw(graph, path):
    rows = {}
    for room in sorted(graph, key=lambda room: (room == "presets", room)):  # where its arrows cross least
        rows.setdefault(rank(graph, room), []).append(room)
    place = {}
    for height, rooms in rows.items():
        for index, room in enumerate(rooms):
            place[room] = ((index - (len(rooms) - 1) / 2) * 2.2, height)
    figure, axes = plt.subplots(figsize=(6.4, 0.62 * (len(rows) + 1)))
    for room, others in graph.items():
        implied = set().union(*(reachable(graph, other) for other in others))
        for other in sorted(others - implied):
            (x, y), (to_x, to_y) = place[room], place[other]
            bend = 0 if y - to_y < 1.5 else -0.9 if other == "presets" else 0.3
            style = {"arrowstyle": "-|>", "color": "0.45", "linewidth": 1, "connectionstyle": f"arc3,rad={bend}"}
            axes.annotate("", (to_x, to_y + 0.27), (x, y - 0.27), arrowprops=style)
    for room, (x, y) in place.items():
        label = "files, jit, memory, …" if room == "ground" else room
        axes.text(
            x, y, label, ha="center", va="center", bbox={"boxstyle": "round,pad=0.35", "fc": "#eef2fb", "ec": "#3b5bdb"}
        )
    axes.set_xlim(-4.2, 4.2)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.axis("off")
    figure.savefig(path, dpi=150, bbox_inches="tight")


draw(imports(), DOCS / "images" / "imports.png")
