"""Obstacle Course of the SSET paper (section 5.3, A.2)."""

from typing import Any

from recipes.envs.grid import GOAL, KEY, LAVA, SPIKE
from recipes.envs.objects import ObjectWorld


class ObstacleCourse(ObjectWorld):
    """A course with spikes, a gap, lava, a second gap, keys and doors on the way to the goal, in this fixed order.

    Each episode draws the rows of lava and gaps, and the rows and colours of keys and doors. The paper gives neither
    the layout nor the reward of the goal. It gives a start (1, 1) in the top-left corner and a shifted start (1, 4)
    beside the spikes. Here the grid has 14 x (rows + 2) cells; the outer ones are walls. There are three more walls::

        column   0          4        7          11         13
                 |  spikes  |  lava  |  2 keys  |  2 doors  |

    Two spikes are in the lowest rows of column 2. Lava fills half of the rows of column 6, rounded down, but not the
    row of the gap behind it. The keys are in column 9; each opens one of the doors in column 11. The goal is in the
    bottom-right corner.

    Args:
        start: free cell (x, y) of the first room where the agent starts, facing right. Default: (1, 1).
        rows: rows of all rooms, >= 3. Random actions reach the goal in roughly one of 45 episodes with 3 rows, and in
            one of 350 with 4. Default: 4.
        step_reward: see `ObjectWorld`. Default: 0.
        render_mode: ``"rgb_array"`` or None (default).

    Raises:
        ValueError: if `rows` is less than 3, or `start` is not a free cell of the first room.
    """

    width = 14
    EVENTS = ("at_spike", "at_lava", "at_gap", "pickup_key", "at_door", "done")

    def __init__(
        self,
        start: tuple[int, int] = (1, 1),
        rows: int = 4,
        step_reward: float = 0.0,
        render_mode: str | None = None,
    ):
        if not isinstance(rows, int) or rows < 3:
            raise ValueError(f"ObstacleCourse(rows={rows!r}): must be a whole number >= 3")
        self.height = rows + 2
        self._spikes = ((2, rows - 1), (2, rows))
        start = (start[0], start[1])
        free = [(x, y) for x in range(1, 4) for y in range(1, rows + 1) if (x, y) not in self._spikes]
        if start not in free:
            cells = ", ".join(map(str, free))
            raise ValueError(f"ObstacleCourse(start={start}): must be a free cell of the first room, one of {cells}")
        super().__init__(start, step_reward, render_mode)

    def _build(self) -> dict[str, Any]:
        rows = self.height - 2
        for x, y in self._spikes:
            self._put(x, y, SPIKE)
        self._put_gap(4)
        gap = self._put_gap(7)
        for y in [y for y in self._rows(rows) if y != gap][: rows // 2]:
            self._put(6, y, LAVA)
        colours = self._random_colours(2)
        # Keys in the columns beside the walls could block gap or doors.
        for y, colour in zip(self._rows(2), colours, strict=True):
            self._put(9, y, KEY, colour)
        self._put_doors(11, colours)
        self._put(12, rows, GOAL)
        return {}
