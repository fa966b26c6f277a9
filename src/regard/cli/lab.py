"""`regard lab`: test a claim with a short experiment; writes a plot and a verdict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from regard.labs.experiment import Findings, Size


CAVEATS = {"quick": " (not meaningful: --quick)", "small": " (a preview: a quarter of the training)", "full": ""}


def lab(
    name: Annotated[str | None, typer.Argument(metavar="LAB", help="The lab's name; --list shows all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all labs and their claims.")] = False,
    out: Annotated[Path, typer.Option(help="Write results to a folder per lab in this one.")] = Path("runs/labs"),
    seed: Annotated[int, typer.Option(min=0, help="The first seed of the weights and the data.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="The number of seeds; by default 3 or 5, as the lab declares.")
    ] = None,
    size: Annotated[
        Literal["quick", "small", "full"],
        typer.Option(help="full; small: a quarter of the training, a preview; quick: only check that the lab runs."),
    ] = "full",
    quick: Annotated[bool, typer.Option(help="The same as --size quick.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json instead of tables.")] = False,
) -> None:
    """Test a claim about transformers with a short experiment.

    Writes result.json, plot.png and report.html. The verdict follows from the measured numbers and may contradict the
    claim. A prediction holds if it holds with every seed.

    \b
    Examples:
      regard lab --list
      regard lab gradients-through-time
      regard lab memory-span --size small
      regard lab gradients-through-time --seed 5 --seeds 10 --out /tmp/labs --json
    """
    from regard.labs import LABS, claim

    if listed:
        width = max(map(len, LABS))
        print("\n".join(f"{lab_name:<{width}}  {claim(lab_name)}" for lab_name in LABS))
    elif name is None:
        raise typer.BadParameter("give the name of a lab, or --list")
    else:
        run_lab(name, out, seed, seeds, "quick" if quick else size, as_json)


def run_lab(name: str, out: Path, seed: int, seeds: int | None, size: "Size", as_json: bool) -> None:
    import time

    from rich.console import Console

    from regard.labs import LABS, documentation, module_of
    from regard.labs.experiment import Bench, run_seeds
    from regard.labs.report import write

    module = module_of(name)
    bench = Bench(seed, size, Console(stderr=True))
    start = time.perf_counter()
    with bench.bar:
        findings = run_seeds(module.run, bench, seeds or LABS[name])
    settings = {"size": size, "seconds": round(time.perf_counter() - start, 1)}
    folder = out / name
    write(folder, name, documentation(name), findings, settings)
    if as_json:
        print((folder / "result.json").read_text(encoding="utf-8"), end="")
    else:
        print_findings(findings, folder, size)


def print_findings(findings: "Findings", folder: Path, size: "Size") -> None:
    from rich.console import Console
    from rich.table import Table

    from regard.labs.report import SEVERAL_SEEDS, cells

    console = Console()
    header, rows = cells(findings)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if len(findings.seeds) > 1:
        console.print(SEVERAL_SEEDS.format(", ".join(map(str, findings.seeds))), highlight=False)
    for check in findings.checks:
        mark = "yes" if check.holds else "no"
        console.print(f"{mark:<3}  {check.seeds} seeds  {check.expected}: {check.observed}", highlight=False)
    console.print(f"{findings.verdict}{CAVEATS[size]}", style="bold")
    if findings.remark:
        console.print(findings.remark, highlight=False)
    console.print(f"report: {folder / 'report.html'}", highlight=False)
