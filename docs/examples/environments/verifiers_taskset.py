"""Learn from a taskset of verifiers v1 (`pip install verifiers` and the taskset): one turn, scored by its rewards.

    python verifiers_taskset.py TASKSET 2000 > rows.jsonl

    [environment]
    agent = "verifiers_taskset.py:run"

Hooks and rewards that take a `runtime` get a folder and processes of this host. Tasks with tool servers, a container or
a simulated user need verifiers' own harness, and are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import make_runtime
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import invoke
from verifiers.v1.utils.loaders import load_taskset, taskset_class, taskset_config_type


def main(name: str, most: int) -> None:
    config = taskset_config_type(name)(id=name)
    for task in load_taskset(config).take(most):
        prompt, tools = task.data.prompt, [*task.toolsets(task.config), *taskset_class(name).toolsets(config)]
        if tools or task.NEEDS_CONTAINER or prompt is None:
            sys.exit(f"{name} has tool servers, needs a container, or its user speaks first")
        asked = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else [*prompt]
        if task.data.system_prompt:
            asked = [vf.SystemMessage(content=task.data.system_prompt), *asked]
        row = {"prompt": [message.model_dump(exclude_none=True) for message in asked], "taskset": name}
        print(json.dumps({**row, "data": task.data.model_dump(mode="json")}))


async def run(task: Mapping[str, Any], client: Any) -> dict[str, Any]:
    kind = taskset_class(task["taskset"]).task_type()
    mine = kind(kind.data_type().model_validate(task["data"]), taskset_config_type(task["taskset"])().task)
    agent = vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig()))
    trace = vf.Trace(task=vf.TraceTask(type=kind.__name__, data=mine.data), agent=agent, state=state_cls(kind)())
    runtime = make_runtime(agent.config.runtime, name=trace.id)
    await runtime.start()
    try:
        await invoke(mine.setup, {"trace": trace, "runtime": runtime})
        reply = await client.chat(task["messages"])
        for place, message in enumerate([*task["messages"], {"role": "assistant", "content": reply["content"]}]):
            sampled, parent = place == len(task["messages"]), place - 1 if place else None
            trace.nodes.append(vf.MessageNode(message=message, parent=parent, sampled=sampled))
        await invoke(mine.finalize, {"trace": trace, "runtime": runtime})
        await mine.score(trace, runtime)
    finally:
        await runtime.stop()
    return {"reward": trace.reward, "metrics": trace.metrics}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
