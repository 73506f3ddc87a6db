"""Calls of ``pipemem`` without a new interpreter."""

from __future__ import annotations

from collections.abc import Mapping

from typer.testing import CliRunner, Result

from megatron_pipemem.tools.cli.app import app


def pipemem(*arguments: object, env: Mapping[str, str | None] | None = None) -> Result:
    """Return exit code, stdout and stderr, as of ``pipemem("simulate", "1f1b", "-p", 4)``.

    A variable of ``env`` that is ``None`` is not set during the call.
    """
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="pipemem", env=env)


def run_as_rank(*arguments: object) -> None:
    """Run a command in the process of a rank, and leave it with the command's exit code."""
    app([str(argument) for argument in arguments], prog_name="pipemem")
