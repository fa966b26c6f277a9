"""TokenLayout: the tokens of a document are adjacent in their row."""

import pytest
import torch

from regard.layout import TokenLayout


def layout_of(segments: list[list[int]], valid: list[list[bool]] | None = None) -> TokenLayout:
    positions = torch.zeros(len(segments), len(segments[0]), dtype=torch.long)
    return TokenLayout(positions, torch.tensor(segments), None if valid is None else torch.tensor(valid))


def test_a_document_in_two_parts_of_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 documents in 3 runs of tokens; .* must be adjacent"):
        layout_of([[0, 0, 0, 1, 1, 1], [1, 1, 2, 2, 1, 1]])
    with pytest.raises(ValueError, match="must be adjacent"):
        layout_of([[1, 2, 1]], [[True, True, True]])


def test_adjacent_documents_may_have_any_ids() -> None:
    layout_of([[2, 2, 1, 1, 7], [0, 0, 0, 0, 0]])


def test_the_documents_of_a_replaced_layout_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of([[2, 2, 1, 1, 7]])
    monkeypatch.setattr("regard.layout.check_adjacent", lambda documents: pytest.fail("checked again"))
    layout.tokens(slice(1, 4)).with_embeddings(torch.zeros(1, 3, 4))


def test_padding_may_be_inside_a_document() -> None:
    layout = layout_of([[1, 1, -1, 1, 2]], [[True, True, False, True, True]])
    assert layout.documents is not None and layout.documents.tolist() == [[1, 1, 1, 1, 2]]
    with pytest.raises(ValueError, match="must be adjacent"):
        layout_of([[1, -1, 2, -1, 1]], [[True, False, True, False, True]])


def test_compiled_code_builds_layouts_without_the_check() -> None:
    def next_segments(segments: torch.Tensor) -> torch.Tensor:
        layout = TokenLayout(torch.zeros_like(segments), segments)
        assert layout.segments is not None
        return layout.segments + 1

    compiled = torch.compile(next_segments, fullgraph=True, backend="eager")
    assert compiled(torch.tensor([[1, 2, 1]])).tolist() == [[2, 3, 2]]
