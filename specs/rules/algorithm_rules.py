"""Rules of an algorithm: its pieces, and its reference."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.algorithms.algorithm import Algorithm, FunctionLoss
from specs.schema.algorithms.algorithm_tables import ActorCritic, ClipCovLoss, Gae
from specs.schema.recipes import RlSpec
from specs.schema.sections import same_source
from specs.schema.table import Table, no_effect

_MORE_UPDATES = "raise algorithm.mini_batches_per_step or algorithm.epochs_per_step, or "
_ONE_UPDATE = "with one mini-batch and one epoch per step"


def algorithm_problems(spec: RlSpec) -> Iterator[Problem]:
    """Yield combinations that cannot work, and keys without effect."""
    yield from _reference(spec)
    yield from _kl(spec)
    yield from _dynamic_sampling(spec)
    yield from _correction(spec)
    yield from _critic(spec)
    yield from _own_functions(spec)
    loss = spec.loss
    if isinstance(loss, ClipCovLoss) and loss.covariance_low > loss.covariance_high:
        message = f"below algorithm.covariance_low = {loss.covariance_low:g}: no token is in the band"
        yield Problem("algorithm.covariance_high", message, "widen the band")


def algorithm_warnings(spec: RlSpec) -> Iterator[Problem]:
    """Yield keys that do nothing in this run, and a teacher that teaches nothing."""
    algorithm, teacher = spec.algorithm, spec.ref.model if spec.ref is not None else ""
    if spec.ratio_against == "current":
        always = f"{_ONE_UPDATE} the ratio is always 1"
        if spec.loss.needs_ratio:
            message = f"{always}, and the loss is the plain policy gradient"
            yield Problem("algorithm.kind", message, f"{_MORE_UPDATES}choose grpo")
        for key in spec.loss.ratio_keys:
            if key in algorithm.model_fields_set:
                yield Problem(f"algorithm.{key}", f"does nothing: {always}", f"{_MORE_UPDATES}leave it out")
    if isinstance(algorithm, ActorCritic) and algorithm.value_clip is not None and algorithm.on_policy:
        message = f"does nothing: {_ONE_UPDATE} no value has moved yet"
        yield Problem("algorithm.value_clip", message, f"{_MORE_UPDATES}leave it out")
    if _only_teacher(algorithm) and (not teacher or same_source(teacher, spec.model.path)):
        message = f"the teacher of {algorithm.kind} is the actor's own start, so nothing is learned"
        yield Problem("ref.model", message, "name a trained model with the actor's tokenizer")


def _only_teacher(algorithm: Algorithm) -> bool:
    """Tell whether nothing is learned from rewards."""
    return algorithm.advantage.needs_teacher and not getattr(algorithm, "reward_coef", 0.0)


def _reference(spec: RlSpec) -> Iterator[Problem]:
    if spec.ref_is_actor and spec.ref is not None:
        message = "has no effect: with actor.lora the reference is the actor without its adapters"
        yield Problem("[ref]", message, "remove the section, or name another model in ref.model")
    if spec.ref is not None and not spec.needs_ref:
        hint = "set algorithm.kl_coef above 0, or remove the section"
        yield Problem("[ref]", "has no effect: algorithm.kl_coef is 0, so no reference is loaded", hint)


def _kl(spec: RlSpec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    estimator, in_reward, given = algorithm.kl_estimator, algorithm.kl_in == "reward", algorithm.model_fields_set
    if not algorithm.kl_coef:
        for key in ("kl_in", "kl_estimator", "kl_target", "kl_horizon"):
            if key in given:
                yield no_effect(f"algorithm.{key}", "algorithm.kl_coef is 0")
        return
    if "kl_horizon" in given and algorithm.kl_target is None:
        yield no_effect("algorithm.kl_horizon", "without algorithm.kl_target the weight stays")
    if algorithm.kl_target is not None and algorithm.kl_horizon < spec.samples_per_step:
        message = f"a step has {spec.samples_per_step} rollouts: the weight would change by more than 20 % in one"
        yield Problem("algorithm.kl_horizon", message, f"use at least {spec.samples_per_step}")
    if estimator == "k1" and not in_reward:
        message = "as a loss its gradient is zero in expectation (the mean of ∇ log p over the policy's own samples)"
        hint = 'use k2, k3, k3-straight-through or k3-unbiased, or set algorithm.kl_in = "reward"'
        yield Problem("algorithm.kl_estimator", message, hint)
    if in_reward and _only_teacher(algorithm):
        message = "subtracts the KL from rewards, and with algorithm.reward_coef = 0 none is learned from"
        yield Problem("algorithm.kl_in", message, 'set algorithm.kl_in = "loss", or algorithm.reward_coef above 0')
    if "-" in estimator and in_reward:
        message = "has another gradient than its value, and no gradient passes through a reward"
        yield Problem("algorithm.kl_estimator", message, f"use {estimator[:2]}")


def _dynamic_sampling(spec: RlSpec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if not algorithm.dynamic_sampling:
        if "max_refills" in algorithm.model_fields_set:
            yield no_effect("algorithm.max_refills", "algorithm.dynamic_sampling is false")
    elif not algorithm.advantage.equal_is_silent:
        kind = algorithm.advantage.model_dump()["kind"]
        message = f"the advantage {kind} learns from a group of equal scores too: none may be thrown away"
        hint = "set algorithm.dynamic_sampling = false, or choose an algorithm that compares the scores of a group"
        yield Problem("algorithm.dynamic_sampling", message, hint)
    elif algorithm.group_size == algorithm.advantage.min_group == 1:
        message = "a group of one has equal scores always, and algorithm.dynamic_sampling would throw all away"
        yield Problem("algorithm.group_size", message, "use 2 or more")
    elif spec.needs_reward_model and spec.colocated:
        message = "refills are sampled after groups were scored, when the sampler has made room for the reward model"
        hint = 'set it to false, or give rollout other devices than actor (and leave run.colocate = "always" out)'
        yield Problem("algorithm.dynamic_sampling", message, hint)


def _correction(spec: RlSpec) -> Iterator[Problem]:
    table, key = spec.algorithm.correction, "algorithm.correction"
    if table is None:
        return
    if table.mode == "truncate" and "low" in table.model_fields_set:
        yield no_effect(f"{key}.low", 'mode "truncate" has an upper bound alone')
    if table.mode != "mask" and spec.algorithm.anchor == "sampler":
        message = 'with algorithm.anchor = "sampler" the loss\'s ratio holds this weight already: it would count twice'
        hint = 'set mode = "mask", which leaves tokens out, or algorithm.anchor = "trainer"'
        yield Problem(f"{key}.mode", message, hint)
    if table.band[0] == table.band[1]:
        yield Problem(f"{key}.high", "the band is empty: low and high are 1", "widen it")


def _critic(spec: RlSpec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if spec.critic is not None and algorithm.value_loss is None:
        hint = 'set algorithm.kind = "ppo", or remove the section'
        yield Problem("[critic]", f'has no effect: algorithm.kind = "{algorithm.kind}" has no critic', hint)
    advantage = algorithm.advantage
    settled = isinstance(advantage, Gae) and None not in (advantage.gae_length_alpha, advantage.gae_lambda_value)
    if settled and "gae_lambda" in algorithm.model_fields_set:
        why = "the policy's λ follows from gae_length_alpha, and the critic's is gae_lambda_value"
        yield no_effect("algorithm.gae_lambda", why)


def _own_functions(spec: RlSpec) -> Iterator[Problem]:
    """Yield keys that a function of the user's replaces, or cannot replace."""
    algorithm = spec.algorithm
    if algorithm.advantage_function is not None and algorithm.value_loss is not None:
        message = f"{algorithm.kind} has a critic, whose returns the kind's own advantage makes"
        hint = "leave it out, or choose a kind without a critic, such as grpo"
        yield Problem("algorithm.advantage_function", message, hint)
    replaced: dict[str, type[Table]] = {
        "advantage_function": algorithm.advantage_table,
        "loss_function": algorithm.loss_table,
    }
    for key in algorithm.own_functions:
        own = replaced[key].model_fields.keys() - FunctionLoss.model_fields.keys()
        for name in sorted(own & algorithm.model_fields_set):
            yield no_effect(f"algorithm.{name}", f"algorithm.{key} replaces what reads it")
