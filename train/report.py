"""`python -m train.report runs=[runs/a,runs/b]`: compare runs, or draw one again."""

from dataclasses import dataclass, field
from functools import partial

from train.cli.command import run_command
from train.errors import ConfigError, Mistake, check_all


@dataclass(frozen=True)
class ReportConfig:
    """Keys of `python -m train.report`."""

    runs: list[str] = field(default_factory=list)  # their directories
    output: str = "comparison.html"  # of several; of one it is its own report.html


def validate(config: ReportConfig) -> list[Mistake]:
    """List the mistakes: no run to draw."""
    rule = "must name directories of runs: runs=[runs/a,runs/b]"
    return [] if config.runs else [Mistake("runs", config.runs, rule)]


def main(asked: ReportConfig) -> int:
    """Write the page and print its tables.

    Raises:
        ConfigError: naming each directory that holds no run; or what cannot be written.
    """
    from train.console import print_table
    from train.run.comparison import compare_runs
    from train.run.folder import run_folder
    from train.run.page import write_page
    from train.run.report import TEMPLATE, write_report
    from train.run.starts import existing_run

    found = check_all(*(partial(existing_run, run, "runs") for run in asked.runs))
    folders = [*dict.fromkeys(found)]  # a run that is named twice is one
    if len(folders) == 1:
        try:
            print(write_report(folders[0]))
        except OSError as error:
            rule = f"its report.html cannot be written: {error.strerror or error}; "
            rule += "name a copy of the run where you may write"
            raise ConfigError([Mistake("runs", str(folders[0]), rule)]) from None
        return 0
    output, data = run_folder(asked.output, "output"), compare_runs(folders)
    for title, headers, rows in data["tables"]:
        print_table(rows, headers, title)
        print()
    try:
        write_page(output, TEMPLATE, data)
    except OSError as error:
        rule = f"cannot be written: {error.strerror or error}; name another file"
        raise ConfigError([Mistake("output", str(output), rule)]) from None
    print(output)
    return 0


if __name__ == "__main__":
    run_command(main, "report", ReportConfig, validate)
