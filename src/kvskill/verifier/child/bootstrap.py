"""Entry of a child process: `python bootstrap.py <kvskill package dir> <job.json>`.

Loads the kvskill package from its folder without putting that folder's parent on sys.path: the parent may be a
site-packages of another interpreter, whose torch must not shadow this one's.
"""

import importlib.util
import json
import sys
from pathlib import Path


def load_package(folder: str) -> None:
    """Make `import kvskill` work from `folder`."""
    spec = importlib.util.spec_from_file_location(
        "kvskill", Path(folder) / "__init__.py", submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kvskill"] = module
    spec.loader.exec_module(module)


def main() -> None:
    """Run one job; the result file tells how it went."""
    folder, job_file = sys.argv[1:3]
    sys.path.pop(0)  # this script's folder
    load_package(folder)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    from kvskill.verifier.child.main import run_job

    sys.exit(run_job(job))


if __name__ == "__main__":
    main()
