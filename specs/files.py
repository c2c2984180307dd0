"""Rules about what a spec names on this machine: model, data, reward functions, interpreters, GPUs.

Nothing is created, changed, imported or downloaded.
"""

from __future__ import annotations

import ast
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from specs.attention_rules import attention_problems
from specs.data_files import check_data
from specs.errors import Problem
from specs.explain import show
from specs.interpreters import interpreter_problems
from specs.keys import closest
from specs.model_files import ModelCheck
from specs.node_rules import hostfile_problems
from specs.schema import Function, RoleName, RoleSection, Spec


def file_problems(spec: Spec, spec_dir: Path, *, starting: bool = False) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings about everything that the spec names. Relative paths start at `spec_dir`.

    GPUs that this machine lacks are errors when `starting` a run, else warnings: a spec may be checked elsewhere.
    """
    errors, warnings = _models(spec, spec_dir)
    data_errors, data_warnings = check_data(spec, spec_dir)
    errors += data_errors + _functions(spec, spec_dir)
    errors += interpreter_problems(spec, spec_dir, nvidia_driver=has_nvidia_driver())
    errors += attention_problems(spec, spec_dir)
    errors += _launchers(spec) + hostfile_problems(spec, spec_dir)
    warnings += data_warnings
    (errors if starting else warnings).extend(_devices(spec))
    return errors, warnings


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def _models(spec: Spec, spec_dir: Path) -> tuple[list[Problem], list[Problem]]:
    model = spec.model
    fake = spec.actor.engine.kind == "fake"
    main = ModelCheck(
        "model.path",
        model.path,
        spec_dir,
        from_scratch=model.from_scratch or fake,
        remote_code=model.trust_remote_code,
        tokenizer=True,
    )
    checks = [main]
    if spec.ref is not None and spec.ref.model:
        checks.append(
            ModelCheck(
                "ref.model",
                spec.ref.model,
                spec_dir,
                from_scratch=False,
                remote_code=model.trust_remote_code,
                tokenizer=False,
            )
        )
    if not fake:
        for check in checks:
            check.check_length(spec.max_sequence_tokens)
    errors = [problem for check in checks for problem in check.problems]
    warnings = [problem for check in checks for problem in check.warnings]
    if spec.data.chat == "always" and not main.has_chat_template():
        errors.append(
            Problem(
                "data.chat",
                f"the tokenizer of {model.path} has no chat template",
                'write "auto" or "never"',
                '"always"',
            )
        )
    if len(checks) == 2:
        errors += _smaller_vocabulary(main, checks[1])
    return errors, warnings


def _smaller_vocabulary(actor: ModelCheck, ref: ModelCheck) -> list[Problem]:
    wanted, given = actor.config.get("vocab_size"), ref.config.get("vocab_size")
    if not isinstance(wanted, int) or not isinstance(given, int) or given >= wanted:
        return []
    message = f"its vocabulary ({given}) is smaller than the actor's ({wanted}): it cannot score the same tokens"
    return [Problem("ref.model", message, "use a model with the same tokenizer", show(ref.path))]


# ── reward functions, launchers, devices ──────────────────────────────────────────────────────────


def _functions(spec: Spec, spec_dir: Path) -> list[Problem]:
    problems = []
    for index, term in enumerate(spec.reward.terms):
        if isinstance(term, Function):
            found = _function(term.path, spec_dir)
            if found:
                problems.append(Problem(f"reward.terms.{index}.path", found[0], found[1], show(term.path)))
    return problems


def _function(path: str, spec_dir: Path) -> tuple[str, str] | None:
    """What is wrong with `file.py:name`, and a hint. The file is parsed, never run."""
    name = path.rpartition(":")[2]
    file = spec_dir / Path(path.rpartition(":")[0]).expanduser()
    if not file.is_file():
        return f"no such file ({os.path.abspath(file)})", "a relative path starts at the spec file's folder"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return f"{file.name}:{error.lineno}: {error.msg}", "repair the file"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}", "make it a readable Python file"
    names = _top_level_names(tree)
    if name not in names:
        near = closest(name, [known for known in names if known])
        return (
            f"{file.name} defines no {name}",
            f"did you mean `{near}`?" if near else f"write def {name}(prompt, completion, row) in it",
        )
    node = names[name]
    if isinstance(node, ast.AsyncFunctionDef):
        return f"{name} is async", "write a plain function"
    if isinstance(node, ast.FunctionDef) and not _takes_three(node.args):
        return f"{name} must take three arguments", f"write def {name}(prompt, completion, row)"
    return None


def _top_level_names(tree: ast.Module) -> dict[str, ast.AST]:
    """Names that the module binds, also inside `if` and `try`."""
    names: dict[str, ast.AST] = {}
    scopes: list[ast.AST] = list(tree.body)
    while scopes:
        node = scopes.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = node
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: node for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node
        scopes += list(ast.iter_child_nodes(node))
    return names


def _takes_three(arguments: ast.arguments) -> bool:
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    required_by_name = any(default is None for default in arguments.kw_defaults)
    return least <= 3 and (most >= 3 or arguments.vararg is not None) and not required_by_name


def _launchers(spec: Spec) -> list[Problem]:
    """Launchers that come from packages which need not be there. Another interpreter is asked elsewhere."""
    sections: list[tuple[RoleName, RoleSection | None]] = [("actor", spec.actor), ("ref", spec.ref)]
    wanting = [role for role, section in sections if section and section.launcher == "deepspeed" and not section.python]
    if not wanting or find_spec("deepspeed") is not None:
        return []
    hint = "scripts/setup-engine deepspeed adds it, and torchrun starts every engine too"
    return [Problem(f"{role}.launcher", "deepspeed is not installed", hint, '"deepspeed"') for role in wanting]


def has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _devices(spec: Spec) -> list[Problem]:
    """Roles that ask for GPUs on a machine without an NVIDIA driver."""
    sections: list[tuple[str, RoleSection | None]] = [
        ("actor", spec.actor),
        ("ref", spec.ref),
        ("rollout", spec.rollout),
    ]
    asked = [(role, section) for role, section in sections if section is not None and section.devices]
    if not asked or has_nvidia_driver():
        return []
    message = "this machine has no NVIDIA driver"
    return [
        Problem(f"{role}.devices", message, "leave it out to run on the CPU", show(section.devices))
        for role, section in asked
    ]
