"""Environments of the recipes, registered with Gymnasium: grid worlds of the event-table paper (SSET) and others.

    gymnasium.make("recipes.envs:ThreeRooms-v0", rewards=(1.0, 0.0))

========================  =========================================================================================
``ThreeRooms-v0``         three rooms in a row: ``rewards``, ``shaping``, ``gamma``
``TwoRooms-v0``           two rooms, for the comparison with reward shaping: ``rewards``, ``shaping``, ``gamma``
``ObstacleCourse-v0``     spikes, lava, gaps, keys and doors in a fixed order: ``start``, ``rows``, ``step_reward``
``RandomizedSkill-v0``    lava, a gap or a locked door, chosen per episode: ``scenario``, ``step_reward``
``DeepSea-v0``            a treasure that one of 2^N sequences of actions finds: ``size``, ``mapping_seed``
``MinAtar-v0``            a game of MinAtar (needs ``pip install minatar``): ``game``, ``sticky_action_prob``,
                          ``difficulty_ramping``
``CartPolePositions-v0``  CartPole that shows positions without velocities: the options of CartPole
========================  =========================================================================================

Every ``info`` of a grid world holds a bool for each name in the class attribute ``EVENTS``: whether the last step
triggered the event. After a reset, all are ``False``.
"""

from gymnasium.envs.registration import register

# Time limits are those of Gymnasium: they truncate and can be changed with max_episode_steps=.
for _name, _entry_point, _limit in (
    ("ThreeRooms", "rooms:ThreeRooms", 500),
    ("TwoRooms", "rooms:TwoRooms", 500),
    ("ObstacleCourse", "objects:ObstacleCourse", 1000),
    ("RandomizedSkill", "objects:RandomizedSkill", 200),
    ("DeepSea", "deep_sea:DeepSea", None),
    # good players of Breakout would never end
    ("MinAtar", "minatar_games:MinAtar", 5000),
    ("CartPolePositions", "positions:make", 500),
):
    register(f"{_name}-v0", f"recipes.envs.{_entry_point}", max_episode_steps=_limit)
