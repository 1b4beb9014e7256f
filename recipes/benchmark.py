"""Times replay buffers and whole training loops, of this package, of TorchRL and of whatever peer is installed.

    python -m recipes.benchmark
    python -m recipes.benchmark --only torchrl compiled --batch-sizes 256 --skip-training

Peers: cpprb, tianshou, flashbax, stable-baselines3. Everything runs on one CPU thread, and all contenders in turn
within one run, so that they share whatever else the machine does. Each finds the processor's caches full of the others'
data, as in training; on its own (--only) it is about twice as fast.

Replay: wall-clock time of one cycle, that is a sample of a full buffer and the update of its priorities from new TD
errors; median over the cycles. "sample only" stands for uniform replay, which has nothing to update. What comes out is
in each library's own arrays: NumPy for cpprb and tianshou, JAX for flashbax (which leaves the importance-sampling
weights to its user), torch for the others. TD errors are handed over in the same kind of array. A median does not show
the sort of rank-based replay, once in capacity / 20 updates.

Training: CPU time of one step of the environment in a DQN on CartPole, with one update per ten steps; median over
chunks of steps.

benchmark.csv has a row per number: measurement (replay or training), capacity, batch_size, contender, microseconds, and
times_faster, the time of TorchRL's own over this one.
"""

import argparse
import csv
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from tqdm import tqdm

from recipes.collect import EpsilonRandom, VectorCollector
from recipes.update import CompiledUpdate, eager_update, target_pairs
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    compile_step,
)

REPLAY_BASELINE, TRAINING_BASELINE = "torchrl PrioritizedSampler", "torchrl DQN, uniform replay"
LIBRARIES = ("torch", "torchrl", "tensordict", "torchrl_replay_ext", "gymnasium", "numpy")
PEERS = ("cpprb", "tianshou", "flashbax", "jax", "stable-baselines3")

ALPHA, BETA = 0.6, 0.4
EPISODE_LENGTH = 200
FILL_CHUNK = 100_000

ENV = "CartPole-v1"
HIDDEN_SIZES = (120, 84)
TRAINING_CAPACITY, TRAINING_BATCH = 10_000, 128
STEPS_PER_UPDATE, UPDATES_PER_COPY = 10, 50
STEPS_PER_CHUNK = 1000
GAMMA, EPSILON, LEARNING_RATE, MAX_GRAD_NORM = 0.99, 0.1, 2.5e-4, 10.0

Cycle = Callable[[Any], object]
TrainingLoop = Callable[[int], object]


class LeftOutError(Exception):
    """A contender that cannot run here; the message says why."""


@dataclass
class Row:
    """A number of the table."""

    measurement: str
    capacity: int
    batch_size: int
    contender: str
    microseconds: float
    times_faster: float | None = None


@dataclass(frozen=True)
class Contender:
    """A replay buffer.

    Args:
        name: what the table calls it.
        build: from transitions (`transitions`) to a function from a batch size to the cycle, a function of TD errors.
        convert: brings TD errors [B], a tensor, into the form the cycle takes; not timed.
    """

    name: str
    build: Callable[[TensorDict], Callable[[int], Cycle]]
    convert: Callable[[Tensor], Any] = lambda td_error: td_error


def transitions(count: int, episode_length: int = EPISODE_LENGTH) -> TensorDict:
    """The steps of one environment; every episode has `episode_length` of them."""
    done = ((torch.arange(count) + 1) % episode_length == 0).unsqueeze(1)
    return TensorDict(
        {
            "observation": torch.randn(count, 4),
            "action": torch.zeros(count, 1),
            "next": {
                "observation": torch.randn(count, 4),
                "reward": torch.zeros(count, 1),
                "done": done,
                "terminated": done.clone(),
            },
        },
        [count],
    )


def td_errors(count: int) -> Tensor:
    """TD errors, all positive, of about the size of one."""
    return torch.randn(count).square()


# Replay: TorchRL and this package


def fill(buffer: TensorDictReplayBuffer, data: TensorDict) -> None:
    """Fills the buffer with `data` and updates every transition once."""
    for chunk in data.split(FILL_CHUNK):
        buffer.extend(chunk.clone())
    if isinstance(buffer.sampler, PrioritizedSampler):
        for index in torch.arange(len(data)).split(FILL_CHUNK):
            buffer.update_priority(index, td_errors(len(index)))


def torchrl_cycle(buffer: TensorDictReplayBuffer, batch_size: int) -> Cycle:
    """The cycle of a buffer of TorchRL's, or of one that is derived from it."""

    def sample(td_error: Tensor) -> object:
        return buffer.sample(batch_size)

    def sample_and_update(td_error: Tensor) -> object:
        batch = buffer.sample(batch_size)
        batch.set("td_error", td_error)
        buffer.update_tensordict_priority(batch)
        return batch

    return sample_and_update if isinstance(buffer.sampler, PrioritizedSampler) else sample


def compiled_cycle(buffer: TensorDictReplayBuffer, batch_size: int, *, checked: bool) -> Cycle:
    """`torchrl_cycle` as one graph; `checked` by torch at each call whether it still applies."""
    cycle: Any = torchrl_cycle(buffer, batch_size)
    if not checked:
        return compile_step(cycle)
    # A code object of its own: graphs are cached by code object, and would have to be told apart at every call.
    cycle.__code__ = cycle.__code__.replace()
    return torch.compile(cycle, fullgraph=True)


def eager(make_sampler: Callable[[int], Any]) -> Callable[[TensorDict], Callable[[int], Cycle]]:
    """A sampler in a stock buffer."""

    def build(data: TensorDict) -> Callable[[int], Cycle]:
        sampler = make_sampler(len(data))
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(len(data)), sampler=sampler, writer=writer_for(sampler)
        )
        fill(buffer, data)
        return lambda batch_size: torchrl_cycle(buffer, batch_size)

    return build


def compiled(
    make_sampler: Callable[[int], Any], *, checked: bool = False
) -> Callable[[TensorDict], Callable[[int], Cycle]]:
    """A sampler in a compilable buffer, the cycle compiled."""

    def build(data: TensorDict) -> Callable[[int], Cycle]:
        sampler = make_sampler(len(data))
        buffer = CompilableReplayBuffer(
            storage=CompilableTensorStorage(len(data)), sampler=sampler, writer=writer_for(sampler)
        )
        fill(buffer, data)
        return lambda batch_size: compiled_cycle(buffer, batch_size, checked=checked)

    return build


def torchrl_per(capacity: int) -> PrioritizedSampler:
    """TorchRL's sampler.

    Raises:
        LeftOutError: its C++ extension does not load next to this version of torch.
    """
    try:
        return PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA)
    except (ImportError, RuntimeError) as error:
        raise LeftOutError("the C++ extension of TorchRL does not load next to this version of torch") from error


def proportional(capacity: int) -> ProportionalSampler:
    """Our PER."""
    return ProportionalSampler(capacity, alpha=ALPHA, beta=BETA)


def event_tables(capacity: int) -> EventTableSampler:
    """Our event tables: two of them, with uniform draws inside."""
    specs = [EventSpec("end", ("next", "terminated"), 50), EventSpec("goal", ("next", "done"), 100)]
    tables = EventTables(specs, {"end": capacity // 5, "goal": capacity // 10})
    return EventTableSampler(tables, eta={"default": 0.5, "end": 0.2, "goal": 0.3})


def writer_for(sampler: Any) -> EventTableWriter | None:
    """The writer that a sampler needs; None: the buffer's default."""
    return EventTableWriter(sampler.tables) if isinstance(sampler, EventTableSampler) else None


# Replay: peers


def peer(module: str) -> Any:
    """A peer's module.

    Raises:
        LeftOutError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise LeftOutError(f"{module} cannot be imported ({error})") from error


def columns(data: TensorDict) -> dict[str, np.ndarray]:
    """The columns as NumPy arrays [N, ...]."""
    return {
        "obs": data["observation"].numpy(),
        "act": data["action"].numpy(),
        "next_obs": data["next", "observation"].numpy(),
        "rew": data["next", "reward"].numpy(),
        "done": data["next", "done"].numpy(),
        "terminated": data["next", "terminated"].numpy(),
    }


def cpprb_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of cpprb."""
    cpprb = peer("cpprb")
    shapes = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in columns(data).items()}
    buffer = cpprb.PrioritizedReplayBuffer(len(data), shapes, alpha=ALPHA)
    for chunk in data.split(FILL_CHUNK):
        buffer.add(**columns(chunk))
    for index in torch.arange(len(data)).split(FILL_CHUNK):
        buffer.update_priorities(index.numpy(), td_errors(len(index)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch = buffer.sample(batch_size, beta=BETA)
        buffer.update_priorities(batch["indexes"], td_error)
        return batch

    return lambda batch_size: lambda td_error: cycle(batch_size, td_error)


def tianshou_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of tianshou."""
    tianshou = peer("tianshou.data")
    arrays = columns(data)
    filled = tianshou.ReplayBuffer.from_data(
        obs=arrays["obs"],
        act=arrays["act"],
        rew=arrays["rew"][:, 0],
        terminated=arrays["terminated"][:, 0],
        truncated=np.zeros(len(data), dtype=bool),
        done=arrays["done"][:, 0],
        obs_next=arrays["next_obs"],
    )
    buffer = tianshou.PrioritizedReplayBuffer(len(data), alpha=ALPHA, beta=BETA)
    buffer.update(filled)
    buffer.update_weight(np.arange(len(data)), td_errors(len(data)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch, index = buffer.sample(batch_size)
        buffer.update_weight(index, td_error)
        return batch

    return lambda batch_size: lambda td_error: cycle(batch_size, td_error)


def flashbax_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of flashbax, compiled by JAX, its state donated."""
    # Read when JAX starts: one thread, on the CPU.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    jax, flashbax = peer("jax"), peer("flashbax")

    def make(batch_size: int) -> Any:
        return flashbax.make_prioritised_flat_buffer(
            max_length=len(data),
            min_length=1,
            sample_batch_size=batch_size,
            add_sequences=True,
            priority_exponent=ALPHA,
        )

    buffer = make(1)
    # A sample is two successive steps: the next observation need not be stored.
    arrays = {key: value for key, value in columns(data).items() if key != "next_obs"}
    state = buffer.init({key: value[0] for key, value in arrays.items()})
    add = jax.jit(buffer.add, donate_argnums=0)
    set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
    for start in range(0, len(data), FILL_CHUNK):
        state = add(state, {key: value[start : start + FILL_CHUNK] for key, value in arrays.items()})
    # The newest step has no successor, and its priority stays 0.
    for index in torch.arange(len(data) - 1, dtype=torch.int32).split(FILL_CHUNK):
        state = set_priorities(state, index.numpy(), td_errors(len(index)).numpy())
    key = jax.random.key(0)

    def cycle_of(batch_size: int) -> Cycle:
        sized = make(batch_size)

        @jax.jit
        def sample(state: Any, key: Any) -> Any:
            key, draw = jax.random.split(key)
            return sized.sample(state, draw), key

        # Two graphs: in one, XLA would copy the whole tree twice per cycle.
        def cycle(td_error: Any) -> object:
            nonlocal state, key
            batch, key = sample(state, key)
            state = set_priorities(state, batch.indices, td_error)
            return jax.block_until_ready((state, batch))[1]

        return cycle

    return cycle_of


def to_jax(td_error: Tensor) -> Any:
    """TD errors as an array of JAX's."""
    return peer("jax.numpy").asarray(td_error.numpy())


def stable_baselines3_uniform(data: TensorDict) -> Callable[[int], Cycle]:
    """Uniform replay of stable-baselines3; it has no other."""
    buffers = peer("stable_baselines3.common.buffers")
    arrays = columns(data)
    box = gymnasium.spaces.Box
    buffer = buffers.ReplayBuffer(len(data), box(-np.inf, np.inf, (4,)), box(-1.0, 1.0, (1,)), device="cpu")
    buffer.observations[:] = arrays["obs"][:, None]
    buffer.next_observations[:] = arrays["next_obs"][:, None]
    buffer.actions[:] = arrays["act"][:, None]
    buffer.rewards[:] = arrays["rew"]
    buffer.dones[:] = arrays["done"]
    buffer.full = True
    return lambda batch_size: lambda td_error: buffer.sample(batch_size)


REPLAY = (
    Contender(REPLAY_BASELINE, eager(torchrl_per)),
    Contender("torchrl RandomSampler (sample only)", eager(lambda capacity: RandomSampler())),
    Contender("ProportionalSampler", eager(proportional)),
    Contender("RankBasedSampler", eager(RankBasedSampler)),
    Contender("ReaPERSampler", eager(ReaPERSampler)),
    Contender("EventTableSampler (sample only)", eager(event_tables)),
    Contender("compiled ProportionalSampler, torch.compile", compiled(proportional, checked=True)),
    Contender("compiled ProportionalSampler", compiled(proportional)),
    Contender("compiled RankBasedSampler", compiled(RankBasedSampler)),
    Contender("compiled ReaPERSampler", compiled(ReaPERSampler)),
    Contender("compiled RandomSampler (sample only)", compiled(lambda capacity: RandomSampler())),
    Contender("compiled EventTableSampler (sample only)", compiled(event_tables)),
    Contender("cpprb PER", cpprb_per, Tensor.numpy),
    Contender("tianshou PER", tianshou_per, Tensor.numpy),
    Contender("flashbax PER", flashbax_per, to_jax),
    Contender("stable-baselines3 uniform (sample only)", stable_baselines3_uniform),
)


def measure_replay(
    contenders: Sequence[Contender], capacity: int, batch_sizes: Sequence[int], cycles: int
) -> tuple[list[Row], list[str]]:
    """Times the cycles.

    Returns:
        The rows, and notes on what was left out.
    """
    data = transitions(capacity)
    notes, entrants, rows = [], [], []
    for contender in tqdm(contenders, desc="filling", leave=False):
        try:
            entrants.append((contender, contender.build(data)))
        except LeftOutError as error:
            notes.append(f"{contender.name} is left out: {error}.")
    for batch_size in batch_sizes:
        runs: list[tuple[Contender, Cycle, list[float]]] = [(c, cycle_of(batch_size), []) for c, cycle_of in entrants]
        for contender, cycle, _ in tqdm(runs, desc=f"compiling, batch {batch_size}", leave=False):
            cycle(contender.convert(td_errors(batch_size)))
        # A tenth of the cycles more, for the warm-up.
        for number in tqdm(range(-max(cycles // 10, 3), cycles), desc=f"replay, batch {batch_size}", leave=False):
            td_error = td_errors(batch_size)
            for contender, cycle, seconds in runs:
                converted = contender.convert(td_error)
                start = time.perf_counter()
                cycle(converted)
                stop = time.perf_counter()
                if number >= 0:
                    seconds.append(stop - start)
        rows += [
            Row("replay", capacity, batch_size, contender.name, 1e6 * statistics.median(seconds))
            for contender, _, seconds in runs
        ]
    return rows, notes


# Training loops


def make_network() -> nn.Sequential:
    """The network of every contender: from observations [4] to action values [2]."""
    first, second = HIDDEN_SIZES
    return nn.Sequential(nn.Linear(4, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2))


def torchrl_training_loop() -> TrainingLoop:
    """TorchRL's components, put together as in its own DQN example for CartPole."""
    env = TransformedEnv(GymEnv(ENV))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter())
    actor = QValueActor(make_network(), in_keys=["observation"], spec=env.action_spec)
    exploration = EGreedyModule(env.action_spec, eps_init=EPSILON, eps_end=EPSILON)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(TRAINING_CAPACITY), batch_size=TRAINING_BATCH)
    loss_module = DQNLoss(actor, loss_function="l2", delay_value=True)
    loss_module.make_value_estimator(gamma=GAMMA)
    target_update = HardUpdate(loss_module, value_network_update_interval=UPDATES_PER_COPY)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LEARNING_RATE)
    collector = Collector(
        env,
        TensorDictSequential([actor, exploration]),
        frames_per_batch=STEPS_PER_UPDATE,
        total_frames=-1,
        device="cpu",
        storing_device="cpu",
    )
    batches = iter(collector)

    def run(num_env_steps: int) -> None:
        for _ in range(num_env_steps // STEPS_PER_UPDATE):
            collected = next(batches).reshape(-1)
            replay.extend(collected)
            exploration.step(collected.numel())
            loss = loss_module(replay.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target_update.step()
            collector.update_policy_weights_()

    return run


def stable_baselines3_training_loop() -> TrainingLoop:
    """The DQN of stable-baselines3."""
    library = peer("stable_baselines3")
    model = library.DQN(
        "MlpPolicy",
        gymnasium.make(ENV),
        learning_rate=LEARNING_RATE,
        buffer_size=TRAINING_CAPACITY,
        learning_starts=0,
        batch_size=TRAINING_BATCH,
        gamma=GAMMA,
        train_freq=STEPS_PER_UPDATE,
        gradient_steps=1,
        target_update_interval=UPDATES_PER_COPY * STEPS_PER_UPDATE,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        policy_kwargs={"net_arch": list(HIDDEN_SIZES)},
        device="cpu",
    )
    return lambda num_env_steps: model.learn(num_env_steps, log_interval=None, reset_num_timesteps=False)


def our_training_loop(sampler: Callable[[], Any], *, compiled: bool) -> TrainingLoop:
    """A loop made of the parts of the recipes."""
    network = make_network()
    replay = CompilableReplayBuffer(
        storage=CompilableTensorStorage(TRAINING_CAPACITY), sampler=sampler(), batch_size=TRAINING_BATCH
    )
    loss_module = DQNLoss(
        QValueActor(network, in_keys=["observation"], action_space="categorical"),
        delay_value=True,
        action_space="categorical",
    )
    loss_module.make_value_estimator(gamma=GAMMA)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LEARNING_RATE, fused=True)

    @torch.inference_mode()
    def greedy(observation: np.ndarray) -> np.ndarray:
        return network(torch.from_numpy(observation)).argmax(-1).numpy()

    behaviour = EpsilonRandom(greedy, gymnasium.make(ENV).action_space, seed=0)
    collector = VectorCollector(
        [lambda: gymnasium.make(ENV)] * STEPS_PER_UPDATE, behaviour, frames_per_batch=STEPS_PER_UPDATE, seed=0
    )
    replay.extend(collector.collect())
    behaviour.epsilon = EPSILON

    compiled_update = CompiledUpdate(
        replay, loss_module, [optimizer], MAX_GRAD_NORM, targets=target_pairs(loss_module), extends=True
    )
    update = eager_update(replay, loss_module, [optimizer], MAX_GRAD_NORM)
    target_update = HardUpdate(loss_module, value_network_update_interval=UPDATES_PER_COPY)
    updates = 0

    def loop(num_env_steps: int) -> None:
        nonlocal updates
        for _ in range(num_env_steps // STEPS_PER_UPDATE):
            data = collector.collect()
            updates += 1
            if compiled:
                compiled_update(data, target_due=updates % UPDATES_PER_COPY == 0)
            else:
                replay.extend(data)
                update()
                target_update.step()

    return loop


def our_training_loops() -> dict[str, TrainingLoop]:
    """This package's loops: functions that run so many steps of the environment."""
    samplers: dict[str, Callable[[], Any]] = {
        "uniform": RandomSampler,
        "ProportionalSampler": lambda: ProportionalSampler(TRAINING_CAPACITY, alpha=ALPHA, beta=BETA),
        "ReaPERSampler": lambda: ReaPERSampler(TRAINING_CAPACITY, num_streams=STEPS_PER_UPDATE),
    }
    loops = {"recipe, eager, ProportionalSampler": our_training_loop(samplers["ProportionalSampler"], compiled=False)}
    return loops | {f"recipe, compiled, {k}": our_training_loop(v, compiled=True) for k, v in samplers.items()}


PEER_TRAINING: dict[str, Callable[[], TrainingLoop]] = {
    TRAINING_BASELINE: torchrl_training_loop,
    "stable-baselines3 DQN, uniform replay": stable_baselines3_training_loop,
}


def measure_training(loops: dict[str, TrainingLoop], env_steps: int) -> list[Row]:
    """Times chunks of steps; the first chunk of every loop is the warm-up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    chunk = min(STEPS_PER_CHUNK, env_steps) // STEPS_PER_UPDATE * STEPS_PER_UPDATE
    for number in tqdm(range(-1, env_steps // chunk), desc="training", leave=False):
        for name, loop in loops.items():
            start = time.process_time()
            loop(chunk)
            stop = time.process_time()
            if number >= 0:
                seconds[name].append((stop - start) / chunk)
    return [
        Row("training", TRAINING_CAPACITY, TRAINING_BATCH, name, 1e6 * statistics.median(values))
        for name, values in seconds.items()
    ]


# Results


def compare(rows: list[Row]) -> None:
    """Fills in `times_faster`, where the baseline was measured."""
    baselines = {
        (row.measurement, row.batch_size): row.microseconds
        for row in rows
        if row.contender in (REPLAY_BASELINE, TRAINING_BASELINE)
    }
    for row in rows:
        baseline = baselines.get((row.measurement, row.batch_size))
        row.times_faster = baseline / row.microseconds if baseline is not None else None


def print_table(rows: list[Row]) -> None:
    """Prints a line per row."""
    width = max(len(row.contender) for row in rows)
    print(f"{'measured':<8} {'capacity':>9} {'batch':>6}  {'contender':<{width}} {'µs':>8} {'times faster':>13}")
    for row in rows:
        ratio = "-" if row.times_faster is None else f"{row.times_faster:.2f}"
        print(
            f"{row.measurement:<8} {row.capacity:>9} {row.batch_size:>6}  {row.contender:<{width}} "
            f"{row.microseconds:>8.1f} {ratio:>13}"
        )


def write_csv(rows: list[Row], path: Path) -> None:
    """Writes a line per row."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Row)])
        writer.writerows(astuple(row) for row in rows)


def plot(rows: list[Row], path: Path) -> None:
    """Draws a panel per measurement and batch size, a bar per contender."""
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.measurement, row.batch_size), []).append(row)
    heights = [len(panel) + 2 for panel in panels.values()]
    figure = Figure(figsize=(9, 0.32 * sum(heights) + 0.3), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, ((measurement, batch_size), panel) in zip(all_axes, panels.items(), strict=True):
        colors = ["tab:grey" if row.contender in (REPLAY_BASELINE, TRAINING_BASELINE) else "tab:blue" for row in panel]
        bars = axes.barh([row.contender for row in panel], [row.microseconds for row in panel], color=colors, log=True)
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.invert_yaxis()
        times = [row.microseconds for row in panel]
        axes.set_xlim(10 ** np.floor(np.log10(min(times) / 1.1)), 2 * max(times))
        axes.xaxis.set_minor_formatter(NullFormatter())
        what = "one cycle" if measurement == "replay" else "CPU time of one environment step"
        axes.set(title=f"{measurement}, batch {batch_size}", xlabel=f"{what} in µs, lower is better")
    figure.savefig(path, dpi=120)


def versions() -> str:
    """The versions of the libraries that are installed, and the CPU."""
    found = []
    for library in LIBRARIES + PEERS:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{', '.join(found)}; {cpu_model()}"


def cpu_model() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def positive(text: str) -> int:
    """An option's number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmark", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--capacity", type=positive, default=1_000_000, help="of the replay buffers [%(default)s]")
    parser.add_argument("--batch-sizes", type=positive, nargs="+", default=[32, 256], help="[32 256]")
    parser.add_argument("--cycles", type=positive, default=1000, help="replay cycles per batch size [%(default)s]")
    parser.add_argument("--env-steps", type=positive, default=10_000, help="steps per training loop [%(default)s]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only contenders whose names begin so")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="directory of the files [%(default)s]")
    parser.add_argument("--skip-training", action="store_true", help="time the replay buffers only")
    options = parser.parse_args(arguments)
    if options.capacity < max(2, *options.batch_sizes):
        parser.error(f"argument --capacity: {options.capacity} is less than a batch")
    if options.env_steps < STEPS_PER_UPDATE:
        parser.error(f"argument --env-steps: {options.env_steps} is less than the {STEPS_PER_UPDATE} of an update")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {error}")

    logging.getLogger("torchrl").setLevel(logging.WARNING)  # its notes would tear the progress bar
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries'
            run(options, parser)
    finally:
        torch.set_num_threads(threads)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Measures what the options ask for, prints the table and writes the files."""
    peers, ours = ({}, {}) if options.skip_training else (PEER_TRAINING, our_training_loops())
    names = [*(contender.name for contender in REPLAY), *peers, *ours]
    prefixes = names if options.only is None else options.only
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            parser.error(f"argument --only: no contender begins with {prefix!r}; there are: {'; '.join(names)}")

    def wanted(name: str) -> bool:
        return name.startswith(tuple(prefixes))

    with torch.no_grad():
        contenders = [contender for contender in REPLAY if wanted(contender.name)]
        rows, notes = measure_replay(contenders, options.capacity, options.batch_sizes, options.cycles)
    loops: dict[str, TrainingLoop] = {}
    for name, make in peers.items():
        if wanted(name):
            try:
                loops[name] = make()
            except LeftOutError as error:
                notes.append(f"{name} is left out: {error}.")
    loops |= {name: loop for name, loop in ours.items() if wanted(name)}
    rows += measure_training(loops, options.env_steps)
    for note in notes:
        print(note)
    if not rows:
        parser.error("argument --only: nothing is left to measure")

    compare(rows)
    print(
        f"Microseconds, one thread. replay: a sample and an update, median of {options.cycles} cycles. "
        f"training: CPU time of an environment step, {options.env_steps} steps, an update per {STEPS_PER_UPDATE}."
    )
    print_table(rows)
    print(versions())
    table, figure = options.out / "benchmark.csv", options.out / "benchmark.png"
    write_csv(rows, table)
    plot(rows, figure)
    print(table, figure)


if __name__ == "__main__":
    main()
