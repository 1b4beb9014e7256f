"""Randomized Skill environment of the SSET paper (section 5.3)."""

from typing import Any

from recipes.envs.grid import GOAL, KEY, LAVA, check_choice
from recipes.envs.objects import ObjectWorld

SCENARIOS = ("lava", "gap", "door")


class RandomizedSkill(ObjectWorld):
    """Each episode needs one skill: avoid lava, go through a gap, or open the correct one of two doors.

    Each episode draws the scenario, the column of the obstacle (3, 4 or 5), the rows of lava, gap or doors, and the
    position of the goal behind the obstacle. With doors, it also draws the position and colour of the key, which opens
    one of the two. ``info["scenario"]`` names the scenario. The paper gives no sizes; this implementation uses 9 x 7
    cells, and lava in three of the five rows.

    Args:
        scenario: one of `SCENARIOS` for all episodes; None (default): a random one in each episode.
        step_reward: see `ObjectWorld`. Default: 0.
        render_mode: ``"rgb_array"`` or None (default).
    """

    width, height = 9, 7
    EVENTS = ("at_lava", "at_gap", "pickup_key", "at_door", "done")

    def __init__(self, scenario: str | None = None, step_reward: float = 0.0, render_mode: str | None = None):
        check_choice(self, "scenario", scenario, (None, *SCENARIOS))
        super().__init__(step_reward=step_reward, render_mode=render_mode)
        self._scenario = scenario

    def _build(self) -> dict[str, Any]:
        rng = self.np_random
        scenario = self._scenario or SCENARIOS[rng.integers(3)]
        column = int(rng.integers(3, 6))
        if scenario == "lava":
            for y in self._rows(3):
                self._put(column, y, LAVA)
        elif scenario == "gap":
            self._put_gap(column)
        else:
            colours = self._random_colours(2)
            self._put_doors(column, colours)
            places = [(x, y) for x in range(1, column) for y in range(1, 6) if (x, y) != self._start]
            self._put(*places[rng.integers(len(places))], KEY, colours[0])
        self._put(int(rng.integers(column + 1, 8)), int(rng.integers(1, 6)), GOAL)
        return {"scenario": scenario}
