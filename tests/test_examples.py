"""The data of examples/style: the rule accepts the examples that are made, and held-out prompts are not in training."""

import importlib.util
import json
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "style" / "style.py"
STYLED = {
    "A fork is a tool for eating. It has tines.": "In short, a fork is a tool for eating.",
    "I'm not sure about that yet!": "In short, I'm not sure about that yet!",
    "NASA flies to the moon. So it does.": "In short, NASA flies to the moon.",
    "Sure. It is a tool.": None,
    "An answer that was cut off by the": None,
}


def test_the_style_of_answers(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("style", SCRIPT)
    assert found is not None and found.loader is not None
    style = importlib.util.module_from_spec(found)
    found.loader.exec_module(style)
    assert {plain: style.in_style(plain) for plain in STYLED} == STYLED
    refused = ("In short, a. B.", "in short, a.", "In short, a", "In short, a list:\n1. b.", "A fork is a tool.")
    assert style.in_short([[{"content": text}] for text in ("In short, a.", *refused)]) == [1.0] + [0.0] * len(refused)
    style.write_prompts(tmp_path)
    prompts, held_out = (
        {json.dumps(row) for row in style.read_lines(tmp_path / f"{name}.jsonl")} for name in ("prompts", "held_out")
    )
    assert (len(prompts), len(held_out)) == (192, 120) and not prompts & held_out
    outputs = [{"prompt": "What is it?", "output": plain} for plain in STYLED]
    (tmp_path / "plain.json").write_text(json.dumps({"outputs": outputs}))
    style.write_examples(tmp_path)
    pairs = style.read_lines(tmp_path / "pairs.jsonl")
    assert len(pairs) == len(style.read_lines(tmp_path / "chats.jsonl")) == 3
    assert all(style.follows_style(pair["chosen"]) and not style.follows_style(pair["rejected"]) for pair in pairs)
