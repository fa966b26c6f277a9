"""Pools so small that they run out."""


def pool(store: str, blocks: int) -> dict[str, int]:
    """Blocks of four tokens for an engine with the paged store; the contiguous one has none."""
    return {"block": 4, "blocks": blocks} if store == "paged" else {}
