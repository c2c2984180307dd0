"""Weight files whose values are none: NaN and infinity anywhere, and zeros where a download ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from corpus import write_weights

from rlctl.models.weight_values import value_findings
from specs.safetensors_header import read_header

SHAPES = {
    "model.embed_tokens.weight": (600, 64),
    **{f"model.layers.{n}.{name}.weight": (256, 64) for n in range(4) for name in ("q_proj", "up_proj", "down_proj")},
    "model.norm.weight": (64,),
}


def write(file: Path, name: str, at: float, content: bytes) -> None:
    """Bytes into a tensor, `at` a share of it."""
    entry = read_header(file).entries[name]
    with file.open("r+b") as stream:
        stream.seek(entry.start + int(at * entry.nbytes) // 64 * 64)
        stream.write(content)


@pytest.mark.parametrize("at", [0.0, 0.3, 0.999])
@pytest.mark.parametrize(
    ("dtype", "bits"), [("F32", "0000c07f"), ("BF16", "c07f"), ("F16", "00fc"), ("F64", "000000000000f0ff")]
)
def test_a_value_that_is_no_number_is_found_wherever_it_is(tmp_path: Path, dtype: str, bits: str, at: float) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES, dtype)
    assert value_findings([file], seconds=10) == ([], [])
    write(file, "model.layers.2.up_proj.weight", at, bytes.fromhex(bits))
    (((said, hint),), _) = value_findings([file], seconds=10)
    assert said == "model.layers.2.up_proj.weight in model.safetensors holds NaN or infinity"
    assert "before the run diverged" in hint


def test_without_time_nothing_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES)
    write(file, "model.layers.2.up_proj.weight", 0.3, bytes.fromhex("0000c07f"))
    assert value_findings([file], seconds=0) == ([], [])


def test_a_file_that_was_filled_up_with_zeros(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES)
    entries = read_header(file).entries
    with file.open("r+b") as stream:
        size = stream.seek(0, 2)
        stream.truncate(entries["model.layers.1.q_proj.weight"].start + 8192)
        stream.truncate(size)
    errors, warnings = value_findings([file], seconds=10)
    ((said, hint),) = errors or warnings
    assert "zeros alone" in said
    assert "download" in hint


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("model.layers.0.down_proj.weight", 256, ""),  # a layer that begins as nothing
        ("model.layers.0.q_proj.weight", 256, "zeros alone, among"),
        ("model.layers.0.q_proj.weight", 100, "zeros alone from byte"),
        ("model.embed_tokens.weight", 100, ""),  # of tokens that no tokenizer has
        ("model.norm.weight", 1, ""),
    ],
)
def test_zeros_in_a_tensor(tmp_path: Path, name: str, rows: int, says: str) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES)
    write(file, name, 0.0, bytes(rows * 64 * 4))
    errors, warnings = value_findings([file], seconds=10)
    assert errors == []
    assert [says in said for said, _ in warnings] == ([True] if says else [])


def test_an_embedding_of_zeros_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    write_weights(file, SHAPES)
    write(file, "model.embed_tokens.weight", 0.0, bytes(600 * 64 * 4))
    (((said, _),), _) = value_findings([file], seconds=10)
    assert said == "model.embed_tokens.weight in model.safetensors holds zeros alone"
