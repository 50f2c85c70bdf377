"""``tutti report``: write one HTML file from run directories. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tutti.errors import ExitCode

if TYPE_CHECKING:
    from tutti.report.target_law import TargetLaw


def report_runs(
    *runs: Annotated[Path, Parameter(show=False)],
    plan: Annotated[Path | None, Parameter(show_default=False)] = None,
    recipe: Annotated[Path | None, Parameter(show_default=False)] = None,
    out: Annotated[Path | None, Parameter(show_default=False)] = None,
) -> int:
    """Write one HTML file on a run, or on several side by side.

    Example: tutti report runs/one-device runs/two-devices --out report.html

    RUN is a run directory; the run may be under way or have failed. The file
    holds everything that it shows, and opens without a network.

    Parameters
    ----------
    plan:
        file to show beside the runs: plan.toml, or JSON such as of tutti simulate
    recipe:
        recipe.json of tutti noise: steps to its target over the batch
    out:
        file to write; default: report.html in the run, or here for several runs

    Returns
    -------
    int
        Exit code. 0: the file is written, and its path printed. A path that is no run, or a missing package, raises
        UsageError, which ``tutti`` turns into exit code 2; a file that cannot be written raises DiskError (8).
    """
    from tutti.report.html_report import write_report

    print(write_report(runs, plan, out, None if recipe is None else recipe_law(recipe)))
    return ExitCode.DONE


def recipe_law(path: Path) -> TargetLaw:
    """Read from a ``recipe.json`` of ``tutti noise`` how many samples training needs to its target at each batch size.

    Args:
        path: the file.

    Returns:
        The law E(B) = E_min(1 + B/B_crit) of the samples with global batch B, as a report draws it: ``draws`` has pairs
        (E_min, B_crit), one of them if the recipe has no draws from their posterior.

    Raises:
        UsageError: the file is missing, or is no recipe.
    """
    from tutti.planning.recipe import read_recipe
    from tutti.report.run_record import printable
    from tutti.report.target_law import TargetLaw

    recipe = read_recipe(path)
    draws = recipe.draws or ((recipe.samples_min, recipe.critical_batch),)
    return TargetLaw(printable(recipe.metric), recipe.value, draws, (), printable(path.name), printable(recipe.basis))
