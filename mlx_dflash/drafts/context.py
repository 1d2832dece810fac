"""The draft's K/V of committed positions, one buffer a layer, always in time order.

Knows positions and buffers only. Rows are written once, for committed positions; a block's own rows are written behind
them and overwritten by whatever comes next, so that no round copies the context.
"""

from __future__ import annotations

import mlx.core as mx

_STEP = 256


class LayerContext:
    """K and V ``[1, kv heads, capacity, head_dim]`` of one layer.

    A full layer keeps everything and grows by steps. A windowed layer keeps at least ``reach + slack`` rows and moves
    them to the front of a buffer at most once in as many rows, so the cost of a row stays constant.

    Attributes:
        begin: position of the buffer's first row.
        end: position after the last committed row.
    """

    def __init__(self, reach: int | None, slack: int, start: int = 0) -> None:
        """
        Args:
            reach: context rows before the anchor that a block can see; ``None`` for all.
            slack: how far :meth:`rewind` may go back and still find a full window.
            start: position of the first row that will ever be told.
        """
        self.reach, self._retain = reach, None if reach is None else reach + slack
        self._start = self.begin = self.end = start
        self._keys: mx.array | None = None
        self._values: mx.array | None = None

    @property
    def retain(self) -> int | None:
        """Rows that are worth telling at once: earlier ones would be forgotten anyway. ``None`` for all."""
        return self._retain

    def append(self, keys: mx.array, values: mx.array, position: int) -> None:
        """Commit rows whose first one sits at ``position``: the next one, or later when ``retain`` rows follow."""
        rows = keys.shape[2]
        if position != self.end:
            # Everything older than these rows is out of every later block's sight.
            assert self._retain is not None and rows >= self._retain and position > self.end
            self.begin = self.end = position
        self._reserve(keys, values, rows)
        self._write(keys, values)
        self.end += rows

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, int]:
        """The visible context followed by a block, which is not committed.

        Returns:
            K and V ``[1, kv heads, context + rows, head_dim]`` (views of the buffer), and the number of context rows.
        """
        rows = keys.shape[2]
        self._reserve(keys, values, rows)
        self._write(keys, values)
        first = self.begin if self.reach is None else max(self.begin, self.end - self.reach)
        low, high = first - self.begin, self.end - self.begin + rows
        assert self._keys is not None and self._values is not None
        return self._keys[:, :, low:high], self._values[:, :, low:high], self.end - first

    def rewind(self, position: int) -> None:
        """Forget rows from ``position`` on.

        Raises:
            ValueError: rows that the window would need have been let go.
        """
        oldest = self._start if self.reach is None else max(self._start, position - self.reach)
        if position < self._start or self.begin > oldest:
            raise ValueError(f"rewind to {position}: the context reaches back to {self.begin}, expected {oldest}")
        self.end = min(self.end, position)

    def arrays(self) -> list[mx.array]:
        return [array for array in (self._keys, self._values) if array is not None]

    def _write(self, keys: mx.array, values: mx.array) -> None:
        assert self._keys is not None and self._values is not None
        low = self.end - self.begin
        self._keys[:, :, low : low + keys.shape[2]] = keys
        self._values[:, :, low : low + keys.shape[2]] = values

    def _reserve(self, keys: mx.array, values: mx.array, rows: int) -> None:
        """Make room behind the committed rows."""
        held = self.end - self.begin
        capacity = 0 if self._keys is None else self._keys.shape[2]
        if held + rows <= capacity:
            return
        kept = held
        if self._retain is not None and held >= 2 * self._retain:
            kept = self._retain
        # Half of what is there at least, so that copying costs a constant a row however long the sequence gets.
        room = -(-max(kept + rows, kept + kept // 2) // _STEP) * _STEP
        if kept < held:
            room = max(room, capacity)
        self._keys = _moved(self._keys, keys, held - kept, held, room)
        self._values = _moved(self._values, values, held - kept, held, room)
        self.begin += held - kept


def _moved(old: mx.array | None, like: mx.array, low: int, high: int, capacity: int) -> mx.array:
    """A new buffer whose first rows are rows ``low .. high`` of the old one."""
    _, heads, _, width = like.shape
    buffer = mx.zeros((1, heads, capacity, width), like.dtype)
    if old is not None and high > low:
        buffer[:, :, : high - low] = old[:, :, low:high]
    return buffer


def visibility(
    context: int, rows: int, *, window: int | None, causal: bool, from_anchor: bool
) -> mx.array | str | None:
    """Which keys the rows of a block may see: ``context`` rows right before the anchor, then the block's own.

    Args:
        window: ``None`` for a full layer.
        from_anchor: the window is counted from the anchor, and the context holds no more than that.

    Returns:
        ``None`` when every row sees every key, ``"causal"`` when rows see all of the context and the block up to
        themselves, else ``[rows, context + rows]`` bool.
    """
    nearest_hidden = None if window is None or from_anchor else window
    # Row rows - 1 and the oldest context row are the farthest apart; the same holds inside the block.
    if nearest_hidden is None or context + rows - 1 < nearest_hidden:
        return "causal" if causal else None
    row = mx.arange(rows)[:, None]
    key = mx.arange(-context, rows)[None]
    distance = row - key
    seen = distance < nearest_hidden
    return seen & ((distance >= 0) if causal else (distance > -nearest_hidden))
