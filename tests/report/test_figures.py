"""Figures come from files, in vector and bitmap form, and say in words what they show."""

import numpy as np
import pytest

from headcode.analysis.decode import write_decoding
from headcode.analysis.files import write_arrays
from headcode.report import figures

PNG = b"\x89PNG"


def row(layer, source, f1, subset="all"):
    numbers = {"macro_f1": f1, "macro_f1_low": f1 - 0.1, "macro_f1_high": f1 + 0.1}
    return {"layer": layer, "source": source, "split": "compositional", "subset": subset, **numbers}


def drawn(paths):
    """The words of a figure, after a look at its files."""
    svg, png = paths
    assert (svg.suffix, png.suffix) == (".svg", ".png") and png.read_bytes()[:4] == PNG
    return svg.read_text()


@pytest.fixture
def decodings(tmp_path):
    rows = [row(layer, source, 0.5) for layer in (0, 1) for source in figures.SOURCES]
    rows += [row(1, "codes", 0.6, "solved"), row(1, "codes", 0.2, "failed")]
    return {m: write_decoding({"card": {}, "rows": rows}, tmp_path, m)[0] for m in ("softmax", "hyla")}


def test_decoding(decodings, tmp_path):
    words = drawn(figures.decoding(decodings, tmp_path / "d"))
    for word in ("softmax", "hyla", "residual stream", "untrained codes", "shuffled labels", "position alone"):
        assert word in words
    again = figures.decoding(decodings, tmp_path / "again")[0].read_text()
    assert again == words, "the same files give the same drawing"
    assert "solved" in drawn(figures.solved_against_failed(decodings, tmp_path / "s"))
    perfect = write_decoding({"card": {}, "rows": [row(1, "codes", 0.6, "solved")]}, tmp_path, "p")[0]
    assert "failed" in drawn(figures.solved_against_failed({"linear": perfect, **decodings}, tmp_path / "s"))


def test_the_legend_of_one_run_alone_is_not_cut(decodings, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(figures, "save", lambda figure, stem: found.append(figure) or [])
    figures.decoding({"hyla": decodings["hyla"]}, tmp_path / "d")
    (figure,) = found
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        label for label, _ in figures.SOURCES.values()
    ]


def test_maps_and_likeness(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"points": rng.normal(size=(30, 2)), "rule": np.arange(30) % 8, "target": rng.random(30)}
    path = write_arrays(tmp_path / "m.npz", arrays, {"task": "sraven"})
    words = drawn(figures.code_map({"layer 1": path}, tmp_path / "f", "rule"))
    assert "distribute" in words and "layer 1" in words
    assert "target" in drawn(figures.code_map({"a": path, "b": path}, tmp_path / "g", "target"))
    with pytest.raises(ValueError, match="coloured by rule, target, not by 'term'"):
        figures.code_map({"a": path}, tmp_path / "h", "term")
    few = write_arrays(
        tmp_path / "few.npz", {"points": arrays["points"], "rule": np.arange(30) % 2}, {"task": "sraven"}
    )
    assert "distribute" in drawn(figures.code_map({"few": few, "all": path}, tmp_path / "f", "rule"))
    matrix = rng.uniform(-1, 1, (8, 8))
    path = write_arrays(tmp_path / "l.npz", {"centred": matrix, "classes": np.arange(8)}, {"task": "sraven"})
    assert "held out" in drawn(figures.rule_likeness({"hyla": path}, tmp_path / "l"))


def test_training_patching_ablation_heads_and_lens(tmp_path):
    rows = [{"step": s, "macro_f1": s / 10, "solved": s / 20} for s in (0, 5, 9)]
    card = {"task": "sraven", "method": "hyla", "rows": rows}
    means = np.random.default_rng(0).normal(size=(3, 8, 2))
    path = write_arrays(
        tmp_path / "t.npz", {"means": means, "steps": np.array([0, 5, 9]), "classes": np.arange(8)}, card
    )
    assert "untrained" in drawn(figures.along_training({"hyla": path}, tmp_path / "t"))

    def result(name, rows):
        return write_decoding({"card": {}, "rows": rows}, tmp_path, name)[0]

    share = {"follows": 0.4, "follows_low": 0.3, "follows_high": 0.5, "pairs": 49}
    rows = [{"donor": "other_rule", "control": "none", "layer": "none", **share}]
    rows += [
        {"donor": "other_rule", "control": c, "layer": x, **share} for c in ("patched", "shuffled") for x in (0, "all")
    ]
    words = drawn(figures.patching({"hyla": result("p", rows)}, tmp_path / "p"))
    assert "heads shuffled" in words and "donor: other rule" in words and "hyla, 49 pairs" in words
    other = result("o", [{**r, "donor": "same_rule"} for r in rows])
    with pytest.raises(ValueError, match="has the donors same_rule, not 'other_rule'"):
        figures.patching({"hyla": tmp_path / "p.json", "linear": other}, tmp_path / "p")
    rows = [{"layer": None, "head": None, "accuracy": 0.9}]
    rows += [{"layer": i, "head": h, "accuracy": 0.5} for i in (0, 1) for h in range(3)]
    assert "accuracy lost" in drawn(figures.head_ablation({"hyla": result("a", rows)}, tmp_path / "a"))
    with pytest.raises(ValueError, match=r"Row 0 of .*b\.json has no valid head"):
        figures.head_ablation({"hyla": result("b", [{"layer": None, "accuracy": 0.9}])}, tmp_path / "b")
    rows = [
        {"method": m, "num_heads": h, "compositional": 0.1 * h, "iid": 0.2 * h, "metric": "r2"}
        for m in ("hyla", "softmax")
        for h in (2, 4)
    ]
    rows.append({**rows[0], "num_heads": 8, "iid": None})  # a metric that was not a number
    assert "softmax, compositional" in drawn(figures.heads_at_fixed_width(result("h", rows), tmp_path / "h"))
    rows = [
        {
            "layer": i,
            "norm_mean": 1.0,
            "rank_mean": 9.0,
            "rank_min": 5.0,
            "rank_max": 11.0,
            "explained": {"share": 0.4, "control": 0.1},
        }
        for i in range(3)
    ]
    assert "effective rank" in drawn(figures.lens_layers(result("lens", rows), tmp_path / "lens"))
