"""The output of a sequence does not depend on the other rows of the batch, on padding, or on packing."""

import torch

from regard.layout import TokenLayout
from regard.verification.laws.memory import LONG
from regard.verification.outcome import Outcome, broken, compared, difference, refused
from regard.verification.trial import Trial


def padded(trial: Trial) -> Outcome:
    """Sequences in a batch that is padded on the left or right equal each sequence alone."""
    length = trial.length
    tokens, lengths = trial.inputs(4, length), [1, length // 2 - 1, length - 1, length]
    alone = [trial.whole(tokens[row : row + 1, :size])[0] for row, size in enumerate(lengths)]
    errors = []
    for left in (False, True):
        for consecutive in (False, True):
            layout, valid = trial.padded(lengths, length, left, consecutive)
            logits = trial.whole(fill_valid_slots(tokens, valid), layout)
            errors += [difference(logits[row, mask], alone[row]) for row, mask in enumerate(valid)]
    return compared(f"lengths {', '.join(map(str, lengths))}, padded left and right", *errors)


def fill_valid_slots(tokens: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """The first tokens of each row in its valid slots, zeros in the others."""
    filled = torch.zeros_like(tokens[:, : valid.shape[1]])
    for row, mask in enumerate(valid):
        filled[row, mask] = tokens[row, : int(mask.sum())]
    return filled


def batched(trial: Trial) -> Outcome:
    """Sequences of one length (or images) in one batch equal each of them alone."""
    inputs = trial.inputs(3, trial.length)
    batch = trial.whole(inputs)
    errors = [difference(batch[row : row + 1], trial.whole(inputs[row : row + 1])) for row in range(3)]
    return compared("three in a batch, and each alone", *errors)


def ragged(trial: Trial) -> Outcome:
    """A padded prefill and decode steps at different positions equal each sequence alone.

    The rows of the store differ from the rows of the batch.
    """
    length = trial.length
    steps = min(3, length - 1)
    longest = length - steps
    lengths = [1 + longest // 5, 1 + longest // 2, longest]
    tokens, rows = trial.inputs(3, length), torch.tensor([4, 0, 2], device=trial.device)
    alone = [trial.whole(tokens[row : row + 1])[0] for row in range(3)]
    errors = []
    for kind in trial.stores:
        for left in (False, True):
            store, (layout, valid) = trial.open_store(kind, 5), trial.padded(lengths, longest, left)
            padded_layout = TokenLayout(layout.positions, valid=valid, rows=rows)
            trial.cached_forward(fill_valid_slots(tokens, valid), padded_layout, store)
            for step in range(steps):
                positions = torch.tensor(lengths, device=trial.device).unsqueeze(-1) + step
                layout = TokenLayout(positions, rows=rows)
                logits = trial.cached_forward(tokens.gather(1, positions), layout, store)[:, 0]
                expected = torch.stack([alone[row][size + step] for row, size in enumerate(lengths)])
                errors.append(difference(logits, expected))
    return compared(f"prompts of {', '.join(map(str, lengths))}, {steps} steps each", *errors)


def uneven(trial: Trial) -> Outcome:
    """Chunks in which one row has fewer tokens than the other, or none, equal one forward over the whole rows."""
    length = trial.length
    tokens, errors = trial.inputs(2, length), []
    whole = trial.whole(tokens)
    for kind in trial.stores:
        for left in (False, True):
            store, lengths = trial.open_store(kind, 2), [0, 0]
            for sizes in ([length // 3, 0], [0, length // 4], [length // 6, length // 3]):
                layout, valid = trial.padded(sizes, max(sizes), left)
                starts = torch.tensor(lengths, device=trial.device).unsqueeze(-1)
                positions = torch.where(valid, layout.positions + starts, 0)
                logits = trial.cached_forward(tokens.gather(1, positions), TokenLayout(positions, valid=valid), store)
                for row, mask in enumerate(valid):
                    expected = whole[row, lengths[row] : lengths[row] + sizes[row]]
                    errors.append(difference(logits[row, mask], expected))
                    lengths[row] += sizes[row]
    return compared("rows that continue by different lengths", *errors)


def packed(trial: Trial) -> Outcome:
    """Documents packed into one row, with padding at the end, equal each document alone.

    One document is longer than a chunk of a recurrence.
    """
    longest = min(max(LONG, trial.length), trial.limit)
    lengths, pads = [3, 1, longest, trial.length, min(8, trial.length)], 4
    documents = [trial.inputs(1, size, seed=10 + i) for i, size in enumerate(lengths)]
    tokens = torch.cat([*documents, torch.zeros_like(documents[0][:, :1]).expand(1, pads)], 1)
    positions = torch.cat([torch.arange(size) for size in [*lengths, pads]]).unsqueeze(0).to(trial.device)
    segments = torch.repeat_interleave(torch.arange(6), torch.tensor([*lengths, pads])).unsqueeze(0).to(trial.device)
    separate = torch.cat([trial.whole(document) for document in documents], 1)
    errors = []
    for consecutive in (False, True):
        layout = TokenLayout(positions, segments, valid=segments < 5, consecutive=consecutive)
        errors.append(difference(trial.whole(tokens, layout)[:, :-pads], separate))
    return compared(f"documents of {', '.join(map(str, lengths))} in one row", *errors)


def packed_memory(trial: Trial) -> Outcome:
    """A store keeps one document per row, so it must refuse a row with several."""
    positions, segments = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 0, 1, 1]])
    layout = TokenLayout(positions.to(trial.device), segments.to(trial.device))
    refusals = []
    for kind in trial.stores:
        try:
            trial.cached_forward(trial.inputs(1, 4), layout, trial.open_store(kind, 1))
        except ValueError as error:
            refusals.append(error)
    all_refused = len(refusals) == len(trial.stores) and all("packed documents" in str(error) for error in refusals)
    return refused(refusals[0]) if all_refused else broken("packed documents were cached as if they were one")
