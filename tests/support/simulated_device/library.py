"""The device's library: built once for a version of torch, and loaded before torch is imported."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("device.cpp")


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def built() -> Path:
    """Return the library, made first where it is not there: half a minute. It is kept for later runs."""
    key = hashlib.sha256(SOURCE.read_bytes() + version("torch").encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"rlctl-simulated-device-{os.getuid()}"
    library = folder / f"{key}.so"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid(), f"{folder} is another user's"
    with FileLock(folder / "lock"):  # other tests may want it at the same time
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    found, gxx = find_spec("torch"), compiler()
    assert found is not None
    assert found.origin is not None
    assert gxx is not None
    torch, making = Path(found.origin).parent, library.with_suffix(".making")
    libraries = [f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-ltorch_cpu", "-lc10"]
    command = [gxx, "-O1", "-shared", "-fPIC", "-std=c++20", "-w", str(SOURCE), "-o", str(making)]
    done = subprocess.run([*command, f"-I{torch}/include", *libraries], capture_output=True, text=True)
    assert done.returncode == 0, f"{SOURCE.name} does not compile against torch {version('torch')}:\n{done.stderr}"
    making.replace(library)


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.held_bytes.restype = library.take_freed.restype = ctypes.c_size_t
    library.take_freed.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    library.resize_storage.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.share_storage.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_bool]
    return library
