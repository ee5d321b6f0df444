"""Drives a runner in a child process: its own class, settings, loop and log lines.

Replaced are only the tokenizer, the device (by the operator backend), and communication groups.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["run_runner"]

_LINE = re.compile(r"inference time cost of (\w[\w ]*?) is ([\d.]+) ms")


def run_runner(job: dict[str, Any], result: dict[str, Any]) -> None:
    """role "old": one prompt at a time. role "new": all prompts in one batch, for each padding side, and again."""
    from kvskill.verifier.child.standins import install_standins
    from kvskill.verifier.child.target import _alias_dtype, _transformers_without_npu
    from kvskill.verifier.standalone.tokens import StubTokenizer

    result["phase"] = "backend"
    from kvskill.verifier.backend import OpContext, install, installed

    if installed() is None:
        _transformers_without_npu()
    context = OpContext(
        dtype="bfloat16",
        block_size=job["deploy_block_size"],
        null_slots=0,
        enforce=job["side"] == "new",
        waive=frozenset(job["waive"]),
    )
    result["backend"] = install(job["backend"], context=context).to_json()
    import torch

    torch.set_num_threads(1)
    sys.path[:0] = [job["folder"], *job["paths"]]
    result["standins"] = install_standins()
    rank, tp = str(job["rank"]), str(job["tp"])
    for name, value in (("LOCAL_RANK", rank), ("RANK", rank), ("RANK_ID", rank), ("WORLD_SIZE", tp)):
        os.environ[name] = value
    os.environ["RANK_OFFSET"] = "0"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    _alias_dtype()
    import transformers

    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    tokenizer = StubTokenizer({f"#{i}": list(p) for i, p in enumerate(job["prompt_ids"])}, "right")
    transformers.AutoTokenizer.from_pretrained = staticmethod(lambda *a, **k: tokenizer)
    _groups(job)
    if job["named_weights"]:
        _load_nothing()
    result["phase"] = "import"
    module = importlib.import_module(job["runner_module"])
    cls = getattr(module, job["runner_class"])
    times = _listen()
    result["phase"] = "load"
    runner, served = _start(cls, job, job["settings"])
    result["groups_served"] = served
    from kvskill.verifier.standalone.watch import Watch

    watch = Watch(type(model_of(runner)), tokenizer)
    result["phase"] = "run"
    arrays: dict[str, Any] = {}
    result["runs"] = {}
    if job["side"] == "old":
        _old_runs(cls, watch, job, result, arrays)
    else:
        _new_runs(runner, watch, tokenizer, job, result, arrays)
    result["facts"] = dict(watch.facts)
    result["times"] = {stage: list(values) for stage, values in times.items()}
    result["rule_warnings"] = _warnings()
    if job["side"] == "new" and "settings_alone" in job:
        _more_runs(cls, watch, job, result, arrays)
    result["problems"] = list(dict.fromkeys(watch.problems))
    np.savez(Path(job["out"]) / "arrays.npz", **arrays)


def _start(cls: type, job: dict[str, Any], settings: dict[str, Any]) -> tuple[Any, list[str]]:
    """A runner with its model loaded, and the groups that are served to it (filled while it runs)."""
    runner = _build(cls, job, settings)
    if hasattr(runner, "init_model"):
        runner.init_model()
    model = model_of(runner)
    if job["named_weights"]:
        from kvskill.verifier.child.weights import fill_named

        fill_named(dict(model.named_parameters()), int(job["seed"]))
    return runner, _serve_groups(model)


def _load_nothing() -> None:
    """Without a checkpoint nothing is read: the weights are set by parameter name once the model stands."""
    import safetensors.torch
    import torch

    safetensors.torch.load_file = lambda *args, **kwargs: {}
    torch.nn.Module.load_state_dict = lambda self, *args, **kwargs: None


def model_of(runner: Any) -> Any:
    """The model that the runner keeps: its attribute `model`, or its one module."""
    import torch

    held = getattr(runner, "model", None)
    if isinstance(held, torch.nn.Module):
        return held
    found = {id(v): v for v in vars(runner).values() if isinstance(v, torch.nn.Module)}
    if len(found) != 1:
        raise AttributeError(f"the runner keeps {len(found)} modules as attributes; its model was not found")
    return next(iter(found.values()))


def _old_runs(cls: type, watch: Any, job: dict[str, Any], result: dict[str, Any], arrays: dict[str, Any]) -> None:
    """One prompt at a time, each with settings of its own length. Contiguous runners may fail on a prompt of one token:
    that is said, and the rest runs.
    """
    order = sorted(range(len(job["prompt_ids"])), key=lambda r: len(job["prompt_ids"][r]) == 1)
    result["failed"] = {}
    for request in order:
        try:
            runner, _ = _start(cls, job, job["settings_by_request"][request])
            watch.start()
            runner.model_generate([f"#{request}"], warm_up=False)
        except Exception as error:
            if len(job["prompt_ids"][request]) > 1:
                raise
            text = " ".join(str(error).split())[:200]
            result["failed"][request] = f"it fails on a prompt of one token ({type(error).__name__}: {text})"
            continue
        _keep(arrays, "right", [request], watch)


def _more_runs(cls: type, watch: Any, job: dict[str, Any], result: dict[str, Any], arrays: dict[str, Any]) -> None:
    """Each prompt by itself with a batch of one, and all prompts with a cache that is one position too short."""
    count = len(job["prompt_ids"])
    try:
        runner, _ = _start(cls, job, job["settings_alone"])
        for request in range(count):
            watch.start()
            runner.model_generate([f"#{request}"], warm_up=False)
            _keep(arrays, "alone", [request], watch)
        result["runs"]["alone"] = "ran"
    except Exception as error:
        result["runs"]["alone"] = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        runner, _ = _start(cls, job, job["settings_short"])
        watch.start()
        runner.model_generate([f"#{r}" for r in range(count)], warm_up=False)
        result["runs"]["overflow"] = "ran"
        _keep(arrays, "overflow", list(range(count)), watch)
    except Exception as error:
        result["runs"]["overflow"] = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _warnings() -> list[dict[str, Any]]:
    """Operator rules of level warning that the calls broke."""
    from kvskill.verifier.backend import take_warnings

    return [
        {"rule": h.rule, "code": h.code, "source": h.source, "message": f"{h.op}: {h.message}", "count": n}
        for h, n in take_warnings().items()
    ]


def _new_runs(
    runner: Any, watch: Any, tokenizer: Any, job: dict[str, Any], result: dict[str, Any], arrays: dict[str, Any]
) -> None:
    order = list(range(len(job["prompt_ids"])))
    names = [f"#{i}" for i in order]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        watch.start()
        try:
            # other prompts first: what a run leaves in the caches must not reach the next one
            runner.model_generate(names[::-1], warm_up=True)
            watch.start()
            runner.model_generate(names, warm_up=False)
        except ValueError as error:
            if side == "left" and "padding_side" in str(error):
                result["runs"][side] = f"refused by the runner: {error}"
                continue
            raise
        result["runs"][side] = "ran"
        _keep(arrays, side, order, watch)
    tokenizer.padding_side = "right"
    watch.start()
    runner.model_generate(names, warm_up=False)
    _keep(arrays, "again", order, watch)


def _keep(arrays: dict[str, Any], side: str, requests: list[int], watch: Any) -> None:
    for request, (logits, tokens) in zip(requests, watch.rows(), strict=True):
        arrays[f"{side}/logits/{request}"] = logits
        arrays[f"{side}/tokens/{request}"] = tokens


def _build(cls: type, job: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The runner, from settings or from the path of a YAML file, as its constructor asks."""
    params = [p for p in inspect.signature(cls).parameters.values() if p.default is inspect.Parameter.empty]
    name = params[0].name if params else ""
    if "path" in name or "yaml" in name or "file" in name:
        import yaml

        path = Path(job["out"]) / "settings.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return cls(str(path))
    return cls(settings)


def _groups(job: dict[str, Any]) -> None:
    """gloo for every group, a file as meeting point, and one process where the code asks for groups by itself."""
    import torch.distributed as dist

    new_group, init = dist.new_group, dist.init_process_group

    def gloo_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks=ranks, backend="gloo")

    def gloo_init(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            init("gloo", init_method=f"file://{job['rendezvous']}", world_size=job["tp"], rank=job["rank"])

    dist.new_group, dist.init_process_group = gloo_group, gloo_init
    gloo_init()


class _Served(dict):  # type: ignore[type-arg]
    """Groups of a model that builds them only for more than one rank and asks for them anyway."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __missing__(self, key: str) -> Any:
        import torch.distributed as dist

        if key not in self.names:
            self.names.append(key)
        return "gloo" if key.endswith("_name") else dist.group.WORLD

    def get(self, key: str, default: Any = None) -> Any:
        """Every name is served."""
        return self[key]


def _serve_groups(model: Any) -> list[str]:
    """At one rank some models leave their dict of groups None; the one process serves then. Returns the names
    asked for, filled while the model runs."""
    names: list[str] = []
    for module in model.modules():
        for attr, value in list(vars(module).items()):
            if "comm_dict" in attr and value is None:
                setattr(module, attr, _Served(names))
    return names


class _Listener(logging.Handler):
    def __init__(self, times: dict[str, list[float]]) -> None:
        super().__init__(logging.INFO)
        self.times = times

    def emit(self, record: logging.LogRecord) -> None:
        found = _LINE.search(record.getMessage())
        if found:
            self.times.setdefault(found[1], []).append(float(found[2]))


def _listen() -> dict[str, list[float]]:
    """Step times as the runner logs them, by stage."""
    times: dict[str, list[float]] = {}
    root = logging.getLogger()
    root.addHandler(_Listener(times))
    root.setLevel(logging.INFO)
    return times
