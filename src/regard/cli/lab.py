"""`regard lab`: a claim tried out in minutes, with a plot and a verdict."""

from pathlib import Path
from typing import Annotated

import typer


def lab(
    name: Annotated[str | None, typer.Argument(help="Which lab; --list names them all.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name all labs and what they claim.")] = False,
    out: Annotated[Path, typer.Option(help="Folder in which each lab has its own.")] = Path("runs/labs"),
    seed: Annotated[int, typer.Option(min=0, help="Of weights and texts.")] = 0,
    quick: Annotated[bool, typer.Option(help="Only show that it runs: sizes too small to mean anything.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print result.json instead of tables.")] = False,
) -> None:
    """Try out a claim about transformers or their ancestors on this machine.

    Writes result.json, plot.png and report.html. The verdict is read off the numbers and may contradict the claim.

    \b
    Examples:
      regard lab --list
      regard lab gradients-through-time
      regard lab gradients-through-time --seed 1 --out /tmp/labs --json
    """
    from regard.labs import LABS, claim

    if listed:
        width = max(map(len, LABS))
        print("\n".join(f"{each:<{width}}  {claim(each)}" for each in LABS))
    elif name is None:
        raise typer.BadParameter("name a lab, or give --list")
    else:
        show(name, out, seed, quick, as_json)


def show(name: str, out: Path, seed: int, quick: bool, as_json: bool) -> None:
    import time

    import torch
    from rich.console import Console

    from regard.labs import documentation, module_of
    from regard.labs.bench import Bench
    from regard.labs.report import write

    module = module_of(name)
    bench = Bench(seed, quick, Console(stderr=True))
    torch.manual_seed(seed)
    start = time.perf_counter()
    with bench.bar:
        findings = module.run(bench)
    settings = {"seed": seed, "quick": quick, "seconds": round(time.perf_counter() - start, 1)}
    folder = out / name
    write(folder, name, documentation(name), findings, settings)
    if as_json:
        print((folder / "result.json").read_text(encoding="utf-8"), end="")
    else:
        tell(findings, folder, quick)


def tell(findings, folder: Path, quick: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from regard.labs.report import cells

    console = Console()
    header, rows = cells(findings)
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for check in findings.checks:
        console.print(f"{'yes' if check.holds else 'no ':<3}  {check.expected}: {check.seen}", highlight=False)
    console.print(f"{findings.verdict}{' (quick: this means nothing)' if quick else ''}", style="bold")
    if findings.remark:
        console.print(findings.remark, highlight=False)
    console.print(f"written: {folder / 'report.html'}", highlight=False)
