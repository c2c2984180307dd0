"""The Hugging Face hub: what of it lies in the local cache, and the small files of a model that does not.

Nothing is written to the cache: `rlctl train` downloads through transformers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlctl.models.tokenizer_files import TOKENIZER_FILES
from rlctl.models.weight_files import INDEX, SINGLE
from specs.json_file import read_or_empty

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TIMEOUT_S = 4.0
_MAX_BYTES = 64 << 20  # of a file that is read; weights never are
_READ = (".json", ".jinja", ".txt", ".model", ".py")  # ends of the files that a model without weights is built from


@dataclass(frozen=True)
class HubModel:
    """A model of the hub. `folder` holds its small files, at least until this process ends; `files` names all that it
    has."""

    folder: Path
    files: frozenset[str]


@dataclass(frozen=True)
class Unavailable:
    """Why a model's files cannot be read. `refused`: the hub answered, and will refuse a run too."""

    why: str
    hint: str
    refused: bool


def offline() -> bool:
    from huggingface_hub import constants

    return constants.is_offline_mode()


def hub_snapshot(hub_id: str, kind: Literal["models", "datasets"] = "models") -> Path | None:
    """Return the folder of the local cache that holds the main revision of a repository, if it is there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, repo_type=kind.removesuffix("s"), local_files_only=True))
    except (OSError, ValueError):
        return None


def loaded_before(dataset: str) -> bool:
    """Whether the library `datasets` has loaded a data set: only what it made of one opens without a network."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, name = dataset.rpartition("/")
    folder = "___".join(filter(None, (owner, camelcase_to_snakecase(name))))
    return any(Path(config.HF_DATASETS_CACHE).expanduser().glob(f"{folder}/*/*/*"))


def hub_model(hub_id: str, *, weights: bool) -> HubModel | Unavailable:
    """Return a model of the local cache, else what `look_up` finds on the hub. A part of one, such as its config.json
    alone, counts where there is no network to bring the rest, unless its `weights` are needed."""
    snapshot, cached = hub_snapshot(hub_id), None
    if snapshot is not None and (snapshot / "config.json").is_file():
        cached = HubModel(snapshot, frozenset(file.name for file in snapshot.iterdir()))
    if cached and (offline() or _is_whole(cached, weights)):
        return cached
    if offline():
        why = "no such folder, and not in the Hugging Face cache while HF_HUB_OFFLINE is set"
        return Unavailable(why, f"check the name; with a network, `hf download {hub_id}` puts it there", refused=True)
    found = look_up(hub_id)
    return cached if cached and not weights and isinstance(found, Unavailable) else found


def _is_whole(model: HubModel, weights: bool) -> bool:
    index = read_or_empty(model.folder / INDEX).get("weight_map")
    placed = {*map(str, index.values())} if isinstance(index, dict) and SINGLE not in model.files else {SINGLE}
    return not model.files.isdisjoint(TOKENIZER_FILES) and (placed <= model.files or not weights)


@cache
def look_up(hub_id: str) -> HubModel | Unavailable:
    """Download a model's small files, or say why they cannot be had. Asks once per process and hub id."""
    from huggingface_hub import HfApi, errors

    if _unreachable:
        return _unreachable[0]
    api = HfApi()
    try:
        return _read(api, hub_id)
    except errors.GatedRepoError:
        hint = f"accept its conditions at {api.endpoint}/{hub_id}, and set HF_TOKEN to a token that may read it"
        return Unavailable("the model is gated, and you have no access to it", hint, refused=True)
    except errors.RepositoryNotFoundError:
        hint = "check the name; a private model needs a token that may read it in HF_TOKEN"
        return Unavailable("no such folder, and no such model on the hub that you may read", hint, refused=True)
    except errors.HfHubHTTPError as error:
        why = f"it answered {error.response.status_code}"
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        why = str(error).strip() or type(error).__name__
    hint = "check the name, and that this machine reaches the hub"
    _unreachable.append(Unavailable(f"{api.endpoint} could not be reached: {why}", hint, refused=False))
    return _unreachable[0]


_unreachable: list[Unavailable] = []  # it is not asked again about other models
_made: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def _read(api: HfApi, hub_id: str) -> HubModel | Unavailable:
    from concurrent.futures import ThreadPoolExecutor

    from huggingface_hub.utils.tqdm import disable_progress_bars

    info = api.model_info(hub_id, files_metadata=True, timeout=TIMEOUT_S)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if "config.json" not in sizes:
        hint = "name a repository of a transformers model"
        return Unavailable("the repository exists on the hub but has no config.json", hint, refused=True)
    names = [name for name, size in sizes.items() if name.endswith(_READ) and "/" not in name and size <= _MAX_BYTES]
    names.remove("config.json")
    _made.append(made := tempfile.TemporaryDirectory(prefix="rlctl-hub-"))
    disable_progress_bars()
    to = f"{made.name}/model"
    download = partial(api.hf_hub_download, hub_id, revision=info.sha, local_dir=to, etag_timeout=TIMEOUT_S)
    config = Path(download("config.json"))  # of a gated model it fails
    with ThreadPoolExecutor(len(names) or 1) as pool:
        list(pool.map(download, names))
    return HubModel(config.parent, frozenset(sizes))
