"""Makes the numbers and figures of docs/codes.md from trained runs: python docs/images/codes.py RUNS [part …]

RUNS has the run folders that docs/codes.md names; tables go to docs/results/codes, figures to docs/images/codes-*.
Parts: decode, patch, maps, training, ablate, figures, table; all unless given.
"""

import json
import sys
import tempfile
from pathlib import Path

from headcode.analysis import (
    ablate,
    ablate_directions,
    along_training,
    capture,
    class_directions,
    decode,
    examples,
    likeness,
    make_map,
    open_run,
    patch,
    write_decoding,
)
from headcode.report import figures

DOCS = Path(__file__).parents[1]
RESULTS, IMAGES = DOCS / "results" / "codes", DOCS / "images"
METHODS = ("softmax", "linear", "hyla")
SRAVEN, PERMUTED, LOGIC = "sraven-2", "sraven-2p", "logic"
# name of the result -> (family of runs, what the decoder sees)
DECODINGS = {
    "sraven": (SRAVEN, {"keys": "self"}),
    "logic-fixed-context": (LOGIC, {"keys": "self", "inputs": "fixed_context"}),
    "logic-fixed-query": (LOGIC, {"keys": "self", "inputs": "fixed_query"}),
    "permuted": (PERMUTED, {"keys": "self"}),
    "sraven-all-keys": (SRAVEN, {"keys": "all"}),
    "logic-fixed-context-all-keys": (LOGIC, {"keys": "all", "inputs": "fixed_context"}),
}
SIZE = 2048
PATCH_SIZES = {SRAVEN: 4096, LOGIC: 2048}


def runs_of(root, family):
    found = {method: root / f"{family}-{method}" for method in METHODS}
    return {method: path for method, path in found.items() if (path / "checkpoints").is_dir()}


def make_decodings(root):
    for name, (family, options) in DECODINGS.items():
        for method, path in runs_of(root, family).items():
            target = f"decode-{name}-{method}"
            if not (RESULTS / f"{target}.json").is_file():
                # With all keys the residual stream has been measured already, beside the code to itself.
                controls = ("shuffled", "untrained", "position", "residual")
                controls = controls if options["keys"] == "self" else controls[:2]
                result = decode(path, fit_size=SIZE, test_size=SIZE, controls=controls, **options)
                write_decoding(result, RESULTS, target)
                print(target, flush=True)


def make_patches(root):
    for family in (SRAVEN, LOGIC):
        for method, path in runs_of(root, family).items():
            target = f"patch-{family}-all-{method}"
            if not (RESULTS / f"{target}.json").is_file():
                rows = patch(path, size=PATCH_SIZES[family], keys="all", split="compositional")
                card = {**open_run(path).facts(), "what": "patching", "split": "compositional"}
                write_decoding({"card": {**card, "size": PATCH_SIZES[family]}, "rows": rows}, RESULTS, target)
                print(target, flush=True)


def make_maps(root):
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for method, path in runs_of(root, SRAVEN).items():
            for split in ("iid", "compositional"):
                target = Path(folder) / f"{method}-{split}.npz"
                files[method, split] = capture(open_run(path), split, target, size=SIZE, layers=[-1])
            codes = files[method, "compositional"]
            for kind in ("tsne", "pca"):
                make_map(codes, RESULTS / f"map-{kind}-sraven-{method}.npz", layer=codes.card["layers"][0], method=kind)
            likeness(
                files[method, "iid"], codes, RESULTS / f"likeness-sraven-{method}.npz", layer=codes.card["layers"][0]
            )
        for method, path in runs_of(root, LOGIC).items():
            run = open_run(path, inputs="fixed_query")
            codes = capture(run, "compositional", Path(folder) / f"logic-{method}.npz", size=SIZE, layers=[-1])
            make_map(codes, RESULTS / f"map-tsne-logic-{method}.npz", layer=codes.card["layers"][0])
    print("maps", flush=True)


def make_training(root):
    for method, path in runs_of(root, SRAVEN).items():
        with tempfile.TemporaryDirectory() as folder:
            result = along_training(path, folder, size=1024)
            (Path(folder) / "training.npz").replace(RESULTS / f"training-sraven-{method}.npz")
        write_decoding(result, RESULTS, f"training-sraven-{method}")
        print("training", method, flush=True)


def make_ablations(root):
    for method, path in runs_of(root, SRAVEN).items():
        run = open_run(path)
        facts = run.facts()
        rows = ablate(run, size=1024)
        write_decoding({"card": {**facts, "what": "ablation"}, "rows": rows}, RESULTS, f"ablate-sraven-{method}")
        last = run.config.model.num_layers - 1
        with tempfile.TemporaryDirectory() as folder:
            codes = capture(run, "iid", Path(folder) / "codes.npz", size=SIZE, layers=[last])
            data = examples(run.task, codes, last)
        rows = ablate_directions(run, class_directions(data, 4), layer=last)
        card = {**facts, "what": "directions ablated"}
        write_decoding({"card": card, "rows": rows}, RESULTS, f"directions-sraven-{method}")
        print("ablate", method, flush=True)


def named(pattern):
    found = {method: RESULTS / pattern.format(method) for method in METHODS}
    return {method: path for method, path in found.items() if path.is_file()}


def make_figures(root):
    for name in DECODINGS:
        if files := named(f"decode-{name}-{{}}.json"):
            figures.decoding(files, IMAGES / f"codes-decode-{name}")
    figures.solved_against_failed(named("decode-sraven-{}.json"), IMAGES / "codes-solved")
    for family in (SRAVEN, LOGIC):
        if files := named(f"patch-{family}-all-{{}}.json"):
            figures.patching(files, IMAGES / f"codes-patch-{family}")
    figures.code_map(named("map-tsne-sraven-{}.npz"), IMAGES / "codes-map-rule", "rule")
    figures.code_map(named("map-tsne-sraven-{}.npz"), IMAGES / "codes-map-target", "target")
    figures.code_map(named("map-tsne-logic-{}.npz"), IMAGES / "codes-map-term", "term")
    figures.rule_likeness(named("likeness-sraven-{}.npz"), IMAGES / "codes-likeness")
    figures.along_training(dict(reversed(named("training-sraven-{}.npz").items())), IMAGES / "codes-training")
    figures.head_ablation(named("ablate-sraven-{}.json"), IMAGES / "codes-ablation")
    if (RESULTS / "lens.json").is_file():
        figures.lens_layers(RESULTS / "lens.json", IMAGES / "codes-lens")
    study = RESULTS.parent / "lens" / "study.json"
    if study.is_file():
        figures.lens_patching(json.loads(study.read_text())["patching"]["rows"], study.with_name("patching"))


def make_table(root):
    """The table of docs/codes.md, last layer of each model."""
    for name in DECODINGS:
        for method, path in named(f"decode-{name}-{{}}.json").items():
            result = json.loads(path.read_text())
            last = max(row["layer"] for row in result["rows"])
            cells = {}
            for row in (row for row in result["rows"] if row["layer"] == last):
                key = row["source"] if row["subset"] == "all" else row["subset"]
                cells[key] = f"{row['macro_f1']:.2f}"
                if key == "codes":
                    cells[key] += f" ({row['macro_f1_low']:.2f} to {row['macro_f1_high']:.2f})"
            order = ("codes", "residual", "untrained", "shuffled", "position", "solved", "failed")
            solved = result["card"]["solved"]["compositional"]
            print(f"| {name} | {method} | {solved:.2f} |", " | ".join(cells.get(key, "") for key in order), "|")


PARTS = {
    "decode": make_decodings,
    "patch": make_patches,
    "maps": make_maps,
    "training": make_training,
    "ablate": make_ablations,
    "figures": make_figures,
    "table": make_table,
}

if __name__ == "__main__":
    for part in sys.argv[2:] or PARTS:
        PARTS[part](Path(sys.argv[1]))
