"""The agent skill: validates it and installs it into the folders where clients look for skills."""

from kvskill.skillpack.clients import Client, Scope, base_folder, client_names, load_client
from kvskill.skillpack.install import Plan, apply_plan, plan_install, plan_uninstall, status
from kvskill.skillpack.pack import SKILL_NAME, role_texts, skill_folder
from kvskill.skillpack.tokens import estimate_tokens
from kvskill.skillpack.validate import validate_skill

__all__ = [
    "SKILL_NAME",
    "Client",
    "Plan",
    "Scope",
    "apply_plan",
    "base_folder",
    "client_names",
    "estimate_tokens",
    "load_client",
    "plan_install",
    "plan_uninstall",
    "role_texts",
    "skill_folder",
    "status",
    "validate_skill",
]
