"""Stand-in for `torchair`: scopes and tags that do nothing, a compile backend that leaves the code as it is.

`torchair.ops.*` attention takes tensors for its lengths (library `air`); here they are read and handed to the
operator of the same name in torch.ops.npu, so that graph-mode code paths can be run eagerly.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["leave_uncompiled", "torchair_modules"]

_LENGTHS = frozenset(
    {"actual_seq_lengths", "actual_seq_lengths_kv", "actual_seq_qlen", "actual_seq_kvlen", "actual_shared_prefix_len"}
)


def _forward(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {k: v.tolist() if k in _LENGTHS and isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        return getattr(torch.ops.npu, name)(*args, **given)

    return call


@contextlib.contextmanager
def _scope(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _first(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _no_cache(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("torchair.inference.cache_compile does not run on the CPU backend; use eager mode")


class _Config(types.SimpleNamespace):
    """CompilerConfig: any option, any depth, can be read and set; none has an effect."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        child = _Config()
        setattr(self, name, child)
        return child


def _run_graph(graph: Any, inputs: Any) -> Any:
    return graph.forward


def _backend(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    return _run_graph


def leave_uncompiled() -> None:
    """Make `torch.compile(f, backend=get_npu_backend(...))` return `f`: nothing is captured on this backend."""
    real = torch.compile

    def compile_or_not(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("backend") is not _run_graph:
            return real(model, *args, **kwargs)
        return (lambda inner: inner) if model is None else model

    torch.compile = compile_or_not


def torchair_modules() -> dict[str, types.ModuleType]:
    """The modules to put into sys.modules."""
    names = (
        "torchair", "torchair.ops", "torchair.scope", "torchair.inference", "torchair.configs",
        "torchair.configs.compiler_config", "torchair.ge_concrete_graph",
        "torchair.ge_concrete_graph.ge_converter", "torchair.ge_concrete_graph.ge_converter.experimental",
        "torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce",
    )  # fmt: skip
    made: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    for name, module in made.items():
        module.__path__ = []
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    made["torchair"].__dict__.update(
        patch_for_hcom=_nothing, get_npu_backend=_backend, get_compiler=_backend, CompilerConfig=_Config,
        logger=types.SimpleNamespace(setLevel=_nothing),
    )  # fmt: skip
    made["torchair.ops"].__dict__.update(
        npu_fused_infer_attention_score=_forward("npu_fused_infer_attention_score"),
        npu_fused_infer_attention_score_v2=_forward("npu_fused_infer_attention_score_v2"),
        npu_create_tagged_event=lambda tag=None: tag,
        npu_tagged_event_record=_nothing,
        npu_tagged_event_wait=_nothing,
        npu_record_tagged_stream=_nothing,
    )
    made["torchair.scope"].__dict__.update(
        npu_stream_switch=_scope, super_kernel=_scope, limit_core_num=_scope, npu_wait_tensor=_first,
    )  # fmt: skip
    made["torchair.inference"].cache_compile = _no_cache
    made["torchair.configs.compiler_config"].CompilerConfig = _Config
    return made
