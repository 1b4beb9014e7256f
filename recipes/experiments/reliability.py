"""Are reliable targets less biased, and do they learn faster? Assumptions and claims of the ReaPER paper (section 3.2).

Tabular Q-learning (learning rate 1/4, discount 0.99, alpha 1, no importance-sampling weights, as in the propositions)
from a fixed buffer of episodes, in which half of the actions are optimal and the others random: 4,000 transitions of
Deep Sea with 8 x 8 cells, learned with 1,000 updates, and 10,000 of the three rooms, learned with 4,000. Initially Q is
0, or noise with a standard deviation of 0.3, which makes targets unreliable. Each update replays 16 transitions one
after the other. As Q* is known, the experiment computes for all stored transitions, 20 times, the TD error δ, the bias
of the target |ε| = |target - Q*(s, a)| and the error |e| = |Q(s, a) - Q*(s, a)| (Eq. 8), and the reliability R of these
TD errors (Eq. 4):

- *error*: the root mean squared error of Q over all stored pairs of state and action (Proposition 3.6).
- *R and bias*: the rank correlation of R and |ε|; below 0 if reliable targets are less biased (Lemma 3.5).
- *bound*: the share of transitions with |ε| <= (1 - R) times the sum of the episode's absolute TD errors, which is
  Lemma 3.5 with λ = 1. The paper assumes it for optimal episodes only.
- *TD error and error*, *Ψ and error*: the rank correlations of |δ| and of Ψ = R |δ| with |e|.
- *bias drawn*: the mean |ε| with the probabilities of the sampler, divided by that of all transitions.
- *R and variance*: the rank correlation of R with the variance of the target over the runs of a dataset; below 0 if R
  stands for its inverse (after Proposition 3.8).

``python -m recipes.experiments.reliability --out runs/reliability`` (some minutes) prints a table of means over the
training and writes ``reliability.csv``, with one row per measurement, and the figure ``reliability.png`` and ``.svg``.
With ``--read CSV`` it draws the figure of an earlier run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import repeat
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
from recipes.envs.deep_sea import DeepSea
from recipes.envs.rooms import Dynamics, ThreeRooms
from recipes.experiments.command_line import ExperimentParser
from recipes.experiments.tabular import experience, learn
from recipes.studies.curves import Curve, correlation, draw_runs
from recipes.studies.figures import env_label
from recipes.studies.intervals import geometric_mean_ratio, ratio_interval
from torchrl_replay_ext import ProportionalSampler, ReaPERSampler

DISCOUNT = 0.99
LEARNING_RATE = 0.25
OPTIMAL_SHARE = 0.5
BATCH_SIZE = 16
MEASUREMENTS = 20
START = ThreeRooms().state_of(*ThreeRooms.START)
PRIORITIES: dict[str, Any] = {"alpha": 1.0, "beta": 0.0, "td_error": "absolute"}
SAMPLERS = {
    "uniform": RandomSampler,
    "per": lambda: ProportionalSampler(**PRIORITIES),
    "reaper": lambda: ReaPERSampler(omega=1.0, **PRIORITIES),
}
# world -> dynamics, initial state, longest episode, transitions in the buffer, updates
WORLDS: dict[str, tuple[Callable[[], Dynamics], int, int, int, int]] = {
    "deepsea": (lambda: deep_sea(8), 0, 8, 4_000, 1_000),
    "threerooms": (lambda: ThreeRooms(rewards=(1.0, 0.0)).dynamics, START, 500, 10_000, 4_000),
}
NOISE = (0.0, 0.3)
MEASURED = ("error", "R and bias", "bound", "TD error and error", "Ψ and error", "bias drawn", "R and variance")
KINDS: dict[str, Callable[[str], Any]] = {"world": str, "noise": float, "dataset": int, "sampler": str, "seed": int}
KINDS |= {"updates": int, **dict.fromkeys(MEASURED, float)}


def deep_sea(size: int) -> Dynamics:
    """Deep Sea with tabulated dynamics; the state is the number of the cell, row by row."""
    env, shape = DeepSea(size), (size * size, 2)
    dynamics = Dynamics(np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, bool))
    for state, action in np.ndindex(shape):
        env.cell = divmod(state, size)
        observation, reward, ends, *_ = env.step(action)
        for table, value in zip(dynamics, (observation.argmax(), reward, ends), strict=True):
            table[state, action] = value
    return dynamics


class Dataset:
    """The transitions of whole episodes, and the optimal Q-values.

    Args:
        world: name in WORLDS.
        seed: seed of the behaviour.
    """

    def __init__(self, world: str, seed: int):
        make, start, horizon, size, self.updates = WORLDS[world]
        self.dynamics = make()
        self.truth = self.dynamics.optimal_q(DISCOUNT)
        of_behaviour = self.truth, start, horizon, size, OPTIMAL_SHARE, seed
        self.state, self.action, self.done = experience(self.dynamics, *of_behaviour)
        self.episode = self.done.cumsum() - self.done
        self.pairs = np.unique(np.stack([self.state, self.action]), axis=1)

    def targets(self, q: np.ndarray) -> np.ndarray:
        """The target of each transition."""
        after, reward, terminal = (table[self.state, self.action] for table in self.dynamics)
        return reward + DISCOUNT * ~terminal * q.max(1)[after]

    def buffer(self, sampler: str) -> TensorDictReplayBuffer:
        """A buffer with all transitions; the entry "row" is their number."""
        count = len(self.state)
        storage = LazyTensorStorage(count)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=BATCH_SIZE)
        following = {"done": torch.from_numpy(self.done).unsqueeze(1)}
        columns = {"row": torch.arange(count), "collector": {"traj_ids": torch.from_numpy(self.episode)}}
        buffer.extend(TensorDict({**columns, "next": following}, [count]))
        return buffer

    def measure(self, q: np.ndarray, density: np.ndarray) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """What can be said of the present Q-values; also the reliability and the target of each transition.

        Args:
            q: the Q-values.
            density: the probability of each transition, up to a factor.
        """
        targets, optimal, present = self.targets(q), *(each[self.state, self.action] for each in (self.truth, q))
        td_error, bias, error = abs(targets - present), abs(targets - optimal), abs(present - optimal)
        finished = self.episode < self.episode[-1] + self.done[-1]
        of_episode = np.bincount(self.episode, td_error)
        sums = of_episode[self.episode]
        # ReaPER, Eqs. 16 and 17: the TD errors of the episode up to a transition, of all of it or of the largest one
        until = td_error.cumsum() - (of_episode.cumsum() - of_episode)[self.episode]
        whole = np.where(finished, sums, of_episode.max())
        trust = np.divide(until, whole, out=np.ones_like(until), where=whole > 0).clip(0, 1)
        found = {
            "error": float(np.sqrt(np.mean((q - self.truth)[tuple(self.pairs)] ** 2))),
            "R and bias": correlation(trust, bias),
            "bound": float(np.mean(bias <= (1 - trust) * sums + 1e-9)),
            "TD error and error": correlation(td_error, error),
            "Ψ and error": correlation(trust * td_error, error),
            "bias drawn": float((density * bias).sum() / density.sum() / bias.mean()) if bias.any() else float("nan"),
        }
        return found, trust, targets


def run(dataset: Dataset, sampler: str, noise: float, seed: int) -> Iterator[tuple]:
    """Learn; yield :meth:`Dataset.measure` MEASUREMENTS times."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        q = noise * np.random.default_rng(seed).standard_normal(dataset.truth.shape)
        values, buffer, density = q.tolist(), dataset.buffer(sampler), np.ones(len(dataset.state))
        drawn_by: Any = buffer.sampler
        for update in range(1, dataset.updates + 1):
            batch = buffer.sample()
            taken = dataset.state[batch["row"]], dataset.action[batch["row"]]
            errors = learn(values, dataset.dynamics, *taken, repeat(LEARNING_RATE), DISCOUNT)
            if sampler != "uniform":
                batch["td_error"] = torch.tensor(errors)
                buffer.update_tensordict_priority(batch)
            if update % (dataset.updates // MEASUREMENTS) == 0:
                if sampler != "uniform":
                    density = drawn_by.probabilities(buffer.storage).numpy()
                yield dataset.measure(np.array(values), density)


def compare(dataset: Dataset, sampler: str, noise: float, seeds: int) -> Iterator[dict[str, Any]]:
    """The measurements of runs with the same data, with the variance of targets between the runs."""
    runs = [[*run(dataset, sampler, noise, seed)] for seed in range(seeds)]
    for number, measured in enumerate(zip(*runs, strict=True), start=1):
        trust, targets = (np.array([each[part] for each in measured]) for part in (1, 2))
        variance = correlation(trust.mean(0), targets.var(0)) if seeds > 1 else float("nan")
        for seed, (found, *_) in enumerate(measured):
            updates = number * (dataset.updates // MEASUREMENTS)
            yield {"seed": seed, "updates": updates, **found, "R and variance": variance}


def runs_of(rows: list[dict]) -> dict[tuple, dict[str, np.ndarray]]:
    """The measurements [n] of each run by name, by world, noise, sampler, dataset and seed."""
    found: dict[tuple, list[dict]] = defaultdict(list)
    for row in rows:
        found[row["world"], row["noise"], row["sampler"], row["dataset"], row["seed"]].append(row)
    names = ("updates", *MEASURED)
    return {run: {name: np.array([float(row[name]) for row in of]) for name in names} for run, of in found.items()}


def means_of(rows: list[dict]) -> dict[tuple, np.ndarray]:
    """The means over the training, [datasets, seeds, MEASURED], by world, noise and sampler."""
    groups: dict[tuple, dict[object, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for (*group, dataset, _), values in sorted(runs_of(rows).items(), key=lambda item: item[0]):
        groups[tuple(group)][dataset].append(np.nanmean([values[name] for name in MEASURED], 1))
    return {group: np.array([*of.values()]) for group, of in groups.items()}


def format_table(rows: list[dict]) -> str:
    """A table of means over the training, and the error as a ratio to that of PER with the same data.

    Runs with the same episodes resemble each other, so the interval is that of the means of the datasets.
    """
    means, lines = means_of(rows), []
    for (world, noise, sampler), values in means.items():
        errors, baseline = values[..., 0].mean(1), means[world, noise, "per"][..., 0].mean(1)
        ratio = f"{geometric_mean_ratio(np.stack([baseline, errors], 1)):.2f}"
        if len(errors) > 1:
            ratio += " [{:.2f}, {:.2f}]".format(*ratio_interval(errors, baseline))
        average = values.mean((0, 1))
        cells = "" if sampler == "per" else ratio, *(f"{x:.2f}" for x in average[1:])
        lines.append((world, noise, sampler, f"{average[0]:.3f}", *cells))
    return markdown(("world", "noise", "sampler", "error", "times that of PER", *MEASURED[1:]), lines)


def plot(rows: list[dict]) -> Figure:
    """Draw the error, and the correlation of reliability and bias, over the updates."""
    curves = []
    for (world, noise, sampler, dataset, seed), values in runs_of(rows).items():
        title = f"{env_label(world)}, noise {noise:g}"
        curves.append(Curve(title, sampler, 1000 * dataset + seed, None, values["updates"], values, "error"))
    figure = draw_runs(curves, ["error", "R and bias"])
    for axes in figure.axes:
        axes.set_xlabel(f"updates with {BATCH_SIZE} transitions")
    return figure


def main(arguments: list[str] | None = None) -> list[dict]:
    """Run the comparison from the command line and return its rows."""
    parser = ExperimentParser("reliability", __doc__)
    parser.add_argument("--datasets", type=positive, default=3, help="sets of episodes (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=10, help="runs for each set (default: %(default)s)")
    options = parser.parse_args(arguments)

    def measure() -> Iterator[dict]:
        groups = [
            (world, noise, number, sampler)
            for world in WORLDS
            for noise in NOISE
            for number in range(options.datasets)
            for sampler in SAMPLERS
        ]
        for world, noise, number, sampler in tqdm(groups, desc="reliability", leave=False):
            group = {"world": world, "noise": noise, "dataset": number, "sampler": sampler}
            for row in compare(Dataset(world, number), sampler, noise, options.seeds):
                yield group | {name: f"{value:.4g}" if name in MEASURED else value for name, value in row.items()}

    return parser.run(options, KINDS, measure, format_table, plot)


if __name__ == "__main__":
    main()
