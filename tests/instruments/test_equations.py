"""Every instrument and part has its equation as MathML, made from its LaTeX; instruments are in the documentation."""

import json
import runpy
from pathlib import Path

import pytest

import regard
from regard.models.stack import bodies_of, stacks_of
from tests.laws import MODELS, OTHERS

VIEWS = Path(regard.__file__).parent / "web/views"
DOCS = Path(__file__).parents[2] / "docs"
GENERATE = runpy.run_path(str(DOCS / "generate_equations.py"))
LATEX = GENERATE["latex_by_view"]()
REMEDY = "run python docs/generate_equations.py with the folder of temml"


def equations_of(view: str) -> dict:
    return json.loads((VIEWS / view / "equations.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("view", LATEX)
def test_the_equations_are_current(view: str) -> None:
    written = {id: digest for id, (digest, _) in equations_of(view).items()}
    assert written == {id: GENERATE["digest"](latex) for id, latex in LATEX[view].items()}, REMEDY


def test_every_mixer_and_feed_forward_layer_has_an_equation() -> None:
    stacks = [stack for spec in (*MODELS.values(), *OTHERS.values()) for stack in stacks_of(spec)]
    assert {body.kind for layers, _ in stacks for body in bodies_of(layers)} <= LATEX["inside"].keys()


@pytest.mark.parametrize("view", LATEX)
def test_trees_have_only_elements_of_mathml_and_no_styles(view: str) -> None:
    def check(node: object) -> None:
        if isinstance(node, str):
            return
        assert isinstance(node, list) and (node[0] == "math" or node[0].startswith("m")) and node[0].isalpha()
        attributes = next((part for part in node if isinstance(part, dict)), {})
        assert not {"style", "class", "href"} & attributes.keys()
        for child in node[1:]:
            if child is not attributes:
                check(child)

    for _, tree in equations_of(view).values():
        assert tree[0] == "math"
        check(tree)


def test_the_table_of_the_documentation_is_current() -> None:
    assert (DOCS / "topics/instruments.md").read_text(encoding="utf-8") == GENERATE["page"](), REMEDY
