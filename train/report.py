"""`python -m train.report runs=[runs/a,runs/b]`: compare runs, or redraw a report."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from typing_extensions import Doc

from data.errors import Mistake
from train.cli.command import Command, run_command
from train.errors import check_all, writing


@dataclass(frozen=True)
class ReportConfig:
    """Keys of `python -m train.report`."""

    runs: Annotated[list[str], Doc("The directories of the runs.")] = field(
        default_factory=list
    )
    output: Annotated[
        str, Doc("The page of several runs. One run has its own report.html.")
    ] = "comparison.html"


def report_mistakes(config: ReportConfig) -> list[Mistake]:
    """Return a mistake if no run is named."""
    rule = "must name directories of runs: runs=[runs/a,runs/b]"
    return [] if config.runs else [Mistake("runs", config.runs, rule)]


def main(config: ReportConfig) -> int:
    """Write the comparison and print its tables, or redraw the report of one run.

    Raises:
        ConfigError: if a directory holds no run, or if the page cannot be written.
    """
    from train.console import print_table
    from train.page import write_page
    from train.run.comparison import compare_runs
    from train.run.folder import run_folder
    from train.run.report import TEMPLATE, write_report
    from train.run.starts import existing_run

    runs = check_all(*(partial(existing_run, run, "runs") for run in config.runs))
    folders = [*dict.fromkeys(runs)]  # each run once, even if it is named twice
    if len(folders) == 1:
        with writing("runs", folders[0]):
            page = write_report(folders[0])
        print(page)
        return 0
    output = run_folder(config.output, "output")
    comparison = compare_runs(folders)
    for title, headers, rows in comparison["tables"]:
        print_table(rows, headers, title)
        print()
    with writing("output", output):
        write_page(output, TEMPLATE, comparison)
    print(output)
    return 0


COMMAND = Command(main, "report", ReportConfig, report_mistakes)

if __name__ == "__main__":
    run_command(COMMAND)
