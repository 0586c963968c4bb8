"""Pages of results: rendered from the committed findings, which the committed records give again."""

import csv
import json
import re
import shutil

import pytest

from headcode.cli import COMMANDS
from headcode.experiments import EXPERIMENTS, Mean, Study, experiment, reproduce
from headcode.experiments._table_a1 import TABLE_A1
from headcode.experiments.base import Verdict
from headcode.experiments.claims import CLAIMS, Claim
from headcode.experiments.pages import (
    COMMENTARY,
    FINDINGS,
    claims_table,
    figures_table,
    fill,
    markdown_table,
    measured,
    page,
    publish,
    read_findings,
    shown,
    write_pages,
)
from headcode.experiments.paper import agree, beside_the_paper, no_model_solves
from headcode.experiments.records import find_records, recorded_rows
from headcode.experiments.run import NothingRecorded, findings_of
from headcode.run import RunConfig
from tests.experiments.test_records import Small, no_training
from tests.support import ROOT
from tests.support.commands import exit_code

RESULTS, RECORDS = ROOT / "docs" / "results", ROOT / "docs" / "results" / "records"
RUN = [name for name in EXPERIMENTS if (RESULTS / name / FINDINGS).is_file()]


def quiet(words):
    """Nothing is said."""


def rows_of(name, folder):
    """The rows of an experiment's last findings: from its records, or as its committed table has them."""
    hashes = read_findings(RESULTS, name)["hashes"]
    lines = find_records(RECORDS, hashes.values())
    if not lines:  # runs on texts, whose configurations have paths
        with (RESULTS / name / "results.csv").open(encoding="utf-8") as file:
            return [{field: cell_of(text) for field, text in row.items()} for row in csv.DictReader(file)]
    pairs = [(run, RunConfig.from_dict(json.loads(lines[identity])["config"])) for run, identity in hashes.items()]
    found = recorded_rows(pairs, RECORDS, folder)
    return [found[run] for run in hashes]


def cell_of(text):
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "": None}.get(text, text)


def test_every_experiment_has_a_page_and_every_page_is_that_of_the_committed_data(tmp_path):
    """What `headcode reproduce --pages` would write is what is there."""
    copy = tmp_path / "results"
    for name in RUN:
        shutil.copytree(RESULTS / name, copy / name)
    shutil.copy(RESULTS.with_suffix(".md"), tmp_path)
    written = write_pages(copy, [experiment(name) for name in EXPERIMENTS])
    assert {path.name for path in written} == {*(f"{name}.md" for name in EXPERIMENTS), "results.md"}
    for path in written:
        kept = RESULTS.parent / path.relative_to(tmp_path)
        assert path.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8"), f"{kept} is not that of its data"
    assert len(RUN) >= 13


@pytest.mark.parametrize("name", [name for name in RUN if not experiment(name).needs_weights])
def test_the_records_give_the_page_again(name, tmp_path):
    found, kept = experiment(name), read_findings(RESULTS, name)
    study = Study(kept["scale"], rows_of(name, tmp_path), tmp_path)
    found.analyse(study, quiet)
    tables = [*found.tables(study), *beside_the_paper(found, study)]
    again = findings_of(found, study, tables, found.verdicts(study), kept["figures"])
    assert (again["hashes"], again["seeds"], again["runs"]) == (kept["hashes"], kept["seeds"], kept["runs"])
    same = {"tables": json.loads(json.dumps(again["tables"])), "verdicts": again["verdicts"]}
    commentary = (RESULTS / name / COMMENTARY).read_text(encoding="utf-8")
    text = page(found, {**kept, **same}, commentary, f"{name}/")
    assert text == (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_every_command_of_the_tables_exists():
    text = RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    named = set(re.findall(r"headcode reproduce ([a-z][a-z-]*)", text)) - {"all"}
    assert named <= set(EXPERIMENTS) and len(named) >= 8
    figures = text.split("<!-- figures")[1].split("<!-- end of figures")[0]
    assert {claim.item for claim in CLAIMS} == set(re.findall(r"^\| ([^|]+?) \|", figures, re.M)) - {
        "figure or table",
        "---",
    }


def test_what_answers_a_claim_without_an_experiment_exists():
    """Its command, be it ours or a test, and its page."""
    for claim in CLAIMS:
        program, *words = claim.command.split() or [""]
        assert program in ("", "headcode", "pytest"), claim.command
        assert program != "headcode" or words[0] in COMMANDS, claim.command
        assert program != "pytest" or (ROOT / words[0]).exists(), claim.command
        assert not claim.page or (ROOT / "docs" / claim.page).is_file(), claim.page


def test_the_tables_name_every_figure_and_table_of_the_paper():
    items = " ".join(claim.item for claim in CLAIMS)
    figures = "2B 2C 2D A2 A3 3 4 5A/B A6 A7 5C 5D 5E A8 5F 6 A4 A5"
    for figure in figures.split():
        assert re.search(rf"\b{figure}\b", items), figure
    assert all(name in items for name in ("Eq. 2–5", "Eq. 6–7", "Table A1", "Table A3", "B.2", "Compute", "Discussion"))
    assert {claim.experiment for claim in CLAIMS} >= set(EXPERIMENTS)


# R² × 100 on fuzzy logic and accuracy × 100 on SRAVEN, each with its standard error, as reported.
REPORTED = {
    "softmax attention": (63.28, 2.31, 56.56, 1.05),
    "linear attention": (59.89, 5.22, 56.30, 1.11),
    "HYLA": (81.13, 7.77, 69.13, 1.90),
    "linear attention + RMSHead": (68.93, 5.10, 59.01, 2.50),
    "linear attention + RMSHead + nonlinear value": (56.91, 4.25, 55.38, 0.32),
    "HYLA - RMSHead": (81.27, 7.88, 62.53, 5.73),
    "HYLA - nonlinearity": (84.54, 5.32, 56.54, 0.21),
    "HYLA - nonlinearity - RMSHead": (79.42, 7.43, 56.33, 1.41),
    "HYLA - RMSHead + softmax": (70.98, 7.08, 38.21, 2.98),
    "HYLA + deeper value network": (87.65, 4.54, 66.59, 0.08),
    "softmax attention + MoE": (63.83, 6.07, 57.68, 1.31),
    "linear attention + MoE": (60.09, 6.16, 64.34, 4.30),
    "HYLA + MoE": (82.37, 6.55, 66.94, 3.94),
}


def test_the_papers_thirteen_rows_stand_beside_ours():
    ours = {model.words: [100 * number for number in (*model.logic, *model.sraven)] for model in TABLE_A1.values()}
    assert ours == {words: pytest.approx(numbers) for words, numbers in REPORTED.items()}
    for name, task in (("logic-ablation", "logic"), ("sraven-ablation", "sraven")):
        rows = read_findings(RESULTS, name)["tables"][-1]["rows"]
        told = {row["model"]: row["paper, as reported"] for row in rows}
        assert told == {model.words: model.reported_words(task) for model in TABLE_A1.values()}
        assert sum(row["ours"] is not None for row in rows) >= 8
    assert TABLE_A1["hyla"].reported_words("logic") == "0.811 (s.e. 0.078)"


def test_agreement_by_hand():
    """Ours: 0.6 ± 0.2484 (t with two degrees of freedom, 4.3027 · 0.1 / √3); the paper's: mean ± 1.96 · 0.1."""
    ours = Mean.of([0.5, 0.6, 0.7])
    assert agree(ours, (1.04, 0.1)) is True and agree(ours, (1.05, 0.1)) is False
    assert agree(ours, (0.16, 0.1)) is True and agree(ours, (0.15, 0.1)) is False
    assert agree(Mean.of([0.6]), (0.6, 0.1)) is None


def test_who_solves_functions_of_new_terms():
    """0.6 ± 0.248, 0.3 ± 0.124 (t of two degrees of freedom), and one that may be either."""
    high, low, wide = Mean.of([0.5, 0.6, 0.7]), Mean.of([0.25, 0.3, 0.35]), Mean.of([0.1, 0.4, 0.9])
    assert no_model_solves({"a": low, "b": high}).holds is False
    assert no_model_solves({"a": low, "b": low}).holds is True
    assert no_model_solves({"a": low, "b": wide}).holds is None
    assert no_model_solves({"a": low, "b": Mean.of([0.1])}).holds is None  # one seed
    told = no_model_solves({"a": low, "b": wide, "c": high, "d": Mean.of([None])}).evidence
    assert told == "R² on novel, the highest three: c 0.600 ± 0.248, b 0.467 ± 1.004, a 0.300 ± 0.124"


def test_models_with_experts_stand_in_rows_of_their_own(tmp_path):
    fixed = {"steps": 7, "learning_rate": 1e-3, "weight_decay": 0.1, "iid/r2": 0.5}
    rows = [
        {**fixed, **TABLE_A1[model].fields, "seed": seed, "compositional/r2": score + seed / 10}
        for model, score in (("softmax", 0.25), ("softmax_experts", 0.5))
        for seed in range(2)
    ]
    (table,) = beside_the_paper(experiment("logic-ablation"), Study("laptop", rows, tmp_path))
    ours = {row["here"]: row["ours"] for row in table.rows if row["ours"]}
    assert ours == {"softmax": Mean.of([0.25, 0.35]), "softmax_experts": Mean.of([0.5, 0.6])}
    assert beside_the_paper(experiment("heads"), Study("laptop", rows, tmp_path)) == []


SCORE = {"value": 0.5, "half_width": 0.25, "count": 3, "each": [0.5, 0.5, 0.5]}
NO_SCORE = {"value": None, "half_width": None, "count": 0, "each": []}
AHEAD = {"statement": "A is ahead.", "holds": None, "evidence": "difference +0.100 ± 0.200: +0.1 (seed 0)"}
FINDINGS_OF_TWO = {
    "experiment": "small",
    "scale": "laptop",
    "runs": 6,
    "taken from kept records": 0,
    "seeds": [0, 1, 2],
    "selection": "None.",
    "figures": ["small.png"],
    "missing": [f"seed={seed}" for seed in range(3, 10)],
    "commits": ["0123456789ab"],
    "tables": [
        {
            "title": "Scores",
            "rows": [{"method": "hyla", "layer": 1, "R²": SCORE}, {"method": "hyla", "layer": 2, "R²": NO_SCORE}],
        }
    ],
    "verdicts": [{**AHEAD, "word": "cannot tell"}],  # as findings of version 0.1 have it
}


def test_a_page_has_the_figure_the_sentences_the_tables_and_the_command():
    commentary = "Layer one has {{hyla; 1 | R²}}, {{test: A is}}.\n\n## Notes\n\n- More."
    text = page(Small(), FINDINGS_OF_TWO, commentary, "small/")
    assert text == (
        "# Small\n\nA test?\n\n**The paper:** Nothing.\n\n![Small](small/small.png)\n\n"
        "Layer one has 0.500 ± 0.250, +0.100 ± 0.200.\n\n## Verdicts\n\n"
        "On each statement; [what the words mean](../results.md#at-a-glance).\n\n"
        "| statement | measured | verdict |\n| --- | --- | --- |\n"
        "| A is ahead. | difference +0.100 ± 0.200: +0.1 (seed 0) | inconclusive |\n\n## Numbers\n\nScores:\n\n"
        "| method | layer | R² |\n| --- | --- | --- |\n| hyla | 1 | 0.500 ± 0.250 |\n| hyla | 2 | – |\n\n"
        "## Notes\n\n- More.\n\n## How it was made\n\n- **Selection**: None.\n"
        "- **Runs**: `laptop` scale, 6 runs; seeds 0, 1, 2.\n"
        "- **Not run yet**: 7 runs: seed=3; seed=4; seed=5; seed=6; seed=7, and 2 more.\n"
        "- **Code of the runs**: commit 0123456789ab.\n\n<!-- not run: it trains 13 models -->\n```sh\n"
        "headcode reproduce small --scale laptop --jobs 2 --threads 1\n```\n"
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("{{softmax | R²}}", "which the findings do not have"),
        ("{{hyla | loss}}", "which the findings do not have"),
        ("{{hyla | R²}}", "which 2 places have"),
        ("{{test: B is}}", "which the findings do not have"),
    ],
)
def test_a_commentary_that_asks_for_what_is_not_there_is_refused(asked, why):
    with pytest.raises(ValueError, match="The commentary of small asks for .*, " + why):
        fill(f"It has {asked}.", FINDINGS_OF_TWO)


def test_cells_and_measurements_as_they_are_shown():
    assert [shown(cell) for cell in (None, 0.12345, 402824, True, "relu", Mean.of([0.5]))] == [
        "–", "0.123", "402,824", "True", "relu", "0.500"]  # fmt: skip
    assert markdown_table([]) == "(no rows)"
    assert markdown_table([{"a": 1}, {"b": 2}]) == "| a |\n| --- |\n| 1 |\n| – |"
    assert measured(Verdict("s", None, "place 2 of 3; one seed")) == "place 2 of 3; one seed"
    long = {**FINDINGS_OF_TWO, "tables": [{"title": "Long", "rows": [{"n": n} for n in range(17)]}]}
    assert "<summary>Long (17 rows)</summary>" in page(Small(), long)
    nothing = {**FINDINGS_OF_TWO, "verdicts": [{**AHEAD, "evidence": "no seed has both"}]}
    assert "| A is ahead. | – | not run yet |" in page(Small(), nothing)


def claims_of(monkeypatch, folder, *claims):
    monkeypatch.setattr("headcode.experiments.pages.CLAIMS", claims)
    lines = claims_table(folder).splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def test_claims_take_their_verdicts_from_the_findings(monkeypatch, tmp_path):
    def verdict(statement, holds, difference):
        return {"statement": statement, "holds": holds, "evidence": f"difference {difference}: +1 (seed 0)"}

    told = [
        verdict("A is ahead of B with N=1.", True, "+0.3 ± 0.1"),
        verdict("A is ahead of C with N=1.", None, "+0.2 ± 0.4"),
        verdict("D helps.", True, "+0.1 ± 0.05"),
        verdict("E helps.", None, "+0.1 ± 0.5"),
        {"statement": "G helps.", "holds": None, "evidence": "no seed has both"},
    ]
    (tmp_path / "results" / "small").mkdir(parents=True)
    (tmp_path / "results" / "small" / FINDINGS).write_text(json.dumps({**FINDINGS_OF_TWO, "verdicts": told}))
    folder = tmp_path / "results"
    last, mixed = "(laptop, seeds 0, 1, 2)", "supports (1 of 2), inconclusive (1 of 2)"
    assert claims_of(
        monkeypatch,
        folder,
        Claim("Fig. 1", "both", "small", ("A is ahead",)),
        Claim("Fig. 2", "one", "small", ("ahead of B",)),
        Claim("Fig. 3", "helps", "small", ("D helps",), kind="no difference"),
        Claim("Fig. 4", "hurts", "small", ("D helps",), kind="opposite"),
        Claim("Fig. 5", "ours", "small", ("D helps",), kind="no claim"),
        Claim("Fig. 6", "nothing", "small", ("F helps",)),
        Claim("Fig. 7", "no difference", "small", ("E helps",), kind="no difference"),
        Claim("Fig. 8", "to come", "later"),
        Claim("Fig. 9", "one side is missing", "small", ("G helps",)),
        Claim("B.2", "in words", ours="half", word="disagrees", page="tasks.md#there"),
    ) == [
        ("Fig. 1", "both", f"ahead of B: +0.3 ± 0.1; ahead of C: +0.2 ± 0.4 {last}", mixed, "–"),
        ("Fig. 2", "one", f"+0.3 ± 0.1 {last}", "supports", "–"),
        ("Fig. 3", "helps", f"+0.1 ± 0.05 {last}", "disagrees", "–"),
        ("Fig. 4", "hurts", f"+0.1 ± 0.05 {last}", "disagrees", "–"),
        ("Fig. 5", "ours", f"+0.1 ± 0.05 {last}", "holds here", "–"),
        ("Fig. 6", "nothing", "–", "not tested", "–"),
        ("Fig. 7", "no difference", f"+0.1 ± 0.5 {last}", "inconclusive", "–"),
        ("Fig. 8", "to come", "–", "not run yet at laptop scale", "–"),
        ("Fig. 9", "one side is missing", "–", "not run yet at laptop scale", "–"),
        ("B.2", "in words", "half", "disagrees", "[tasks](tasks.md#there)"),
    ]  # fmt: skip
    assert "| Fig. 8 | – | not run yet at laptop scale | not run yet at laptop scale |" in figures_table(folder)


def test_results_are_taken_over_as_a_page(tmp_path, monkeypatch):
    """Data without pictures for print, the page, and the tables of claims between their marks."""
    results, folder = tmp_path / "laptop", tmp_path / "docs" / "results"
    results.mkdir()
    (results / FINDINGS).write_text(json.dumps(FINDINGS_OF_TWO))
    for name in ("findings.md", "small.svg", "small.png", "curves.json"):
        (results / name).write_text("x")
    folder.mkdir(parents=True)
    index = folder.with_suffix(".md")
    marks = [f"<!-- {n}: written by headcode reproduce -->\nold\n<!-- end of {n} -->\n" for n in ("claims", "figures")]
    index.write_text(f"Before.\n{''.join(marks)}After.\n")
    monkeypatch.setattr("headcode.experiments.pages.CLAIMS", (Claim("Fig. 1", "both", "small"),))
    assert publish(results, folder, Small()) == [folder / "small.md", index]
    assert {path.name for path in (folder / "small").iterdir()} == {FINDINGS, "small.png", "curves.json"}
    text, last = index.read_text(encoding="utf-8"), "laptop, seeds 0, 1, 2"
    assert text.startswith("Before.\n<!-- claims") and text.endswith("<!-- end of figures -->\nAfter.\n")
    assert "old" not in text
    assert f"| Fig. 1 | both | +0.100 ± 0.200 ({last}) | inconclusive | [small](results/small.md) |" in text
    command = "headcode reproduce small --scale laptop"
    assert f"| Fig. 1 | `{command}` | [{last}](results/small.md) | inconclusive |" in text
    index.write_text("No marks.\n")
    with pytest.raises(ValueError, match="has no place for its table: the lines <!-- claims"):
        publish(results, folder, Small())


def test_an_experiment_without_results_has_a_page_that_says_so(tmp_path):
    (path,) = write_pages(tmp_path, [Small()])
    text = path.read_text(encoding="utf-8")
    assert "**Not run yet at laptop scale.**" in text and "headcode reproduce small --scale laptop" in text


def test_recorded_runs_alone_make_a_page_that_names_the_others(tmp_path, monkeypatch):
    first, second, *_, last = (RECORDS / "heads.jsonl").read_bytes().splitlines()
    records = tmp_path / "records"
    records.mkdir()
    known = {"hash": json.loads(first)["hash"], "commit": "0123456789ab"} | json.loads(first)
    (records / "heads.jsonl").write_bytes(b"\n".join([json.dumps(known).encode(), second, last, b""]))
    monkeypatch.setattr("headcode.experiments.run.run_sweep", no_training)
    options = {"records": records, "recorded_only": True, "say": quiet}
    found = reproduce(experiment("heads"), "laptop", tmp_path / "out", pages=tmp_path / "pages", **options)
    assert (len(found.study.rows), len(found.study.missing)) == (3, 12)
    text = (tmp_path / "pages" / "heads.md").read_text(encoding="utf-8")
    assert f"- **Not run yet**: 12 runs: {found.study.missing[0]}; " in text and ", and 7 more.\n" in text
    assert "- **Code of the runs**: commit 0123456789ab.\n" in text
    nothing = {**options, "records": tmp_path / "empty"}
    with pytest.raises(NothingRecorded, match="has no record of a run of heads at laptop scale"):
        reproduce(experiment("heads"), "laptop", tmp_path / "none", **nothing)
    with pytest.raises(ValueError, match="logic-codes without training needs weights, which records do not have"):
        reproduce(experiment("logic-codes"), "laptop", tmp_path / "none", **options)


def test_the_command_refuses_in_one_sentence(tmp_path, capsys):
    pages = ("--pages", tmp_path)
    assert exit_code("reproduce", "heads", "--scale", "smoke", *pages, "--out", tmp_path / "out") == 2
    assert "Results of smoke scale say nothing, so they get no page" in capsys.readouterr().err
    assert exit_code("reproduce", "heads", "--scale", "laptop", "--recorded", "--out", tmp_path / "out") == 2
    assert "heads without training needs a folder of records" in capsys.readouterr().err
