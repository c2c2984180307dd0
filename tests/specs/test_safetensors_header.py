"""Headers of safetensors files: a file that was cut anywhere is found out by its first bytes and its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.safetensors_header import make_header, read_header


def test_a_file_is_whole_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    header, _ = make_header([("w", "F32", (2,))], {})
    whole = header + bytes(8)
    file.write_bytes(whole)
    assert read_header(file).entries["w"].shape == (2,)
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"cut short|not a safetensors file"):
            read_header(file)


def test_scales_of_blocks_are_a_dtype_of_a_byte(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    header, _ = make_header([("w", "F8_E8M0", (2,))], {})
    file.write_bytes(header + bytes(2))
    assert read_header(file).entries["w"].nbytes == 2


def test_a_header_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    text = b"[" * 200_000
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_header(file)
