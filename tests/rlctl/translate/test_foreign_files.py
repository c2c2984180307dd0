"""Settings of other tools are read from scripts that are never run, or refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.cli import main
from rlctl.translate.foreign_files import read_foreign
from specs.errors import UsageError


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.py", "x = 1", "no settings of TRL, verl or prime-rl"),
        ("a.py", "GRPOConfig(**options)", "no settings of TRL, verl or prime-rl"),
        ("a.py", "GRPOConfig(", "cannot be read"),
        ("a.yaml", "a: [b", "cannot be read"),
        ("a.yaml", "a: b", "no settings of TRL, verl or prime-rl"),
        ("a.yaml", "just words", "it holds no keys"),
        ("a.json", "{", "cannot be read"),
        ("a.toml", "a = ", "cannot be read"),
        ("a.toml", "schema = 1", "a spec of rlctl already"),
        ("a.sh", "echo 'no end\nls", "no settings of TRL, verl or prime-rl"),
        ("a.toml", "\udcff", "cannot be read"),
    ],
)
def test_what_is_no_file_of_theirs_is_refused(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(UsageError, match=reason) as error:
        read_foreign(tmp_path / name)
    assert error.value.exit_code == 2
    assert error.value.hint


@pytest.mark.parametrize(("name", "text"), [("a.py", "GRPOConfig(beta=0.1)"), ("a.yaml", "beta: 0.1")])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_foreign(tmp_path / name)[1] == {"beta": 0.1}


def test_numbers_of_yaml_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("num_generations: 8\nlearning_rate: 1e-6\nseed: 1e-6x\n")
    given = read_foreign(tmp_path / "a.yaml")[1]
    assert given == {"num_generations": 8, "learning_rate": 1e-6, "seed": "1e-6x"}


def test_references_of_yaml_are_followed(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {n: '${oc.select:trainer.n,8}', m: '${oc.select: a.b, 5}', k: '${.n}', e: '${oc.env:M}'}"
    (tmp_path / "a.yaml").write_text(f"{text}\ntrainer: {{n: '${{data.n}}'}}\ndata: {{n: 4}}")
    given = read_foreign(tmp_path / "a.yaml")[1]
    assert [given[f"actor_rollout_ref.{key}"] for key in "nmke"] == [4, 5, None, "${oc.env:M}"]


def test_json_is_read_as_yaml_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"num_generations": 4}))
    assert read_foreign(tmp_path / "a.json")[0] == "GRPOConfig"


def test_a_script_gives_its_variables_their_first_value(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "E=${E:-}\nN=${E:-4}\nM=$N\ncase $X in npu) N=16;; esac\nARGS=(trainer.nnodes=$M)\n"
        "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$((N * 2 + 1)) data.x=$DIR/a \\\n  a.b=c\n"
    )
    assert read_foreign(tmp_path / "a.sh")[1] == {
        "trainer.nnodes": 4,
        "actor_rollout_ref.rollout.n": 9,
        "data.x": "$DIR/a",
        "a.b": "c",
    }


def test_the_command_writes_the_spec_and_says_what_became_of_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sft.py").write_text("SFTConfig(max_length=64, packing=True, max_steps=5)\n")
    assert main(["init", "--from", "sft.py"]) == 0
    shown = capsys.readouterr().out
    assert "max_length = 64" in shown
    assert "rows are always packed without padding" in shown
    assert "max_tokens = 64" in Path("sft.toml").read_text()
    assert main(["init", "--from", "sft.py"]) == 2, "nothing is overwritten"
    assert main(["init", "--from", "sft.py", "sft.py", "--force"]) == 2
    assert main(["init", "--from", "sft.py", "--preset", "sft-cpu"]) == 2
    assert Path("sft.py").read_text().startswith("SFTConfig")


def test_keywords_of_a_dict_that_a_script_writes_out_are_settings(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text("shared = dict(beta=0.04)\nGRPOConfig(**shared, **{'epsilon': 0.3}, num_generations=8, **others)")
    _, given = read_foreign(script)
    assert given == {"beta": 0.04, "epsilon": 0.3, "num_generations": 8, "**others": "others"}


def test_what_a_script_sets_on_its_arguments_later_counts(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text(
        "args = GRPOConfig(beta=0.1)\nargs.beta = 0.2\ntrainer = GRPOTrainer('m', args=args)\ntrainer.x = 3"
    )
    assert read_foreign(script)[1] == {"beta": 0.2, "model_name_or_path": "m"}


def test_of_a_case_in_a_script_one_branch_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "DEVICE=${DEVICE:-$(python3 -c 'import npu' && echo npu || echo gpu)}\nMACHINE=${MACHINE:-}\nN=${N:-}\n"
        'case "$DEVICE" in\n  gpu | tpu)\n    case ${MACHINE} in\n      gb200)\n        N=${N:-4}\n'
        "        X+=(actor_rollout_ref.rollout.enforce_eager=True)\n        ;;\n      *) N=${N:-8};;\n    esac  # x\n"
        "    ;;\n  npu)\n    N=2 a.b=c\n    ;;\nesac\nrun actor_rollout_ref.rollout.n=1 trainer.n_gpus_per_node=$N\n"
    )
    assert read_foreign(tmp_path / "a.sh")[1] == {"actor_rollout_ref.rollout.n": 1, "trainer.n_gpus_per_node": 8}


def test_what_a_script_computes_or_hydra_alone_reads_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "A=1024\npython actor_rollout_ref.a=$(((A + 1) * 4 / 2 - 2)) b.c=$((A/0))/x d.e={*} f.g=$PWD/a\n"
    )
    given = read_foreign(tmp_path / "a.sh")[1]
    assert given == {"actor_rollout_ref.a": 2048, "b.c": "$((A/0))/x", "d.e": "{*}", "f.g": "./a"}


def test_a_trainer_without_arguments_has_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('DPOTrainer(model="m", train_dataset=load_dataset("org/pairs"))')
    kind, given = read_foreign(tmp_path / "a.py")
    assert (kind, given["dataset_name"]) == ("DPOConfig", "org/pairs")
    (tmp_path / "a.py").write_text('DPOTrainer(model="m", args=parsed)')  # they come from a command line
    with pytest.raises(UsageError, match="no settings"):
        read_foreign(tmp_path / "a.py")
