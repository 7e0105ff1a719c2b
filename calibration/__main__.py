"""``python -m calibration``: run the matrix, and write the report of its results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from calibration.report import write_report
from calibration.results import PARTS, RUNS_DIRECTORY
from calibration.run import run_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when all is done, 1 when cells failed; an interrupted run continues where it was."""
    parser = argparse.ArgumentParser(prog="python -m calibration", description=__doc__)
    parser.add_argument("--runs", type=Path, default=RUNS_DIRECTORY, help="directory of runs and results")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and diagnose the cells of a part that are not done yet")
    run.add_argument("--part", choices=PARTS, required=True)
    run.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    run.add_argument("--only", nargs="+", default=(), metavar="NAME", help="faults, pairs or negatives")
    run.add_argument("--seeds", nargs="+", type=int, default=(), metavar="SEED")
    run.add_argument(
        "--keep-runs",
        action="store_true",
        help="leave the run directories: when rules changed, the same command measures them anew "
        "without training; delete them when the training changed",
    )
    commands.add_parser("report", help="write results.parquet and docs/calibration.md")
    options = parser.parse_args(arguments)
    if options.command == "report":
        write_report(options.runs)
        return 0
    failed = run_part(
        options.part,
        options.runs,
        options.workers,
        only=options.only,
        seeds=options.seeds,
        keeps_runs=options.keep_runs,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
