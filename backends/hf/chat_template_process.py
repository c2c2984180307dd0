"""The process that renders a chat template: of each JSON line, a conversation, the texts of its beginnings, one a line.

Run by its path, so it imports nothing of rlctl. It cannot outlast a conversation's time: the kernel ends it by SIGALRM.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, tzinfo
from types import SimpleNamespace
from typing import Any

MAX_CHARACTERS = 1 << 24  # of a rendered conversation
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # keys of a message; a template reads any that it names

Prepare = Callable[[list[Any], list[Any] | None], tuple[Any, dict[str, Any]]]  # a template, and what it is given


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
    prepare: Prepare | None = None
    reply: dict[str, Any]
    for line in sys.stdin:
        request, prepared, whole = json.loads(line), None, ""
        for count, begins_answer in request["cuts"]:
            signal.setitimer(signal.ITIMER_REAL, setup["seconds"])
            try:
                prepare = prepare or (_with_library(setup) if setup["library"] else _with_jinja(setup))
                if prepared is None:
                    said = [
                        {key: value for key, value in one.items() if value is not None} for one in request["messages"]
                    ]
                    prepared = prepare(said, request["tools"])
                template, given = prepared
                messages = given["messages"][:count]
                text = str(template.render(given | {"messages": messages, "add_generation_prompt": begins_answer}))
                if len(text) > MAX_CHARACTERS:
                    reply = {"broken": f"makes a prompt of more than {MAX_CHARACTERS:,} characters"}
                elif whole.startswith(text):
                    reply = {"same": len(text)}  # characters of the first text
                else:
                    reply, whole = {"text": text}, whole or text
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
            sys.stdout.flush()  # what is rendered is told, though the next beginning may end this process


def _with_library(setup: Mapping[str, Any]) -> Prepare:
    """Prepare as `apply_chat_template` of transformers does, which leaves out what is None in a message."""
    from transformers.utils import chat_template_utils

    library, given = vars(chat_template_utils), dict[str, Any]()  # changed in this process alone
    library["datetime"] = _clock(setup)  # what `strftime_now` asks
    compiled = library["_compile_jinja_template"]  # once, of each text

    def take(**variables: Any) -> str:
        given.update(variables)
        return ""

    library["_compile_jinja_template"] = lambda _: SimpleNamespace(render=take)

    def prepare(messages: list[Any], tools: list[Any] | None) -> tuple[Any, dict[str, Any]]:
        template = setup["templates"][tools is not None]
        chat_template_utils.render_jinja_template(
            conversations=[messages], chat_template=template, tools=tools, **setup["special_tokens"]
        )
        return compiled(template), given

    return prepare


def _clock(setup: Mapping[str, Any]) -> type[datetime]:
    """Return the class whose `now` is the day that `today` names, if it names one."""

    class Day(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Day:
            return cls.fromisoformat(setup["today"])

    return Day if setup["today"] else datetime


def _with_jinja(setup: Mapping[str, Any]) -> Prepare:
    """Prepare as transformers does, as far as jinja2 alone can."""
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

    def prepare(messages: list[Any], tools: list[Any] | None) -> tuple[Any, dict[str, Any]]:
        for one in messages:
            if thought := [one[key] for key in THOUGHTS if key in one]:
                one.update({"thinking": thought[0], **one, "reasoning_content": thought[0]})
        variables = {"messages": messages, "tools": tools, "documents": None, **setup["special_tokens"]}
        return compiled[setup["templates"][tools is not None]], variables

    return prepare


if __name__ == "__main__":
    main()
