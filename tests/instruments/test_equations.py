"""Every instrument has its equation as MathML, made from the LaTeX of the registry, and a row in the documentation."""

import json
import runpy
from pathlib import Path

import regard
from regard.instruments import INSTRUMENTS

EQUATIONS = Path(regard.__file__).parent / "web/views/instruments/equations.json"
DOCS = Path(__file__).parents[2] / "docs"
REMEDY = "run python docs/generate_equations.py with the folder of temml"


def test_the_equations_are_current() -> None:
    written = json.loads(EQUATIONS.read_text(encoding="utf-8"))
    assert {id: equation["latex"] for id, equation in written.items()} == {
        id: instrument.equation for id, instrument in INSTRUMENTS.items()
    }, REMEDY


def test_trees_have_only_elements_of_mathml_and_no_styles() -> None:
    def check(node: object) -> None:
        if isinstance(node, str):
            return
        assert isinstance(node, list) and (node[0] == "math" or node[0].startswith("m")) and node[0].isalpha()
        assert isinstance(node[1], dict) and not {"style", "class", "href"} & node[1].keys()
        for child in node[2:]:
            check(child)

    for equation in json.loads(EQUATIONS.read_text(encoding="utf-8")).values():
        assert equation["tree"][0] == "math"
        check(equation["tree"])


def test_the_table_of_the_documentation_is_current() -> None:
    written = runpy.run_path(str(DOCS / "generate_equations.py"))["page"]()
    assert (DOCS / "topics/instruments.md").read_text(encoding="utf-8") == written, REMEDY
