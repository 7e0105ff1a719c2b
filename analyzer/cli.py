"""The command line: ``analyzer ls | sql | diagnose | explain | render | export``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from analyzer.commands import diagnose, explain, export, ls, render, sql
from analyzer.errors import AnalyzerError
from analyzer.exit_codes import ERROR, INTERRUPTED
from analyzer.output import note

COMMANDS = (ls, sql, diagnose, explain, render, export)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 fine, 1 error, 2 usage, 3 findings. Results on stdout, everything else on stderr."""
    arguments = parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except AnalyzerError as error:
        note(str(error))
        return ERROR
    except OSError as error:
        note(f"{error.filename}: {error.strerror}")
        return ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of every command; a module's docstring is its help."""
    top = argparse.ArgumentParser(prog="analyzer", description="Read the flight recorder's runs.")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        text = command.__doc__ or ""
        sub = subparsers.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, usage_error=sub.error)
    return top
