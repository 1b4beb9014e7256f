"""How much more on-policy is the best of K candidate batches? Measured on the buffer of a TD3 run (DPER, App. A).

    python -m recipes.td3 env=halfcheetah sampler=uniform num_envs=8 compile=true
    python -m recipes.experiments.dper_analysis runs/td3/halfcheetah/uniform/seed1-...

Of K uniform batches, DPER takes the one whose actions are nearest to those of the current policy. More candidates do
not improve it; its authors do not explain why. This experiment takes buffer and policy from the checkpoint of a run,
draws the actor's batches with DecoupledSampler, and measures how much nearer to the policy they are than uniform
batches. The CSV has one row per granularity and K; each ratio is followed by its 95 % interval over draws:

- *score*: score of the chosen candidate / mean score of the candidates. The score is the KL to the exploration noise.
- *squared_difference*: squared difference of the actions in the actor's batch / in a uniform batch. The definition is
  the same for all granularities.
- *kl*: KL of the actor's whole batch / of a uniform batch. The definition is the same for all granularities.
- *spread*: standard deviation / mean of the candidates' scores. It limits the gain: the smallest of K normal values is
  expected 0.56 (K = 2), 0.85 (3), 1.16 (5), 1.54 (10) standard deviations below the mean.
- *saturated*: share of the batch's actions for which the policy's action is within 0.01 of its bounds, -1 and 1. There
  the gradient of tanh, and so that of the actor's loss, almost vanishes. Analyses of earlier versions lack it.

For comparison, the rows "newest 0.5" ... give the squared difference of the newest 0.5 ... of the buffer / of the whole
buffer.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from gymnasium.spaces import flatdim
from matplotlib.figure import Figure
from tensordict.nn import TensorDictModule
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler
from tqdm import tqdm

from recipes import td3
from recipes.common.checked import positive
from recipes.common.checkpoint import load_checkpoint
from recipes.common.cli import parse_config
from recipes.common.environment import make_continuous_env
from recipes.common.errors import ConfigError
from recipes.common.files import CHECKPOINT, CONFIG, load_config, markdown, require_files
from recipes.common.replay import decouple, make_sampler, make_writer
from recipes.common.schemas import TD3Run
from recipes.experiments.command_line import ExperimentParser, Row
from recipes.studies.figures import GREY, explain, looks, panel_grid, sample_line, styled
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, DecoupledSampler
from torchrl_replay_ext.functional import gaussian_policy_kl
from torchrl_replay_ext.samplers.decoupled import Granularity

SHARES = (0.5, 0.25, 0.1)
SATURATED = 0.99  # absolute value of an action
MEASURES = {
    "score": "score: chosen / mean candidate",
    "squared_difference": "squared difference of actions: chosen / uniform",
    "kl": "KL of the whole batch: chosen / uniform",
}
RATIOS = [f"{measure}{end}" for measure in MEASURES for end in ("", "_low", "_high")]


def number(text: str) -> float | str:
    """A cell of a column of numbers, which is empty in rows of the newest transitions."""
    return float(text) if text else ""


KINDS: dict[str, Callable[[str], Any]] = {"granularity": str}
KINDS |= dict.fromkeys(("num_candidates", *RATIOS, "spread"), number)


def load_run(run_dir: Path) -> tuple[TensorDictReplayBuffer, TensorDictModule, float]:
    """Load the buffer and the policy of a TD3 run, and the standard deviation of its exploration noise.

    Raises:
        ConfigError: if the run is not one of recipes.td3, or its checkpoint cannot be loaded.
    """
    require_files(run_dir, (CONFIG, CHECKPOINT), "pass the directory of a run of recipes.td3")
    raw_config = load_config(run_dir / CONFIG)
    if "td3" not in raw_config:
        raise ConfigError(f"{run_dir}: not a run of recipes.td3; its {CONFIG} has no td3 group")
    config = parse_config(raw_config, TD3Run)
    env = make_continuous_env(config.env)
    sizes = flatdim(env.observation_space), flatdim(env.action_space)
    env.close()
    device = torch.device("cpu")
    network, loss_module = td3.make_loss(config.td3, *sizes, device)
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    noise_scale = config.td3.exploration_noise
    sampler = make_sampler(config, td_error="squared")
    replay = CompilableReplayBuffer(
        storage=CompilableTensorStorage(config.td3.buffer_size, device=device),
        sampler=decouple(config, sampler, policy, noise_scale),
        writer=make_writer(sampler),
        batch_size=config.td3.batch_size,
    )
    load_checkpoint(run_dir, device, loss=loss_module, replay=replay)
    if not len(replay):
        raise ConfigError(f"{run_dir}: the buffer is empty")
    return replay, policy, noise_scale


@torch.no_grad()
def measure(buffer: TensorDictReplayBuffer, policy: TensorDictModule, noise_scale: float, draws: int) -> np.ndarray:
    """Draw `draws` batches for the actor.

    Returns:
        [draws, 6]: mean score of the chosen candidates; mean score of all candidates; mean squared score of all
        candidates; mean squared difference between the batch's actions and the policy's; KL of the batch; share of the
        policy's actions that are saturated.
    """
    rows = []
    for _ in range(draws):
        batch = buffer.sample()
        score, candidates = batch["score"], batch["candidate_scores"]
        action = policy(batch.select("observation"))["action"]
        difference = batch["action"] - action
        kl = gaussian_policy_kl(difference, noise_scale)
        means = (score, candidates, candidates.square(), difference.square(), kl, action.abs() > SATURATED)
        rows.append([value.double().mean().item() for value in means])
    return np.array(rows)


def ratio(numbers: np.ndarray, references: np.ndarray) -> tuple[float, float, float]:
    """Mean of `numbers` / mean of `references`, both [draws], and its 95 % interval by the delta method."""
    mean = numbers.mean() / references.mean()
    half = 1.96 * (numbers - mean * references).std(ddof=1) / (references.mean() * len(numbers) ** 0.5)
    return float(mean), float(mean - half), float(mean + half)


@torch.no_grad()
def of_newest(replay: TensorDictReplayBuffer, policy: TensorDictModule) -> list[Row]:
    """Squared difference from the policy's actions, newest transitions / all transitions, for each of SHARES."""
    count = len(replay)
    newest_first = (replay.write_count - 1 - torch.arange(count)) % replay.storage.max_size
    stored = replay[newest_first]
    squares = (stored["action"] - policy(stored.select("observation"))["action"]).square().mean(1)
    means = [squares[: math.ceil(share * count)].mean() / squares.mean() for share in SHARES]
    empty = dict.fromkeys((*KINDS, "saturated"), "")
    return [
        empty | {"granularity": f"newest {share:g}", "squared_difference": round(mean.item(), 5)}
        for share, mean in zip(SHARES, means, strict=True)
    ]


def format_table(rows: list[Row]) -> str:
    """A table with one line per granularity and K, and lines for the newest transitions."""
    names = ("score", "squared difference", "KL of the batch")
    lines = []
    for row in rows:
        if row["num_candidates"] == "":
            lines.append((row["granularity"], "", "", f"{row['squared_difference']:.3f}", "", "", ""))
            continue
        ratios = (f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]" for name in MEASURES)
        saturated = f"{float(row['saturated']):.3f}" if "saturated" in row else ""
        lines.append((row["granularity"], f"{row['num_candidates']:g}", *ratios, f"{row['spread']:.3f}", saturated))
    return markdown(("granularity", "K", *names, "spread", "saturated"), lines)


@styled
def plot(rows: list[Row]) -> Figure:
    """Draw the ratios against K, with their intervals."""
    figure, panels = panel_grid(len(MEASURES), len(MEASURES), sharey=True)
    measured = sorted((row for row in rows if row["num_candidates"] != ""), key=lambda row: row["num_candidates"])
    newest = [row for row in rows if row["num_candidates"] == ""]
    names = {row["granularity"]: f"chosen by {row['granularity']}" for row in rows if row not in newest}
    chosen = looks(names)
    for panel, (measure, title) in zip(panels, MEASURES.items(), strict=True):
        for granularity in names:
            of = [row for row in measured if row["granularity"] == granularity]
            keys = ("num_candidates", measure, f"{measure}_low", f"{measure}_high")
            count, value, low, high = (np.array([row[key] for row in of]) for key in keys)
            color, marker = chosen[granularity]
            panel.errorbar(count, value, yerr=[value - low, high - value], color=color, marker=marker, linewidth=1.2)
        for row in newest if measure == "squared_difference" else ():
            value, place = row["squared_difference"], {"xycoords": ("axes fraction", "data"), "ha": "right"}
            panel.axhline(value, color=GREY, linewidth=0.9, linestyle=":")
            panel.annotate(row["granularity"], (1, value), va="bottom", color=GREY, fontsize=8, **place)
        panel.set(title=title.replace(": ", ":\n"), yscale="log")
        panel.set_xticks(sorted({row["num_candidates"] for row in measured}))
        panel.yaxis.set_major_formatter("{x:g}")
    panels[len(panels) // 2].set_xlabel("candidates K")
    note = "Marker: ratio of means; bar: 95 % interval over draws. The y axis is logarithmic."
    if newest:
        note += " Dotted: all transitions of the newest share of the buffer."
    explain(figure, {names[name]: sample_line(chosen[name]) for name in names}, note)
    return figure


def analyse(run_dir: Path, settings: list[tuple[str, int]], draws: int, seed: int) -> Iterator[Row]:
    """Load a run, and measure it: an iterator over the rows of dper_analysis.csv.

    Args:
        run_dir: directory of a run of recipes.td3, with a checkpoint.
        settings: granularities and numbers of candidates.
        draws: batches of the actor for each of them, at least 2.
        seed: seed of the draws.

    Raises:
        ConfigError: if the run cannot be loaded, or its batches cannot be chosen like that.
    """
    torch.manual_seed(seed)
    replay, policy, noise_scale = load_run(run_dir)

    def actor_buffer(granularity: str, num_candidates: int) -> TensorDictReplayBuffer:
        keywords = {"num_candidates": num_candidates, "granularity": granularity, "noise_scale": noise_scale}
        sampler = DecoupledSampler(RandomSampler(), policy, **keywords)
        replay.set_sampler(sampler)
        return sampler.actor_buffer(replay)

    try:
        reference, *buffers = [actor_buffer(*setting) for setting in (("batch", 1), *settings)]
    except ValueError as error:
        raise ConfigError(str(error)) from error

    def measured() -> Iterator[Row]:
        uniform = measure(reference, policy, noise_scale, draws)
        bar = tqdm(zip(settings, buffers, strict=True), total=len(buffers), desc="dper_analysis", leave=False)
        for (granularity, count), buffer in bar:
            chosen, candidates, squares, difference, kl, saturated = measure(buffer, policy, noise_scale, draws).T
            pairs = ((chosen, candidates), (difference, uniform[:, 3]), (kl, uniform[:, 4]))
            spread = np.sqrt(squares.mean() / candidates.mean() ** 2 - 1)
            numbers = [each for pair in pairs for each in ratio(*pair)] + [spread, saturated.mean()]
            named = zip((*RATIOS, "spread", "saturated"), numbers, strict=True)
            yield {"granularity": granularity, "num_candidates": count} | {key: round(float(x), 5) for key, x in named}
        yield from of_newest(replay, policy)

    return measured()


def main(arguments: list[str] | None = None) -> list[Row]:
    """Run the analysis from the command line and return its rows."""
    parser = ExperimentParser("dper_analysis", __doc__)
    add, choices = parser.add_argument, get_args(Granularity)
    add("run", nargs="?", type=Path, help="directory of a run of recipes.td3 with a checkpoint; not with --read")
    text = "numbers of uniform candidate batches per draw, K (default: 1 2 3 5 10)"
    add("--candidates", type=positive, nargs="+", default=[1, 2, 3, 5, 10], metavar="K", help=text)
    add("--granularity", nargs="+", choices=choices, default=choices, help="units of selection (default: all)")
    text = "actor's batches for each K and granularity (default: %(default)s); intervals need 2"
    add("--draws", type=positive, default=2000, help=text)
    add("--seed", type=int, default=1, help="seed of the draws (default: %(default)s)")
    options = parser.parse_args(arguments)
    if (options.run is None) == (options.read is None):
        parser.error("pass the directory of a run of recipes.td3, or --read CSV")
    settings = [(granularity, count) for granularity in options.granularity for count in options.candidates]
    rows: Iterator[Row] = iter(())
    try:
        if options.run is not None:
            rows = analyse(options.run, settings, options.draws, options.seed)
    except ConfigError as error:
        parser.error(str(error))
    return parser.run(options, KINDS, lambda: rows, format_table, plot)


if __name__ == "__main__":
    main()
