"""The case folders keep their format, and their Legacy forms compute what transformers computes."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from loader import Case, load_case, load_cases  # noqa: E402

CASES = load_cases()
NAMES = [case.name for case in CASES]
EXECUTOR = {
    "executor.core.config",
    "executor.core.kv_cache",
    "executor.core.kv_cache.cache_info",
    "executor.utils.forward_metadata",
    "executor.model_loader.weight_utils",
}
TRANSFORMERS = {"transformers", "transformers.configuration_utils", "transformers.activations"}
NEEDED = ("torch", "transformers", "safetensors")


def imports(source: str) -> set[str]:
    """Absolute modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_format(case: Case) -> None:
    for path in (case.config, case.modeling, case.configuration):
        assert path.is_file(), path
    assert not (case.modeling.parent / "__init__.py").exists(), "it would hide the models namespace package"
    assert case.yaml_files and case.yaml_files[0].stem == case.name
    assert case.idioms
    architectures = json.loads(case.config.read_text(encoding="utf-8")).get("architectures")
    assert architectures is None or len(architectures) == 1


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_one_entry_class_and_one_config_class(case: Case) -> None:
    for path, ending in ((case.modeling, "ForCausalLM"), (case.configuration, "Config")):
        tree = ast.parse(path.read_bytes())
        classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith(ending)]
        assert len(classes) == 1, (path, classes)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_imports_stay_within_the_contract(case: Case) -> None:
    for path in (case.modeling, case.configuration):
        names = imports(path.read_text(encoding="utf-8"))
        assert {n for n in names if n.startswith("executor")} <= EXECUTOR, path
        assert {n for n in names if n.startswith("transformers")} <= TRANSFORMERS, path


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_yaml_widths_match(case: Case) -> None:
    """Every width that case.yaml states has run settings, and their sections are mappings."""
    widths = set()
    for file in case.yaml_files:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert isinstance(settings["scheduler_config"], dict)
        widths.add((settings.get("parallel_config") or {}).get("attn_tp_size", 1))
    assert widths >= set(case.tp) or case.tp == (1,)


def test_loader_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    base = {"expect": "convert", "hf_architecture": "X"}
    for change in ({"exspect": 1}, {"expect": "perhaps"}, {"ground": "g"}, {"expect": "refuse"}):
        (tmp_path / "case.yaml").write_text(yaml.safe_dump({**base, **change}), encoding="utf-8")
        with pytest.raises(ValueError, match=tmp_path.name):
            load_case(tmp_path)


@pytest.fixture(scope="session")
def legacy_results() -> dict[tuple[str, int], dict[str, Any]]:
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        pytest.skip("needs torch, transformers and safetensors")
    results = {}
    for width in (1, 2):
        command = [sys.executable, str(HERE / "legacy_check.py"), "--json", "--tp", str(width)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        assert done.stdout.strip(), done.stderr[-3000:]
        for result in json.loads(done.stdout.strip().splitlines()[-1]):
            if "error" in result:
                result["stderr"] = done.stderr[-3000:]
            results[result["case"], width] = result
    return results


@pytest.mark.xdist_group("legacy check")  # one worker runs the check of all cases
@pytest.mark.parametrize(
    ("case", "width"), [(case, width) for case in CASES for width in case.tp], ids=lambda v: getattr(v, "name", v)
)
def test_legacy_agrees_with_transformers(
    case: Case, width: int, legacy_results: dict[tuple[str, int], dict[str, Any]]
) -> None:
    result = legacy_results[case.name, width]
    assert result["ok"], result


def test_the_check_can_fail(tmp_path: Path) -> None:
    """A scale that is off in one line of a copied case is seen."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        pytest.skip("needs torch, transformers and safetensors")
    import shutil

    shutil.copytree(load_cases(("ministral",))[0].path, tmp_path / "ministral")
    modeling = tmp_path / "ministral/models/ministral/models/modeling_ministral.py"
    source = modeling.read_text(encoding="utf-8")
    assert "self.dim ** -0.5" in source
    modeling.write_text(source.replace("self.dim ** -0.5", "self.dim ** -0.49"), encoding="utf-8")
    command = [sys.executable, str(HERE / "legacy_check.py"), "--json", "--root", str(tmp_path), "ministral"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    (result,) = json.loads(done.stdout.strip().splitlines()[-1])
    assert not result["ok"] and result["worst"] > 1e-3, result
