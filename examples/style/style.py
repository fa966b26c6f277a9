"""Tune a chat model to a style: answers of one sentence that begins with "In short,". run.sh runs everything.

    python style.py prompts FOLDER     writes prompts.jsonl, held_out.jsonl and other.txt
    python style.py examples FOLDER    writes chats.jsonl and pairs.jsonl, from the model's own answers in plain.json
    python style.py table FOLDER       prints what run.sh has measured, and compares the adapters' logits with PEFT's

The answers in the style are made of the model's own first sentences, so that it learns the form and no new facts. Of a
preference pair, the rejected completion is its plain answer. `in_short` is the rule, as a reward for `regard eval` and
`regard tune grpo`. Held-out prompts have other topics and other forms than those of training.
"""

import json
import pydoc_data.topics
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

OPENING = "In short, "
SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
OTHER_CHARACTERS = 30_000  # of Python's documentation, for the perplexity of other text

THINGS = """a compass, photosynthesis, a mortgage, inflation, a vaccine, the water cycle, a battery, gravity, a computer
virus, a solar eclipse, yeast, a bicycle gear, a lighthouse, an earthquake, sleep,
recycling""".replace("\n", " ").split(", ")
TASKS = """boil an egg, learn a new language, clean a window, plan a birthday party, write a thank-you letter, save some
money, repair a flat tire, grow tomatoes, wake up earlier, prepare for an exam, choose a good book, pack a suitcase,
take better photos, make friends in a new city, store bread, train a puppy""".replace("\n", " ").split(", ")
OF_THINGS = (
    "What is {}?", "Explain {} to a beginner.", "Why is {} important?", "How does {} work?",
    "What would happen without {}?", "My friend asked me about {}. What should I say?",
)  # fmt: skip
OF_TASKS = (
    "How do I {}?", "What do I need to {}?", "Is it hard to {}?", "Give me a tip: I want to {}.",
    "Who can help me to {}?", "My brother wants to {}. What should he know?",
)  # fmt: skip

PLACES = """a library, the desert, a rainforest, the seaside, a hospital, an airport, a farm, a museum, the mountains, a
bakery, an island, a theatre, a train station, the Arctic, a market, a school, a factory, a harbour, a zoo, a
castle""".replace("\n", " ").split(", ")
HABITS = """drinking tea, running, reading before bed, cooking at home, keeping a diary, walking to work, eating fish,
playing chess, singing, gardening, cycling, taking naps, meditating, swimming, knitting, watching birds, dancing,
collecting stamps, painting, fasting""".replace("\n", " ").split(", ")
OF_PLACES = ("Tell me something about {}.", "Who works at {}?", "What would I see in {}?")
OF_HABITS = ("What are the benefits of {}?", "Should everyone try {}?", "My sister likes {}. What can I ask her?")


def fill(templates: tuple[str, ...], topics: list[str]) -> list[str]:
    return [template.format(topic) for topic, template in product(topics, templates)]


def follows_style(text: str) -> bool:
    """One sentence that begins with the opening."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    return text.startswith(OPENING) and ends == [len(text)] and "\n" not in text


def in_short(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    return [float(follows_style(completion[0]["content"])) for completion in completions]


def in_style(plain: str) -> str | None:
    """The first sentence of an answer in the style; None if it does not make one."""
    first = plain[: end.end()] if (end := SENTENCE_END.search(plain)) else ""
    word = first.split(" ")[0]
    is_name = word != word.capitalize() or word.startswith("I'")
    sentence = OPENING + (first if is_name or word == "I" else first[:1].lower() + first[1:])
    return sentence if follows_style(sentence) and len(first) > 20 else None


def first_two_sentences(plain: str) -> str:
    ends = [match.end() for match in SENTENCE_END.finditer(plain)]
    return plain[: ends[:2][-1]] if ends else plain


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    print(f"{path}: {len(rows)} lines")


def write_prompts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    prompts = fill(OF_THINGS, THINGS) + fill(OF_TASKS, TASKS)
    held_out = fill(OF_PLACES, PLACES) + fill(OF_HABITS, HABITS)
    write_lines(folder / "prompts.jsonl", [{"prompt": user(text)} for text in prompts])
    write_lines(folder / "held_out.jsonl", [{"prompt": user(text)} for text in held_out])
    topics = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    (folder / "other.txt").write_text(topics[:OTHER_CHARACTERS], "utf-8")


def write_examples(folder: Path) -> None:
    outputs = read_json(folder / "plain.json")["outputs"]
    answers = [(user(output["prompt"]), output["output"], in_style(output["output"])) for output in outputs]
    kept = [(prompt, plain, styled) for prompt, plain, styled in answers if styled is not None]
    chats = [{"messages": [*prompt, {"role": "assistant", "content": styled}]} for prompt, _, styled in kept]
    pairs = [
        {"prompt": prompt, "chosen": styled, "rejected": first_two_sentences(plain)} for prompt, plain, styled in kept
    ]
    write_lines(folder / "chats.jsonl", chats)
    write_lines(folder / "pairs.jsonl", pairs)


def print_table(folder: Path) -> None:
    print("| model | seconds of training | in the style | perplexity of other text | logits against PEFT |")
    print("| --- | --: | --: | --: | --: |")
    times = dict(line.split() for line in (folder / "seconds").read_text().splitlines())
    before = read_json(folder / "smollm2.other.json")["perplexity"]
    for name in ("smollm2", "sft", "dpo"):
        rate = read_json(folder / f"{name}.style.json")["reward"]
        perplexity = read_json(folder / f"{name}.other.json")["perplexity"]
        seconds = times.get(name, "–")
        difference = f"{peft_difference(folder, name):.1e}" if name != "smollm2" else "–"
        print(f"| {name} | {seconds} | {rate:.1%} | {perplexity:.2f} ({perplexity / before - 1:+.1%}) | {difference} |")


def peft_difference(folder: Path, name: str) -> float:
    """The largest difference of the logits of a held-out prompt in regard and in PEFT, of max(1, largest logit)."""
    import peft
    import torch
    import transformers

    import regard
    from regard.text.chat import encode_chat

    transformers.utils.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, folder / f"{name}-adapter").eval()
    ours = regard.load(folder / "runs" / name, device="cpu")
    prompt = read_lines(folder / "data" / "held_out.jsonl")[0]["prompt"]
    ids = torch.tensor([encode_chat(ours.tokenizer, prompt)])
    with torch.no_grad():
        expected, logits = theirs(ids).logits, ours.model(ids)
    return ((logits - expected).abs().max() / max(1, expected.abs().max())).item()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    command, folder = sys.argv[1], Path(sys.argv[2])
    {"prompts": write_prompts, "examples": write_examples, "table": print_table}[command](folder)
