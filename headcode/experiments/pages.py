"""Results as pages: DIR/NAME.md from DIR/NAME/findings.json and commentary.md, and the tables of claims in DIR.md.

A page is a function of these two files alone, so that page and data cannot part. `headcode reproduce NAME --pages DIR`
writes data and page; without NAME it writes all pages again from the data that is there, also those of experiments
that have not been run. In a commentary, which stands below the figure (what follows its
heading "Notes": below the tables), numbers come from the data:

    {{hyla | compositional}}                   the cell of that column, in the row that has a cell "hyla"
    {{softmax; 1 (last); codes | held out}}    in the row that has all these cells
    {{test: HYLA is ahead of linear}}          the difference that was measured for the statement that contains this
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headcode.experiments.base import NO_SEED, Experiment, Row, Verdict
from headcode.experiments.claims import CLAIMS, Claim
from headcode.experiments.mean import Mean
from headcode.files import replace_file

FINDINGS, COMMENTARY = "findings.json", "commentary.md"
LONG_TABLE = 16
"""Rows; a longer table is folded."""
MOST_TESTS = 6
"""Listed in a row of the table of claims; of more the row has the number."""
SCALE = "laptop"
ONE_SEED = " (one seed)"
Findings = dict[str, Any]


def page(experiment: Experiment, findings: Findings, commentary: str = "", files: str = "") -> str:
    """The page of an experiment that was run; its figures are at `files`."""
    said, _, notes = fill(commentary, findings).partition("## Notes\n")
    lines = _head(experiment)
    for figure in findings.get("figures", ()):
        lines += [f"![{experiment.title}]({files}{figure})", ""]
    lines += [said.strip(), ""] if said.strip() else []
    tests = [_test(verdict) for verdict in _verdicts(findings)]
    lines += ["## Verdicts", ""]
    lines += ["On each statement; [what the words mean](../results.md#at-a-glance).", ""] if files else []
    lines += [markdown_table(tests), "", "## Numbers", ""]
    for table in findings["tables"]:
        lines += _table(table["title"], table["rows"])
    lines += ["## Notes", "", notes.strip(), ""] if notes.strip() else []
    return "\n".join([*lines, *_origin(experiment, findings), ""])


def _test(verdict: Verdict) -> Row:
    """A verdict's row; where the runs of one side are missing there is none yet."""
    if verdict.evidence == NO_SEED:
        return {"statement": verdict.statement, "measured": None, "verdict": "not run yet"}
    return {"statement": verdict.statement, "measured": verdict.evidence, "verdict": verdict.word}


def page_to_come(experiment: Experiment) -> str:
    """The page of an experiment that has no results yet."""
    lines = [*_head(experiment), f"**Not run yet at {SCALE} scale.**", "", f"**Selection:** {experiment.selection}", ""]
    return "\n".join([*lines, *_command(experiment, SCALE, "it trains for minutes to hours"), ""])


def _head(experiment: Experiment) -> list[str]:
    return [f"# {experiment.title}", "", experiment.question, "", f"**The paper:** {experiment.claim}", ""]


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    if len(rows) <= LONG_TABLE:
        return [f"{title}:", "", markdown_table(rows), ""]
    summary = f"<summary>{title} ({len(rows)} rows)</summary>"
    return ["<details markdown>", summary, "", markdown_table(rows), "", "</details>", ""]


def _origin(experiment: Experiment, findings: Findings) -> list[str]:
    """How the runs were chosen, which are missing, and the command."""
    scale, runs, recorded = findings["scale"], findings["runs"], findings["taken from kept records"]
    seeds = ", ".join(map(str, findings["seeds"]))
    lines = ["## How it was made", "", f"- **Selection**: {findings['selection']}"]
    what = f"{runs} runs{f', {recorded} of them taken from kept records' if recorded else ''}"
    lines.append(
        f"- **Runs**: `{scale}` scale, {what if experiment.trains else 'none: nothing is trained'}; seeds {seeds}."
    )
    missing = findings.get("missing", ())
    if missing:
        more = f", and {len(missing) - 5} more" if len(missing) > 5 else ""
        lines.append(f"- **Not run yet**: {len(missing)} runs: {'; '.join(missing[:5])}{more}.")
    if commits := findings.get("commits", ()):
        lines.append(f"- **Code of the runs**: commit {', '.join(commits)}.")
    lines += [f"- **Failed, and left out**: {name}: {message}" for name, message in findings.get("failed", {}).items()]
    models = runs + len(missing) + len(findings.get("failed", {}))
    return [*lines, "", *_command(experiment, scale, f"it trains {models} models" if experiment.trains else "minutes")]


def _command(experiment: Experiment, scale: str, reason: str) -> list[str]:
    jobs = " --jobs 2 --threads 1" if experiment.trains else ""
    return [f"<!-- not run: {reason} -->", "```sh", f"{command(experiment.name, scale)}{jobs}", "```"]


def command(name: str, scale: str) -> str:
    return f"headcode reproduce {name} --scale {scale}"


def _verdicts(findings: Findings) -> list[Verdict]:
    """Verdicts as they are worded today: older findings have another word for what is inconclusive."""
    return [Verdict(v["statement"], v["holds"], v["evidence"]) for v in findings["verdicts"]]


def fill(commentary: str, findings: Findings) -> str:
    """The commentary with its numbers."""

    def number(found: re.Match[str]) -> str:
        asked = found[1].strip()
        answers = _measured(findings, asked) if asked.startswith("test:") else _cells(findings, asked)
        if len(answers) != 1:
            count = f"{len(answers)} places have" if answers else "the findings do not have"
            raise ValueError(f"The commentary of {findings['experiment']} asks for {found[0]}, which {count}.")
        return answers[0]

    return re.sub(r"\{\{(.+?)\}\}", number, commentary)


def _measured(findings: Findings, asked: str) -> list[str]:
    part = asked.removeprefix("test:").strip()
    return [measured(verdict) for verdict in _verdicts(findings) if part in verdict.statement]


def _cells(findings: Findings, asked: str) -> list[str]:
    keys, _, column = asked.rpartition("|")
    wanted = {key.strip() for key in keys.split(";")}
    rows = [row for table in findings["tables"] for row in table["rows"] if column.strip() in row]
    return [shown(row[column.strip()]) for row in rows if wanted <= {shown(cell) for cell in row.values()}]


def measured(verdict: Verdict) -> str:
    """What was measured, without the seeds' own numbers.

    >>> measured(Verdict("A is ahead.", None, "difference +0.105 ± 0.299: +0.052 (seed 0), +0.158 (seed 1)"))
    '+0.105 ± 0.299'
    >>> measured(Verdict("A is ahead.", None, "difference +0.105 (seed 0); one seed only"))
    '+0.105 (one seed)'
    """
    found = re.match(r"difference (\S+)( ± [^\s:;]+)?", verdict.evidence)
    return verdict.evidence if not found else f"{found[1]}{found[2] or ONE_SEED}"


def write_pages(folder: Path, experiments: Sequence[Experiment]) -> list[Path]:
    """The pages of all experiments, from the data in FOLDER/NAME, and the tables of claims in FOLDER.md."""
    return [*(_write_page(folder, experiment) for experiment in experiments), *_write_tables(folder)]


def publish(results: Path, folder: Path, experiment: Experiment) -> list[Path]:
    """Take an experiment's results over into FOLDER/NAME; its page, and the tables of claims."""
    kept = folder / experiment.name
    kept.mkdir(parents=True, exist_ok=True)
    for path in sorted(results.iterdir()):
        if path.is_file() and path.suffix not in (".svg", ".md"):  # the page has what findings.md has
            shutil.copyfile(path, kept / path.name)
    return [_write_page(folder, experiment), *_write_tables(folder)]


def _write_page(folder: Path, experiment: Experiment) -> Path:
    path, data = folder / f"{experiment.name}.md", folder / experiment.name
    if (data / FINDINGS).is_file():
        commentary = data / COMMENTARY
        said = commentary.read_text(encoding="utf-8") if commentary.is_file() else ""
        text = page(experiment, read_findings(folder, experiment.name), said, f"{experiment.name}/")
    else:
        text = page_to_come(experiment)
    replace_file(path, text.encode())
    return path


def read_findings(folder: Path, name: str) -> Findings:
    found = json.loads((folder / name / FINDINGS).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def _write_tables(folder: Path) -> list[Path]:
    """Put the tables between the marks of FOLDER.md, if there is such a page."""
    path = folder.with_suffix(".md")
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    for name, table in (("claims", claims_table(folder)), ("figures", figures_table(folder))):
        begin, end = f"<!-- {name}: written by headcode reproduce -->", f"<!-- end of {name} -->"
        before, begun, rest = text.partition(begin)
        _, ended, after = rest.partition(end)
        if not begun or not ended:
            raise ValueError(f"{path} has no place for its table: the lines {begin} and {end} are missing.")
        text = f"{before}{begin}\n\n{table}\n\n{end}{after}"
    replace_file(path, text.encode())
    return [path]


def claims_table(folder: Path) -> str:
    """A row for every claim: what the paper says, what we measured, and the verdict."""
    rows = []
    for claim in CLAIMS:
        page = f"[{_title(claim)}]({_address(claim, folder)})" if _address(claim, folder) else None
        told = {"where": claim.item, "the paper": claim.says, "ours": _ours(claim, folder)}
        rows.append({**told, "verdict": _word([claim], folder), "page": page})
    return markdown_table(rows)


def figures_table(folder: Path) -> str:
    """A row for every figure and table, and the experiment behind it: its command, its last run and its verdicts."""
    groups: dict[tuple[str, str, str], list[Claim]] = {}
    for claim in CLAIMS:
        groups.setdefault((claim.item, claim.experiment, claim.command), []).append(claim)
    rows = []
    for (item, name, line), claims in groups.items():
        address = _address(claims[0], folder)
        if name and address:
            line = f"{command(name, SCALE)}"
        run = _last_run(folder, name) if name else "see there"
        told = {"figure or table": item, "command": f"`{line}`" if line else None}
        rows.append({**told, "last run": f"[{run}]({address})" if address else run, "verdict": _word(claims, folder)})
    return markdown_table(rows)


def _title(claim: Claim) -> str:
    return claim.experiment or Path(claim.page.partition("#")[0]).stem


def _address(claim: Claim, folder: Path) -> str:
    """Of the page that answers a claim, seen from the table's page; empty if there is none yet."""
    written = bool(claim.experiment) and (folder / f"{claim.experiment}.md").is_file()
    return claim.page or (f"{folder.name}/{claim.experiment}.md" if written else "")


def _tests(claim: Claim, folder: Path) -> list[Verdict] | None:
    """The verdicts that decide a claim; None if its experiment, or what it needs of it, has not been run."""
    if not (folder / claim.experiment / FINDINGS).is_file():
        return None
    verdicts = _verdicts(read_findings(folder, claim.experiment))
    tests = [v for v in verdicts if not claim.tests or any(re.search(test, v.statement) for test in claim.tests)]
    decided = [test for test in tests if test.evidence != NO_SEED]
    return None if tests and not decided else decided


def _ours(claim: Claim, folder: Path) -> str:
    """What we measured, and in which runs."""
    if claim.ours:
        return claim.ours
    tests = _tests(claim, folder)
    if not tests:
        return "–"
    if len(tests) > MOST_TESTS:
        told = f"{len(tests)} tests"
    elif len(tests) == 1:
        told = measured(tests[0])
    else:
        told = "; ".join(f"{label}: {measured(v)}" for label, v in zip(_labels(tests), tests, strict=True))
    if all(measured(test).endswith(ONE_SEED) for test in tests):
        return f"{told.replace(ONE_SEED, '')} ({read_findings(folder, claim.experiment)['scale']}, one seed)"
    return f"{told} ({_last_run(folder, claim.experiment)})"


def _labels(tests: Sequence[Verdict]) -> list[str]:
    """The statements without the words that all of them begin or end with, but for two words before they differ."""
    words = [test.statement.rstrip(".").split() for test in tests]
    shortest = min(map(len, words))
    first = next((i for i in range(shortest) if len({w[i] for w in words}) > 1), shortest)
    begin = max(first - 2, 0)
    last = next((i for i in range(shortest - first) if len({w[-1 - i] for w in words}) > 1), shortest - first)
    labels = [" ".join(w[begin : len(w) - last]).rstrip(":,") for w in words]
    whole = all(label and label.count("(") == label.count(")") for label in labels)
    return labels if whole else [" ".join(w[begin:]) for w in words]


def _word(claims: Sequence[Claim], folder: Path) -> str:
    """The verdict on some claims, in a word; where their tests differ, how many have which."""
    words: list[str] = []
    for claim in claims:
        tests = _tests(claim, folder) if not claim.word else []
        if tests is None:
            words.append(f"not run yet at {SCALE} scale")
        elif tests:
            words += [_told(claim, test.holds) for test in tests]
        else:
            words.append(claim.word or "not tested")
    counts = {word: words.count(word) for word in sorted(set(words), key=_rank)}
    if len(counts) == 1:
        return words[0]
    return ", ".join(f"{word} ({count} of {len(words)})" for word, count in counts.items())


def _told(claim: Claim, holds: bool | None) -> str:
    if claim.kind == "no claim" and holds is not None:
        return "holds here" if holds else "does not hold here"
    if claim.kind == "no difference" and holds is not None:
        return "disagrees"
    return Verdict("", not holds if claim.kind == "opposite" and holds is not None else holds, "").word


def _rank(word: str) -> tuple[int, str]:
    order = ("supports", "holds here", "disagrees", "does not hold here", "inconclusive")
    return order.index(word) if word in order else len(order), word


def _last_run(folder: Path, name: str) -> str:
    if not (folder / name / FINDINGS).is_file():
        return f"not run yet at {SCALE} scale"
    findings = read_findings(folder, name)
    seeds = findings["seeds"]
    words = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    return f"{findings['scale']}, {words}"


def table_cells(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The columns of a table, each cell as it is shown."""
    return {column: [shown(row.get(column)) for row in rows] for column in rows[0]} if rows else {}


def markdown_table(rows: Sequence[Row]) -> str:
    if not rows:
        return "(no rows)"
    columns = table_cells(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*columns.values(), strict=True)]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A cell of a table; a mean may be one, or its parts as a findings file has them."""
    if isinstance(value, Mapping):
        value = None if value["value"] is None else Mean(**{**value, "each": tuple(value["each"])})
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
