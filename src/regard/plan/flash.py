"""Traffic with slow memory: attention that writes its scores down, against tiles that never leave fast memory.

    standard    read Q, K; write S; read S; write P; read P, V; write O          4·n·E + 4·n²  numbers
    tiled       read Q once, write O once, and K, V once for each block of queries        2·n·E + 2·n·E·⌈n / B⌉

Four tiles of B rows (Q, K, V, O) share the fast memory of M numbers, B = M / 4E: about 8·n²·E²/M in all. So the gain is
M / 2E², and there is none once E² > M / 2. The products are the same: tiling changes bytes, not FLOPs. Dao et al. 2022,
in the loop order of FlashAttention-2 (Dao 2023).
"""


def tile_rows(fast: int, head_dim: int) -> int:
    """Rows of a tile when four of them fill a fast memory of this many numbers."""
    rows = fast // (4 * head_dim)
    if rows < 1:
        raise ValueError(f"fast={fast} numbers hold no tile of head_dim={head_dim}; give at least {4 * head_dim}")
    return rows


def standard_traffic(length: int, head_dim: int) -> int:
    """Numbers moved by one head."""
    return 4 * length * head_dim + 4 * length * length


def tiled_traffic(length: int, head_dim: int, fast: int) -> int:
    """Numbers moved by one head whose tiles stay in a fast memory of this many numbers."""
    blocks = -(-length // tile_rows(fast, head_dim))
    return 2 * length * head_dim * (1 + blocks)
