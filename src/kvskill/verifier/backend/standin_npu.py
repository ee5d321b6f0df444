"""Stand-ins for `torch.npu` and `torch_npu`: constant answers for one idle 64 GiB device, streams that do nothing.

A name that is not here and is no operator of the release raises AttributeError with the release in the message.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["npu_module", "serve_queries", "torch_npu_module"]

_GIB = 1 << 30


class Stream:
    """All work is done when a call returns, so waiting is nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.npu_stream = 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Any:
        """The given or a new event."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always finished."""
        return True


class Event:
    """An event that has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always finished."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds: 0."""
        return 0.0


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[Any]:
    yield stream


def _no_graph(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("graph mode (npugraph_ex) does not run on the CPU backend; run the model in eager mode")


def _seed(seed: int) -> None:
    # not torch.manual_seed, which calls this one; device and host share the CPU generator here
    torch.default_generator.manual_seed(int(seed))


def _nothing() -> Any:
    # a new function each time: dynamo keeps one rule for each function object
    return lambda *args, **kwargs: None


def _queries() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _nothing(),
        "synchronize": _nothing(),
        "empty_cache": _nothing(),
        "mem_get_info": lambda device=None: (60 * _GIB, 64 * _GIB),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": _nothing(),
        "get_device_name": lambda device=None: "kvskill CPU stand-in",
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "init": _nothing(),
        "set_compile_mode": _nothing(),
        "_lazy_init": _nothing(),
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": _stream,
        "set_stream": _nothing(),
        "Stream": Stream,
        "Event": Event,
    }


def serve_queries(module: Any) -> None:
    """Put the constant answers over those of a `torch.npu` module (the wheel's would start a device)."""
    for name, value in _queries().items():
        setattr(module, name, value)
    inference = types.SimpleNamespace(cache_compile=_no_graph)
    module.npugraph_ex = types.SimpleNamespace(inference=inference, compile_fx=_no_graph)


def npu_module() -> types.ModuleType:
    """A `torch.npu` for the table backend."""
    module = types.ModuleType("torch.npu")
    serve_queries(module)
    module.config = types.SimpleNamespace(allow_internal_format=False)  # type: ignore[attr-defined]
    module.amp = types.SimpleNamespace()  # type: ignore[attr-defined]
    return module


class _Profile:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Profile:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def step(self) -> None:
        pass


def _profiler() -> types.ModuleType:
    module = types.ModuleType("torch_npu.profiler")
    level = types.SimpleNamespace(Level_none=-1, Level0=0, Level1=1, Level2=2)
    names: dict[str, Any] = {
        "profile": _Profile,
        "schedule": lambda **kwargs: None,
        "tensorboard_trace_handler": lambda *args, **kwargs: None,
        "_ExperimentalConfig": types.SimpleNamespace,
        "ProfilerLevel": level,
        "ProfilerActivity": types.SimpleNamespace(CPU="cpu", NPU="npu"),
        "AiCMetrics": types.SimpleNamespace(
            AiCoreNone=0, PipeUtilization=1, ArithmeticUtilization=2, Memory=3, MemoryL0=4, MemoryUB=5
        ),
        "ExportType": types.SimpleNamespace(Text="text", Db="db"),
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


# torch_npu's own numbers for dtypes that torch has no name for (read from torch_npu 2.13.0)
_DTYPE_NUMBERS = {"float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296, "hifloat8": 290}


def torch_npu_module(release: str, npu: types.ModuleType, covered: frozenset[str]) -> types.ModuleType:
    """An importable `torch_npu` whose functions are the operators of `release` in torch.ops.npu.

    `covered` names the operators that the schema table knows about, in whatever release.
    """
    module = types.ModuleType("torch_npu")
    module.__path__ = []
    module.__version__ = release  # type: ignore[attr-defined]
    module.npu = npu  # type: ignore[attr-defined]
    module.profiler = _profiler()  # type: ignore[attr-defined]
    for name, value in _DTYPE_NUMBERS.items():
        setattr(module, name, value)

    class Options(types.SimpleNamespace):
        """ProcessGroupHCCL.Options: a bag of settings."""

    group = types.SimpleNamespace(Options=Options)
    c10d = types.SimpleNamespace(ProcessGroupHCCL=group)
    module._C = types.SimpleNamespace(_distributed_c10d=c10d)  # type: ignore[attr-defined]

    def __getattr__(name: str) -> Any:  # noqa: N807
        if not name.startswith("__"):
            try:
                return getattr(torch.ops.npu, name)
            except AttributeError:
                pass
        if name in covered:
            raise AttributeError(f"torch_npu {release} has no {name!r} (schema table of kvskill)")
        raise AttributeError(f"torch_npu.{name} is not covered by kvskill's schema table; --backend wheel has it all")

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module
