"""Text to tokens to windows: nothing lost, nothing twice, the same order however it is read."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from headcode.tasks import LanguageModelling, TaskStream, add_sums
from headcode.tasks.language import corpus, shards
from headcode.tasks.language.corpus import StandardLibrary, TextFiles
from headcode.tasks.language.prepare import prepare
from headcode.tasks.language.shards import ShardWriter, TokenShards, open_shards
from headcode.tasks.language.shuffle import key_of, shuffled
from headcode.tasks.language.tokenizer import ByteTokenizer, TextStream, Tokenizer, read_tokenizer, train_bpe

POEM = "Ein Rabe saß auf einem Stein,\nder sah gar müde aus — « oh nein! »\n日本語 too.\n"


@pytest.fixture
def folder(tmp_path):
    """Forty documents, each with a word of its own."""
    for n in range(40):
        (tmp_path / f"part-{n:02d}.txt").write_text(
            f"Document {n} begins. " + POEM * (1 + n % 3) + f"Its end is {n}.\n"
        )
    return tmp_path


def bytes_task(path, context=7, **options):
    text = prepare(TextFiles(path), tokenizer="bytes", **options)
    return LanguageModelling(context=context).with_text(text)


class TestShuffle:
    @given(st.integers(1, 300), st.integers(0, 2**64 - 1))
    def test_every_thing_has_one_place(self, count, key):
        assert sorted(shuffled(np.arange(count), count, key).tolist()) == list(range(count))

    def test_places_are_computed_one_by_one(self):
        whole = shuffled(np.arange(1000), 1000, 5)
        assert [int(shuffled(np.array([n]), 1000, 5)[0]) for n in (0, 17, 999)] == whole[[0, 17, 999]].tolist()

    def test_orders_differ_and_are_even(self):
        """Over many keys, each of 5 things is first about equally often."""
        first = [int(shuffled(np.array([0]), 5, key_of("test", key))[0]) for key in range(2000)]
        assert np.bincount(first).min() > 328 and np.bincount(first).max() < 472  # 4 standard deviations
        pairs = {tuple(shuffled(np.arange(4), 4, key_of("test", key)).tolist()) for key in range(500)}
        assert len(pairs) == math.factorial(4)


class TestTokenizers:
    def test_bytes_are_bytes_with_and_without_the_package(self):
        ours = ByteTokenizer()
        (tokens,) = ours.encode([POEM])
        assert tokens.tolist() == list(POEM.encode()) and ours.decode(tokens) == POEM
        assert (ours.vocab_size, ours.end_token) == (257, 256)
        theirs = Tokenizer("file", ours.content)  # through the package tokenizers, as other tools read it
        assert theirs.encode([POEM])[0].tolist() == tokens.tolist() and theirs.decode(tokens) == POEM
        assert theirs.byte_lengths.tolist() == [1] * 256 + [0] == ours.byte_lengths.tolist()

    def test_bpe_spells_every_byte_and_is_made_alike_each_time(self):
        one, two = (train_bpe(iter([POEM] * 5), 300) for _ in range(2))
        assert one.content == two.content and one.vocab_size == 300
        text = POEM + "never seen: \x01 \u00ff 😀 <|end|>"
        (tokens,) = one.encode([text])
        assert one.decode(tokens) == text
        assert one.byte_lengths[tokens].sum() == len(text.encode()) and len(tokens) < len(text.encode())
        assert one.end_token == 0 and 0 not in tokens  # the text's own letters are not the token

    def test_tokens_that_do_not_spell_bytes_are_counted_by_their_place(self, tmp_path):
        from tokenizers import Tokenizer as Fast
        from tokenizers import models, normalizers, pre_tokenizers, trainers

        fast = Fast(models.WordPiece(unk_token="[UNK]"))
        fast.normalizer, fast.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
        fast.train_from_iterator([POEM], trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]", "[SEP]"]))
        fast.save(str(tmp_path / "tokenizer.json"))
        tokenizer = read_tokenizer(tmp_path)
        assert tokenizer.byte_lengths is None and tokenizer.vocabulary["[SEP]"] == tokenizer.end_token
        ((tokens, lengths),) = tokenizer.encode_with_lengths(["  Rabe —\tSTEIN 日本  "])
        assert lengths.sum() == len("  Rabe —\tSTEIN 日本  ".encode()) and len(tokens) == len(lengths)
        (tmp_path / "text.txt").write_text(POEM * 30)
        task = LanguageModelling(context=5).with_text(prepare(TextFiles(tmp_path / "text.txt"), tokenizer=tokenizer))
        text = task.text
        counted = text.read_bytes("train", np.array([0]), text.read("train", np.array([0]), text.count("train")))
        assert counted.tolist() == [text.count("train", "bytes")] and task.tokenizer == "file"
        (tmp_path / "broken.json").write_text('{"model": {"type": "Magic"}}')
        with pytest.raises(ValueError, match="is not a tokenizer in the format of tokenizer.json"):
            read_tokenizer(tmp_path / "broken.json")

    def test_a_stream_shows_whole_characters_and_loses_none(self):
        tokenizer = ByteTokenizer()
        stream = TextStream(tokenizer, tokenizer.encode(["ab"])[0].tolist())
        tokens = tokenizer.encode([POEM * 3])[0].tolist()
        shown = [stream.add(token) for token in tokens]
        assert "".join(shown) + stream.finish() == POEM * 3
        assert not any("\ufffd" in piece for piece in shown)
        broken = TextStream(tokenizer)
        assert broken.add(0xC3) == "" and broken.finish() == "\ufffd"


class TestPreparing:
    def test_every_byte_of_the_text_is_there_in_order(self, folder):
        task = bytes_task(folder)
        found = {split: task.text.read(split, np.array([0]), task.text.count(split))[0] for split in task.splits}
        documents = [file.read_bytes() for file in sorted(folder.iterdir())]
        parts = {split: bytes(t if t < 256 else 0 for t in tokens).split(b"\0") for split, tokens in found.items()}
        assert parts["train"][-1] == parts["validation"][-1] == b""
        assert sorted(parts["train"][:-1] + parts["validation"][:-1]) == sorted(documents)
        assert parts["train"][:-1] == [d for d in documents if d in parts["train"]]
        assert 0 < len(parts["validation"]) < 12
        counts = task.text.index["splits"]["train"]
        assert counts["bytes"] == sum(map(len, parts["train"])) and counts["documents"] == len(parts["train"]) - 1

    def test_copies_of_a_document_are_on_one_side(self, folder):
        (folder / "again").mkdir()
        for file in sorted(folder.glob("*.txt")):
            shutil.copy(file, folder / "again" / f"copy-of-{file.name}")
        task = bytes_task(folder)
        sides = {}
        for split in task.splits:
            tokens = task.text.read(split, np.array([0]), task.text.count(split))[0]
            for document in bytes(t if t < 256 else 0 for t in tokens).split(b"\0")[:-1]:
                sides.setdefault(document, []).append(split)
        assert len(sides) == 40 and all(len(sorts) == 2 and len(set(sorts)) == 1 for sorts in sides.values())

    def test_one_document_gives_its_end_to_validation(self, tmp_path):
        (tmp_path / "one.txt").write_text(POEM * 50)
        task = bytes_task(tmp_path / "one.txt", validation=0.25)
        train, validation = (
            bytes(task.text.read(split, np.array([0]), task.text.count(split) - 1)[0].astype(np.uint8)).decode()
            for split in ("train", "validation")
        )
        assert train + validation == POEM * 50 and train.endswith("\n")
        assert 0.2 < len(validation) / len(train + validation) < 0.3

    @pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "words"])
    def test_reading_ends_with_the_tokens_that_were_asked_for(self, tmp_path, tokenizer):
        """Also inside a document, whose end, beyond what is read, is validation; bytes are those of the tokens."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import models, pre_tokenizers, trainers

        (tmp_path / "one.txt").write_text(POEM * 50)
        if tokenizer == "words":
            fast = Fast(models.WordLevel(unk_token="?"))
            fast.pre_tokenizer = pre_tokenizers.Whitespace()
            fast.train_from_iterator([POEM], trainers.WordLevelTrainer(special_tokens=["?"]))
            tokenizer = Tokenizer("file", fast.to_str().encode())
        options = {"tokenizer": tokenizer, "vocab_size": 300, "validation": 0.2}
        whole = prepare(TextFiles(tmp_path / "one.txt"), **options)
        part = prepare(TextFiles(tmp_path / "one.txt"), **options, max_tokens=101)
        assert part.count("train") == 101 and part.count("validation") == 26  # a quarter of 101, rounded up
        for split, count in (("train", 101), ("validation", 26)):
            tokens = whole.read(split, np.array([0]), count)
            assert part.read(split, np.array([0]), count).tolist() == tokens.tolist()
            assert part.count(split, "bytes") == int(whole.read_bytes(split, np.array([0]), tokens)[0])

    def test_a_long_document_is_not_read_to_its_end_for_a_few_tokens(self, monkeypatch):
        """The text may be larger than anyone has time for."""
        monkeypatch.setattr("headcode.tasks.language.prepare.PIECES_AT_ONCE", 4)
        read = []

        class Endless:
            def identity(self):
                return {"kind": "endless"}

            def words(self):
                return {}

            def documents(self, validation):
                yield corpus.Document("train", (read.append(n) or POEM for n in itertools.count()))
                yield corpus.Document("validation", (read.append(n) or POEM for n in itertools.count()))
                pytest.fail("both sides are full")

        size = len(POEM.encode())
        text = prepare(Endless(), tokenizer="bytes", max_tokens=5 * size + 1, validation=0.5)
        assert text.count("train") == text.count("validation") == 5 * size + 1
        assert text.count("train", "documents") == 0  # cut before its end
        assert len(read) <= 20

    def test_something_is_held_out_of_every_folder(self, tmp_path):
        """However the hashes of its documents fall."""
        for n in range(corpus.FEW_DOCUMENTS):
            (tmp_path / f"{n}.txt").write_text(f"Document {n}. {POEM}")
        assert all(corpus._side(digest, 1e-9) == "train" for _, digest in TextFiles(tmp_path)._entries)
        sides = [document.split for document in TextFiles(tmp_path).documents(1e-9)]
        assert sides.count("validation") == 1 and sides.count("train") == corpus.FEW_DOCUMENTS - 1
        assert {document.split for document in TextFiles(tmp_path).documents(0.0)} == {"train"}

    def test_long_documents_are_cut_without_loss(self, tmp_path, monkeypatch):
        monkeypatch.setattr(corpus, "PIECE_BYTES", 37)
        for text in (POEM * 9, "ß" * 500, "日" * 300 + "\n" + "x" * 90):
            (tmp_path / "text").write_text(text)
            pieces = [piece for document in TextFiles(tmp_path / "text").documents(0.0) for piece in document.pieces]
            assert "".join(pieces) == text and all(len(piece.encode()) <= 37 for piece in pieces)

    def test_prepared_once_and_found_again(self, folder, texts, monkeypatch):
        first = prepare(TextFiles(folder), vocab_size=300)
        before = (first.folder / "index.json").stat().st_mtime_ns
        monkeypatch.setattr("headcode.tasks.language.prepare.train_bpe", None)  # would fail if it were needed
        again = prepare(TextFiles(folder), vocab_size=300)
        assert again.fingerprint == first.fingerprint == open_shards(first.fingerprint).fingerprint
        assert (again.folder / "index.json").stat().st_mtime_ns == before
        moved = folder.rename(folder.with_name("elsewhere"))
        assert prepare(TextFiles(moved), vocab_size=300).fingerprint == first.fingerprint
        (moved / "part-03.txt").write_text("changed")
        with pytest.raises(TypeError):
            prepare(TextFiles(moved), vocab_size=300)

    def test_a_preparation_that_fails_leaves_nothing(self, folder, texts, monkeypatch):
        monkeypatch.setenv("HEADCODE_TEXTS", str(folder.parent / "store"))
        source = TextFiles(folder)
        (folder / "part-20.txt").write_text("it changed meanwhile")
        with pytest.raises(ValueError, match=r"part-20.txt changed while it was being read"):
            prepare(source, tokenizer="bytes")
        assert [path.name for path in (folder.parent / "store").iterdir()] == [".lock"]

    @pytest.mark.parametrize("vocab_size", [257, 70_000])
    def test_windows_reach_over_the_ends_of_files(self, tmp_path, vocab_size):
        tokenizer = ByteTokenizer()
        tokenizer.__dict__["vocab_size"] = vocab_size  # from 2**16 on, tokens are uint32
        stream = np.arange(100) * 7 % 251
        with ShardWriter(tmp_path / ".x", tokenizer, shard_tokens=13) as writer:
            for part in np.array_split(stream, 9):
                writer.add("train", part, None, len(part))
            text = TokenShards(writer.finish("recipe", {}))
        assert len(list(text.folder.glob("train-*.bin"))) == 8
        starts = np.array([0, 5, 12, 13, 60])
        assert text.read("train", starts, 40).tolist() == [stream[s : s + 40].tolist() for s in starts]

    def test_damage_is_noticed(self, folder):
        task = bytes_task(folder)
        file = task.text.folder / "train-00000.bin"
        content = file.read_bytes()
        for damaged, words in ((content[:-2], "has another size"), (b"\1" + content[1:], "does not have the content")):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=words):
                open_shards(task.shards)
        file.write_bytes(content)
        index = task.text.folder / "index.json"
        values = json.loads(index.read_text())
        values["splits"]["train"]["tokens"] += 1
        index.write_text(json.dumps(values))
        with pytest.raises(ValueError, match=r"index.json is damaged"):
            open_shards(task.shards)
        shutil.rmtree(task.text.folder)
        assert bytes_task(folder).shards == task.shards

    def test_bad_texts(self, tmp_path):
        (tmp_path / "empty").write_bytes(b"")
        (tmp_path / "binary").write_bytes(b"MZ\0\1\2")
        (tmp_path / "latin").write_bytes("müde".encode("latin-1"))
        for name, words in (("empty", "is empty"), ("binary", "is a binary file"), ("latin", r"UTF-8 \(byte 1\)")):
            with pytest.raises(ValueError, match=words):
                TextFiles(tmp_path / name)
        with pytest.raises(ValueError, match="has no text file named"):
            TextFiles(tmp_path)
        (tmp_path / "good").write_text("text")
        assert len(TextFiles(tmp_path).skipped) == 3
        with pytest.raises(ValueError, match="There is no file or folder"):
            TextFiles(tmp_path / "nowhere")
        with pytest.raises(ValueError, match=r"The pattern \*.md chooses among the files .* is one file; leave it out"):
            TextFiles(tmp_path / "good", "*.md")
        with pytest.raises(ValueError, match="A dataset needs a name: python, c4, wikitext"):
            corpus.find_dataset(" ")
        with pytest.raises(ValueError, match=r"too short: its train part has \d tokens"):
            bytes_task(tmp_path / "good")
        with pytest.raises(ValueError, match="The token shards abc… are neither in"):
            open_shards("abc")

    def test_the_standard_library_without_tests(self):
        source = StandardLibrary()
        names = [file.name for file, _ in source._entries]
        assert "argparse.py" in names and "test_argparse.py" not in names and len(names) > 300
        assert not any("site-packages" in file.parts for file, _ in source._entries)


class TestTask:
    def test_an_epoch_has_every_window_once(self, folder):
        task = bytes_task(folder)
        windows = task.epoch_size
        starts = [task.instances("train", range(e * windows, (e + 1) * windows)).info["start"] for e in range(3)]
        for start in starts:
            assert len(set(start.tolist())) == windows and len({s % 7 for s in start.tolist()}) == 1
            assert start.min() >= 0 and start.max() + 7 < task.text.count("train")
        assert not torch.equal(starts[0], starts[1])
        other = task.replace(seed=1).instances("train", range(windows)).info["start"]
        assert not torch.equal(starts[0], other)

    def test_the_offsets_of_epochs_reach_the_tail(self, folder):
        task = bytes_task(folder, context=11)
        spare = (task.text.count("train") - 1) % 11
        offsets = {int(task.instances("train", [e * task.epoch_size]).info["start"][0]) % 11 for e in range(200)}
        assert offsets == set(range(spare + 1))

    def test_targets_are_one_ahead_and_bytes_are_exact(self, folder):
        for task in (bytes_task(folder), LanguageModelling(context=5).with_text(prepare(TextFiles(folder)))):
            batch = task.sample("train", 3, 6)
            assert torch.equal(batch.x[:, 1:], batch.y[:, :-1]) and batch.x.dtype == torch.int64
            texts = [task.text.tokenizer.decode(row.tolist()) for row in batch.y]
            lengths = task.text.tokenizer.byte_lengths[batch.y.numpy()].sum(1)
            assert batch.info["bytes"].tolist() == lengths.tolist()
            whole = [n for n, text in enumerate(texts) if "\ufffd" not in text]
            assert whole and all(len(texts[n].encode()) == lengths[n] for n in whole)

    def test_any_batch_and_any_worker_gives_the_same(self, folder):
        task = bytes_task(folder)
        near_the_end = task.epoch_size // 6 - 2  # batches that straddle two epochs are among them
        alone = [task.sample("train", index, 6) for index in range(near_the_end, near_the_end + 6)]
        singles = task.instances("train", range(near_the_end * 6, (near_the_end + 6) * 6))
        assert torch.equal(torch.cat([batch.x for batch in alone]), singles.x)
        for workers in (0, 2):
            stream = TaskStream(task, "train", 6, start=near_the_end, num_batches=6)
            loaded = list(DataLoader(stream, batch_size=None, num_workers=workers))
            assert all(torch.equal(a.x, b.x) and torch.equal(a.y, b.y) for a, b in zip(alone, loaded, strict=True))
        for ranks in (2, 3):
            shares = [task.sample("train", near_the_end * ranks + rank, 6 // ranks).x for rank in range(ranks)]
            assert torch.equal(torch.cat(shares), alone[0].x)

    def test_validation_is_read_once_and_ends(self, folder):
        task = bytes_task(folder)
        size = task.split_size("validation")
        everything = task.instances("validation", range(size))
        tokens = task.text.read("validation", np.array([0]), size * 7 + 1)[0]
        assert everything.x.flatten().tolist() == tokens[:-1].tolist()
        assert everything.y.flatten().tolist() == tokens[1:].tolist()
        with pytest.raises(ValueError, match="has the windows 0.."):
            task.instances("validation", [size])
        assert task.split_size("train") is None

    def test_metrics_by_hand(self, folder):
        task = bytes_task(folder)
        batch = task.sample("validation", 0, 3)
        logits = torch.zeros(3, 7, 257)
        sums = add_sums(task.score(logits, batch), task.score(logits, batch))
        found = task.metrics(sums)
        nats = 2 * 21 * math.log(257)
        assert found["perplexity"] == pytest.approx(257)
        assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / (2 * int(batch.info["bytes"].sum())))
        sure = torch.nn.functional.one_hot(batch.y, 257).float() * 1000
        assert task.metrics(task.score(sure, batch))["bits_per_byte"] == pytest.approx(0, abs=1e-6)
        wrong = task.score(-1e6 * sure, batch)
        assert task.metrics(wrong)["perplexity"] == math.inf
        with pytest.raises(ValueError, match=r"score takes logits \(3, 7, 257\)"):
            task.score(logits[..., :5], batch)

    def test_without_text(self):
        task = LanguageModelling()
        assert task.splits == ("train", "validation")
        with pytest.raises(ValueError, match="This run has no text yet: give --text"):
            task.sample("train", 0, 2)

    def test_another_vocabulary_is_noticed(self, folder):
        task = bytes_task(folder)
        with pytest.raises(ValueError, match="have 257 different tokens, the run's vocab_size is 256"):
            task.replace(vocab_size=256).sample("train", 0, 1)


def test_the_lock_and_the_leftovers(texts):
    with shards.locked_store() as folder:
        (folder / ".prepare-1").mkdir()
    with shards.locked_store() as folder:
        assert not (folder / ".prepare-1").exists()
    assert all(not path.name.startswith(".prepare") for path in folder.iterdir())
