"""Pages: self-contained and escaped; and the report about runs."""

import base64
import re

import pytest

from headcode.cli import main
from headcode.presets import override, preset
from headcode.report.page import Figure, Heading, Page, Preformatted, Table, Text
from headcode.train import Trainer

SIZES = {"dim": 12, "num_heads": 3, "qk_dim": 6, "v_dim": 6, "mlp_dim": 8, "num_layers": 2, "backend": "reference"}
SHORT = {"steps": 4, "batch_size": 8, "eval_size": 16, "eval_every": 2, "checkpoint_every": 0, "log_every": 1}


def test_everything_is_escaped():
    page = Page("<b>", "a & b")
    page.section("<i>", Text("<script>"), Heading('"h"'), Preformatted("</pre>", "<u>"), Table([{"<k>": "<v>"}]))
    text = page.html()
    for tag in ("<b>", "<i>", "<script>", "</pre></pre>", "<u>", "<k>", "<v>"):
        assert tag not in text
    assert "&lt;script&gt;" in text and "a &amp; b" in text


def test_numbers_stand_right_and_none_is_marked():
    """A table has no intervals, so it cannot say which of its numbers is the best."""
    rows = [{"method": "a", "r2": 0.25}, {"method": "b", "r2": 0.75}, {"method": "c", "r2": None}]
    text = Table(rows).html()
    assert '<td class="number">0.750</td>' in text and '<td class="number">0.250</td>' in text
    assert '<td class="number">–</td>' in text and "<td>a</td>" in text
    assert Table([{"n": 12345, "x": float("nan")}]).html().count("12,345") == 1


def test_a_picture_is_inside(tmp_path):
    picture = tmp_path / "p.svg"
    picture.write_text("<svg/>")
    text = Figure(picture, "caption").html()
    assert base64.b64encode(b"<svg/>").decode() in text and 'alt="caption"' in text


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for method in ("softmax", "hyla"):
        Trainer(override(preset("sraven-small"), method=method, **SIZES, **SHORT), root / method).run()
    return root


def test_report_of_two_runs(runs, tmp_path, capsys):
    main(["decode", str(runs / "hyla"), "--size", "64", "--controls", "shuffled"])
    main(["decode", str(runs / "hyla"), "--ablate", "--size", "16"])
    out = tmp_path / "report.html"
    main(["report", str(runs / "softmax"), str(runs / "hyla"), "--out", str(out)])
    assert capsys.readouterr().out.endswith(f"wrote {out}\n")
    text = out.read_text(encoding="utf-8")
    assert text.count("<img ") == 4  # scores, curves, decoding, ablation
    assert "Heads taken out" in text and "Decoding rules" in text and "best possible" in text
    assert "<td>method</td><td>&quot;softmax&quot;</td><td>&quot;hyla&quot;</td>" in text
    assert nothing_outside(text)


def test_maps_of_codes_are_on_the_page(runs, tmp_path):
    """Of the last layer, where `headcode codes --map` wrote them."""
    main(["codes", str(runs / "softmax"), "--size", "48", "--map", "pca", "--map-size", "48"])
    assert (runs / "softmax" / "codes-pca-layer1.npz").is_file()
    out = tmp_path / "report.html"
    main(["report", str(runs / "softmax"), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    assert "Map of the codes" in text and "coloured by rule" in text
    assert text.count("<img ") == 3 and text.count("data:image/png") == 1  # scores, curves and the map
    for path in (runs / "softmax").glob("codes*"):
        path.unlink()


def test_a_model_of_the_zoo_can_be_analysed_and_reported(tmp_path, monkeypatch):
    """The package's own folder is not written to: the analysis lies in zoo/NAME of the reader's folder."""
    monkeypatch.chdir(tmp_path)
    main(["report", "zoo/sraven-2-hyla"])
    hint = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "run headcode decode zoo/sraven-2-hyla --patch --ablate, then" in hint and "<h1>sraven-2-hyla</h1>" in hint
    main(["decode", "zoo/sraven-2-hyla", "--ablate", "--size", "16"])
    main(["report", "zoo/sraven-2-hyla"])
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Heads taken out" in text and text.count("<img ") == hint.count("<img ") + 1


def test_the_page_is_light_on_paper_and_prints_what_is_folded():
    page = Page("t", "l")
    page.section("s", Preformatted("inside", "folded"))
    text = page.html()
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert not re.search(r"@media \(prefers-color-scheme: dark\)", text)
    assert "details::details-content" in text.split("@media print")[1]


def nothing_outside(text):
    """No address of anything that a browser would fetch."""
    return not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"|@import|url\(', text)


def test_report_of_one_run_without_analysis(runs, tmp_path):
    out = tmp_path / "report.html"
    main(["report", str(runs / "softmax"), "--out", str(out)])
    text = out.read_text(encoding="utf-8")
    assert "Nothing here yet" in text and "Where the runs differ" not in text and nothing_outside(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Give at least one run folder"),
        (["zoo/logic-hyla", "--out", "page.pdf"], "name ends in .html, got 'page.pdf'"),
        (["zoo/logic-hyla", "zoo/sraven-2-hyla"], "compares runs of one task, got logic, sraven"),
        (["nowhere"], "is not a run folder"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", *arguments])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and words in said and said.count("\n") == 1
