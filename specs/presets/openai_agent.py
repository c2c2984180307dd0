"""An agent on OpenAI's own client. It knows nothing of rlctl: OPENAI_BASE_URL leads to the model that learns."""

import ast
import json
import operator

from openai import AsyncOpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
EXPRESSION = {"type": "string", "description": "Sums, differences and products of whole numbers, such as 7*24."}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Return the value of an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": EXPRESSION}, "required": ["expression"]},
    },
}


def value(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    return int(node.value)


def calculate(arguments: str) -> str:
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def run(task, client):
    """Let the model call the calculator until it answers; the reward is 1 where the answer is right."""
    messages = [*task["messages"]]
    async with AsyncOpenAI() as openai:
        while True:
            reply = await openai.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float((message.content or "").strip() == task["answer"])
            for call in message.tool_calls:
                result = calculate(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
