"""Installing: order of `auto`, clear messages, device mapping, stand-ins. Each in its own process."""

from __future__ import annotations

import json
import os

import pytest

KINDS = ["table", "wheel"]

DEVICE = """
import sys, threading, json
from kvskill.verifier.backend import OpContext, install
install(sys.argv[1], context=OpContext())
import torch, torch_npu, torchair
from torch import nn
out = {}
out["factory"] = [str(t.device) for t in (
    torch.zeros(2, device="npu"), torch.ones(2, device="npu:0"), torch.tensor([1], device=torch.device("npu", 0)),
    torch.empty_like(torch.ones(2), device="npu"), torch.arange(3, device="npu"), torch.randn(2).npu(),
    torch.randn(2).to("npu"), torch.randn(2).to(torch.device("npu:0"), torch.float16),
    torch.full((2,), 1., device="npu"),
    torch.randn(2).to(device="npu", non_blocking=True), torch.zeros(2, pin_memory=True), torch.ones(2).pin_memory())]
with torch.device("npu"):
    out["context"] = str(torch.ones(2).device)
torch.set_default_device("npu")
out["default"] = str(torch.ones(2).device)
torch.set_default_device(None)
layer = nn.Linear(2, 2, device="npu")
out["module"] = [str(layer.weight.device), str(layer.to("npu").weight.device), str(layer.npu().weight.device)]
seen = []
thread = threading.Thread(target=lambda: seen.append(str(torch.zeros(1, device="npu").device)))
thread.start(); thread.join()
out["thread"] = seen
x = torch.ones(2)
out["identity"] = x.npu() is x
out["device type"] = torch.device("npu").type
out["queries"] = [torch.npu.is_available(), torch.npu.device_count(), torch.npu.current_device(),
                  len(torch.npu.mem_get_info()), torch.npu.synchronize(), torch_npu.npu.memory_allocated()]
torch.manual_seed(7); a = torch.rand(2)
torch.npu.manual_seed_all(7); b = torch.rand(2)
out["seeds"] = bool(torch.equal(a, b))
torch.npu.config.allow_internal_format = True
with torch.npu.stream(torch.npu.Stream()):
    torch.npu.current_stream().wait_stream(torch.npu.Stream())
event = torch.npu.Event(); event.record(); event.wait()
try:
    torch.npu.npugraph_ex.inference.cache_compile(lambda x: x)
except RuntimeError as error:
    out["graph"] = str(error)
import torchair.ge_concrete_graph.ge_converter.experimental.patch_for_hcom_allreduce
from torchair.configs.compiler_config import CompilerConfig
config = CompilerConfig(); config.experimental_config.frozen_parameter = True; config.mode = "max-autotune"
scope = torchair.scope
with scope.npu_stream_switch("1", 3), scope.super_kernel("s", ""), scope.limit_core_num(1, 1):
    tag = torchair.ops.npu_create_tagged_event(tag="t")
    torchair.ops.npu_tagged_event_record(tag); torchair.ops.npu_tagged_event_wait(tag)
torchair.patch_for_hcom()
compiled = torch.compile(lambda x: x + 1, backend=torchair.get_npu_backend(compiler_config=config))
out["compiled"] = compiled(torch.ones(1)).tolist()
q = torch.randn(2, 4, 64); k = torch.randn(2, 2, 64)
kw = dict(num_query_heads=4, num_key_value_heads=2, softmax_scale=0.5, input_layout="TND")
a = torchair.ops.npu_fused_infer_attention_score_v2(q, k, k, actual_seq_qlen=torch.tensor([1, 2]),
                                                    actual_seq_kvlen=torch.tensor([1, 2]), **kw)[0]
b = torch_npu.npu_fused_infer_attention_score_v2(q, k, k, actual_seq_qlen=[1, 2], actual_seq_kvlen=[1, 2], **kw)[0]
out["torchair ops"] = bool(torch.equal(a, b))
out["profiler"] = [hasattr(torch_npu.profiler, n) for n in ("profile", "schedule", "ProfilerActivity", "AiCMetrics")]
out["numbers"] = [torch_npu.float8_e8m0fnu, torch_npu.float4_e2m1fn_x2, torch_npu.hifloat8]
try:
    torch_npu.npu_no_such_operator
except AttributeError as error:
    out["unknown"] = str(error)
try:
    torch_npu.npu_moe_finalize_routing_v9
except AttributeError as error:
    out["unknown"] += str(error)
print(json.dumps(out))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_device_npu_is_the_cpu(run, kind):
    out = json.loads(run(DEVICE, kind).splitlines()[-1])
    assert set(out["factory"]) == {"cpu"} and out["context"] == out["default"] == "cpu"
    assert set(out["module"]) == {"cpu"} and out["thread"] == ["cpu"] and out["identity"] is True
    assert out["device type"] == "cpu" and out["queries"] == [True, 1, 0, 2, None, 0] and out["seeds"] is True
    assert "eager" in out["graph"] and out["compiled"] == [2.0] and out["torchair ops"] is True
    assert all(out["profiler"]) and out["numbers"] == [293, 296, 290]
    assert "npu_no_such_operator" in out["unknown"]


RECORD = """
import sys
from dataclasses import replace
from kvskill.verifier.backend import OpContext, current, install, record_calls, take_warnings, using
from kvskill.verifier.backend import OperatorRuleViolation
install(sys.argv[1], context=OpContext())
import torch, torch_npu
x = torch.ones(3, 8)[:, ::2]
with record_calls() as outer:
    torch_npu.npu_swiglu(x)
    with record_calls() as inner:
        with record_calls() as empty:
            pass
        torch_npu.npu_rms_norm(torch.full((2, 4), float("nan")), torch.ones(4), epsilon=1e-5)
assert [c.op for c in outer] == ["npu_swiglu", "npu_rms_norm"] and [c.op for c in inner] == ["npu_rms_norm"]
assert empty == []
fact = outer[0].arguments["input"]
assert (fact.shape, fact.stride, fact.dtype, fact.has_nan) == ((3, 4), (8, 2), "float32", False)
assert outer[0].arguments["dim"] == -1 and outer[0].results[0].shape == (3, 2)
assert inner[0].arguments["input"].has_nan and inner[0].arguments["epsilon"] == 1e-5 and inner[0].results[0].has_nan
torch_npu.npu_swiglu(x)
assert len(outer) == 2
with record_calls() as failed:
    try:
        torch_npu.npu_rms_norm(torch.ones(2, 4), torch.ones(3))
    except OperatorRuleViolation:
        pass
assert "norm-gamma" in failed[0].error and failed[0].results == []
with using(replace(current(), enforce=False)):
    try:
        torch_npu.npu_rms_norm(torch.ones(2, 4), torch.ones(3))
    except RuntimeError as error:
        assert not isinstance(error, OperatorRuleViolation)
q = torch.ones(1, 1, 64)
args = dict(num_query_heads=1, input_layout="TND", actual_seq_qlen=[1], actual_seq_kvlen=[1])
torch_npu.npu_fused_infer_attention_score_v2(q, q, q, **args)
torch_npu.npu_fused_infer_attention_score_v2(q, q, q, **args)
found = take_warnings()
assert [(h.rule, n) for h, n in found.items()] == [("fa-scale", 2)] and take_warnings() == {}
with using(replace(current(), strict=True)):
    try:
        torch_npu.npu_fused_infer_attention_score_v2(q, q, q, **args)
        raise SystemExit("not strict")
    except OperatorRuleViolation as error:
        assert error.rule == "fa-scale" and error.code == "KV465"
print("fine")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_records_warnings_and_contexts(run, kind):
    assert run(RECORD, kind).splitlines()[-1] == "fine"


ASK = """
import sys
from kvskill.verifier.backend import BackendError, OpContext, install
try:
    info = install(sys.argv[1], context=OpContext(), release=sys.argv[2] if len(sys.argv) > 2 else None)
    print(info.kind, info.torch_npu, *info.notes, sep=" | ")
except BackendError as error:
    print("refused", error, sep=" | ")
"""


def test_auto_takes_the_wheel_and_says_why_not_the_npu(run, wheel):
    line = run(ASK, "auto").splitlines()[-1]
    assert line.startswith("wheel | 2.13.0 | npu: no Ascend device")


def test_auto_with_a_release_takes_the_table(run):
    line = run(ASK, "auto", "2.8.0").splitlines()[-1]
    assert line.startswith("table | 2.8.0") and "only the table can promise" in line


def test_npu_refuses_without_a_device(run):
    assert run(ASK, "npu").strip().startswith("refused | no Ascend device")


def test_unknown_release(run):
    out = run(ASK, "table", "2.8.0.post77")
    assert "refused" in out and "2.8.0.post5" in out


def test_wheel_of_another_release(run):
    out = run(ASK, "wheel", "2.8.0")
    assert "refused | torch_npu 2.13.0 is installed, not 2.8.0" in out


def test_wheel_without_a_compiler(run, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CC": ""}
    out = run(ASK, "wheel", env=env)
    assert "refused" in out and "found no C compiler" in out and "--backend table" in out


def test_wheel_with_a_broken_compiler(run, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path), "CC": "false"}
    out = run(ASK, "wheel", env=env)
    assert "refused" in out and "false could not build" in out
    assert [p.name for p in (tmp_path / "kvskill").iterdir()] == []


def test_stubs_are_built_once(run, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "wheel | 2.13.0" in run(ASK, "wheel", env=env)
    (folder,) = (tmp_path / "kvskill").iterdir()
    assert folder.name.startswith("cann-stubs-2.13.0-") and len(list(folder.glob("*.so"))) == 7
    stamp = (folder / "libhccl.so").stat().st_mtime_ns
    assert "wheel | 2.13.0" in run(ASK, "wheel", env={**env, "CC": "false"})
    assert (folder / "libhccl.so").stat().st_mtime_ns == stamp


def test_table_without_torch_npu_installed_and_wheel_message(run):
    text = """
import importlib.metadata as m
real = m.distribution
def hidden(name):
    if name == "torch_npu":
        raise m.PackageNotFoundError(name)
    return real(name)
m.distribution = hidden
""" + ASK
    out = run(text, "wheel")
    assert "refused | torch_npu is not installed here" in out
    line = run(text, "auto").splitlines()[-1]
    assert line.startswith("table | 2.13.0") and "wheel: torch_npu is not installed" in line


def test_second_install(run):
    text = """
from kvskill.verifier.backend import BackendError, OpContext, current, install, installed
first = install("table", context=OpContext())
assert installed() is first and install("table", context=OpContext(profile="cann-9.1")) is first
assert current().profile == "cann-9.1" and install("auto", context=OpContext()) is first
for kind, release in (("wheel", None), ("table", "2.8.0")):
    try:
        install(kind, context=OpContext(), release=release)
        raise SystemExit("accepted")
    except BackendError as error:
        print(error)
import json; print(json.dumps(first.to_json()))
"""
    lines = run(text).splitlines()
    assert "start another process" in lines[0] and '"kind": "table"' in lines[-1]


def test_torch_npu_imported_before(run):
    text = """
import sys, types
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
""" + ASK
    assert "loaded in this process already" in run(text, "table")


def test_importing_the_package_imports_no_torch(run):
    text = "import sys; import kvskill.verifier.backend; assert 'torch' not in sys.modules; print('light')"
    assert run(text).strip() == "light"


def test_older_release_lacks_what_it_lacked(run):
    text = """
import sys
from kvskill.verifier.backend import OpContext, install
install("table", context=OpContext(), release="2.6.0")
import torch, torch_npu
assert torch_npu.__version__ == "2.6.0"
for name in ("npu_fused_infer_attention_score_v2", "npu_kv_rmsnorm_rope_cache_v2"):
    try:
        getattr(torch_npu, name)
        raise SystemExit(name)
    except AttributeError as error:
        print(error)
print(torch_npu.npu_kv_rmsnorm_rope_cache)
"""
    lines = run(text).splitlines()
    assert "torch_npu 2.6.0 has no 'npu_fused_infer_attention_score_v2'" in lines[0] and len(lines) == 3


CUDA = """
import sys
from kvskill.verifier.backend import OpContext, install
install(sys.argv[1], context=OpContext())
import torch
try:
    torch.zeros(1, device="cuda")
    raise SystemExit("cuda was served without transfer_to_npu")
except (RuntimeError, AssertionError):
    pass
from torch_npu.contrib import transfer_to_npu
x = torch.ones(2)
print(torch.zeros(1, device="cuda:0").device, x.cuda() is x, torch.nn.Linear(1, 1).cuda().weight.device,
      torch.cuda.is_available())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_is_served_only_after_transfer_to_npu(run, kind):
    assert run(CUDA, kind).splitlines()[-1] == "cpu True cpu True"


def test_environment_is_left_for_grandchildren(run):
    """TORCH_DEVICE_BACKEND_AUTOLOAD=0 stays set, so that processes started by the target can import torch too."""
    text = "import os\nfrom kvskill.verifier.backend import OpContext, install\ninstall('table', context=OpContext())\n"
    text += "print(os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    assert run(text).strip() == "0"
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ or os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] in "01"
