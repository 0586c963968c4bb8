"""Datasets as sources of text: folders of data files, saved datasets, and what is said when the hub is out of reach."""

import json
import os
import sys

import pytest

from headcode.tasks.language import corpus
from headcode.tasks.language.corpus import StreamedDataset
from headcode.tasks.language.prepare import prepare
from headcode.tasks.language.tokenizer import train_bpe

POEM = "Ein Rabe saß auf einem Stein,\n日本語 too.\n"


@pytest.fixture
def local(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"text": f"Row {n}. {POEM}", "number": n} for n in range(30)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_a_folder_of_data_files(local):
    source = StreamedDataset(str(local))
    documents = [(document.split, "".join(document.pieces)) for document in source.documents(0.2)]
    assert [text for _, text in documents] == [f"Row {n}. {POEM}" for n in range(30)]
    assert {split for split, _ in documents} == {"train", "validation"}
    limited = prepare(source, tokenizer="bytes", max_tokens=500)
    whole = prepare(source, tokenizer="bytes")
    assert limited.count("train") == 500 < whole.count("train")


def test_its_own_validation_split(local):
    (local / "validation.jsonl").write_text(json.dumps({"text": "held out", "number": 0}))
    documents = [(d.split, "".join(d.pieces)) for d in StreamedDataset(str(local)).documents(0.2)]
    assert [split for split, _ in documents] == ["validation"] + ["train"] * 30
    assert documents[0][1] == "held out"


def test_a_saved_dataset(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    documents = StreamedDataset(str(tmp_path / "saved")).documents(0.0)
    assert ["".join(document.pieces) for document in documents] == ["one", "two"]


def test_a_column_that_is_not_there(local):
    with pytest.raises(ValueError, match="has no text in the column 'body'; it has: text, number"):
        list(StreamedDataset(str(local), "body").documents(0.1))


def test_wikitext_rows_become_articles():
    lines = [
        "",
        " = First = \n",
        "",
        " Words . \n",
        " = = Section = = \n",
        " More . \n",
        " = Second = \n",
        " End \n",
    ]
    source = StreamedDataset("wikitext")
    articles = list(source._texts({"text": line} for line in lines))
    assert source.whole and len(articles) == 2
    assert articles[0].endswith(" More . \n") and articles[1] == " = Second = \n End \n"


def test_unreachable(monkeypatch):
    import datasets

    def fail(*arguments, **options):
        raise ConnectionError("Couldn't reach the hub.\nMax retries exceeded")

    def lookup(*arguments):
        raise OSError("Name or service not known")

    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever happens to it
        monkeypatch.delenv(name)
    monkeypatch.setattr(corpus.socket, "getaddrinfo", lookup)
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ValueError, match=r"'c4' could not be reached or read \(Couldn't reach the hub. Max retries"):
        next(StreamedDataset("c4").documents(0.1))
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # no minutes of attempts to connect
    with pytest.raises(ValueError, match="There is no dataset ./nowhere"):
        StreamedDataset("./nowhere")


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(corpus, "_hub_is_there", lambda: True)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'headcode\[hf\]'"):
        next(StreamedDataset("c4").documents(0.1))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"headcode\[text\]'; or use --tokenizer bytes"):
        train_bpe([POEM], 300)
