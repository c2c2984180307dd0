"""Settings that are allowed and leave nothing to learn: completions that are all the same, steps of no size or of one
that destroys the model, deadlines that nothing can meet."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from specs.errors import Problem
from specs.schema.rewards import ExactMatch, MathVerify, Overlong, Regex
from specs.schema.role_section import Optimizer
from specs.schema.roles import RoleName
from specs.schema.spec import Spec
from specs.text import show

_COLDEST, _NARROWEST = 0.05, 0.05  # temperature and top_p below which one token is nearly all that can be drawn
_NEARLY_ALL = 0.95  # top_p from which on log-probs lie less than 0.06 apart
_HOTTEST = 2.0  # temperature above which tokens are drawn nearly as by lot
_LARGEST_LR = 0.1  # AdamW moves each weight by about lr per step; weights of a transformer are around 0.02
_SMALLEST_LR = 1e-9
_MOST_SHRUNK, _MOST_DECAY = 0.1, 0.5  # share of a weight that a step takes, and what no recipe has
_LEAST_LEFT = 0.05  # share of a reward that γ leaves the first of the most tokens
_MOST_KL = 1.0  # nats a token: a model that was steered there says something else
_START_S, _VERB_S, _GRADE_S = 5.0, 1.0, 0.05  # what importing torch, one request and one grade take at the least


def learning_warnings(spec: Spec) -> Iterator[Problem]:
    """Warnings about sampling, learning rate and deadlines."""
    yield from _sampling(spec)
    yield from _learning_rate(spec)
    yield from _patterns(spec)
    yield from _punished(spec)
    yield from _pays_failure(spec)
    yield from _only_short(spec)
    yield from _far_from_usual(spec)
    yield from _adapters_scale(spec)
    yield from _rewards_reach(spec)
    yield from _kl_target(spec)
    yield from _clip(spec)
    yield from _deadlines(spec)


def _sampling(spec: Spec) -> Iterator[Problem]:
    rollout = spec.rollout
    same = "draws the likeliest token nearly always: the completions of a prompt are all the same"
    if rollout.temperature < _COLDEST:
        yield Problem("rollout.temperature", same, "1.0 is usual", show(rollout.temperature))
    if rollout.temperature > _HOTTEST:
        message = "draws every token nearly as often as any other"
        yield Problem("rollout.temperature", message, "1.0 is usual", show(rollout.temperature))
    for key, off, alone in (
        ("top_p", 1.0, rollout.top_p < _NARROWEST),
        ("top_k", 0, rollout.top_k == 1),
    ):
        value = getattr(rollout, key)
        if value != off and (key != "top_p" or value < _NEARLY_ALL):
            message = same if alone else "samples from another distribution than the one that is trained"
            yield Problem(f"rollout.{key}", message, f"{off:g} makes them equal", show(value))


def _learning_rate(spec: Spec) -> Iterator[Problem]:
    for role, optimizer in optimizers(spec):
        lr, key = optimizer.lr, f"{role}.optimizer.lr"
        if lr > _LARGEST_LR and spec.actor.engine.model_of != "bigram":
            message = "AdamW moves every weight by about this much in a step, and most weights are smaller"
            yield Problem(key, message, "1e-6 is usual, with adapters 1e-5", show(lr))
        if 0 < lr < _SMALLEST_LR and spec.run.steps > 1:
            steps = max(1, spec.optimizer_steps_of(role))
            message = f"moves a weight by at most {lr * steps:.0e} in the whole run, which no completion shows"
            yield Problem(key, message, "1e-6 is usual, with adapters 1e-5", show(lr))
        if optimizer.betas[0] > optimizer.betas[1]:
            message = "the gradient is averaged for longer than its square: are they the wrong way round?"
            yield Problem(f"{role}.optimizer.betas", message, "[0.9, 0.999] is usual", show(optimizer.betas))
        shrinks, decay = lr * optimizer.weight_decay, optimizer.weight_decay
        if shrinks > _MOST_SHRUNK or decay > _MOST_DECAY:
            far = "is what is lost, as a share times lr, not what is kept"
            message = f"takes {shrinks:.0%} a step" if shrinks > _MOST_SHRUNK else far
            yield Problem(f"{role}.optimizer.weight_decay", message, "0.0 to 0.1 is usual", show(decay))
        if optimizer.schedule != "constant" and optimizer.min_lr_ratio == 1:
            message = f'schedule = "{optimizer.schedule}" ends where it begins: lr never falls'
            yield Problem(f"{role}.optimizer.min_lr_ratio", message, "0.0 or 0.1 is usual", "1.0")
        if lr == 0 and spec.run.steps > 1:  # one such step is a trial of everything else
            yield Problem(key, f"the {role} never learns", "1e-6 is usual, with adapters 1e-5", show(lr))


def optimizers(spec: Spec) -> Iterator[tuple[RoleName, Optimizer]]:
    """Optimizers of the roles that have a section."""
    for role, section in spec.sections():
        optimizer = getattr(section, "optimizer", None)
        if isinstance(optimizer, Optimizer):
            yield role, optimizer


_LATEX = re.compile(r"(?<!\\)\\(?:boxed|frac|text|begin|right)")
_SPECIAL = re.compile(r"<\|(?:im_end|im_start|endoftext|eot_id|end|eos)\|>|<(?:eos|end_of_turn)>|</s>$")
_READ_AS = {"b": "the end of a word", "f": "a form feed", "t": "a tab", "r": "a carriage return"}
_CHARACTERS_A_TOKEN = 16  # more than text has on average in any vocabulary


def _needs_more(pattern: str, tokens: int) -> bool:
    """Whether the shortest text that a pattern is found in is longer than so many tokens."""
    try:
        return int(_parser.parse(pattern, re.DOTALL).getwidth()[0]) > tokens * _CHARACTERS_A_TOKEN
    except (re.error, RecursionError, OverflowError):
        return False


def _patterns(spec: Spec) -> Iterator[Problem]:
    """Patterns that are written as another language writes them, and are found in nothing."""
    for index, term in enumerate(spec.reward.terms):
        if not isinstance(term, Regex):
            continue
        key, value = f"reward.terms.{index}.pattern", show(term.pattern)
        if re.fullmatch(r"/.+/[gimsuy]*", term.pattern, re.DOTALL):
            yield Problem(key, "the slashes are part of the pattern", "leave them and the flags out", value)
        elif re.search(r"\\\\[dDwWsS](?:[+*?)]|\{\d|$)", term.pattern):
            yield Problem(key, "is found only behind a backslash", r"in TOML's '...' write \d, not \\d", value)
        elif found := _LATEX.search(term.pattern):
            message = f"{found[0]} is no text in a pattern but {_READ_AS[found[0][1]]} and {found[0][2:]}"
            yield Problem(key, message, rf"write \{found[0]}, in TOML within '...'", value)
        elif special := _SPECIAL.search(re.sub(r"\\(\W)", r"\1", term.pattern)):
            message = f"looks for {special[0]}, and completions are read without the tokens that end a turn"
            yield Problem(key, message, "leave it out: $ is where a completion ends", value)
        elif _needs_more(term.pattern, spec.data.max_response_tokens):
            message = "is found only in texts of more characters than data.max_response_tokens can hold"
            yield Problem(key, message, "raise data.max_response_tokens, or ask for less", value)


def _punished(spec: Spec) -> Iterator[Problem]:
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, ExactMatch | MathVerify) and term.weight < 0:
            message = "a right completion lowers the reward"
            yield Problem(f"reward.terms.{index}.weight", message, "write it without the minus", show(term.weight))
        if isinstance(term, Overlong) and term.weight < 0:
            message = "its value is 0 or below already: with this weight a completion gains by being too long"
            yield Problem(f"reward.terms.{index}.weight", message, "write it without the minus", show(term.weight))


def _pays_failure(spec: Spec) -> Iterator[Problem]:
    """A completion that cannot be graded gets as much as the best that the terms can give."""
    terms, fallback = spec.reward.terms, spec.reward.fallback
    if fallback > 0 and all(isinstance(term, ExactMatch | MathVerify | Regex | Overlong) for term in terms):
        best = sum(max(term.weight, 0.0) for term in terms if not isinstance(term, Overlong))
        if fallback >= best:
            message = f"a completion that cannot be graded gets as much as the best one can, {best:g}"
            yield Problem("reward.fallback", message, "0.0 is the default", show(fallback))


def _only_short(spec: Spec) -> Iterator[Problem]:
    if all(isinstance(term, Overlong) for term in spec.reward.terms):
        message = "the length alone is graded: whatever is short scores the same, and nothing rewards what is right"
        yield Problem("reward.terms", message, "add a term that grades the answer", 'kind = "overlong"')


_NO_REWARD = "leaves the reward no weight"
_ROUNDING = "is smaller than the rounding of float32, so that no step passes"
_FLOAT32 = 1e-6
# Key → from when on its value is far from any in use, what it then does, and what is usual.
_FAR: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "algorithm.kl_coef": (lambda value: value > 10, _NO_REWARD, "0.001"),
    "algorithm.entropy_coef": (lambda value: abs(value) > 1, _NO_REWARD, "0.001"),
    "algorithm.epochs_per_step": (
        lambda value: value > 20,
        "learns the same samples so often that all ratios are clipped",
        "1",
    ),
    "actor.optimizer.eps": (lambda value: value > 1e-3, "is larger than most gradients", "1e-8"),
    "actor.optimizer.max_grad_norm": (lambda value: 0 < value < 1e-4, "leaves nothing of any gradient", "1.0"),
    "rollout.max_probe_gap": (lambda value: value is not None and value < _FLOAT32, _ROUNDING, "2e-3"),
    "rollout.max_logprob_gap": (lambda value: value is not None and value < _FLOAT32, _ROUNDING, "1e-2"),
}


def _far_from_usual(spec: Spec) -> Iterator[Problem]:
    """Numbers of another order of magnitude than any that is in use: a slip of the pen, or a percentage."""
    for key, (far, message, usual) in _FAR.items():
        value = attrgetter(key)(spec)
        if far(value):
            yield Problem(key, message, f"{usual} is usual", show(value))
    parts = spec.algorithm.mini_batches_per_step
    if parts > 64:
        message = f"takes {parts} optimizer steps on samples of the first one's weights"
        yield Problem("algorithm.mini_batches_per_step", message, "1 to 16 is usual", show(parts))


def _adapters_scale(spec: Spec) -> Iterator[Problem]:
    for role, lora in spec.adapters():
        times, key = f"multiplies what adapters do by {lora.alpha / lora.rank:g}", f"{role}.lora.alpha"
        if lora.alpha < lora.rank / 100:
            message = f"{times}: they hardly change the model"
            yield Problem(key, message, "once or twice the rank is usual", show(lora.alpha))
        if lora.alpha > 1000 * lora.rank:
            yield Problem(key, times, "once or twice the rank is usual", show(lora.alpha))


def _rewards_reach(spec: Spec) -> Iterator[Problem]:
    discount, longest = getattr(spec.algorithm, "discount", 1.0), spec.data.max_response_tokens
    if discount**longest < _LEAST_LEFT:
        message = f"the first of {longest} tokens gets {discount**longest:.1%} of the reward"
        yield Problem("algorithm.discount", message, "1.0 is usual", show(discount))


def _kl_target(spec: Spec) -> Iterator[Problem]:
    target = spec.algorithm.kl_target
    if target is not None and target > _MOST_KL:
        message = "is a mean per token, and no policy that still writes sense is so far away: β would fall to nothing"
        hint = "divide a target for whole completions by their tokens; 0.01 to 0.1 is usual"
        yield Problem("algorithm.kl_target", message, hint, show(target))


def _clip(spec: Spec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    clip_low, clip_high = getattr(algorithm, "clip_low", None), getattr(algorithm, "clip_high", None)
    written = {"clip_low", "clip_high"} <= algorithm.model_fields_set
    if written and clip_low is not None and clip_high is not None and clip_high < clip_low < 1:  # 1: no bound
        message = f"leaves less room up than algorithm.clip_low down ({clip_low:g}): are they the wrong way round?"
        yield Problem("algorithm.clip_high", message, "0.2 below and 0.28 above are usual", show(clip_high))
    if clip_low is not None and clip_high is not None and 0.5 <= clip_low < 1 <= clip_high < 2:
        message = f"is a distance from 1, as clip_high is: ratios are clipped at {1 - clip_low:g} and {1 + clip_high:g}"
        hint = f"bounds of {clip_low:g} and {clip_high:g} are clip_low = {1 - clip_low:.3g} and "
        yield Problem("algorithm.clip_low", message, f"{hint}clip_high = {clip_high - 1:.3g}", show(clip_low))
    if clip_high is not None and clip_high > 10:
        yield Problem("algorithm.clip_high", "is a share, not a percentage", "0.2 is usual", show(clip_high))


def _deadlines(spec: Spec) -> Iterator[Problem]:
    run, heavy = spec.run, spec.actor.engine.model_of != "bigram"
    if heavy and run.start_timeout_s < _START_S:
        message = f"a role needs about {_START_S:g} s to import torch alone"
        yield Problem("run.start_timeout_s", message, "300 is the default", show(run.start_timeout_s))
    if heavy and run.verb_timeout_s < _VERB_S:
        message = "sampling, learning or saving for a whole step is one request"
        yield Problem("run.verb_timeout_s", message, "1800 is the default", show(run.verb_timeout_s))
    if heavy and run.heartbeat_timeout_s < _START_S:
        message = f"a role that imports torch is silent for up to {_START_S:g} s, and would count as one that hangs"
        yield Problem("run.heartbeat_timeout_s", message, "30 is the default", show(run.heartbeat_timeout_s))
    if spec.reward.timeout_s < _GRADE_S:
        message = "a process that is slow for a moment would count as one that hangs"
        yield Problem("reward.timeout_s", message, "10 is the default", show(spec.reward.timeout_s))
