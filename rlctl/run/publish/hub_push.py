"""`rlctl export-checkpoint --push-to-hub`: make a repository on the Hugging Face hub of an exported folder.

What would refuse the upload is found out before the export. A repository is private unless the user says otherwise.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rlctl.models.hub import TIMEOUT_S, offline
from specs.errors import ExportError, Interrupted, UsageError

# The names that `huggingface_hub` takes, of ASCII alone.
_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))(\w([\w.-]{,94}\w)?/)?\w([\w.-]{,94}\w)?", re.ASCII)
# Files of an earlier export that the new one may not replace by name; beside a model, adapters would be loaded instead.
_EARLIER = ["*.safetensors*", "adapter_config.json"]


@dataclass(frozen=True)
class HubRepo:
    """Name a repository that may be pushed to. `there`: it exists."""

    name: str  # owner/name
    public: bool
    there: bool


def find_repo(name: str, *, public: bool) -> HubRepo:
    """Find the repository to push to, which need not exist. Raises UsageError for what the hub would refuse, and for a
    repository that is public where `public` was not asked for, or private where it was."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError  # type: ignore[attr-defined]
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

    option = f"--push-to-hub {name}"
    later = f"push later: `hf upload NAME OUT_DIR{' --private' * (not public)}`"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{option}: not the name of a repository", hint="write OWNER/NAME, or NAME for your own")
    if offline():
        raise UsageError(f"{option}: HF_HUB_OFFLINE is set", hint=f"unset it, or {later}")
    if not get_token():
        raise UsageError(f"{option}: this machine has no token of the hub", hint="`hf auth login`, or set HF_TOKEN")
    api = HfApi()
    try:  # `api.whoami` would wait for an answer for ever
        about = get_session().get(f"{api.endpoint}/api/whoami-v2", headers=build_hf_headers(), timeout=TIMEOUT_S)
        hf_raise_for_status(about)
        name = name if "/" in name else f"{about.json()['name']}/{name}"
        there = api.repo_info(name, timeout=TIMEOUT_S)
    except RepositoryNotFoundError:
        return HubRepo(name, public, there=False)
    except HfHubHTTPError as error:
        code = error.response.status_code
        hint = (
            "`hf auth login` with a token that may write, or set HF_TOKEN" if code in (401, 403) else "try again later"
        )
        raise UsageError(f"{option}: the hub answered {code}: {_words(error)}", hint=hint) from None
    except (HTTPError, OSError, ValueError) as error:  # a sign-in page is no JSON
        hint = f"see that this machine reaches the hub, or {later}"
        raise UsageError(f"{option}: the hub cannot be reached: {_words(error)}", hint=hint) from None
    if not there.private and not public:
        raise UsageError(f"{option}: {name} is public", hint="add --public to push there, or name another repository")
    if there.private and public:
        raise UsageError(f"--public: {name} is private", hint="leave it out, or make it public in its settings first")
    return HubRepo(name, public, there=True)


def push(repo: HubRepo, folder: Path, message: str) -> str:
    """Upload the folder as one commit; what earlier exports left to be loaded goes. Returns the repository's address.
    Raises ExportError or Interrupted."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    api = HfApi()
    try:
        if not repo.there:
            api.create_repo(repo.name, private=not repo.public, exist_ok=True)
        api.upload_folder(repo_id=repo.name, folder_path=folder, commit_message=message, delete_patterns=_EARLIER)
    except (HTTPError, OSError, ValueError, RuntimeError, KeyboardInterrupt) as error:
        kind = Interrupted if isinstance(error, KeyboardInterrupt) else ExportError
        private = " --private" * (not repo.public)
        earlier = " ".join(f"--delete {shlex.quote(pattern)}" for pattern in _EARLIER)
        again = f"hf upload {repo.name} {shlex.quote(str(folder))}{private} {earlier}"
        message = f"{folder} is exported, but not on the hub: {_words(error)}"
        raise kind(message, hint=f"`{again}` tries again") from None
    return f"{api.endpoint}/{repo.name}"


def _words(error: BaseException) -> str:
    """Return the first line of what huggingface_hub says."""
    said = getattr(error, "server_message", None) or str(error)
    return next((line.strip() for line in said.splitlines() if line.strip()), type(error).__name__)
