"""Whether the judges that a spec names have a key, and answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing

from specs.errors import Problem
from specs.schema.rewards import Judge
from specs.schema.spec import Spec
from specs.text import show

TIMEOUT_S = 5.0
REFUSED = (401, 403)


def key_problems(spec: Spec) -> list[Problem]:
    """Find keys that the environment does not have. Nothing is sent."""
    found = []
    for index, term in _judges(spec):
        from workers.grading.judge_client import key_problem  # brings asyncio and ssl

        named = term.key_env.isidentifier()  # else it may be the key itself, and a rule says so
        if named and (why := key_problem(term.key_env)):
            hint = f"export {term.key_env}=… before rlctl is called, or leave key_env out where none is needed"
            found.append(Problem(f"reward.terms.{index}.key_env", why, hint))
    return found


def address_problems(spec: Spec) -> list[Problem]:
    """Ask each address for its list of models, once; return those that nobody answers at, or that refuse the key."""
    judges = {(term.base_url, term.key_env): index for index, term in reversed(list(_judges(spec)))}
    if not judges:
        return []
    import asyncio

    async def ask_all() -> list[Problem | None]:
        return await asyncio.gather(*(_ask(*judge, f"reward.terms.{index}") for judge, index in judges.items()))

    return [problem for problem in asyncio.run(ask_all()) if problem is not None]


async def _ask(base_url: str, key_env: str, term: str) -> Problem | None:
    """Return what is wrong with an address; None where somebody answers. Not every server lists its models, and some
    are busy: any other status is an answer too."""
    from workers.grading.judge_client import JudgeClient, JudgeError

    async with aclosing(JudgeClient(base_url, key_env, 1)) as client:
        try:
            await client.request("GET", "models", b"", TIMEOUT_S)
        except JudgeError as error:
            if client.key and error.status in REFUSED:
                hint = "check the key and base_url"
                return Problem(f"{term}.key_env", f"its key is refused: {error}", hint, show(key_env))
            if not error.status:
                hint = "check the address, and that the server is up and this machine reaches it"
                return Problem(f"{term}.base_url", f"nobody answers: {error}", hint, show(base_url))
    return None


def _judges(spec: Spec) -> Iterator[tuple[int, Judge]]:
    return ((index, term) for index, term in enumerate(spec.reward_terms) if isinstance(term, Judge))
