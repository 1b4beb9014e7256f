"""Environments of the recipes, registered with Gymnasium: grid worlds of the event-table paper (SSET) and others.

    gymnasium.make("recipes.envs:ThreeRooms-v0", rewards=(1.0, 0.0))

========================  =========================================================================================
``ThreeRooms-v0``         three rooms in a row: ``rewards``, ``shaping``, ``gamma``
``TwoRooms-v0``           two rooms, for the comparison with reward shaping: ``rewards``, ``shaping``, ``gamma``
``ObstacleCourse-v0``     spikes, lava, gaps, keys and doors in a fixed order: ``start``, ``rows``, ``step_reward``
``RandomizedSkill-v0``    lava, a gap or a locked door, chosen per episode: ``scenario``, ``step_reward``
``DoorKey-v0``            MiniGrid's DoorKey with events: ``size`` (needs ``pip install minigrid``)
``LavaGap-v0``            MiniGrid's LavaGap with events: ``size`` (needs ``pip install minigrid``)
``DeepSea-v0``            a treasure that one of 2^N sequences of actions finds: ``size``, ``mapping_seed``
``MinAtar-v0``            a game of MinAtar (needs ``pip install minatar``): ``game``, ``sticky_action_prob``,
                          ``difficulty_ramping``
``CartPolePositions-v0``  CartPole that shows positions without velocities: the options of CartPole
========================  =========================================================================================

Every ``info`` of a grid world holds a bool for each name in the class attribute ``EVENTS``: whether the last step
triggered the event. After a reset, all are ``False``.
"""

from gymnasium.envs.registration import register, registry

from recipes.envs.deep_sea import DeepSea
from recipes.envs.minatar_games import MinAtar
from recipes.envs.minigrid_events import MiniGridEvents
from recipes.envs.obstacle_course import ObstacleCourse
from recipes.envs.positions import CartPolePositions
from recipes.envs.randomized_skill import RandomizedSkill
from recipes.envs.rooms import Dynamics, ThreeRooms, TwoRooms

__all__ = [
    "CartPolePositions",
    "DeepSea",
    "Dynamics",
    "MinAtar",
    "MiniGridEvents",
    "ObstacleCourse",
    "RandomizedSkill",
    "ThreeRooms",
    "TwoRooms",
]

# Time limits are those of Gymnasium: they truncate and can be changed with max_episode_steps=. MiniGrid has its own.
for _id, _entry_point, _limit in (
    ("ThreeRooms-v0", "recipes.envs.rooms:ThreeRooms", 500),
    ("TwoRooms-v0", "recipes.envs.rooms:TwoRooms", 500),
    ("ObstacleCourse-v0", "recipes.envs.obstacle_course:ObstacleCourse", 1000),
    ("RandomizedSkill-v0", "recipes.envs.randomized_skill:RandomizedSkill", 200),
    ("DoorKey-v0", "recipes.envs.minigrid_events:door_key", None),
    ("LavaGap-v0", "recipes.envs.minigrid_events:lava_gap", None),
    ("DeepSea-v0", "recipes.envs.deep_sea:DeepSea", None),
    # good players of Breakout would never end
    ("MinAtar-v0", "recipes.envs.minatar_games:MinAtar", 5000),
    ("CartPolePositions-v0", "recipes.envs.positions:CartPolePositions", 500),
):
    if _id not in registry:
        register(id=_id, entry_point=_entry_point, max_episode_steps=_limit)
