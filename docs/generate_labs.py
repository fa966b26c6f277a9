"""Write the results of labs into docs/topics/labs.md: `python docs/generate_labs.py [runs/labs]`.

With a folder, its results are first copied to docs/labs, one file per lab, which replaces earlier results of that lab.
Those that the page shows are also written into the package.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from regard.instruments.lora_findings import LABS as SHOWN
from regard.instruments.measurements import FOLDER as PACKAGED
from regard.labs import LABS

DOCS = Path(__file__).parent
RESULTS, PAGE = DOCS / "labs", DOCS / "topics" / "labs.md"
SECTION = re.compile(r"(?<=<!-- results -->\n).*(?=<!-- end of results -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the results of labs into docs/topics/labs.md.")
    parser.add_argument("folder", nargs="?", type=Path, help="copy the results of `regard lab --out FOLDER` first")
    folder = parser.parse_args().folder
    for name in LABS if folder else ():
        if (result := folder / name / "result.json").exists():
            RESULTS.mkdir(exist_ok=True)
            shutil.copy(result, RESULTS / f"{name}.json")
    for name in SHOWN:
        if (recorded := RESULTS / f"{name}.json").exists():
            result = json.loads(recorded.read_text(encoding="utf-8"))
            text = json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n"
            (PACKAGED / f"{name}.json").write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def page(text: str) -> str:
    """The page with a new results section."""
    files = [RESULTS / f"{name}.json" for name in LABS]
    sections = [section(json.loads(file.read_text(encoding="utf-8"))) for file in files if file.exists()]
    return SECTION.sub(lambda _: "\n" + "\n".join(sections), text)


def section(result: dict[str, Any]) -> str:
    settings, (first, *_, last) = result["settings"], result["seeds"]
    cores = f"{settings['threads']} of {settings['cores']} cores ({settings['machine']})"
    torch_version = settings["torch"].partition("+")[0]
    run = f"Seeds {first} to {last}, {settings['size']} size, on {cores}, with torch {torch_version}"
    rows = [
        f"| {cell(check['expected'])} | {check['seeds']} | {cell(check['observed'])} |" for check in result["checks"]
    ]
    return f"""### {result["lab"]}

Claim: {result["claim"]}

Verdict: **{result["verdict"]}.** {run}.

| prediction | seeds | observed |
| --- | --- | --- |
{chr(10).join(rows)}
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
