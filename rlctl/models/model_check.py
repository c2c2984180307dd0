"""Find out from its config, tokenizer and headers of weights whether a model can be used. `--probe` builds it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlctl.models.hub import HubModel, hub_model
from rlctl.models.paths import builtin_models, not_found, read_config, resolve_model
from rlctl.models.run_export import RunExport
from rlctl.models.tokenizer_files import tokenizer_problems
from rlctl.models.weight_files import AGAIN, no_weights, weight_problems
from specs.errors import NotHere, Problem
from specs.load.keys import closest
from specs.model_facts import LAYER_KINDS, merged_config, positions_of, tokens_of_one_rope
from specs.schema.recipes import RowsSpec, sampling_of
from specs.schema.roles import ROLES, ROLLOUT, HeadKind, RoleName
from specs.schema.spec import Spec

_REPAIR = "config.json is not the one that the model was trained with: copy it again"
_CAUSAL = "name a causal language model (Qwen, Llama, Gemma, …)"
# Models over images whose language model has no class of its own in transformers.
_WHOLE_ONLY = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Methods that models are published with → transformers' config that can undo them. Without `save_original_format=False`
# it saves the copy under the names of quantized weights.
_DEQUANTIZES = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
_COPY = (
    "transformers.AutoModelForCausalLM.from_pretrained('{path}', quantization_config="
    "transformers.{own}(dequantize=True)).save_pretrained('bf16', save_original_format=False)"
)
# Heads that do something else with the same layers.
_OTHER_HEADS = re.compile(r"For(MaskedLM|PreTraining|\w*Classification|QuestionAnswering|MultipleChoice|\w*Reward\w*)$")


class ModelCheck:
    """Problems of the model that a role names. `config`: its parsed config.json, with what `text_config` says of a
    language model that is a part of it; `folder`: where its files can be read. Both are empty where they are not at
    hand."""

    def __init__(self, spec: Spec, role: RoleName, spec_dir: Path) -> None:
        self.path = spec.model_path(role)
        self.key = f"{role}.model" if getattr(spec.role(role), "model", "") else "model.path"
        self._bigram = spec.lead_engine.model_of == "bigram"
        self._role, self._learns = role, spec.learns(role)
        self._head: HeadKind = ROLES[role].head
        if self._learns and self._head != "lm":
            self._head = "value"  # one that learns is made where the files have none
        self._same_tokens = role == spec.lead or ROLES[role].same_tokens
        self._from_scratch = role == spec.lead and (spec.model.from_scratch or self._bigram)
        self._export = RunExport.of(os.path.abspath(spec_dir / Path(self.path).expanduser()))
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.config: dict[str, Any] = {}
        self.folder: Path | None = None
        where = resolve_model(self.path, spec_dir)
        if isinstance(where, Path):
            self._check_folder(where)
        else:
            self._check_hub(where)
        if not self._bigram:
            for limit in self._limits(spec):
                self._check_length(*limit)
            if wrong := self._kind_problem():  # what follows from its kind is not reported beside it
                self.problems = [problem for problem in self.problems if problem.key != self.key]
                self._wrong(*wrong)

    def _wrong(self, message: str, hint: str, key: str = "", value: str = "") -> None:
        self.problems.append(Problem(key or self.key, message, hint, value))

    # ── where it is ───────────────────────────────────────────────────────────────────────────────

    def _check_hub(self, hub_id: str) -> None:
        found = hub_model(hub_id, weights=not self._from_scratch)
        if isinstance(found, HubModel):
            self._check_files(found.folder, found.files)
        elif found.refused:
            self._wrong(found.why, found.hint)
        else:
            message = f"no such folder; taken as a hub id, which will be downloaded when the run starts. {found.why}"
            hint = f'did you mean "builtin:{hub_id}"?' if hub_id in builtin_models() else found.hint
            self.warnings.append(NotHere(self.key, message, hint))

    def _check_folder(self, folder: Path) -> None:
        name = self.path.removeprefix("builtin:")
        if name != self.path and name not in builtin_models():
            near = closest(name, builtin_models()) or builtin_models()[0]
            known = ", ".join(builtin_models())
            self._wrong(f"no such built-in model; known: {known}", f'did you mean "builtin:{near}"?')
        elif folder.is_dir():
            self._check_files(folder, frozenset(file.name for file in folder.iterdir()))
        elif folder.exists():
            self._wrong(f"a file, not a model folder ({folder})", "name the folder that it is in")
        else:
            address = re.fullmatch(r"(?:https?://huggingface\.co/|hf://)([\w.-]+/[\w.-]+).*", self.path)
            what, hint = "model folder", f'write "{address[1]}"' if address else ""
            if self._export is not None:
                what, hint = f"export, nor its run ({self._export})", "put that run back, or name another run or step"
            self.problems.append(not_found(self.key, what, folder, self.path, hint))

    # ── what is in it ─────────────────────────────────────────────────────────────────────────────

    def _check_files(self, folder: Path, names: frozenset[str]) -> None:
        self.folder = folder
        if "config.json" not in names:
            hint = "check that it is a model folder"
            if "adapter_config.json" in names:
                hint = "merge the adapter into its base model first"
            elif "checkpoints" in names or "manifest.json" in names:
                hint = 'name the directory of a run: "RUN" is its newest checkpoint, "RUN@STEP" another'
            self._wrong(f"no config.json in {folder}", hint)
            return
        try:
            self.config = dict(merged_config(read_config(folder)))
        except ValueError as error:
            self._wrong(f"config.json {error}", AGAIN)
            return
        if not self._heads_fit():
            return
        if self.key == "model.path" or not self._same_tokens:  # else it is compared with the actor's
            for wrong in tokenizer_problems(folder, self.config):
                self._wrong(*wrong)
        if not self._from_scratch and (self._export is None or self._export.folder == folder):
            self._check_weights(folder, names)

    def _heads_fit(self) -> bool:
        hidden, heads, kv_heads = map(self.config.get, ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        before = len(self.problems)
        if heads:
            if isinstance(hidden, int) and hidden % heads and not self.config.get("head_dim"):
                self._wrong(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}", _REPAIR)
            if isinstance(kv_heads, int) and (kv_heads < 1 or heads % kv_heads):
                self._wrong(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}", _REPAIR)
        return len(self.problems) == before

    def _check_weights(self, folder: Path, names: frozenset[str]) -> None:
        if self.path.startswith("builtin:"):
            actor = self.key == "model.path"
            hint = "set model.from_scratch = true" if actor else "name a model that has been trained"
            if self.key == "ref.model":
                hint = "leave it out for the actor's starting weights"
            self._wrong("a built-in model has no weights", hint, "model.from_scratch" if actor else "")
        elif wrong := no_weights(names):
            self._wrong(*wrong)
        elif not all(os.path.lexists(folder / name) for name in names if name.endswith(".safetensors")):
            return  # they are on the hub
        else:
            for wrong in weight_problems(folder, self.config, self._head):
                self._wrong(*wrong)

    # ── what a role does with it ──────────────────────────────────────────────────────────────────

    def _kind_problem(self) -> tuple[str, str] | None:
        """Return why rlctl cannot use a model of this kind, and a hint."""
        kind, layers = self.config.get("model_type"), self.config.get("layer_types")
        architecture = str(next(iter(self.config.get("architectures") or ()), ""))
        how = self.config.get("quantization_config") or self.config.get("compression_config")
        if self.config.get("is_encoder_decoder"):
            return f"{kind} is an encoder-decoder model; rlctl trains decoder-only models", _CAUSAL
        if str(kind).startswith(_WHOLE_ONLY):
            return f"transformers has no class for the language model alone of {kind}", _CAUSAL
        if isinstance(layers, list) and (unknown := sorted({*map(str, layers)} - LAYER_KINDS)):
            of_type = f"{kind} has layers of type {', '.join(unknown)}"
            return f"{of_type}; rlctl does not compute these on packed rows", _CAUSAL
        if not self._from_scratch and self._head == "lm" and _OTHER_HEADS.search(architecture):
            return f"holds a {architecture}, which has no language modeling head", _CAUSAL
        if how and not self._from_scratch:
            method = how.get("quant_method", "") if isinstance(how, dict) else ""
            learns = "they can be neither trained nor synced"
            why = learns if self._learns else "its log-probs would not be the model's own"
            hint = "name the model that it was made from, in bf16 or fp32"
            if own := _DEQUANTIZES.get(method):
                hint += f", or a copy: {_COPY.format(own=own, path=self.path)}"
            return f"its weights are quantized ({method or 'quantization_config'}): {why}", hint
        return None

    def _limits(self, spec: Spec) -> Iterator[tuple[int, str, str]]:
        """Yield the longest sequence that the model reads, what to do where it is too long, and the key that says it;
        of a model that learns from rows and is sampled from, both kinds of sequences."""
        if not self._same_tokens:
            yield spec.longest_tokens(self._role), "lower it", f"{self._role}.max_sequence_tokens"
            return
        of_rows, sampling = isinstance(spec, RowsSpec), sampling_of(spec)
        if of_rows:
            yield spec.longest_tokens(self._role), "lower it", "data.max_tokens"
        if sampling is not None and sampling.environments:
            yield spec.longest_tokens(ROLLOUT), "lower it", "environment.max_episode_tokens"
        elif sampling is not None and (self._role == spec.lead or not of_rows):
            prompts, completions = (f"{sampling.lengths}.max_{part}_tokens" for part in ("prompt", "response"))
            yield spec.longest_tokens(ROLLOUT), f"lower {prompts} or {completions}", f"{prompts} + {completions}"

    def _check_length(self, longest: int, hint: str, key: str) -> None:
        """Check that the model has positions for sequences of `longest` tokens, which `key` says."""
        positions, short = positions_of(self.config), tokens_of_one_rope(self.config)
        if positions and longest > positions:
            message = f"more than the {positions} positions of {self.path}"
        elif 0 < short < longest:
            message = f"{self.path} rotates positions otherwise beyond {short} tokens (longrope), for the whole call: "
            message += "log-probs would depend on the micro-batch"
        else:
            return
        self._wrong(message, hint, key, str(longest))
