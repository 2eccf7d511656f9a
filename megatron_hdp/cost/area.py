"""Attention work of pieces and of the steps of a zigzag ring, as twice the area of the mask in token^2 (integers).

A piece is two chunks of c tokens; in full causal attention every step of every rank then has twice the area
4 c^2 = t^2 with t = 2c, so that seconds are a t^2 with the same a as the a s^2 of a whole local sequence. With a window
of w tokens (a query sees itself and the w - 1 tokens before it) the work of a pair of chunks depends on their distance.
Areas are those of the continuous mask: exact for blocks, and t/2 smaller than the count of pairs on a diagonal.
"""

from typing import Any

import numpy as np


def chunk_area(chunk: Any, window: int | None, distance: Any) -> Any:
    """Twice the area that queries of one chunk see of the keys ``distance`` chunks before theirs; arrays broadcast."""
    if window is None:
        return np.where(distance == 0, chunk * chunk, 2 * chunk * chunk)
    reach = np.minimum(window, chunk)
    diagonal = 2 * chunk * reach - reach * reach
    edge = np.clip(window - distance * chunk, -chunk, chunk)  # where the window's edge cuts the block's diagonal
    beyond = np.where(edge <= 0, (chunk + edge) ** 2, 2 * chunk * chunk - (chunk - edge) ** 2)
    return np.where(distance == 0, diagonal, beyond)


def own_area(chunk: Any, window: int | None) -> Any:
    """Twice the area of step 0 on the busiest rank: both chunks' diagonals, and the high chunk on the low one.

    The busiest rank is the last one, whose two chunks are neighbours.
    """
    return 2 * chunk_area(chunk, window, 0 * chunk) + chunk_area(chunk, window, 0 * chunk + 1)


def step_area(chunk: Any, window: int | None, distance: Any) -> Any:
    """Twice the area of step k on the busiest rank of a ring of d, with distance = min(k, d - k) >= 1.

    Rank p at step k holds the keys of rank p - k (mod d). Its two pairs of chunks are k and 2d - 1 - 2p + k apart for
    p >= k, d - k and d - 1 - 2p + k for p < k; the nearest of all are p = d - 1 with k, k + 1 and p = k - 1 with
    d - k, d - k + 1.
    """
    return chunk_area(chunk, window, distance) + chunk_area(chunk, window, distance + 1)


def busiest_area(chunk: Any, window: int, ring: Any) -> Any:
    """Twice the area of all that the busiest piece of a ring computes; of a whole local sequence for a ring of 1.

    The first n tokens have F(n) = r (2 n - r) with r = min(n, w). Chunks later in the sequence have more, but by ever
    less, so the piece of chunks d - 1 and d, which are neighbours, has most: F((d + 1) c) - F((d - 1) c).
    """
    end = np.minimum(ring + 1, window // chunk + 3)  # beyond the window every two chunks have the same

    def first(tokens: Any) -> Any:
        reach = np.minimum(tokens, window)
        return reach * (2 * tokens - reach)

    return first(end * chunk) - first((end - 2) * chunk)
