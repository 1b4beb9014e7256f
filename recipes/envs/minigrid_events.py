"""MiniGrid's DoorKey and LavaGap with event flags and flat observations. Needs ``pip install minigrid``."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box

# The largest category, colour and door state of MiniGrid's encoding.
_LARGEST = np.array([10, 5, 2], dtype=np.float32)


class MiniGridEvents(gymnasium.Wrapper):
    """Adds event flags to the `info` of a MiniGrid environment and flattens its observations.

    Events: the step picked up a key (pickup_key) or opened a door (door_opened); the agent stands in the gap of
    LavaGap's column (at_gap), in lava (at_lava) or in the goal (done).

    The observation holds these numbers, each divided by its largest value: MiniGrid's image (category, colour and door
    state of the cells in view), the agent's direction, whether the agent carries an object, and the object's category
    and colour, or (-1, -1) without an object.

    Args:
        env: a MiniGrid environment with MiniGrid's dictionary observations.
    """

    EVENTS = ("pickup_key", "door_opened", "at_gap", "at_lava", "done")

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self._world: Any = env.unwrapped
        image_size = int(np.prod(self._world.observation_space["image"].shape))
        low = np.concatenate([np.zeros(image_size), [-1.0, 0.0, -1.0, -1.0]]).astype(np.float32)
        self.observation_space = Box(low, np.float32(1.0), dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Reset the environment; all events are False."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._flatten(observation), info | dict.fromkeys(self.EVENTS, False)

    def step(self, action: int):
        """Step the environment; events are found by comparing the states before and after."""
        world = self._world
        before = self._holdings()
        observation, reward, terminated, truncated, info = self.env.step(action)
        position = tuple(int(i) for i in world.agent_pos)
        cell = world.grid.get(*position)
        here = None if cell is None else cell.type
        gap, (has_key, open_doors) = getattr(world, "gap_pos", None), self._holdings()
        events = {
            "pickup_key": has_key > before[0],
            "door_opened": open_doors > before[1],
            "at_gap": gap is not None and position == tuple(gap),
            "at_lava": here == "lava",
            "done": here == "goal",
        }
        return self._flatten(observation), float(reward), terminated, truncated, info | events

    def _holdings(self) -> tuple[bool, int]:
        """Whether the agent carries a key, and the number of open doors."""
        carried, cells = self._world.carrying, self._world.grid.grid
        doors = sum(cell is not None and cell.type == "door" and cell.is_open for cell in cells)
        return carried is not None and carried.type == "key", doors

    def _flatten(self, observation: dict[str, Any]) -> np.ndarray:
        carried, carrying = self._world.carrying, [0.0, -1.0, -1.0]
        if carried is not None:
            carrying = [1.0, *carried.encode()[:2] / _LARGEST[:2]]
        direction = 2 * int(observation["direction"]) / 3 - 1
        image = observation["image"] / _LARGEST
        return np.concatenate([image.ravel(), [direction, *carrying]]).astype(np.float32)


def make(world: str, size: int = 5, render_mode: str | None = None) -> MiniGridEvents:
    """An environment of MiniGrid with events.

    Args:
        world: DoorKeyEnv (fetch the key, open the door, reach the goal) or LavaGapEnv (reach the goal through the gap
            in a column of lava).
        size: width and height in cells including the walls, >= 5. Default: 5.
        render_mode: a render mode of MiniGrid, or None (default).
    """
    if size < 5:
        raise ValueError(f"{world}(size={size}): must be >= 5")
    try:
        from minigrid import envs
    except ImportError as error:
        raise ImportError(f"{world} needs MiniGrid: pip install minigrid") from error
    return MiniGridEvents(getattr(envs, world)(size=size, render_mode=render_mode))
