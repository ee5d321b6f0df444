"""A process that has everything imported and forks one child per job line on its input.

`python zygote_main.py <kvskill package dir> <target tree> <backend>`; each input line names a job file.
"""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path


def preload(package: str, tree: str, backend: str) -> None:
    """Import kvskill's child code, the backend and the target's framework."""
    sys.path.pop(0)
    bootstrap = Path(package) / "verifier" / "child" / "bootstrap.py"
    spec = importlib.util.spec_from_file_location("kvskill_bootstrap", bootstrap)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_package(package)
    from kvskill.verifier.child import target
    from kvskill.verifier.child.standins import install_registry, install_standins

    job = {"backend": backend, "role": "paged", "block_size": 16, "waive": []}
    target._install_backend({**job, "deploy_dtype": "bfloat16", "deploy_block_size": 128})
    sys.path.insert(0, tree)
    install_standins()
    install_registry("none", tuple)
    target._alias_dtype()
    from transformers import AutoTokenizer, GenerationConfig  # noqa: F401  lazy, and needed by every job

    for name in ("executor.core.config", "executor.core.engine", "executor.core.scheduler"):
        importlib.import_module(name)
    for name in ("child.recorder", "child.paged", "child.observe", "child.links", "child.groups", "child.loading"):
        importlib.import_module(f"kvskill.verifier.{name}")


def main() -> None:
    """Fork per line; a line on stdout tells the end of each job."""
    package, tree, backend = sys.argv[1:4]
    preload(package, tree, backend)
    from kvskill.verifier.child.main import run_job

    print("ready", flush=True)
    running: dict[int, str] = {}

    def reap(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            os.write(1, f"done {running.pop(pid, '?')} {os.waitstatus_to_exitcode(status)}\n".encode())

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        path = line.strip()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            job = json.loads(Path(path).read_text(encoding="utf-8"))
            out = Path(job["out"])
            log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(out)
            run_job(job)
            os._exit(99)
        running[pid] = path
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


if __name__ == "__main__":
    main()
