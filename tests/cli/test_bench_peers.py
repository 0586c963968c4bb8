"""`headcode bench peers`: every peer trains what it says, and the table says what was measured."""

import builtins
import json
import os
import re
from pathlib import Path

import pytest
import torch

from headcode import ModelConfig, Transformer
from headcode.bench import lm, peaks, peer_models, peers
from headcode.bench.measure import aligned_table
from headcode.bench.train import setting
from headcode.cli import main
from headcode.nn import HyperAttention
from headcode.tasks import Batch
from headcode.train.cost import product_speed, step_flops


def test_sdpa_is_softmax_attention_with_the_trained_band():
    torch.manual_seed(0)
    sizes = {"dim": 6, "num_layers": 2, "num_heads": 3, "qk_dim": 15, "v_dim": 6, "mlp_dim": 7, "method": "softmax"}
    config = ModelConfig(input_dim=5, output_dim=2, max_length=7, backend="reference", **sizes)
    assert same_as_sdpa(config, torch.randn(2, 7, 5, dtype=torch.float64)) == 2  # one table of the band in each layer


def test_sdpa_is_causal_and_rotary_in_language_models():
    torch.manual_seed(0)
    sizes = {"dim": 12, "num_layers": 2, "num_heads": 3, "qk_dim": 12, "v_dim": 6, "mlp_dim": 7, "method": "softmax"}
    more = {"position": "rotary", "causal": True, "feedforward": "swiglu", "backend": "reference"}
    config = ModelConfig(vocab_size=11, max_length=7, **sizes, **more)
    assert same_as_sdpa(config, torch.randint(0, 11, (2, 7))) == 0


def same_as_sdpa(config, x):
    """Hold outputs and gradients of SDPA to those of the reference; how many tables of the band have a gradient."""
    model, other = Transformer(config).double(), Transformer(config).double()
    other.load_state_dict(model.state_dict())
    for module in other.modules():
        if isinstance(module, HyperAttention):
            module.__class__ = peer_models.SdpaAttention
    outputs = []
    for each in (model, other):
        outputs.append(each(x))
        outputs[-1].sin().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-11, atol=1e-12)
    gradients = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-10, atol=1e-12)
    return sum("table" in name for name in gradients)


def puzzles(method="softmax"):
    config = setting("logic", method, 3)
    return config, config.task.sample("train", 0, 3)


def language(method="softmax"):
    config = lm.Lm(dim=12, num_heads=3, mlp_dim=24, num_layers=1, vocab_size=11, context=5, batch_size=2).config(method)
    tokens = torch.randint(0, 11, (2, 6))
    return config, Batch(tokens[:, :-1], tokens[:, 1:], {})


@pytest.mark.parametrize("made", [puzzles, language])
@pytest.mark.parametrize(("method", "flash"), [("softmax", False), ("softmax", True), ("linear", False)])
def test_x_transformers_has_our_sizes_and_learns(made, method, flash):
    pytest.importorskip("x_transformers")
    config, batch = made(method)
    peer = peer_models.XTransformers(config, batch, flash)
    ours = sum(parameter.numel() for parameter in Transformer(config.model).parameters())
    assert sum(parameter.numel() for parameter in peer.model.parameters()) == pytest.approx(ours, rel=0.05)
    attentions = [module for module in peer.model.modules() if type(module).__name__ == "Attend"]
    assert len(attentions) == config.model.num_layers and all(each.flash is flash for each in attentions)
    before = [parameter.detach().clone() for parameter in peer.model.parameters()]
    peer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, peer.model.parameters(), strict=True)]
    assert all(moved)


def test_codes_of_linear_attention_are_the_scores_and_0_where_masked():
    lowest = torch.finfo(torch.float32).min
    scores = torch.tensor([[-3.5, 0.0, 7.25], [lowest, -1e30, lowest]])
    assert peer_models.unnormalised(scores).tolist() == [[-3.5, 0.0, 7.25], [0.0, torch.tensor(-1e30).item(), 0.0]]


def test_x_transformers_linear_sees_no_later_token():
    pytest.importorskip("x_transformers")
    torch.manual_seed(0)
    config, batch = language("linear")
    model = peer_models.XTransformers(config, batch, False).model.eval()
    later = batch.x.clone()
    later[:, 3:] = (later[:, 3:] + 1) % 11
    one, other = model(batch.x), model(later)
    assert one.isfinite().all() and not torch.allclose(one[:, 3:], other[:, 3:])
    torch.testing.assert_close(one[:, :3], other[:, :3])


@pytest.fixture
def quick(monkeypatch):
    """Measurements of nothing: limits, turns and compiling are instant."""
    monkeypatch.setattr(peers, "measured_peaks", lambda: {"float32": 2e11, "bf16": 3e11})
    taken = iter(range(1, 1000))
    monkeypatch.setattr(peers, "timed", lambda step, seconds, fewest: [0.001 * next(taken)] * fewest)


def measure(capsys, *flags):
    main(["bench", "peers", "--rounds", "1", "--batch-size", "2", "--threads", "1", *flags])
    return capsys.readouterr()


def test_rows(quick, capsys, tmp_path):
    flags = ("--tasks", "logic", "--methods", "softmax", "linear", "--peers", "eager", "sdpa", "--json")
    printed = measure(capsys, *flags, "--out", str(tmp_path / "new" / "table.md"))
    found = json.loads(printed.out)
    assert found["limits"] == {"float32": 200, "bf16": 300}
    names = [(row["model"], row["method"]) for row in found["rows"]]
    assert names == [
        ("headcode", "softmax"),
        ("PyTorch, eager", "softmax"),
        ("headcode", "linear"),
        ("PyTorch, eager", "linear"),
        ("PyTorch, SDPA", "softmax"),
        ("authors' JAX†", "softmax"),
        ("authors' JAX†", "linear"),
    ]
    measured, known = found["rows"][:5], found["rows"][5:]
    assert [row["ms"] for row in measured] == pytest.approx([1, 2, 3, 4, 5])
    assert [row["times_ours"] for row in measured] == pytest.approx([1, 2, 1, 4 / 3, 5])
    gflops = step_flops(setting("logic", "softmax", 2)) / 1e9
    assert measured[4]["gflops"] == pytest.approx(gflops / 0.005)
    assert measured[4]["peak_share"] == pytest.approx(gflops / 0.005 / 200)
    assert [(row["times_ours"], row["ms"], row["measured"]) for row in known] == [
        (3.2, None, False),
        (3.4, None, False),
    ]
    lines = (tmp_path / "new" / "table.md").read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 80
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert table[0] == ["model", "method", "ms", "× ours", "GFLOP/s", "of peak"]
    by_method = [1, 1, 1, 1, 0, 0, 0]
    assert [row[1] == "softmax" for row in table[2:]] == by_method
    assert table[4][:4] == ["PyTorch, SDPA", "softmax", "5.0", "5.00×"]
    assert table[5] == ["authors' JAX†", "softmax", "", "3.20×", "", ""]
    assert "turn 1 of 1" in printed.err


def test_a_missing_package_is_left_out_with_what_to_install(quick, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] in ("x_transformers", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    table = measure(capsys, "--tasks", "lm", "--methods", "softmax", "--peers", "x-transformers", "llama").out
    assert "Left out: x-transformers is not installed: pip install x-transformers." in table
    assert "Left out: The comparison needs transformers: pip install 'headcode[hf]'." in table
    assert table.count("Left out") == 2 and "| headcode" in table and "| x-transformers" not in table


def test_without_a_compiler_the_rows_are_left_out_and_say_why(quick, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    found = measure(capsys, "--tasks", "logic", "--methods", "softmax", "linear", "--peers", "compile", "--json").out
    part = json.loads(found)["tasks"][0]
    assert part["compile_seconds"] == {} and len(part["left_out"]) == 1
    assert part["left_out"][0].startswith("torch.compile needs a C++ compiler, and there is no ")


def test_a_compiler_that_fails_is_a_reason_too(monkeypatch):
    def fail(self):
        raise RuntimeError("C++ compile error\nand a page of details")

    monkeypatch.setattr(peer_models, "why_not_compile", lambda: None)
    monkeypatch.setattr(peer_models.Compiled, "step", fail)
    with pytest.raises(peer_models.CannotCompile, match=r"^torch.compile failed: C\+\+ compile error$"):
        peer_models.Compiled(*puzzles())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rounds", "0"], "--rounds, --batch-size and --threads must be 1 or more"),
        (["--seconds", "nan"], "--seconds above 0"),
        (["--tasks", "chess"], "--tasks must be of sraven, logic, lm, got 'chess'"),
        (["--methods", "magic"], "--methods must be of hyla, softmax, linear, got 'magic'"),
        (["--peers", "jax"], "--peers must be of eager, compile, sdpa, x-transformers, llama, got 'jax'"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(capsys, monkeypatch, flags, words):
    monkeypatch.setattr(peers.Peers, "measure", lambda self: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "peers", *flags])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and len(error.splitlines()) == 1
    assert re.search(words, error)


def test_aligned_columns():
    assert aligned_table(("model", "ms"), [("a", "1.0"), ("longer", "22.5")]) == [
        "| model  |   ms |",
        "| ------ | ---: |",
        "| a      |  1.0 |",
        "| longer | 22.5 |",
    ]


def test_the_peak_is_the_fastest_product(monkeypatch):
    speeds = {
        (512, torch.float32, False): 2.0,
        (1024, torch.float32, False): 3.0,
        (512, torch.float32, True): 7.0,
        (1024, torch.float32, True): 5.0,
    }
    monkeypatch.setattr(peaks, "product_speed", lambda size, seconds, dtype, onednn: speeds[size, dtype, onednn])
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(peaks, "has_bf16", lambda: False)
    assert peaks.measured_peaks() == {"float32": 7.0}
    speeds |= {(size, torch.bfloat16, onednn): size + onednn for size in peaks.SIZES for onednn in (False, True)}
    monkeypatch.setattr(peaks, "has_bf16", lambda: True)
    assert peaks.measured_peaks() == {"float32": 7.0, "bf16": 1025}
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert peaks.measured_peaks() == {"float32": 3.0, "bf16": 1024}


@pytest.mark.parametrize(
    ("names", "has"), [((), False), (("avx512_f",), False), (("amx_bf16",), True), (("bf16",), True)]
)
def test_a_processor_with_bf16(monkeypatch, names, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True), raising=False)
    assert peaks.has_bf16() is has


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("onednn", [False, torch.backends.mkldnn.is_available()])
def test_the_speed_of_products(dtype, onednn):
    assert product_speed(16, 0.001, dtype, onednn) > 0


def test_the_compiler_starts_from_an_empty_cache_and_leaves_nothing(monkeypatch):
    for before in (None, "/elsewhere"):
        if before is None:
            monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        else:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        with peer_models.fresh_compiler():
            folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
            assert folder.is_dir() and not list(folder.iterdir())
        assert not folder.exists() and os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


@pytest.mark.slow
@pytest.mark.skipif(peer_models.why_not_compile() is not None, reason="needs a C++ compiler")
def test_everybody_in_a_tiny_run(capsys):
    pytest.importorskip("x_transformers")
    pytest.importorskip("transformers")
    flags = ["--tasks", "logic", "lm", "--methods", "softmax", "--seconds", "0.01", "--json"]
    found = json.loads(measure(capsys, *flags).out)
    measured = [row["model"] for row in found["rows"] if row["measured"]]
    common = ["headcode", "PyTorch, eager", "torch.compile", "PyTorch, SDPA", "x-transformers", "x-transformers, flash"]
    assert measured == [*common, *common, "Llama (Hugging Face)"]
    assert all(row["ms"] > 0 and row["peak_share"] > 0 for row in found["rows"] if row["measured"])
    for part in found["tasks"]:
        assert part["left_out"] == [] and part["compile_seconds"]["softmax"] > 0
