"""Operator backends: where `torch_npu` calls of the code under test go.

Use, in a child process, before the target's code is imported:

    from kvskill.verifier.backend import OpContext, install, record_calls
    info = install("auto", context=OpContext(profile="cann-9.0", dtype="bfloat16", block_size=128))
    import torch, torch_npu, torchair        # real, or stand-ins; torch.ops.npu.* runs our reference kernels

`install(kind, *, context, release=None) -> BackendInfo`

* "npu": real hardware; nothing is replaced. Records SoC, CANN and torch_npu.
* "wheel": the installed torch_npu on a CPU host: stub libraries stand in for CANN (built once from the wheel's
  undefined symbols, needs a C compiler and pyelftools), real schemas, dispatcher and Meta kernels.
* "table": no torch_npu: the operators of `release` (default: the newest for the installed torch) are defined
  through torch.library, and `torch_npu`, `torch.npu` are stand-ins.
* "auto": the first of npu, wheel, table that works; `BackendInfo.notes` says why others were passed over.

With "wheel" and "table" device npu is mapped to the CPU, `torch.npu` queries have constant answers, `torchair` is
a stand-in, and every operator call is checked against the rules of `context.profile`:
`OperatorRuleViolation` (rule, code, source, message), `UnmodelledCall`, `MissingKernel` are raised from the call.
An install is for the rest of the process; a second `install` of another kind raises BackendError.

`record_calls()` collects op names, plain arguments, shapes, strides and NaN flags of every call in its block.
`using(replace(current(), nan="absorbing"))` runs a block in another mode. See `OpContext` for all settings.
"""

from __future__ import annotations

from kvskill.verifier.backend.context import DEFAULT_PROFILE, OpContext, current, set_context, using
from kvskill.verifier.backend.install import BackendError, BackendInfo, BackendKind, install, installed
from kvskill.verifier.backend.record import CallRecord, TensorFact, record_calls
from kvskill.verifier.kernels.errors import MissingKernel, OperatorRuleViolation, RuleHit, UnmodelledCall
from kvskill.verifier.kernels.rules.warnings import take_warnings

__all__ = [
    "DEFAULT_PROFILE",
    "BackendError",
    "BackendInfo",
    "BackendKind",
    "CallRecord",
    "MissingKernel",
    "OpContext",
    "OperatorRuleViolation",
    "RuleHit",
    "TensorFact",
    "UnmodelledCall",
    "current",
    "install",
    "installed",
    "record_calls",
    "set_context",
    "take_warnings",
    "using",
]
