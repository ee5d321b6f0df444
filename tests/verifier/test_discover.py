"""Finding the target, the model folder and its classes, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvskill.diagnostics import InputError
from kvskill.verifier.discover import find_model, find_target

MODEL = """
class FooConfigHelper: ...
class FooModel: ...
class FooForCausalLM:
    def __init__(self, comm):
        comm.register_group(name="attn_tp_group", group_num=1, group_size=1)
        if self.ep > 1:
            comm.register_group(name="moe_ep_group", group_num=1, group_size=2)
    def get_cache_info(self): return 128
class FooModelMTP(FooForCausalLM): ...
"""
CONFIG = "class FooConfig(PretrainedConfig):\n    model_type = 'foo'\n"
EAGER = """
from models.other.models.modeling_other import OtherForCausalLM
from models.foo.models.modeling_foo import FooForCausalLM as Foo, FooModelMTP
from models.foo.models.configuration_foo import FooConfig
model_dict = {"other": (OtherForCausalLM, FooConfig), "foo-x": (Foo, FooModelMTP, FooConfig)}
"""
LAZY = """
_specs: dict[str, list[tuple[str, str]]] = {
    "foo_x": [
        ("models.foo.models.modeling_foo", "FooForCausalLM"),
        ("models.foo.models.configuration_foo", "FooConfig"),
    ],
}
"""


def make(root: Path, registry: tuple[str, str] | None = None, model: str = MODEL) -> Path:
    (root / "executor" / "core" / "entrypoints").mkdir(parents=True)
    folder = root / "models" / "foo" / "models"
    folder.mkdir(parents=True)
    (folder / "modeling_foo.py").write_text(model)
    (folder / "configuration_foo.py").write_text(CONFIG)
    if registry is not None:
        (root / registry[0]).write_text(registry[1])
    return root / "models" / "foo"


@pytest.mark.parametrize(
    ("registry", "key", "mtp"),
    [
        (("executor/core/entrypoints/support_models.py", EAGER), "foo-x", "FooModelMTP"),
        (("executor/core/support_models.py", LAZY), "foo_x", "FooModelMTP"),
        (None, None, "FooModelMTP"),
    ],
)
def test_classes_from_registry_or_scan(
    tmp_path: Path, registry: tuple[str, str] | None, key: str | None, mtp: str
) -> None:
    found = find_model(make(tmp_path, registry), None)
    assert found.root == tmp_path.resolve()
    assert (found.modeling_module, found.causal_lm) == ("models.foo.models.modeling_foo", "FooForCausalLM")
    assert (found.config_module, found.config_class) == ("models.foo.models.configuration_foo", "FooConfig")
    assert (found.registered, found.mtp) == (key, mtp)
    assert found.shown == "models/foo/models/modeling_foo.py"
    assert found.has_cache_info
    assert 128 in found.literals


def test_only_conditional_groups_may_be_served(tmp_path: Path) -> None:
    found = find_model(make(tmp_path), None)
    assert found.group_names == ("moe_ep_group@__init__",)


def test_name_under_models_of_a_repo(tmp_path: Path) -> None:
    make(tmp_path)
    assert find_model(Path("foo"), tmp_path).folder == (tmp_path / "models" / "foo").resolve()


def test_target_is_found_by_walking_up(tmp_path: Path) -> None:
    assert find_target(make(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("make_it", "model", "code"),
    [
        (lambda p: None, "nothing", "KV430"),
        (lambda p: (p / "foo").mkdir(), "foo", "KV430"),
        (lambda p: make(p, model="class Foo: ..."), "models/foo", "KV431"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_it: object, model: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_it(tmp_path)  # type: ignore[operator]
    with pytest.raises(InputError) as caught:
        find_model(Path(model), None)
    assert caught.value.findings[0].code == code
