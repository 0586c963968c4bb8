"""How the op's cost grows: what is measured, what the limit is, and the figure of `headcode bench ops`."""

import csv

import matplotlib.image
import pytest

from headcode.bench import growth
from headcode.bench.ops import Shape
from headcode.cli import main


@pytest.mark.parametrize(("method", "products"), [("softmax", 2), ("linear", 2), ("hyla", 3)])
def test_the_limit_counts_the_products_of_pairs_forward_and_twice_backward(method, products):
    # Scores, and sums over keys; a two-layer value net has one product more. 2 FLOPs for each multiply-add.
    assert growth.needed_flops(Shape(batch=2, heads=3, length=5, width=7), method) == 3 * 2 * products * 2 * 3 * 25 * 7
    shapes = [Shape(1, 1, 1, 1), Shape(1, 1, 2, 1)]
    assert growth.limits(shapes, method, 1e6) == pytest.approx([6e-3 * products, 24e-3 * products])


def test_one_size_changes_at_a_time_around_one_shape():
    for axis, sizes in growth.AXES.items():
        assert getattr(growth.BASE, axis) in sizes and list(sizes) == sorted(set(sizes))


def test_the_figure_and_its_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(growth, "BASE", Shape(batch=2, heads=3, length=5, width=2))
    monkeypatch.setattr(growth, "AXES", {"length": (5, 7), "heads": (2, 3), "width": (2, 3), "batch": (2,)})
    flags = ["--shapes", "--lengths", "--no-memory", "--repeats", "5", "--methods", "hyla", "linear", "--threads", "1"]
    main(["bench", "ops", *flags, "--out", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "ops.csv").open(encoding="utf-8")))
    shapes = ["B2 H3 T5 D2", "B2 H3 T7 D2", "B2 H2 T5 D2", "B2 H3 T5 D3"]  # the base is in every panel, measured once
    assert [row["shape"] for row in rows] == [shape for shape in shapes for _ in range(3)]
    assert [(row["method"], row["backend"]) for row in rows[:3]] == [
        ("hyla", "cpu"),
        ("linear", "cpu"),
        ("softmax", "torch"),
    ]
    for hyla, _, torch in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        ratio = float(hyla["milliseconds"]) / float(torch["milliseconds"])
        assert float(hyla["relative_to_torch"]) == pytest.approx(ratio)
        assert 0 < float(hyla["forward_error"]) < 1e-5 and torch["forward_error"] == ""
    picture = matplotlib.image.imread(tmp_path / "how-cost-grows.png")
    assert (picture[0, 0, :3] == 1).all()  # white
    printed = capsys.readouterr().out
    assert "B2 H2 T5 D2" in printed and "× reference" not in printed
