"""Rules of environments: what they are made from, limits that cannot be reached, what they need of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from specs.errors import Problem
from specs.schema.algorithms.algorithm import FunctionAdvantage
from specs.schema.algorithms.algorithm_tables import Gae, GreedyBaseline, ReturnToGo
from specs.schema.environment import EnvironmentSection
from specs.schema.recipes import RlSpec
from specs.schema.table import no_effect
from specs.text import show

_BY_TOKEN = (Gae, GreedyBaseline, ReturnToGo)  # advantages that credit a token with what comes after it


def environment_problems(spec: RlSpec) -> Iterator[Problem]:
    """Yield environments that cannot be made or reached, and keys that do nothing."""
    column, data = spec.data.environment_column, spec.data
    for number, (key, section) in enumerate(spec.environments_by_key.items()):
        yield from _made_of(key, section, spec)
        yield from _limits(key, section, spec)
        yield from _credit(key, section, spec)
        if section.name in [one.name for one in spec.environments[:number]]:
            yield Problem(f"{key}.name", "another environment has this name", "give each a name of its own")
        for name in ("learn_truncated", "credit"):
            if getattr(section, name) != getattr(spec.environments[0], name):
                yield Problem(f"{key}.{name}", "differs from the first environment's", "say the same in all")
    if len(spec.environments) > 1 and not column:
        hint = 'name the column that says which one a row is for: environment_column = "…"'
        yield Problem("data.environment_column", f"missing: there are {len(spec.environments)} environments", hint)
    elif len(spec.environments) < 2 and column:
        yield no_effect("data.environment_column", "there is one environment, or none")
    if len(spec.environments) == 1 and "name" in spec.environments[0].model_fields_set:
        yield no_effect(f"{next(iter(spec.environments_by_key))}.name", "there is one environment: no row chooses it")
    if spec.environments and data.chat == "never":
        message = "an environment's turns are written by the chat template"
        yield Problem("data.chat", message, "remove the key")
    if not spec.environments and spec.environment_term is not None:
        hint = 'add [environment], or [reward] with terms such as { kind = "exact_match" }'
        if "reward" not in spec.model_fields_set:
            yield Problem("[reward]", "this section is missing", hint)
        elif "terms" not in spec.reward.model_fields_set:
            yield Problem("reward.terms", "missing", hint)
        else:
            yield Problem(f"reward.terms.{spec.environment_term}", "the spec has no environment", hint)


def _made_of(key: str, section: EnvironmentSection, spec: RlSpec) -> Iterator[Problem]:
    given = [name for name in ("path", "tools", "agent") if getattr(section, name)]
    if len(given) != 1:
        wrong = f"has {' and '.join(given)}" if given else "says nothing of what it is"
        yield Problem(
            f"[{key}]", wrong, "give one of path (a class), tools (functions, MCP servers) and agent (a loop)"
        )
    for number, source in enumerate(section.tools):
        if not source.startswith("mcp:") and ".py:" not in source:
            hint = 'write "file.py:function", or "mcp:command"'
            yield Problem(f"{key}.tools.{number}", "neither a function nor an MCP server", hint)
    if section.agent and section.on_parse_error == "end":
        yield no_effect(f"{key}.on_parse_error", "an agent reads what the model wrote itself")
    nothing_else = len(spec.reward_terms) == 1 and spec.environment_term == 0
    if section.command and not section.command.reward and nothing_else:
        hint = 'name a function: agent.reward = "file.py:name", or add [reward] with terms of its own'
        yield Problem(f"{key}.agent.reward", "missing, and nothing else grades what the program does", hint)
    if not section.agent and "learn_from" in section.model_fields_set:
        yield no_effect(f"{key}.learn_from", "there is no agent")


def _limits(key: str, section: EnvironmentSection, spec: RlSpec) -> Iterator[Problem]:
    """Yield limits that leave no room, or that another one comes before."""
    data, most = spec.data, section.max_episode_tokens
    if most <= data.max_prompt_tokens:
        message = f"leaves a prompt of data.max_prompt_tokens = {data.max_prompt_tokens} no room for a turn"
        yield Problem(f"{key}.max_episode_tokens", message, f"use at least {data.max_prompt_tokens + 1}")
    elif data.max_response_tokens >= most:
        message = f"no turn can be so long: {key}.max_episode_tokens = {most}, with the prompt"
        yield Problem("data.max_response_tokens", message, f"use less than {most}")
    if section.call_timeout_s > section.episode_timeout_s:
        message = f"no call can take so long: {key}.episode_timeout_s = {section.episode_timeout_s:g}"
        yield Problem(f"{key}.call_timeout_s", message, f"use at most {section.episode_timeout_s:g}")


def _credit(key: str, section: EnvironmentSection, spec: RlSpec) -> Iterator[Problem]:
    if section.credit == "episode":
        return
    if not isinstance(spec.algorithm.advantage, _BY_TOKEN):
        own = isinstance(spec.algorithm.advantage, FunctionAdvantage)
        gives = "algorithm.advantage_function" if own else f"algorithm.kind = {show(spec.algorithm.kind)}"
        hint = ("leave it out, and " if own else "") + 'use algorithm.kind = "reinforce++", "remax" or "ppo"'
        yield Problem(f"{key}.credit", f"{gives} gives all tokens of a rollout the same advantage", hint)
    elif spec.environment_term is None:
        yield no_effect(f"{key}.credit", 'no term of reward.terms is { kind = "environment" }')
