"""Pushing an export: against a server that answers huggingface_hub as the hub does."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hub_pushed
import pytest
from hub_pushed import PushedHub, Repo

from rlctl.run.publish import hub_push
from rlctl.run.publish.hub_push import find_repo, push
from specs.errors import ExportError, Interrupted, UsageError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushedHub]:
    with hub_pushed.pushed_hub() as found:
        hub_pushed.use(found, monkeypatch)
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "out"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "README.md").write_text("---\ntags: [rlctl]\n---\n# x\n")
    return model


def test_a_new_repository_is_private_and_holds_the_folder(hub: PushedHub, folder: Path) -> None:
    repo = find_repo("mine", public=False)
    assert (repo.name, repo.there) == ("me/mine", False)
    assert hub.repos == {}, "nothing is made before there is something to push"
    assert push(repo, folder, "step 3 of a run") == f"{hub.url}/me/mine"
    made = hub.repos["me/mine"]
    assert made.private
    assert made.commits == ["step 3 of a run"]
    assert made.files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_models_and_adapters_of_an_earlier_export_go_and_other_files_stay(hub: PushedHub, folder: Path) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": b"old" for number in (1, 2)}
    adapters = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"old"}  # which would be loaded instead
    others = {"model.safetensors.index.json": b"{}", "LICENSE": b"mine"}
    hub.repos["me/mine"] = Repo(private=True, files={**shards, **adapters, **others})
    push(find_repo("me/mine", public=False), folder, "again")
    assert sorted(hub.repos["me/mine"].files) == ["LICENSE", "README.md", "model.safetensors"]
    assert hub.repos["me/mine"].commits == ["again"]


@pytest.mark.parametrize(
    ("private", "public", "said"), [(False, False, "me/mine is public"), (True, True, "is private")]
)
def test_a_repository_that_is_seen_by_others_than_asked_for_is_refused(
    hub: PushedHub, private: bool, public: bool, said: str
) -> None:
    hub.repos["me/mine"] = Repo(private=private)
    with pytest.raises(UsageError, match=said) as caught:
        find_repo("me/mine", public=public)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["a b", "../x", "me/a--b", "a..b", "mine.git", "me/x-", "me/" + "a" * 97])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(UsageError, match="not the name of a repository") as caught:
        find_repo(name, public=False)
    assert caught.value.exit_code == 2


def test_without_a_token_or_network_the_export_does_not_begin(
    hub: PushedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as changed:
        changed.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(UsageError, match="the hub answered 401") as caught:
            find_repo("mine", public=False)
        assert "hf auth login" in caught.value.hint
        changed.delenv("HF_TOKEN")
        changed.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(UsageError, match="no token of the hub"):
            find_repo("mine", public=False)
        changed.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(UsageError, match="HF_HUB_OFFLINE is set") as caught:
            find_repo("mine", public=True)
        assert caught.value.hint.endswith("`hf upload NAME OUT_DIR`")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UsageError, match="the hub cannot be reached"):
        find_repo("mine", public=False)


def test_a_hub_that_does_not_answer_is_not_waited_for(hub: PushedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub_push, "TIMEOUT_S", 0.2)
        with pytest.raises(UsageError, match="the hub cannot be reached"):
            find_repo("mine", public=False)


@pytest.mark.parametrize("name", ["mine", "me/mine"])
def test_a_sign_in_page_in_place_of_the_hub_is_not_the_hub(
    name: str, hub: PushedHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_pushed.PushHandler, "_say", lambda self, *_, **__: self._send(200, b"<html>sign in</html>"))
    with pytest.raises(UsageError, match="the hub cannot be reached"):
        find_repo(name, public=False)


@pytest.mark.parametrize("public", [False, True])
def test_the_command_that_tries_again_does_what_the_push_would_have_done(
    hub: PushedHub, folder: Path, public: bool
) -> None:
    hub.refuses.add("create")
    with pytest.raises(ExportError) as caught:
        push(find_repo("mine", public=public), folder, "x")
    hub.refuses.clear()
    again = shlex.split(caught.value.hint.split("`")[1])
    variables = {**os.environ, **hub_pushed.variables(hub)}
    subprocess.run([Path(sys.executable).with_name("hf"), *again[1:]], env=variables, check=True, timeout=60)
    assert hub.repos["me/mine"].private is not public
    old = {"model.safetensors.index.json": b"{}", "adapter_config.json": b"{}", "adapter_model.safetensors": b"old"}
    hub.repos["me/mine"].files.update(old)
    subprocess.run([Path(sys.executable).with_name("hf"), *again[1:]], env=variables, check=True, timeout=60)
    assert hub.repos["me/mine"].files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_command_that_tries_again_names_a_folder_with_spaces(hub: PushedHub, folder: Path) -> None:
    hub.refuses.add("create")
    spaced = folder.rename(folder.with_name("my export"))
    with pytest.raises(ExportError) as caught:
        push(find_repo("mine", public=False), spaced, "x")
    assert str(spaced) in shlex.split(caught.value.hint.split("`")[1])


@pytest.mark.parametrize(("what", "said"), [("create", "don't have the rights"), ("commit", "over your quota")])
def test_a_refused_push_leaves_the_export_and_says_how_to_push_it(
    hub: PushedHub, folder: Path, what: str, said: str
) -> None:
    hub.refuses.add(what)
    with pytest.raises(ExportError, match=said) as caught:
        push(find_repo("mine", public=False), folder, "x")
    assert f"{folder} is exported, but not on the hub" in caught.value.message
    earlier = "--delete '*.safetensors*' --delete adapter_config.json"
    assert caught.value.hint == f"`hf upload me/mine {folder} --private {earlier}` tries again"
    assert (folder / "model.safetensors").is_file()


def test_a_push_that_a_person_ends_says_what_is_there(hub: PushedHub, folder: Path) -> None:
    hub.refuses.add("a person")
    with pytest.raises(Interrupted, match=f"{folder} is exported, but not on the hub") as caught:
        push(find_repo("mine", public=False), folder, "x")
    assert "`hf upload me/mine" in caught.value.hint
