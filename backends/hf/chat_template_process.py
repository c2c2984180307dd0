"""The process that renders a chat template: one JSON line for each conversation, as long as its input is open.

Run by its path, so it imports nothing of rlctl. It cannot outlast a conversation's time: the kernel ends it by SIGALRM.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, tzinfo
from typing import Any

MAX_CHARACTERS = 1 << 24  # of a rendered conversation
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of a message; a template reads any that it names

Render = Callable[[list[Any], bool, list[Any] | None], str]


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    if setup["library"]:
        from transformers.utils import chat_template_utils  # noqa: F401  before memory is limited
    import jinja2.exceptions
    import jinja2.ext

    with open("/proc/self/statm", encoding="ascii") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    limit = now + (setup["memory_MiB"] << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    render: Render | None = None
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, setup["seconds"])
        try:
            render = render or (_with_library(setup) if setup["library"] else _with_jinja(setup))
            reply = {"text": render(request["messages"], request["begins_answer"], request["tools"])}
            if len(reply["text"]) > MAX_CHARACTERS:
                reply = {"broken": f"makes a prompt of more than {MAX_CHARACTERS:,} characters"}
        except jinja2.TemplateSyntaxError as error:
            reply = {"broken": f"is not Jinja: line {error.lineno}: {error.message}"}
        except jinja2.exceptions.SecurityError as error:
            reply = {"broken": f"does what is not safe: {error}"}
        except (MemoryError, OverflowError):
            reply = {"broken": f"takes more than {setup['memory_MiB']} MiB of memory"}
        except Exception as error:  # its expressions may raise anything
            reply = {"refused": str(error) or type(error).__name__}
        line = json.dumps(reply) + "\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(line)
        sys.stdout.flush()


def _with_library(setup: Mapping[str, Any]) -> Render:
    """Render as `apply_chat_template` of transformers does, which leaves out what is None in a message."""
    from transformers.utils import chat_template_utils

    vars(chat_template_utils)["datetime"] = _clock(setup)  # what `strftime_now` asks; in this process alone

    def render(messages: list[Any], begins_answer: bool, tools: list[Any] | None) -> str:
        given = [{key: value for key, value in one.items() if value is not None} for one in messages]
        rendered: Any = chat_template_utils.render_jinja_template(
            conversations=[given],
            chat_template=setup["templates"][tools is not None],
            add_generation_prompt=begins_answer,
            tools=tools,
            **setup["special_tokens"],
        )
        return str(rendered[0][0])

    return render


def _clock(setup: Mapping[str, Any]) -> type[datetime]:
    """Return the class whose `now` is the day that `today` names, if it names one."""

    class Day(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Day:
            return cls.fromisoformat(setup["today"])

    return Day if setup["today"] else datetime


def _with_jinja(setup: Mapping[str, Any]) -> Render:
    """Render as transformers does, as far as jinja2 alone can."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):  # transformers' tag around what the assistant says; it changes nothing here
        tags = {"generation"}  # noqa: RUF012  as jinja2 has it

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    clock = _clock(setup)
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: clock.now().strftime(form)}
    compiled = {text: environment.from_string(text) for text in setup["templates"]}  # once, where both are the same

    def render(messages: list[Any], begins_answer: bool, tools: list[Any] | None) -> str:
        given = [{key: value for key, value in one.items() if value is not None} for one in messages]
        for one in given:
            if thought := [one[key] for key in THOUGHTS if key in one]:
                one.update({"thinking": thought[0], **one, "reasoning_content": thought[0]})
        return compiled[setup["templates"][tools is not None]].render(
            messages=given,
            tools=tools,
            documents=None,
            add_generation_prompt=begins_answer,
            **setup["special_tokens"],
        )

    return render


if __name__ == "__main__":
    main()
