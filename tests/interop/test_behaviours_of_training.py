"""What training and fine-tuning are expected to do, tried on the library's Llama and on ours.

`docs/huggingface.md` has a row for each of these tests.
"""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from tests.support.hf_models import KINDS, LAYERS, VOCABULARY, close, model, tokens

pytestmark = pytest.mark.parametrize("kind", KINDS)


def gradients(one, **inputs):
    one.zero_grad()
    loss = one(tokens(), labels=tokens(), **inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}


def test_the_loss_is_of_the_next_token(kind):
    one, labels = model(kind), tokens()
    labels[0, 3] = labels[1, :2] = -100
    found = one(tokens(), labels=labels)
    expected = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    close(found.loss, expected, 1e-6)
    close(one(tokens(), labels=labels, num_items_in_batch=20).loss, expected * 10 / 20, 1e-6)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    close(one(tokens(), labels=labels, shift_labels=shifted).loss, expected, 1e-6)
    one.loss_function = lambda logits, labels, vocab_size, **options: logits.sum() * 0 + vocab_size
    assert one(tokens(), labels=labels).loss == VOCABULARY


def test_every_parameter_gets_a_gradient(kind):
    for head, labels in (("lm", tokens()), ("labels", torch.tensor([0, 1]))):
        one = model(kind, head).train()
        one(tokens(), labels=labels).loss.backward()
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "every second"])
def test_gradient_checkpointing(kind, options):
    """Activations are computed anew, the gradients are the same; it can be turned off again."""
    one = model(kind).train()
    loss, expected = gradients(one)
    assert one.supports_gradient_checkpointing and not one.is_gradient_checkpointing
    counted = []
    parts = one.model.layers if kind == "llama" else one.transformer.blocks
    for part in parts:
        inner = part.mlp if kind == "llama" else part.feedforward
        inner.register_forward_pre_hook(lambda *_: counted.append(1))
    one.gradient_checkpointing_enable(**({"every_n_layers": 2} if options == "every second" else options))
    assert one.is_gradient_checkpointing
    found_loss, found = gradients(one)
    assert len(counted) == LAYERS + (2 if options == "every second" else LAYERS)
    close(found_loss, loss, 1e-6)
    assert found.keys() == expected.keys()
    for name in expected:
        close(found[name], expected[name], 1e-5)
    one.gradient_checkpointing_disable()
    counted.clear()
    gradients(one)
    assert len(counted) == LAYERS and not one.is_gradient_checkpointing


def test_inputs_can_require_gradients(kind):
    """What adapters in frozen models need: with every weight frozen, gradients reach the embeddings' output."""
    one = model(kind).train()
    one.requires_grad_(False)
    one.enable_input_require_grads()
    assert one(tokens(), labels=tokens()).loss.requires_grad
    one.disable_input_require_grads()
    assert not one(tokens(), labels=tokens()).loss.requires_grad


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_kinds_of_labels(kind, problem):
    count = 1 if problem == "regression" else 3
    one = model(kind, "labels", num_labels=count, problem_type=problem)
    labels = {"regression": torch.tensor([0.5, 2.0]), "single_label_classification": torch.tensor([2, 0])}
    labels = labels.get(problem, torch.tensor([[1.0, 0, 1], [0, 0, 1]]))
    found = one(tokens(), labels=labels)
    expected = {
        "regression": lambda: F.mse_loss(found.logits[:, 0], labels),
        "single_label_classification": lambda: F.cross_entropy(found.logits, labels),
        "multi_label_classification": lambda: F.binary_cross_entropy_with_logits(found.logits, labels),
    }[problem]()
    close(found.loss, expected, 1e-6)
    assert one(tokens(), labels=labels, num_items_in_batch=2).loss.isfinite()  # as the Trainer calls it


@torch.no_grad()
def test_labels_are_read_from_the_last_token(kind):
    one = model(kind, "labels")
    plain, filler = one(tokens()).logits, torch.zeros(2, 3).long()
    for padded in (torch.cat((tokens(), filler), 1), torch.cat((filler, tokens()), 1)):
        close(one(padded, attention_mask=(padded != 0).long()).logits, plain)


def test_labels_of_tokens(kind):
    """Padding and -100 do not count, and a label depends on nothing behind its token."""
    one = model(kind, "token labels", num_labels=3)
    assert isinstance(AutoModelForTokenClassification.from_config(one.config), type(one))
    labels = tokens() % 3
    labels[0, 4] = -100
    found = one(tokens(), labels=labels)
    assert found.logits.shape == (2, 7, 3)
    close(found.loss, F.cross_entropy(found.logits.flatten(0, 1), labels.flatten(), ignore_index=-100), 1e-6)
    close(one(tokens()[:, :4]).logits, found.logits[:, :4])
    padded = torch.cat((torch.zeros(2, 3).long(), tokens()), 1)
    close(one(padded, attention_mask=(padded != 0).long()).logits[:, 3:], found.logits)
    found.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in one.parameters())


def test_answers_in_a_text(kind):
    """The two places of an answer; the embeddings can be got, set and resized as with the other heads."""
    one = model(kind, "answers")
    assert isinstance(AutoModelForQuestionAnswering.from_config(one.config), type(one))
    first, last = torch.tensor([1, 5]), torch.tensor([3, 6])
    found = one(tokens(), start_positions=first, end_positions=last)
    expected = (F.cross_entropy(found.start_logits, first) + F.cross_entropy(found.end_logits, last)) / 2
    close(found.loss, expected, 1e-6)
    found.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in one.parameters())
    if kind != "llama":  # whose head looks for its embeddings by another name
        assert one.resize_token_embeddings(VOCABULARY + 2) is one.get_input_embeddings()


def test_mixed_precision(kind):
    one = model(kind).train()
    _, expected = gradients(one)
    with torch.autocast("cpu", torch.bfloat16):
        found_loss = one(tokens(), labels=tokens()).loss
    one.zero_grad()
    found_loss.backward()
    for name, parameter in one.named_parameters():
        assert F.cosine_similarity(parameter.grad.flatten(), expected[name].flatten(), 0) > 0.95, name


class Rows(torch.utils.data.Dataset):
    """Counting, modulo 5, from 2 on; with sizes that differ."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        row = ((torch.arange(6 + index % 3) + index) % 5 + 2).tolist()
        return {"input_ids": row, "labels": row, "attention_mask": [1] * len(row)}


class Padding:
    """As a tokenizer pads: on the right, with 0, labels with -100."""

    def __call__(self, rows):
        longest = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
        return {
            name: torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])
            for name, value in fill.items()
        }


def trainer(one, folder, collator, **changes):
    settings = {"max_steps": 40, "learning_rate": 0.02, "save_steps": 20, "logging_steps": 10, "seed": 1}
    settings |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "eval_steps": 20}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "eval_strategy": "steps"} | changes
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    return Trainer(model=one, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), data_collator=collator)


@pytest.mark.parametrize("collator", ["padded", "packed"])
def test_the_trainer(kind, collator, tmp_path):
    """Rows of several lengths, padded or packed; accumulated batches, evaluation, checkpoints, a run that goes on."""
    one = model(kind, **({} if kind == "llama" else {"logit_scale": 1.0}))
    made = Padding() if collator == "padded" else DataCollatorWithFlattening()
    first = trainer(one, tmp_path, made)
    first.train()
    losses = [entry["eval_loss"] for entry in first.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2 and losses[-1] < 1.0 and first.evaluate()["eval_loss"] < 1.0
    again = trainer(model(kind, **({} if kind == "llama" else {"logit_scale": 1.0})), tmp_path, made)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-20"))
    for (name, found), expected in zip(again.model.named_parameters(), one.parameters(), strict=True):
        close(found, expected, 1e-3), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-40")
    text = loaded.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert text[0].tolist() == [2, 3, 4, 5, 6, 2, 3]


def test_accelerate(kind):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    one = model(kind).train()
    wrapped, optimizer = accelerator.prepare(one, torch.optim.AdamW(one.parameters(), 0.01))
    losses = []
    for _ in range(8):
        loss = wrapped(tokens(), labels=tokens()).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert accelerator.unwrap_model(wrapped) is one


def _one_of_two(rank, kind, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    one, whole = model(kind).train(), model(kind).train()
    for block in one.model.layers if kind == "llama" else one.transformer.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(one, mesh=mesh)
    _, expected = gradients(whole)
    one(tokens(), labels=tokens()).loss.backward()
    for name, parameter in one.named_parameters():
        close(parameter.grad.full_tensor(), expected[name], 1e-6)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(one.eval().generate(tokens(), **options), whole.eval().generate(tokens(), **options))
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_by_two_processes(kind, tmp_path):
    """Gradients and texts of a model whose blocks are divided by FSDP are those of the whole model."""
    torch.multiprocessing.spawn(_one_of_two, (kind, tmp_path / "store"), 2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_with_default_parts(kind, checkpointing, tmp_path):
    """No target_modules; only adapters learn, also where activations are computed anew; saved, loaded and merged."""
    peft = pytest.importorskip("peft")
    one = model(kind)
    expected = one(tokens()).logits.detach()
    adapted = peft.get_peft_model(one, peft.LoraConfig(task_type="CAUSAL_LM", r=2)).train()
    close(adapted(tokens()).logits, expected)
    if checkpointing:
        adapted.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(adapted.parameters(), 1.0)
    for _ in range(2):
        adapted(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    learning = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert len(learning) == 2 * 2 * LAYERS and all("lora_" in name for name in learning)
    adapted.save_pretrained(tmp_path)
    adapted.eval()
    found = adapted(tokens()).logits.detach()
    assert (found - expected).abs().max() > 1e-4
    close(peft.PeftModel.from_pretrained(model(kind), tmp_path)(tokens()).logits, found)
    close(adapted.merge_and_unload()(tokens()).logits, found)


@pytest.mark.parametrize("method", ["LoHaConfig", "IA3Config", "VeraConfig", "OFTConfig"])
def test_other_adapters_with_default_parts(kind, method):
    """They find the parts of every layer, learn alone, and can be merged."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model(kind), getattr(peft, method)(task_type="CAUSAL_LM")).train()
    optimizer = torch.optim.SGD(adapted.parameters(), 1.0)
    for _ in range(2):
        adapted(input_ids=tokens(), labels=tokens()).loss.backward()
        optimizer.step()
    learning = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert {re.search(r"\.(\d+)\.", name)[1] for name in learning} == set(map(str, range(LAYERS)))
    adapted.eval()
    found = adapted(tokens()).logits.detach()
    assert (found - model(kind)(tokens()).logits).abs().max() > 1e-4
    close(adapted.merge_and_unload()(tokens()).logits, found)


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_tuned_prompts(kind, method):
    """Vectors before the text, or keys and values of each layer, learn while the model stays as it is."""
    peft = pytest.importorskip("peft")
    one = model(kind)
    settings = getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(one, settings)
    loss = adapted(input_ids=tokens(), attention_mask=torch.ones(2, 7).long(), labels=tokens()).loss
    loss.backward()
    learning = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert learning and all("prompt_encoder" in name for name in learning)
    adapted.eval()
    found = adapted.generate(input_ids=tokens(), attention_mask=torch.ones(2, 7).long(), max_new_tokens=3)
    assert found.shape == (2, 10)


def overfitted(one, steps=300):
    """Loss and gradient norm, first and last, of the library's task: one text of 64 tokens that repeats 19."""
    ids = (torch.arange(64) % 19 + 1).expand(2, -1)
    optimizer = torch.optim.Adam(one.parameters(), 1e-3)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = one(ids, labels=ids).loss
        loss.backward()
        seen.append((loss.item(), torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0).item()))
        optimizer.step()
    return ids, seen[0], seen[-1]


def test_a_small_model_overfits(kind):
    """Within 300 steps loss and gradients fall by nine tenths, and the text is generated from its first token."""
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": False}
    one = model(kind, **changes, **({} if kind == "llama" else {"logit_scale": 1.0})).train()
    ids, (loss, norm), (last_loss, last_norm) = overfitted(one)
    assert last_loss < 0.1 * loss and last_norm < 0.1 * norm
    text = one.eval().generate(ids[:1, :1], max_new_tokens=63, do_sample=False, use_cache=False, eos_token_id=0)
    assert torch.equal(text, ids[:1])
