"""Writes the list of the instruments in docs/topics/instruments.md, with the pictures of photograph_page.py, and for
the page their equations and those of the parts (part_equations.py) as MathML trees:

    python docs/generate_equations.py [TEMML]

TEMML is the folder of the npm package `temml`, which converts LaTeX to MathML; Node runs it. The page builds elements
from the trees [tag, attributes if any, ...children], so it parses no HTML and needs no library for equations. A digest
of its LaTeX stands before each tree, for the test that the equations are current.
"""

import hashlib
import json
import runpy
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from PIL import Image

from regard.instruments import COURSE, INSTRUMENTS

PAGE = Path(__file__).parent / "topics/instruments.md"
PICTURES = Path(__file__).parent / "pictures/instruments"
START, END = "<!-- instruments -->\n", "<!-- end -->"
VIEWS = Path(__file__).parents[1] / "src/regard/web/views"
KEPT = {"display", "form", "stretchy", "lspace", "rspace", "width", "mathvariant", "accent", "largeop", "movablelimits",
        "scriptlevel", "displaystyle", "linethickness"}  # fmt: skip
SCRIPT = """
const temml = require(process.argv[1] + "/dist/temml.cjs");
const latex = JSON.parse(require("fs").readFileSync(0));
const rendered = latex.map((text) => temml.renderToString(text, { displayMode: true, throwOnError: true }));
process.stdout.write(JSON.stringify(rendered));
"""


def tree(element: ElementTree.Element, default_form: str = "infix") -> list:
    """[tag, attributes if any, ...children], without styles, which the page's security policy forbids.

    default_form: of an operator at this place in its row, which MathML assumes; only another form is written.
    """
    children: list = [element.text] if element.text else []
    for i, child in enumerate(element):
        ends = {0: "prefix", len(element) - 1: "postfix"} if len(element) > 1 else {}
        children.append(tree(child, ends.get(i, "infix") if element.tag.endswith("mrow") else ""))
        if child.tail:
            children.append(child.tail)
    attributes = {name: value for name, value in element.attrib.items() if name in KEPT}
    if attributes.get("form") == default_form:
        del attributes["form"]
    return [element.tag.rpartition("}")[2], *([attributes] if attributes else []), *children]


def digest(latex: str) -> str:
    return hashlib.sha256(latex.encode()).hexdigest()[:8]


def sections() -> str:
    """The instruments by chapter, each with its picture, its explanation and its question."""
    lines = []
    for chapter, ids in COURSE.items():
        lines.append(f"## {chapter}\n")
        for instrument in (INSTRUMENTS[id] for id in ids):
            lines += [
                f"### {instrument.title} (`{instrument.id}`)\n",
                f"![{description(instrument.id)}](../pictures/instruments/{instrument.id}.png)\n",
                f"{instrument.explanation} *{instrument.quiz.question}*\n",
            ]
    return "\n".join(lines) + "\n"


def description(id: str) -> str:
    """The titles of the panels in the picture of an instrument, for people who do not see it."""
    path = PICTURES / f"{id}.png"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; run python docs/photograph_page.py RUN {id}")
    with Image.open(path) as picture:
        text = picture.info["Description"]
    return text.replace("[", "(").replace("]", ")")


def page() -> str:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return before + START + "\n" + sections() + END + rest.partition(END)[2]


def latex_by_view() -> dict[str, dict[str, str]]:
    parts = runpy.run_path(str(Path(__file__).parent / "part_equations.py"))["EQUATIONS"]
    main = {id: instrument.equation for id, instrument in INSTRUMENTS.items()}
    more = {f"{id}/{name}": latex for id, i in INSTRUMENTS.items() for name, latex in i.equations.items()}
    return {"instruments": main | more, "inside": parts}


def write_equations(view: str, latex: dict[str, str], temml: str) -> None:
    command, text = ["node", "-e", SCRIPT, str(Path(temml).resolve())], json.dumps(list(latex.values()))
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    equations = {
        id: [digest(source), tree(ElementTree.fromstring(mathml))]
        for (id, source), mathml in zip(latex.items(), json.loads(found), strict=True)
    }
    written = json.dumps(equations, ensure_ascii=False, separators=(",", ":")) + "\n"
    (VIEWS / view / "equations.json").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    if len(sys.argv) > 1:
        for view, latex in latex_by_view().items():
            write_equations(view, latex, sys.argv[1])
