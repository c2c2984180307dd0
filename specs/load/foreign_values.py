"""What a value of another trainer's key is here: the arithmetic with the spec's numbers, or our name of a choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specs.load.keys import Path, dotted, homes, kinds_of, tables_at, value_at
from specs.load.synonyms import CHOICES, SYNONYMS
from specs.schema.roles import ACTOR
from specs.text import show

Number = int | float
_PROMPTS, _GROUP = "data.prompts_per_step", "algorithm.group_size"
_UPDATES, _EPOCHS = "algorithm.mini_batches_per_step", "algorithm.epochs_per_step"
_ROUNDS = "steps_per_generation"
_HUGE = 2**53  # nothing that a spec counts


@dataclass(frozen=True)
class Converted:
    """`words` follow the name of our key. `number`: its value here. `key`: ours, where the value shows that another is
    meant than `SYNONYMS` says."""

    words: str
    number: Number | None = None
    key: str = ""


class Numbers:
    """The numbers of a spec that holds keys of another tool too. Those of the tool go first: a preset wrote others."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw, self._leaves = raw, list(_leaves(raw, ()))
        self._under_way: set[Path] = set()  # a number that is being converted cannot be made of itself

    def their(self, *name: str) -> Any:
        """The value of their key that ends so; None where there is none."""
        return next((value for path, value in self._leaves if path[-len(name) :] == name), None)

    def ours(self, key: str, default: Number | None = None) -> Number | None:
        """The number that our `key` has, or will have when a key of theirs is converted."""
        for path, value in self._leaves:
            if _is_number(value) and (found := self._converted_to(key, path, value)) is not None:
                return found
        own = value_at(tuple(key.split(".")), self._raw)
        return own if _is_number(own) else default

    def _converted_to(self, key: str, path: Path, value: Number) -> Number | None:
        name = str(path[-1])
        said = SYNONYMS.get(dotted(path[-2:])) or SYNONYMS.get(name, "")
        if name in homes() or path in self._under_way:
            return None
        convert = CONVERSIONS.get(name)
        if convert is None or key not in (said, *_TURNED.get(name, ())):
            return value if said == key else None
        self._under_way.add(path)
        found = convert(value, self)
        self._under_way.remove(path)
        if found is None:
            return value if said == key else None
        return found.number if (found.key or said) == key else None


def converted(path: Path, value: Any, raw: dict[str, Any]) -> Converted | None:
    """What the value of another tool's key at `path` is here; None where it is the same, or nothing is known."""
    name = str(path[-1])
    choices = CHOICES.get(dotted(path[-2:])) or CHOICES.get(name)
    if choices is not None and isinstance(value, str | bool):
        said = choices.get(str(value).lower(), "")
        return Converted(f"{show(value)} is {said}") if said else None
    convert = CONVERSIONS.get(dotted(path[-2:])) or CONVERSIONS.get(name)
    if convert is None or not (_is_number(value) or convert in _NO_NUMBER):
        return None
    return convert(value, Numbers(raw))


def _leaves(node: dict[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _HUGE


def _divided(above: Number | None, what: str, below: Number) -> Converted:
    """`1024 prompts / 256 = 4`; without the number above, how it is had."""
    if above is None:
        return Converted(f"{what} / {below:g}")
    if below <= 0 or above % below:
        return Converted(f"{_g(above)} {what} / {_g(below)} is no whole number: change one of them")
    return Converted(f"{_g(above)} {what} / {_g(below)} = {_g(above // below)}", int(above // below))


def _g(number: Number) -> str:
    return f"{number:.10g}"


# ── batches ───────────────────────────────────────────────────────────────────────────────────────


def _of_prompts(size: Number, numbers: Numbers) -> Converted:
    """Prompts of an optimizer step, as how many of these there are."""
    return _divided(numbers.ours(_PROMPTS), "prompts of a step", size)


def _of_completions(size: Number, numbers: Numbers) -> Converted:
    """Completions of an optimizer step, as how many of these there are."""
    prompts, group = numbers.ours(_PROMPTS), numbers.ours(_GROUP)
    if prompts is None or group is None:
        return _divided(None, "completions of a step", size)
    return _divided(prompts * group, f"completions of a step ({_g(prompts)} prompts × {_g(group)})", size)


def _train_batch(size: Number, numbers: Numbers) -> Converted | None:
    """Beside `rollout_batch_size` (OpenRLHF) completions of an optimizer step, else (verl) prompts of a step."""
    if numbers.their("rollout_batch_size") is None:
        return None
    found = _of_completions(size, numbers)
    return Converted(found.words, found.number, _UPDATES)


def _batch(size: Number, numbers: Numbers) -> Converted | None:
    """The completions of a step, where a group's size has the name that it has in prime-rl; else its prompts."""
    if numbers.their("rollouts_per_example") is None and numbers.their("rollouts_per_prompt") is None:
        return None
    return _generation(size, numbers)


def _generation(size: Number, numbers: Numbers) -> Converted:
    """Completions of a step, as prompts."""
    group = numbers.ours(_GROUP)
    if group is None:
        return Converted(f"{_g(size)} completions of a step / {_GROUP}")
    return _divided(size, "completions of a step", group)


def _accumulation(steps: Number, numbers: Numbers) -> Converted:
    """Micro-batches of an optimizer step, as prompts of a step: TRL generates for so many, or as it says."""
    each, group = numbers.their("per_device_train_batch_size"), numbers.ours(_GROUP)
    rounds, processes = numbers.their(_ROUNDS), numbers.ours(f"{ACTOR}.processes", 1) or 1
    rounds = rounds if _is_number(rounds) else steps
    if not _is_number(each) or group is None:
        found = Converted(f"samples of a micro-batch × {_g(rounds)} × processes / {_GROUP}")
    else:
        counted = f"completions of a step ({_g(each)} × {_g(rounds)} × {_g(processes)} processes)"
        found = _divided(each * rounds * processes, counted, group)
    return Converted(f"micro-batches are made by themselves; {found.words}", found.number)


def _rounds(rounds: Number, numbers: Numbers) -> Converted:
    accumulated = numbers.their("gradient_accumulation_steps")
    return _divided(rounds, "micro-batches of a step", accumulated if _is_number(accumulated) else 1)


def _micro_batch(size: Number, numbers: Numbers) -> Converted:
    prompt, response = numbers.ours("data.max_prompt_tokens"), numbers.ours("data.max_response_tokens")
    counts = "it counts tokens and changes no result"
    if prompt is None or response is None:
        return Converted(f"{counts}: {_g(size)} × the longest sequence")
    tokens, sequence = size * (prompt + response), f"{_g(prompt)} + {_g(response)}"
    return Converted(f"{counts}: {_g(size)} sequences of {sequence} are {_g(tokens)}", tokens)


# ── lengths, steps, rates, bounds ─────────────────────────────────────────────────────────────────


def _response(length: Number, numbers: Numbers) -> Converted | None:
    prompt = numbers.ours("data.max_prompt_tokens")
    if prompt is None or length <= prompt:
        return None
    rest = length - prompt
    return Converted(f"without the prompt it is {_g(length)} - {_g(prompt)} = {_g(rest)}", rest)


def _epochs(epochs: Number, numbers: Numbers) -> Converted:
    prompts = numbers.ours(_PROMPTS)
    each = _PROMPTS if prompts is None else f"{_g(prompts)} prompts of a step"
    return Converted(f"{_g(epochs)} × the rows of data.train / {each}")


def _episodes(samples: Number, numbers: Numbers) -> Converted:
    prompts, group = numbers.ours(_PROMPTS), numbers.ours(_GROUP)
    if not prompts or not group:
        return Converted(f"{_g(samples)} / completions of a step")
    steps = math.ceil(samples / (prompts * group))
    return Converted(f"{_g(samples)} completions / {_g(prompts * group)} of a step = {steps}", steps)


def _warmup(share: Number, numbers: Numbers) -> Converted:
    steps = numbers.ours("run.steps")
    if steps is None:
        return Converted(f"{_g(share)} × the run's optimizer steps")
    updates = steps * (numbers.ours(_UPDATES, 1) or 1) * (numbers.ours(_EPOCHS, 1) or 1)
    warmup = round(share * updates)
    return Converted(f"{_g(share)} × {_g(updates)} optimizer steps = {warmup}", warmup)


def _least_rate(rate: Number, numbers: Numbers) -> Converted:
    peak = numbers.ours(f"{ACTOR}.optimizer.lr")
    if not peak:
        return Converted(f"a share of the learning rate: {_g(rate)} / lr")
    return Converted(f"a share of the learning rate: {_g(rate)} / {_g(peak)} = {_g(rate / peak)}", rate / peak)


def _both_bounds(share: Number, numbers: Numbers) -> Converted | None:
    if numbers.their("epsilon_high") is not None or numbers.their("clip_ratio_high") is not None:
        return None
    return Converted(f"and algorithm.clip_high = {_g(share)}, which is a key of its own here", share)


def _low_and_high(bounds: Any, _: Numbers) -> Converted | None:
    if not (isinstance(bounds, list) and len(bounds) == 2):
        return None
    return Converted(f"algorithm.clip_low = {show(bounds[0])} and algorithm.clip_high = {show(bounds[1])}")


def _betas(_: Any, numbers: Numbers) -> Converted | None:
    first, second = numbers.their("adam_beta1"), numbers.their("adam_beta2")
    return Converted(f"both in one list: [{show(first) or 0.9}, {show(second) or 0.999}]")


# ── places, trackers, functions ───────────────────────────────────────────────────────────────────


def _gpus(count: Number, _: Numbers) -> Converted | None:
    if not 0 < count <= 64:
        return None
    return Converted(f"the GPUs themselves, {show(list(range(int(count))))}; actor.processes counts them all")


def _trackers(names: Any, _: Numbers) -> Converted | None:
    known = [kind for table in tables_at(("tracking",), {}) for kind in kinds_of(table)]
    asked = [name for name in (names if isinstance(names, list) else [names]) if name in known]
    if not asked:
        return Converted("lines on the console and metrics.jsonl are always there: leave it out")
    return Converted("; ".join(f"[[tracking]] with kind = {show(name)}" for name in asked))


def _own_function(_: Any, numbers: Numbers) -> Converted | None:
    table = "custom_reward_function"
    file, name = numbers.their(table, "path"), numbers.their(table, "name") or "compute_score"
    if not isinstance(file, str):
        return None
    return Converted(f'file and name together: terms = [{{ kind = "function", path = {show(f"{file}:{name}")} }}]')


def _or_never(never: str) -> Callable[[Number, Numbers], Converted | None]:
    """How often or how much; 0 and less, which mean none in other tools, are no value here."""
    return lambda value, _: Converted(never) if value <= 0 else None


# Their key → what its value is here. A name that SYNONYMS has and that is not here takes the same value.
CONVERSIONS: dict[str, Callable[[Any, Numbers], Converted | None]] = {
    "ppo_mini_batch_size": _of_prompts,
    **dict.fromkeys(("train_global_batch_size", "global_batch_size"), _of_completions),
    "train_batch_size": _train_batch,
    "batch_size": _batch,
    "generation_batch_size": _generation,
    "gradient_accumulation_steps": _accumulation,
    _ROUNDS: _rounds,
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "micro_train_batch_size",
            "train_micro_batch_size",
            "micro_batch_size_per_gpu",
            "ppo_micro_batch_size_per_gpu",
            "forward_micro_batch_size_per_gpu",
            "log_prob_micro_batch_size_per_gpu",
            "logprob_batch_size",
        ),
        _micro_batch,
    ),
    **dict.fromkeys(("max_model_len", "max_seq_length", "vllm_max_model_length"), _response),
    **dict.fromkeys(("num_train_epochs", "total_epochs", "num_episodes"), _epochs),
    "total_episodes": _episodes,
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), _warmup),
    "min_lr": _least_rate,
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "cliprange"), _both_bounds),
    "eps_clip_low_high": _low_and_high,
    **dict.fromkeys(("adam_beta1", "adam_beta2"), _betas),
    **dict.fromkeys(("save_freq", "save_steps"), _or_never("never: leave it out; the last step is always saved")),
    **dict.fromkeys(("test_freq", "eval_steps"), _or_never("never: leave [eval] out")),
    **dict.fromkeys(("lora_rank", "lora_r"), _or_never("none: leave actor.lora out")),
    **dict.fromkeys(("n_gpus_per_node", "num_gpus_per_node", "actor_num_gpus_per_node", "gpus_per_node"), _gpus),
    **dict.fromkeys(("report_to", "logger"), _trackers),
    **dict.fromkeys(("custom_reward_function.path", "custom_reward_function.name"), _own_function),
}
_TURNED = {"train_batch_size": (_UPDATES,)}  # what these may be beside what SYNONYMS says
_NO_NUMBER = (_low_and_high, _trackers, _own_function)
