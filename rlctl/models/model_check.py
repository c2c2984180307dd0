"""Whether a model can be used: its config, tokenizer, weights and code. Reads JSON and file headers, of the hub only
small files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from rlctl.models.chat_template import check_chat_template
from rlctl.models.config_class import ConfigClass, config_class, transformers_folder
from rlctl.models.config_values import value_problems
from rlctl.models.end_tokens import check_end_tokens
from rlctl.models.hub import Folder, HubFolder, hub_snapshot, look_up, offline
from rlctl.models.kinds import Wrong, causal_kinds, kind_problem, quantized_problem
from rlctl.models.paths import builtin_models, not_found, read_object, resolve_model
from rlctl.models.remote_code import code_problems
from rlctl.models.tokenizer_files import check_tokenizer
from rlctl.models.weight_files import hub_weight_problems, weight_files, weight_problems
from rlctl.models.weight_values import value_findings
from specs.errors import NotHere, Problem
from specs.load.keys import closest
from specs.model_facts import positions_of, tokens_of_one_rope
from specs.schema.roles import HeadKind
from specs.schema.sections import DataSection
from specs.text import show

VALUES_S = 0.1  # for which values of weights are read
_REPAIR = "config.json is not the one that the model was trained with: copy it again"


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
    return "check that it is a model folder"


class ModelCheck:
    """Findings about one model; `problems` refuse the run, `warnings` do not."""

    def __init__(
        self,
        key: str,
        path: str,
        spec_dir: Path,
        *,
        from_scratch: bool,
        remote_code: bool,
        tokenizer: bool,
        head: HeadKind = "lm",
    ) -> None:
        self.key, self.path, self.head = key, path, head
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

    def _doubt(self, message: str, hint: str = "") -> None:
        self.warnings.append(Problem(self.key, message, hint, show(self.path)))

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
            self.warnings.append(NotHere(self.key, message, hint, show(self.path)))

    def _check_folder(self, folder: Path) -> None:
        name = self.path.removeprefix("builtin:")
        if name != self.path and name not in builtin_models():
            near = closest(name, builtin_models())
            hint = f'did you mean "builtin:{near}"?' if near else f'write "builtin:{builtin_models()[0]}"'
            self._wrong(f"no such built-in model; known: {', '.join(builtin_models())}", hint)
            return
        if not folder.is_dir():
            self._no_folder(folder)
            return
        self._check_files(folder, builtin=name != self.path)

    def _no_folder(self, folder: Path) -> None:
        if folder.is_symlink() and not folder.exists():
            self._wrong(f"a symbolic link to {os.readlink(folder)}, which does not exist ({folder})", "repair the link")
        elif folder.exists():
            self._wrong(f"a file, not a model folder ({folder})", "name the folder that it is in")
        else:
            address = re.fullmatch(r"(?:https?://huggingface\.co/|hf://)([\w.-]+/[\w.-]+).*", self.path)
            hint = f'write "{address[1]}"' if address else ""
            self.problems.append(not_found(self.key, f"no such model folder ({folder})", self.path, hint=hint))

    def _check_files(self, folder: Folder, *, builtin: bool = False) -> None:
        self.folder = folder
        if not self._read_config(folder):
            return
        if self.tokenizer:
            check_tokenizer(folder, self.config.get("vocab_size"), self._wrong)
            check_end_tokens(folder, self.config, self._wrong, self._doubt)
        if not self.from_scratch:
            self._check_weights(folder, builtin)
        self._check_code()

    def _read_config(self, folder: Folder) -> bool:
        if not (folder / "config.json").is_file():
            self._wrong(f"no config.json in {folder}", _what_it_is(folder))
            return False
        config = read_object(folder / "config.json", self._wrong)
        if config is None:
            return False
        if not isinstance(config.get("model_type"), str):
            self._wrong("config.json has no model_type", "it must be the config of a Hugging Face model")
            return False
        for name in ("text_config", "auto_map"):
            if not isinstance(config.get(name) or {}, dict):
                self._wrong(f"{name} in config.json must be an object", _REPAIR)
                return False
        self.whole_config = config
        self.config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
        if not self._heads_share_out():
            return False
        before = len(self.problems)
        for wrong in value_problems(self.config):
            self._wrong(*wrong)
        return len(self.problems) == before

    def _heads_share_out(self) -> bool:
        before = len(self.problems)
        family = config_class(str(self.config["model_type"])) or ConfigClass()
        names = [family.own_name(name) for name in ("hidden_size", "num_attention_heads")]
        hidden, heads = (self.config.get(name) for name in names)
        kv_heads = self.config.get("num_key_value_heads")
        if isinstance(heads, int) and heads > 0:
            if isinstance(hidden, int) and hidden % heads and not self.config.get("head_dim"):
                self._wrong(f"{names[0]} {hidden} is not a multiple of {names[1]} {heads}", _REPAIR)
            if isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
                self._wrong(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}", _REPAIR)
        return len(self.problems) == before

    def _check_weights(self, folder: Folder, builtin: bool) -> None:
        if builtin:
            if self.key != "model.path":
                self._wrong("a built-in model has no weights", "leave it out for the actor's starting weights")
                return
            self._wrong(
                "a built-in model has no weights", "set model.from_scratch = true", "model.from_scratch", "false"
            )
            return
        if isinstance(folder, Path):
            found = weight_problems(folder, self.config, self.head)
        else:
            found = hub_weight_problems(folder, self.config)
        for message, hint in found:
            self._wrong(message, hint)
        if isinstance(folder, Path):
            wrong, doubtful = value_findings(weight_files(folder)[0], seconds=VALUES_S)
            for one in wrong:
                self._wrong(*one)
            for one in doubtful:
                self._doubt(*one)
            if (folder / "model.safetensors").is_file() and (folder / "model.safetensors.index.json").is_file():
                message = "has model.safetensors and shards with an index: the single file alone is read"
                self._doubt(message, "remove what is left of another save")

    def _check_code(self) -> None:
        kind = str(self.whole_config["model_type"])
        native = kind in causal_kinds() or config_class(kind) is not None
        if self.remote_code and isinstance(self.folder, Path):
            for wrong in code_problems(self.folder, self.whole_config, native=native):
                self._wrong(*wrong)
        elif not self.remote_code and self.whole_config.get("auto_map") and not native and transformers_folder():
            hint = "read that code, then set model.trust_remote_code = true"
            self._wrong("needs Python code from the model folder", hint)

    def check_kind(self, *, learns: bool, here: bool) -> None:
        """Whether rlctl can train the model, by its kind; `here`: the role runs in this interpreter."""
        if not self.whole_config:
            return
        wrong = kind_problem(self.whole_config, from_scratch=self.from_scratch, head=self.head) if here else None
        if wrong is None and not self.from_scratch:
            wrong = quantized_problem(self.whole_config, learns=learns)
        if wrong:
            self.problems = [problem for problem in self.problems if problem.key != self.key]  # they follow from it
            self._wrong(*wrong)

    def can_end_in(self, head: HeadKind) -> Wrong | None:
        """Why a model with this backbone cannot end in `head`, made anew."""
        return kind_problem(self.whole_config, from_scratch=True, head=head) if self.whole_config else None

    def check_length(self, max_sequence_tokens: int, limited_by: str = "") -> None:
        """`limited_by`: the key that says how long a sequence may be, where it is not the data's."""
        family = config_class(str(self.config.get("model_type", ""))) or ConfigClass()
        own = family.value(self.config, "max_position_embeddings") if self.config else None
        positions = positions_of({**self.config, "max_position_embeddings": own})
        if positions and max_sequence_tokens > positions:
            self._too_long(f"more than the {positions} positions of {self.path}", max_sequence_tokens, limited_by)
            return
        short = tokens_of_one_rope(self.config)
        if 0 < short < max_sequence_tokens:
            message = f"{self.path} rotates positions otherwise beyond {short} tokens (longrope), for the whole call"
            self._too_long(f"{message}: log-probs would depend on the micro-batch", max_sequence_tokens, limited_by)

    def _too_long(self, message: str, max_sequence_tokens: int, limited_by: str) -> None:
        if limited_by:
            self._wrong(message, "lower it", limited_by, str(max_sequence_tokens))
            return
        hint = "lower data.max_prompt_tokens or data.max_response_tokens"
        self._wrong(message, hint, "data.max_prompt_tokens + data.max_response_tokens", str(max_sequence_tokens))

    def check_chat(self, data: DataSection) -> None:
        """Its chat template, where its files can be looked at."""
        if self.folder is not None:
            check_chat_template(self.folder, self.path, data, self._wrong, self._doubt)
