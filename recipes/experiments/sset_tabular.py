"""Do event tables speed up Q-learning? The setting of SSET's Theorem 1 with tabular Q-learning (SSET, App. A.1).

Tabular Q-learning in the Three Room Grid World, from a stream of experience that is the same for all methods of a seed.
The behaviour takes an optimal action with probability 0.1, else a random one. The reward is 1 at the goal and 0
elsewhere, the discount 0.99, the learning rate 0.2, and initially Q = 0. Every 8 steps, 32 transitions are replayed one
after the other, each with a target from the current Q-values. The experiment counts the env steps until the root mean
squared error of Q against Q*, over all actions and all states except the goal, is at most 0.7. The error is computed
every 500 steps.

- *uniform*: uniform draws from 20,000 transitions.
- *history 60*, *history 200*: event tables at_gap (κ 4,000, η 0.2) and done (κ 6,000, η 0.3) besides the default table
  (κ 10,000, η 0.5). Event tables hold the last 60 or 200 transitions before each event, which stay stored as long as a
  table holds them.
- *history 1*: event tables with the event transitions only. This method is no faster than uniform replay: event tables
  need histories.
- *history 60 + PER*: proportional priorities inside the tables (α 0.65), importance-sampling weights with exponent 0.4.
- *PER*, *ReaPER*: these priorities without event tables, and with the reliabilities of targets (ω 0.2) too. The largest
  weight of a batch is 1: with the largest one of the buffer, that of a transition with a TD error of 0, all weights of
  a batch are near 0.03, and so is the factor of the learning rate.

``python -m recipes.experiments.sset_tabular --out runs/sset_tabular`` (some minutes) prints a table and writes
``sset_tabular.csv``, with one row per run, and the figure ``sset_tabular.png`` and ``.svg``. With ``--read CSV`` it
draws the figure of an earlier run.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler
from tqdm import tqdm

from recipes.common.checked import positive
from recipes.common.files import markdown
from recipes.envs.rooms import Rooms, ThreeRooms
from recipes.experiments.command_line import ExperimentParser
from recipes.experiments.tabular import experience, learn
from recipes.studies.curves import Curve, draw_runs
from torchrl_replay_ext import (
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    ReaPERSampler,
)

STEPS = 20_000
HORIZON = 500
DISCOUNT = 0.99
LEARNING_RATE = 0.2
OPTIMAL_SHARE = 0.1
START = 200
INTERVAL = 8
BATCH_SIZE = 32
CHECK_INTERVAL = 500
THRESHOLD = 0.7
ERROR = "root mean squared error of Q"
CAPACITY = {"default": 10_000, "at_gap": 4_000, "done": 6_000}
ETA = {"default": 0.5, "at_gap": 0.2, "done": 0.3}
PER: dict[str, Any] = {"kind": "proportional", "alpha": 0.65, "beta": 0.4, "td_error": "absolute"}

ALONE = {"proportional": ProportionalSampler, "reaper": ReaPERSampler}

# Method -> history (None: no event tables), priorities inside the tables or without them (None: uniform draws).
METHODS: dict[str, tuple[int | None, dict[str, Any] | None]] = {
    "uniform": (None, None),
    "history 60": (60, None),
    "history 200": (200, None),
    "history 1": (1, None),
    "history 60 + PER": (60, PER),
    "PER": (None, PER | {"weight_norm": "batch"}),
    "ReaPER": (None, PER | {"weight_norm": "batch", "kind": "reaper", "omega": 0.2}),
}


def make_world() -> Rooms:
    """The three rooms with rewards in [0, 1], as the theorem requires."""
    return ThreeRooms(rewards=(1.0, 0.0))


def make_stream(world: Rooms, truth: np.ndarray, seed: int) -> TensorDict:
    """The stream of experience of a seed, [STEPS]."""
    start = world.state_of(*world.START)
    state, action, done = experience(world.dynamics, truth, start, HORIZON, STEPS, OPTIMAL_SHARE, seed)
    after, reward, terminated = (table[state, action] for table in world.dynamics)
    at_gap = [world.pose_of(place)[:2] in world.GAPS for place in after]
    following = {
        "state": after,
        "reward": reward.astype(np.float32),
        "terminated": terminated,
        "done": done,
        "events": {"at_gap": at_gap, "done": terminated},
    }
    return TensorDict({"state": state, "action": action, "next": following}, [STEPS])


def make_buffer(method: str) -> TensorDictReplayBuffer:
    """The buffer of a method."""
    history, priority = METHODS[method]
    storage = LazyTensorStorage(sum(CAPACITY.values()))
    if history is None:
        options = dict(priority or {})
        sampler = ALONE[options.pop("kind")](**options) if options else RandomSampler()
        return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH_SIZE)
    specs = [EventSpec(name, ("next", "events", name), history) for name in ("at_gap", "done")]
    tables = EventTables(specs, CAPACITY, retention="pinned")
    writer, sampler = EventTableWriter(tables), EventTableSampler(tables, eta=ETA, priority=priority)
    return TensorDictReplayBuffer(storage=storage, writer=writer, sampler=sampler, batch_size=BATCH_SIZE)


def run(method: str, seed: int) -> list[float]:
    """Run a method; return the error of Q after every CHECK_INTERVAL steps."""
    world = make_world()
    truth = world.dynamics.optimal_q(DISCOUNT)
    stream = make_stream(world, truth, seed)
    inner = slice(0, world.num_states - 4)
    q = np.zeros_like(truth).tolist()
    buffer = make_buffer(method)
    curve = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for step, rows in zip(range(INTERVAL, STEPS + 1, INTERVAL), stream.split(INTERVAL), strict=True):
            buffer.extend(rows.clone())
            if step >= START:
                batch = buffer.sample()
                taken = batch["state"].numpy(), batch["action"].numpy()
                weights = batch.get("priority_weight", torch.ones(BATCH_SIZE)).tolist()
                errors = learn(q, world.dynamics, *taken, [LEARNING_RATE * each for each in weights], DISCOUNT)
                if METHODS[method][1] is not None:
                    batch["td_error"] = torch.tensor(errors)
                    buffer.update_tensordict_priority(batch)
            while step >= CHECK_INTERVAL * (len(curve) + 1):
                curve.append(float(np.sqrt(np.mean((np.array(q) - truth)[inner] ** 2))))
    return curve


def format_table(rows: list[dict]) -> str:
    """A table of median steps, their share of uniform's, and the number of seeds in which a method was faster."""
    of = {name: {row["seed"]: float(row["steps"]) for row in rows if row["method"] == name} for name in METHODS}
    lines = []
    for method, steps in of.items():
        median, uniform = (statistics.median(each.values()) for each in (steps, of["uniform"]))
        faster = sum(steps[seed] < of["uniform"][seed] for seed in steps)
        lines.append((method, f"{median:,.0f}", f"{median / uniform:.2f}", f"{faster} of {len(steps)}"))
    return markdown(("method", "median steps", "of uniform", "faster in"), lines)


def plot(rows: list[dict]) -> Figure:
    """Draw the error of each method over the steps."""
    runs = []
    for row in rows:
        errors = np.array([float(value) for key, value in row.items() if key.startswith("error_")])
        steps = CHECK_INTERVAL * np.arange(1, len(errors) + 1)
        runs.append(Curve("threerooms", row["method"], row["seed"], THRESHOLD, steps, {ERROR: errors}, ERROR))
    return draw_runs(runs, [ERROR])


def main(arguments: list[str] | None = None) -> list[dict]:
    """Run the comparison from the command line and return its rows."""
    parser = ExperimentParser("sset_tabular", __doc__)
    parser.add_argument("--seeds", type=positive, default=10, help="runs of each method (default: %(default)s)")
    options = parser.parse_args(arguments)

    def measure() -> Iterator[dict]:
        runs = [(method, seed) for seed in range(options.seeds) for method in METHODS]
        for method, seed in tqdm(runs, desc="sset_tabular", leave=False):
            curve = run(method, seed)
            errors = {f"error_{CHECK_INTERVAL * (i + 1)}": f"{error:.4f}" for i, error in enumerate(curve)}
            good = (CHECK_INTERVAL * number for number, error in enumerate(curve, start=1) if error <= THRESHOLD)
            yield {"method": method, "seed": seed, "steps": next(good, math.inf), **errors}

    columns = {"method": str, "seed": int, f"error_{CHECK_INTERVAL}": float}
    return parser.run(options, columns, measure, format_table, plot)


if __name__ == "__main__":
    main()
