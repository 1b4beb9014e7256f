"""Trains each recipe on the emulated accelerator and prints what became of it, as JSON.

    python -m tests.recipes.emulated_runs DIRECTORY

A program of its own, because the emulated device computes gradients only in a process that made none before.
"""

import json
import math
import sys
import traceback
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch

from recipes.common import run as training
from tests.emulated_device import NAME, EmulatedDevice, leave
from tests.recipes.runs import composed, noted_replays, rows, tiny

SHORT = {"total_steps": 32, "learning_starts": 16, "num_evaluations": 1}
ACER = tiny("acer", **SHORT | dict.fromkeys(["train_interval", "learning_starts", "gradient_steps"]), slice_len=4)
# the recipe, and overrides of its configuration
RUNS = {
    "dqn": ("dqn", [*tiny("dqn", **SHORT), "sampler=per"]),
    "dqn, event tables": (
        "dqn",
        [*tiny("dqn", buffer_size=1000, **SHORT), "env=threerooms", "sampler=sset_per", "num_envs=2"],
    ),
    "td3, decoupled": ("td3", [*tiny("td3", **SHORT), "sampler=dper"]),
    "sac": ("sac", [*tiny("sac", **SHORT), "sampler=reaper"]),
    "acer": ("acer", [*ACER, "num_envs=4", "sampler=rank"]),
    "acer, continuous": ("acer", [*ACER, "num_envs=4", "env=pendulum", "sampler=per"]),
}


def train(recipe: str, overrides: list[str], run_dir: Path) -> dict[str, object]:
    """Train a recipe; return its exit code, the storage's device, and whether priorities and losses are sound."""
    with patch.object(training, "find_device", lambda _: torch.device(NAME)), noted_replays() as replays:
        code = import_module(f"recipes.{recipe}").train(composed(recipe, *overrides), run_dir)
    last = rows(run_dir)[-1]
    losses = [float(value) for key, value in last.items() if key.startswith("loss")]
    return {
        "code": code,
        "device": replays[0].storage.device.type,
        "updated": float(replays[0].sampler.stats()["never_updated"]) < 1,
        "losses": bool(losses) and all(math.isfinite(loss) for loss in losses),
    }


def main() -> None:
    """Print the results of all runs."""
    results = {}
    with EmulatedDevice():
        for name, (recipe, overrides) in RUNS.items():
            run_dir = Path(sys.argv[1]) / name
            try:
                results[name] = train(recipe, overrides, run_dir)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    print(f"\n{json.dumps(results)}")
    leave()


if __name__ == "__main__":
    main()
