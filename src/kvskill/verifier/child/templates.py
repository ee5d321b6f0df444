"""Role "templates": runs the cases of a job one after the other and keeps a figure, or why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

__all__ = ["run_templates"]


def run_templates(job: dict[str, Any], result: dict[str, Any]) -> None:
    """Fill result["results"]: {"error": figure, "meta": True where the calls' Meta kernels ran} by case id."""
    from kvskill.verifier.backend import OpContext, current, install, using

    info = install(job["backend"], context=OpContext())
    result["backend"] = info.to_json()
    import torch

    torch.set_num_threads(1)
    from kvskill.verifier.child.template_cases import Place, run_attention, run_last_token, run_mla, run_standalone
    from kvskill.verifier.child.template_contract import run_cache_info, run_mla_cache_info
    from kvskill.verifier.child.template_latent import run_standalone_latent

    runners = {
        "attention": run_attention,
        "mla": run_mla,
        "last_token": run_last_token,
        "cache_info": run_cache_info,
        "mla_cache_info": run_mla_cache_info,
        "standalone": run_standalone,
        "standalone_latent": run_standalone_latent,
    }
    on_npu = info.kind == "npu"
    place = Place(torch.device("npu" if on_npu else "cpu"), torch.bfloat16 if on_npu else torch.float32)
    progress = Path(job["out"]) / "progress"
    results: dict[str, Any] = {}
    result["results"] = results
    for number, case in enumerate(job["cases"]):
        # the 2048 x 2048 mask is the same in every case: its contents are looked at in one of ten
        waive = frozenset() if number % 10 == 0 else frozenset({"fa-mask-contents"})
        context = replace(current(), block_size=128, null_slots=case.get("block", 16), waive=waive)
        try:
            with using(context), torch.no_grad():
                found: dict[str, Any] = {"error": runners[case["kind"]](case, place)}
                if info.kind == "wheel":
                    found["meta"] = _meta(case, runners, place)
            results[case["id"]] = found
        except Exception as error:
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            line = f" (line {where.tb_lineno} of {where.tb_frame.f_code.co_filename})" if where else ""
            results[case["id"]] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}{line}"[:500]}
        if number % 5 == 0:
            progress.write_text(str(number + 1), encoding="utf-8")
    progress.write_text(str(len(job["cases"])), encoding="utf-8")


def _meta(case: dict[str, Any], runners: dict[str, Any], place: Any) -> bool:
    """Every operator call of the case, repeated on meta tensors: the release's own Meta kernels check shapes."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = 0

    class Repeat(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal seen
            out = func(*args, **(kwargs or {}))
            if func.namespace == "npu":
                move = torch.utils._pytree.tree_map_only
                meta_args, meta_kwargs = move(torch.Tensor, lambda t: t.to("meta"), (args, kwargs or {}))
                shadow = func(*meta_args, **meta_kwargs)
                flat = torch.utils._pytree.tree_leaves
                pairs = zip(flat(out), flat(shadow), strict=True)
                wrong = [(a.shape, b.shape) for a, b in pairs if isinstance(a, torch.Tensor) and a.shape != b.shape]
                if wrong:
                    raise RuntimeError(f"Meta of {func} gives {wrong[0][1]}, the reference {wrong[0][0]}")
                seen += 1
            return out

    with torch.no_grad(), Repeat():
        runners[case["kind"]]({**case, "steps": 1}, place)
    return seen > 0
