"""A batch as text: its documents token by token, and which tokens count in the loss.

    green: counts with weight 1          yellow: counts with another weight          grey: does not count

Without colours, tokens that count are in ⟦ ⟧. A token that is predicted at its own position, such as a masked one, is
shown as `input→target`.
"""

from collections.abc import Iterator

import torch
from rich.text import Text

from regard.data.batch import Batch
from regard.text.tokenizer import Tokenizer


def describe_batch(batch: Batch, tokenizer: Tokenizer, rows: int, colours: bool = True) -> Iterator[Text]:
    """Lines that describe the first rows of a batch, and its totals."""
    for row in range(min(rows, batch.size)):
        yield Text(f"row {row}", "bold")
        for name in ("source", "first_tokens", "second_tokens"):
            if name in batch:
                valid = batch.get(f"{name}_valid")
                ids = batch[name][row] if valid is None else batch[name][row][valid[row]]
                yield Text(f"  {name}: ").append(token_texts(ids.tolist(), tokenizer), "dim")
        if "targets" in batch:
            yield from describe_segments(batch.rows(slice(row, row + 1)), tokenizer, colours)
        elif "tokens" in batch:
            ids = batch.tokens[row][batch.valid[row]] if "valid" in batch else batch.tokens[row]
            yield Text("  tokens: ").append(token_texts(ids.tolist(), tokenizer), "dim")
        if "images" in batch:
            yield Text(f"  image: {' × '.join(map(str, batch.images.shape[1:]))}")
        if "labels" in batch:
            yield Text(f"  label: {batch.labels[row].tolist()}", "green")
    yield Text(totals(batch), "bold")


def describe_segments(row: Batch, tokenizer: Tokenizer, colours: bool) -> Iterator[Text]:
    """One line per document of a row of a batch with targets."""
    segments = row.segments[0]
    for segment in range(int(segments.max()) + 1):
        inside = segments == segment
        tokens, targets, weights = (row[name][0][inside] for name in ("tokens", "targets", "weights"))
        is_shifted = torch.equal(tokens[1:], targets[:-1])
        line = Text(f"  document {segment}, positions 0 to {len(tokens) - 1}: ")
        if is_shifted:
            line.append(tokenizer.decode_token(int(tokens[0])), "dim")
        for token, target, weight in zip(tokens.tolist(), targets.tolist(), weights.tolist(), strict=True):
            text = tokenizer.decode_token(target)
            if not is_shifted and token != target:
                text = f"{tokenizer.decode_token(token)}→{text}" if weight else tokenizer.decode_token(token)
            line.append(text if colours or not weight else f"⟦{text}⟧", style_of(weight))
        yield line
    padding = int((segments < 0).sum())
    if padding:
        yield Text(f"  padding: {padding} tokens", "dim")


def style_of(weight: float) -> str:
    return "dim" if weight == 0 else "green" if weight == 1 else "yellow"


def token_texts(ids: list[int], tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.decode_token(id) for id in ids)


def totals(batch: Batch) -> str:
    parts = [f"{batch.size} rows"]
    if "targets" in batch:
        used, counted = int((batch.segments >= 0).sum()), int((batch.weights > 0).sum())
        documents = int((batch.segments.amax(-1) + 1).sum())
        parts += [
            f"{documents} documents",
            f"{used} tokens ({used / batch.segments.numel():.0%} of the batch)",
            f"{counted} count in the loss",
        ]
    return ", ".join(parts)
