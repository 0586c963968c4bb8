"""The shape of the records in a run's files; a file of another shape is damaged, or was made to harm."""

from typing import Any

from headcode.files import is_count, is_number, is_word


def is_record(value: Any) -> bool:
    """A line of metrics.jsonl: kind, step, the split of an evaluation, and numbers by name, null where not finite."""
    if not isinstance(value, dict) or not is_word(value.get("kind")) or not is_count(value.get("step")):
        return False
    if value["kind"] in ("train", "eval") and "loss" not in value:
        return False
    if value["kind"] == "eval" and not is_word(value.get("split")):
        return False
    metrics = {name: number for name, number in value.items() if name not in ("kind", "step", "split")}
    return all(is_word(name) and (number is None or is_number(number)) for name, number in metrics.items())


def is_timing(value: Any) -> bool:
    """A line of timing.jsonl: step, seconds since the start, and steps per second."""
    if not isinstance(value, dict) or not is_count(value.get("step")) or not is_number(value.get("seconds")):
        return False
    return is_number(value.get("steps_per_second", 0.0))


def is_start(value: Any) -> bool:
    """A start in environment.json: versions, threads and so on by name, and the runtime as an object."""
    return isinstance(value, dict) and isinstance(value.get("runtime", {}), dict)


def is_state(value: dict[str, Any]) -> bool:
    """A state.json: the step and the hashes of files, and in a run's own checkpoints all that training goes on from."""
    files, best = value.get("files"), value.get("best")
    if not is_count(value.get("step")) or not isinstance(files, dict) or not isinstance(value.get("config", {}), dict):
        return False
    if not all(is_word(hash_) for hash_ in files.values()):
        return False
    if best is not None and not (isinstance(best, dict) and is_count(best.get("step")) and is_number(best.get("loss"))):
        return False
    if "generator_version" not in value:  # weights alone, as in the zoo
        return True
    losses, norms, metrics = value.get("losses"), value.get("gradient_norms"), value.get("metrics")
    if not isinstance(losses, list) or not isinstance(norms, list) or not isinstance(metrics, list):
        return False
    random = value.get("random")
    return (
        all(is_number(number) for number in (*losses, *norms))
        and all(is_record(record) for record in metrics)
        and isinstance(random, dict)
        and all(isinstance(state, str) for state in random.values())
        and "cpu" in random
    )
