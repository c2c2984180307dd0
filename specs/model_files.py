"""Where a model lies, and whether it can be used. Reads JSON and file headers, of the hub only small files."""

from __future__ import annotations

import importlib.util
import json
import operator
import os
import re
from pathlib import Path
from typing import Any

from specs.errors import Problem
from specs.explain import show
from specs.hub import Folder, HubFile, HubFolder, look_up, unread
from specs.keys import closest
from specs.model_kinds import config_problem, kind_problem, quantized_problem
from specs.model_weights import AGAIN, LFS, LFS_HINT, hub_weight_problems, weight_problems
from specs.schema import DataSection

BUILTIN_FOLDER = Path(__file__).parent / "builtin"
# First parts of a relative path that nobody means as an organisation on the hub.
FOLDER_WORDS = {
    "model",
    "models",
    "checkpoint",
    "checkpoints",
    "ckpt",
    "ckpts",
    "export",
    "exports",
    "output",
    "outputs",
}
FOLDER_WORDS |= {"run", "runs", "data", "weights", "tmp"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "vocab.txt", "tekken.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")  # the first that has one
_REPAIR = "config.json is not the one that the model was trained with: copy it again"


def builtin_models() -> list[str]:
    return sorted(folder.name for folder in BUILTIN_FOLDER.iterdir() if (folder / "config.json").is_file())


def resolve_model(path: str, spec_dir: Path) -> Path | str:
    """A folder as an absolute Path, or a hub id as str.

    `builtin:NAME` is a folder of this package. Anything else is a folder relative to `spec_dir` when there is one, a
    hub id when it looks like one (`name` or `organisation/name`), and else a folder, existing or not.
    """
    if path.startswith("builtin:"):
        return BUILTIN_FOLDER / path.removeprefix("builtin:")
    folder = Path(os.path.abspath(spec_dir / Path(path).expanduser()))
    if folder.exists() or folder.is_symlink() or not looks_like_hub_id(path, spec_dir):
        return folder
    return path


def looks_like_hub_id(path: str, spec_dir: Path) -> bool:
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", path):
        return False
    first = path.split("/")[0]
    return "/" not in path or not (first.lower() in FOLDER_WORDS or (spec_dir / first).is_dir())


def hub_snapshot(hub_id: str, kind: str = "models") -> Path | None:
    """The folder in Hugging Face's cache that holds the main revision of a repository, when it is there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"{kind}--{hub_id.replace('/', '--')}"
    try:
        revision = (cache / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = cache / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def model_folder(path: str, spec_dir: Path) -> Folder | None:
    """Where a model's small files can be read: its folder, the hub's cache, or the hub; None where nowhere."""
    where = resolve_model(path, spec_dir)
    if isinstance(where, Path):
        return where
    if (snapshot := hub_snapshot(where)) is not None and (snapshot / "config.json").is_file():
        return snapshot
    found = None if offline() else look_up(where)
    return found if isinstance(found, HubFolder) else None


def config_of(path: str, spec_dir: Path) -> dict[str, Any]:
    """A model's parsed `config.json`; empty where it cannot be read, which others report."""
    folder = model_folder(path, spec_dir)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def template_error(template: str) -> str:
    """What is wrong with the syntax of a chat template, or ""."""
    try:
        from jinja2 import Environment, TemplateSyntaxError
    except ImportError:
        return ""  # the reward role's interpreter has it, and will say
    # transformers' own tag around what the assistant says; it has no meaning here.
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(plain, raw=True)  # filters are looked up too
    except TemplateSyntaxError as error:
        return f"not a Jinja template: line {error.lineno}: {error.message}"
    return ""


def _what_it_is(folder: Folder) -> str:
    """A hint for a folder without a config.json: what else it may be."""
    if (folder / "adapter_config.json").is_file():
        return "merge the adapter into its base model first"
    if isinstance(folder, Path):
        if (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file():
            return "rlctl export-checkpoint makes a model folder of a run's checkpoint"
        inside = sorted(
            file.parent for file in [*folder.glob("snapshots/*/config.json"), *folder.glob("*/config.json")]
        )
        if inside:
            return f"did you mean {inside[0]}?"
    return "is it a model folder at all?"


class ModelCheck:
    """Findings about one model; `problems` refuse the run, `warnings` do not."""

    def __init__(
        self, key: str, path: str, spec_dir: Path, *, from_scratch: bool, remote_code: bool, tokenizer: bool
    ) -> None:
        self.key, self.path = key, path
        self.from_scratch, self.remote_code, self.tokenizer = from_scratch, remote_code, tokenizer
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.config: dict[str, Any] = {}  # with what `text_config` says of the language model of several in one
        self.whole_config: dict[str, Any] = {}  # as written
        self.folder: Folder | None = None
        where = resolve_model(path, spec_dir)
        if isinstance(where, Path):
            self._check_folder(where)
        else:
            self._check_hub(where)

    def _wrong(self, message: str, hint: str = "", key: str = "", value: str | None = None) -> None:
        self.problems.append(Problem(key or self.key, message, hint, show(self.path) if value is None else value))

    def _check_hub(self, hub_id: str) -> None:
        snapshot = hub_snapshot(hub_id)
        if snapshot is not None and (snapshot / "config.json").is_file():
            self._check_folder(snapshot)
            return
        if offline():
            self._wrong(
                "no such folder, and not in the Hugging Face cache while HF_HUB_OFFLINE is set", "check the name"
            )
            return
        found = look_up(hub_id)
        if isinstance(found, HubFolder):
            self._check_files(found)
        elif found.refused:
            self._wrong(found.why, found.hint)
        else:
            message = f"no such folder; taken as a hub id, which will be downloaded when the run starts. {found.why}"
            hint = f'did you mean "builtin:{hub_id}"?' if hub_id in builtin_models() else found.hint
            self.warnings.append(Problem(self.key, message, hint, show(self.path)))

    def _check_folder(self, folder: Path) -> None:
        name = self.path.removeprefix("builtin:")
        if name != self.path and name not in builtin_models():
            near = closest(name, builtin_models())
            hint = f'did you mean "builtin:{near}"?' if near else f'write "builtin:{builtin_models()[0]}"'
            self._wrong(f"no such built-in model; known: {', '.join(builtin_models())}", hint)
            return
        if not folder.is_dir():
            what = "a file, not a model folder" if folder.exists() else "no such model folder"
            if folder.is_symlink() and not folder.exists():
                what = f"a link to {os.readlink(folder)}, which is not there"
            address = re.fullmatch(r"(?:https?://huggingface\.co/|hf://)([\w.-]+/[\w.-]+).*", self.path)
            hint = f'write "{address[1]}"' if address else "a relative path starts at the spec file's folder"
            self._wrong(f"{what} ({folder})", hint)
            return
        self._check_files(folder, builtin=name != self.path)

    def _check_files(self, folder: Folder, *, builtin: bool = False) -> None:
        self.folder = folder
        if not self._read_config(folder):
            return
        if self.tokenizer:
            self._check_tokenizer(folder)
        if not self.from_scratch:
            self._check_weights(folder, builtin)
        self._check_code()

    def _read_config(self, folder: Folder) -> bool:
        if not (folder / "config.json").is_file():
            self._wrong(f"no config.json in {folder}", _what_it_is(folder))
            return False
        config = self._json(folder / "config.json")
        if config is None:
            return False
        if not isinstance(config.get("model_type"), str):
            self._wrong("config.json has no model_type", "it must be the config of a Hugging Face model")
            return False
        self.whole_config = config
        self.config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
        if wrong := config_problem(self.config):
            self._wrong(*wrong)
            return False
        return self._heads_share_out()

    def _json(self, file: Path | HubFile) -> dict[str, Any] | None:
        hint = AGAIN if isinstance(file, Path) else "it lies so on the hub: name another model, or tell its owner"
        try:
            text = file.read_text(encoding="utf-8")
            content = json.loads(text)
        except json.JSONDecodeError as error:
            if text.startswith(LFS):
                self._wrong(f"{file.name} is a pointer of Git LFS, not the file itself", LFS_HINT)
            else:
                self._wrong(f"{file.name} cannot be read: not JSON (line {error.lineno}, column {error.colno})", hint)
            return None
        except (OSError, ValueError, RecursionError) as error:
            words = error.strerror if isinstance(error, OSError) and error.strerror else "not JSON in UTF-8"
            self._wrong(f"{file.name} cannot be read: {words}", hint)
            return None
        if not isinstance(content, dict):
            self._wrong(f"{file.name} is not a JSON object", hint)
            return None
        return content

    def _heads_share_out(self) -> bool:
        before = len(self.problems)
        hidden, heads = self.config.get("hidden_size"), self.config.get("num_attention_heads")
        kv_heads = self.config.get("num_key_value_heads")
        if isinstance(heads, int) and heads > 0:
            if isinstance(hidden, int) and hidden % heads and not self.config.get("head_dim"):
                self._wrong(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}", _REPAIR)
            if isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
                self._wrong(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}", _REPAIR)
        return len(self.problems) == before

    def _check_tokenizer(self, folder: Folder) -> None:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            if unread(folder, TOKENIZER_FILES):
                return
            here = isinstance(folder, Path)
            hint = f"put the model's tokenizer files into {folder}" if here else "name a repository that has one"
            where = "in the model folder" if here else "with the model on the hub"
            self._wrong(f"no tokenizer {where} (none of {', '.join(TOKENIZER_FILES[:3])}, …)", hint)
            return
        file, vocab_size = folder / "tokenizer.json", self.config.get("vocab_size")
        # Large files cost more time to parse than the check may take; the reward role parses them anyway.
        if not file.is_file() or unread(folder, ["tokenizer.json"]):
            return
        if isinstance(file, Path) and file.stat().st_size > 2**22:
            return
        tokenizer = self._json(file)
        if tokenizer is None or not isinstance(vocab_size, int):
            return
        try:
            vocab, added = (tokenizer.get("model") or {}).get("vocab"), tokenizer.get("added_tokens") or []
            ids = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1] if vocab else []
            highest = max([*map(operator.index, ids), *(operator.index(token["id"]) for token in added)], default=-1)
        except (AttributeError, TypeError, KeyError):
            self._wrong("tokenizer.json is JSON, but no tokenizer", AGAIN)
            return
        if highest >= vocab_size:
            message = f"the tokenizer has token {highest}, but the model's vocab_size is {vocab_size}"
            self._wrong(message, "use the tokenizer that the model was trained with")

    def _check_weights(self, folder: Folder, builtin: bool) -> None:
        if builtin:
            if self.key == "ref.model":
                self._wrong("a built-in model has no weights", "leave it out for the actor's starting weights")
                return
            self._wrong(
                "a built-in model has no weights", "set model.from_scratch = true", "model.from_scratch", "false"
            )
            return
        if isinstance(folder, Path):
            found = weight_problems(folder, self.config)
        else:
            found = hub_weight_problems(folder, self.config)
        for message, hint in found:
            self._wrong(message, hint)

    def _check_code(self) -> None:
        if self.remote_code or not self.config.get("auto_map"):
            return
        package = importlib.util.find_spec("transformers")
        roots = list(package.submodule_search_locations or []) if package else []
        native = self.config["model_type"].replace("-", "_")
        if roots and not any((Path(root) / "models" / native).is_dir() for root in roots):
            hint = "read that code, then set model.trust_remote_code = true"
            self._wrong("needs Python code that lies in the model folder", hint)

    def check_kind(self, *, learns: bool, here: bool) -> None:
        """Whether rlctl can train the model, by its kind; `here`: the role runs in this interpreter."""
        if not self.whole_config:
            return
        wrong = kind_problem(self.whole_config, from_scratch=self.from_scratch) if here else None
        if wrong is None and learns and not self.from_scratch:
            wrong = quantized_problem(self.whole_config)
        if wrong:
            self.problems = [problem for problem in self.problems if problem.key != self.key]  # they follow from it
            self._wrong(*wrong)

    def check_length(self, max_sequence_tokens: int) -> None:
        positions = self.config.get("max_position_embeddings")
        if isinstance(positions, int) and max_sequence_tokens > positions:
            message = f"longer than {self.path} can read, which has {positions} positions"
            hint = "lower data.max_prompt_tokens or data.max_response_tokens"
            self._wrong(message, hint, "data.max_prompt_tokens + data.max_response_tokens", str(max_sequence_tokens))

    def check_chat(self, data: DataSection) -> None:
        """The chat template against what the spec wants of it: that there is one, and that it is Jinja."""
        if self.folder is None or data.chat == "never":
            return  # not here to look at, or not used
        name, template = self._chat_template(self.folder)
        lacks = f"the tokenizer of {self.path} has no chat template"
        if template:
            if wrong := template_error(template):
                self._wrong(f"{name}: {wrong}", 'repair the template, or set data.chat = "never"')
        elif unread(self.folder, _TEMPLATE_FILES):
            return
        elif data.chat == "always":
            self._wrong(lacks, 'write "auto" or "never"', "data.chat", '"always"')
        elif data.system:
            hint = "remove the key, or put its text into data.template"
            self._wrong(f"has no effect: {lacks}", hint, "data.system", show(data.system))

    def _chat_template(self, folder: Folder) -> tuple[str, str]:
        """Where the template stands, and its text; "" where there is none. Of several the default one."""
        for name in _TEMPLATE_FILES:
            file = folder / name
            if not file.is_file() or unread(folder, [name]):
                continue
            if name.endswith(".jinja"):
                return name, file.read_text(encoding="utf-8", errors="replace")
            found = (self._json(file) or {}).get("chat_template")
            if isinstance(found, list):
                found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
            if found:
                return f"chat_template in {name}", str(found)
        return "", ""
