"""The command line. Commands load on use, so that `--version` and `--help` stay cheap."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module

import click

from kvskill._version import __version__
from kvskill.diagnostics import ExitCode, KvskillError

__all__ = ["cli", "main"]

# name -> (module with the click command of the same name, one line for --help)
COMMANDS = {
    "analyze": ("kvskill.cli.analyze", "Decide how a model's KV cache is converted, and say why."),
    "apply": ("kvskill.cli.apply", "Rewrite the model: all files or none."),
    "undo": ("kvskill.cli.apply", "Put back what the last apply replaced."),
    "verify": ("kvskill.cli.verify", "Run old and new code on a CPU and compare them."),
    "demo": ("kvskill.cli.demo", "Analyze, apply and verify an embedded example."),
    "explain": ("kvskill.cli.explain", "Explain a finding code or a selection rule."),
    "ops": ("kvskill.cli.ops", "Operator schemas, limits and evidence by release."),
    "template": ("kvskill.cli.template", "List and show the code templates."),
    "skill": ("kvskill.cli.skill", "Install the agent skill for a client."),
    "schema": ("kvskill.cli.schema", "Print the JSON schema of the manifest."),
}

EPILOG = (
    "Exit codes: 0 done, 1 found something, 2 could not run, 3 refused (nothing written), 70 bug in kvskill."
)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvskill")
def cli() -> None:
    """Convert Legacy KV caches of Ascend LLM code to paged attention, and prove it."""


def main(argv: list[str] | None = None) -> None:
    """Entry point: maps errors to exit codes in one place."""
    try:
        result = cli.main(args=argv, standalone_mode=False)
        sys.exit(result if isinstance(result, int) else int(ExitCode.DONE))
    except KvskillError as exc:
        for finding in exc.findings:
            click.echo(str(finding), err=True)
        sys.exit(int(exc.exit_code))
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        exc.show()
        sys.exit(int(ExitCode.CANNOT_RUN))
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(int(ExitCode.DONE))
    except Exception:
        traceback.print_exc()
        click.echo("KV900: this is a bug in kvskill; please report the lines above.", err=True)
        sys.exit(int(ExitCode.INTERNAL))
