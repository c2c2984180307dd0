"""`[environment]`: what answers the model between its turns, and how far an episode may go."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from specs.schema.table import NonEmpty, OptionalFunctionPath, Table

StopReason = Literal[
    "completed",  # the model called no tool, or its environment said that the task is done
    "tool_stopped",  # a tool said that the episode is done
    "max_turns",
    "max_tokens",  # a turn was truncated at `data.max_response_tokens`
    "max_tool_calls",
    "context_overflow",  # `max_episode_tokens` has no room for another turn
    "parse_error",  # a tool call did not parse, and `on_parse_error` is "end"
    "timeout",  # the episode's calls took longer than `episode_timeout_s` together
    "environment_lost",
]
"""Reasons for which an episode ends, in the order of their numbers in the column `stop_B`."""

STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)
BY_ITSELF: frozenset[StopReason] = frozenset({"completed", "tool_stopped", "parse_error"})  # others: a limit, or lost
UNSCORED = tuple(STOP_REASONS.index(reason) for reason in ("timeout", "environment_lost"))
"""Numbers of the reasons after which the environment cannot be asked: such an episode has no score."""


class AgentCommand(Table):
    """An agent that is a program of its own: a process for each episode, which reaches the model at an address that
    OpenAI's and Anthropic's clients know. `{prompt}`, `{model}`, `{base_url}`, `{key}`, `{spec_dir}` and the row's
    columns are replaced by their values."""

    command: tuple[NonEmpty, ...] = Field(min_length=1)
    """The program and its arguments. It gets `OPENAI_BASE_URL`, `ANTHROPIC_BASE_URL` and a key of its own."""
    env: dict[NonEmpty, str] = Field(default_factory=dict)
    """Variables besides `PATH`, locale, `TZ`, `SSL_CERT_…` and an empty `HOME`: no others of this machine."""
    cwd: NonEmpty = "fresh"
    """The working directory at the start: empty (`fresh`), or a copy of a folder, of an archive or of a git bundle,
    relative to the spec file."""
    keep_cwd: bool = False
    """Whether the working directory is kept, in the run's folder `agents`."""
    reward: OptionalFunctionPath = ""
    """`file.py:name` of a function that gives the reward. It is called in the episode's process, and each parameter
    gets what its name says: `cwd`, `exit_code`, `output`, `messages` or a column of the row."""


# How errors name the forms of `agent`; no key of a spec looks like them.
LOOP, COMMAND = "agent = a function", "agent = a command"

AgentSource = Annotated[
    Annotated[OptionalFunctionPath, Tag(LOOP)] | Annotated[AgentCommand, Tag(COMMAND)],
    Discriminator(lambda raw: COMMAND if isinstance(raw, dict | AgentCommand) else LOOP),
]


class EnvironmentSection(Table):
    """An environment of several turns: one of `path`, `tools` and `agent`."""

    name: NonEmpty = "environment"
    """Name by which rows choose one of several, in the column `data.environment_column`."""
    path: OptionalFunctionPath = ""
    """`file.py:Class`, relative to the spec file. A class with `reset` whose other public methods are tools, or one
    with `step(text)`, which replies to each turn."""
    tools: tuple[NonEmpty, ...] = ()
    """Tools that need no class: functions (`file.py:name`) and MCP servers (`mcp:command`)."""
    agent: AgentSource = ""
    """`file.py:name` of `async def run(task, client)`, a loop of your own against the sampler; or a program, as
    `{ command = ["mini", "-t", "{prompt}"] }`."""
    learn_from: Literal["main", "all"] = "main"
    """Requests of an agent that are learned from: conversations about the task with the most tools (`main`), or also
    the titles, summaries and such that it had written beside them (`all`)."""
    max_turns: int = Field(8, gt=0)
    """Turns of the model in an episode."""
    max_episode_tokens: int = Field(2048, gt=0)
    """Tokens of a whole episode: prompt, turns and replies. `data.max_response_tokens` limits one turn."""
    max_tool_calls: int = Field(16, gt=0)
    """Tool calls in an episode."""
    call_timeout_s: float = Field(10.0, gt=0)
    """Seconds that one call may take: of a tool, `step` or `reset`. One that takes longer loses the episode."""
    episode_timeout_s: float = Field(120.0, gt=0)
    """Seconds that all calls of an episode may take together; waiting for the sampler does not count."""
    learn_truncated: bool = True
    """Whether episodes that a limit ended are learned from."""
    on_parse_error: Literal["observe", "mask", "end"] = "observe"
    """A turn whose tool call does not parse: the model is told (`observe`), is told and does not learn from that turn
    (`mask`), or the episode ends (`end`)."""
    credit: Literal["episode", "turn"] = "episode"
    """Whether each turn is credited with the reward of the whole episode, or with what came after it (`turn`)."""
    history: Literal["append", "branch"] = "append"
    """A chat template that rewrites earlier turns, such as one that drops their thinking: `append` refuses it, `branch`
    starts another sample of the same rollout with the rewritten conversation."""
    processes: int = Field(256, ge=1, le=4096)
    """Isolated processes on each node of the reward role; each holds one episode at a time."""
    memory_MiB: int = Field(1024, gt=0)
    """Memory that an episode may take beyond what its code takes when it is imported."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The code that it is made from, as the spec names it."""
        return tuple(filter(None, (self.path, *self.tools, self.loop, *([self.program] if self.program else []))))

    @property
    def files(self) -> tuple[str, ...]:
        """The Python files among its sources."""
        named = (self.path, *self.tools, self.loop, self.command.reward if self.command else "")
        return tuple(source for source in named if source and not source.startswith("mcp:"))

    @property
    def loop(self) -> str:
        """The function that is its agent; "" where it is none."""
        return self.agent if isinstance(self.agent, str) else ""

    @property
    def command(self) -> AgentCommand | None:
        """The program that is its agent."""
        return None if isinstance(self.agent, str) else self.agent

    @property
    def program(self) -> str:
        """How a person would write the program."""
        return shlex.join(self.command.command) if self.command else ""


# How errors name the two forms of the section; no key of a spec looks like them.
ONE, SEVERAL = "[environment]", "[[environment]]"
FORMS = frozenset({ONE, SEVERAL, LOOP, COMMAND})


def _form(raw: Any) -> str:
    return SEVERAL if isinstance(raw, list | tuple) else ONE


EnvironmentTables = Annotated[
    Annotated[EnvironmentSection, Tag(ONE)]
    | Annotated[tuple[EnvironmentSection, ...], Field(min_length=1), Tag(SEVERAL)],
    Discriminator(_form),
]
