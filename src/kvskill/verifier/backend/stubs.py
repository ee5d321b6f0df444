"""Stub libraries that stand in for CANN, so that the real torch_npu wheel imports on a CPU host.

The wheel links six CANN libraries with BIND_NOW, so each of their symbols that it leaves undefined must exist. One
library gets a function returning 0 for every such symbol of the *installed* wheel, the others are empty; they are
found by soname when loaded with RTLD_GLOBAL first. Built once per wheel into the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvskill.verifier.backend.install import BackendError

__all__ = ["LIBRARIES", "build_stubs", "cache_folder", "load_stubs", "undefined_symbols"]

# NEEDED entries that CANN must provide: the same six in 16 releases read (2.1.0.post8 .. 2.14.0)
LIBRARIES = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
# dlopened by name at import in some releases (seen in 2.8.0)
EXTRA = ("libopapi.so",)
# in all 16 releases the undefined C symbols of CANN start so; five old ones also want C++ symbols of ge::
PREFIXES = ("acl", "Hccl", "Msprof", "rt")
GE_PREFIXES = ("_ZN2ge", "_ZNK2ge", "_ZTVN2ge", "_ZTIN2ge")


def undefined_symbols(libraries: Iterable[Path]) -> list[str]:
    """Names that the given shared objects want from CANN. Raises BackendError without pyelftools."""
    try:
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise BackendError("pyelftools is needed to read the wheel; `pip install kvskill[verify]`") from error
    wanted: set[str] = set()
    own: set[str] = set()
    for path in libraries:
        with path.open("rb") as stream:
            for symbol in ELFFile(stream).get_section_by_name(".dynsym").iter_symbols():
                (wanted if symbol["st_shndx"] == "SHN_UNDEF" else own).add(symbol.name)
    return sorted(s for s in wanted - own if s.startswith(PREFIXES + GE_PREFIXES))


def cache_folder() -> Path:
    """The user's cache folder for kvskill; a folder for this user in the temporary folder if it cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvskill"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"kvskill-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BackendError(f"{folder} belongs to another user; set XDG_CACHE_HOME to a folder of yours")
    return folder


def build_stubs(root: Path, version: str) -> Path:
    """Folder with the stub libraries for the torch_npu installed at `root`; built when not there yet.

    Raises BackendError when there is no C compiler or it fails.
    """
    libraries = [
        *sorted(root.glob("_C*.so")),
        *(p for p in sorted(root.glob("lib/*.so")) if "atb" not in p.name),
    ]
    facts = "".join(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns};" for p in libraries)
    key = hashlib.sha256(facts.encode()).hexdigest()[:12]
    target = cache_folder() / f"cann-stubs-{version}-{key}"
    if all((target / name).exists() for name in (*LIBRARIES, *EXTRA)):
        return target
    compiler = os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise BackendError(
            "the wheel backend builds stub libraries for CANN and found no C compiler (cc, gcc, clang, $CC); "
            "install one or use --backend table"
        )
    symbols = undefined_symbols(libraries)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix="cann-stubs-"))
    for index, name in enumerate((*LIBRARIES, *EXTRA)):
        source = work / f"{name}.c"
        names = symbols if index == 0 else []
        source.write_text("".join(f"long {s}(void) {{ return 0; }}\n" for s in names) or "typedef int nothing;\n")
        command = [*compiler.split(), "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(work / name), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode:
            shutil.rmtree(work)
            raise BackendError(f"{compiler} could not build the CANN stub {name}: {done.stderr.strip()[:400]}")
        source.unlink()
    try:
        work.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return target


def load_stubs(folder: Path) -> None:
    """Load every stub with RTLD_GLOBAL; a later dlopen of the same soname finds it."""
    for name in (*LIBRARIES, *EXTRA):
        ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
