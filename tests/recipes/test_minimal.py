"""The recipes of one file each: what they import, their updates, their target networks, and what they reach."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torchrl.objectives import DQNLoss, SACLoss, TD3Loss

from tests.recipes.runs import copies

FOLDER = Path(__file__).parents[2] / "recipes" / "minimal"
RECIPES = ("dqn", "sac", "td3", "acer")
# few frames and updates; each recipe evaluates once in the course of training
SMALL = {
    "dqn": {"FRAMES_PER_BATCH": 20, "UPDATES": 3, "LEARNING_STARTS": 60, "EVALUATION_INTERVAL": 80},
    "sac": {"FRAMES_PER_BATCH": 2, "LEARNING_STARTS": 96, "EVALUATION_INTERVAL": 98},
    "td3": {"FRAMES_PER_BATCH": 2, "LEARNING_STARTS": 96, "EVALUATION_INTERVAL": 98},
    "acer": {"FRAMES_PER_BATCH": 40, "EVALUATION_INTERVAL": 80},
}
FRAMES = {"dqn": 100, "sac": 100, "td3": 100, "acer": 120}
# rounds at 60, 80 and 100 frames; at 96, 98 and 100 frames, two updates each
BATCHES = {"dqn": 9, "sac": 6, "td3": 6}
# targets are updated after each round; after each update; after each second update of the critics
TARGET_STEPS = {"dqn": 3, "sac": 6, "td3": 3}
TARGETS = {"dqn": ["value"], "sac": ["qvalue"], "td3": ["actor", "qvalue"], "acer": ["actor"]}
# losses and their methods, and whether importance weights reach them
LOSSES = {
    "dqn": [(DQNLoss, "forward", True)],
    "sac": [(SACLoss, "qvalue_v2_loss", True), (SACLoss, "actor_loss", False)],
    "td3": [(TD3Loss, "value_loss", True), (TD3Loss, "actor_loss", False)],
}
SHARE = {"dqn": 1.0, "sac": 0.02, "td3": 0.02, "acer": 0.01}  # of the network that enters its target
LAST_LINE = r"(CartPole-v1|Pendulum-v1): mean return (-?[\d.]+) of (\d+) episodes after ([\d,]+) frames, \d+ s"
SOLVED = {"CartPole-v1": 475.0, "Pendulum-v1": -200.0}


class Watched:
    """A recipe with few updates, which are counted and checked."""

    def __init__(self, name, monkeypatch):
        self.name, self.module = name, importlib.import_module(f"recipes.minimal.{name}")
        self.count, self.buffer = Counter(), None
        for constant, value in SMALL[name].items():
            assert hasattr(self.module, constant)
            monkeypatch.setattr(self.module, constant, value)
        monkeypatch.setattr(self.module, "EPISODES", 1)
        updater = "HardUpdate" if name == "dqn" else "SoftUpdate"
        monkeypatch.setattr(self.module, updater, self.watch_targets(getattr(self.module, updater)))
        monkeypatch.setattr(self.module, "CompilableReplayBuffer", self.watch_buffer())
        for loss, method, weighted in LOSSES.get(name, ()):
            monkeypatch.setattr(loss, method, self.watch_weights(getattr(loss, method), weighted))

    def watch_targets(self, updater):
        def make(loss_module, **settings):
            made, self.loss_module = updater(loss_module, **settings), loss_module
            step, share = made.step, SHARE[self.name]
            for value in values("target_") if self.name == "dqn" else ():
                if len(value) == 2:  # of the last layer, so that the target network prefers the other action
                    value.data.neg_()
            self.before = [value.detach().clone() for value in loss_module.parameters()]

            def checked_step():
                before, online = copies(values("target_")), copies(values(""))
                step()
                for old, new, now in zip(before, online, values("target_"), strict=True):
                    torch.testing.assert_close(now, (1 - share) * old + share * new)
                    self.count["targets that moved"] += not torch.equal(now, old)
                self.count["target steps"] += 1

            made.step = checked_step
            return made

        def values(prefix):
            params = (getattr(self.loss_module, f"{prefix}{name}_network_params") for name in TARGETS[self.name])
            return [value for each in params for value in each.flatten_keys().values()]

        return make

    def watch_weights(self, method, weighted):
        """The weights that were drawn reach the losses of values, and no loss of a policy."""

        def call(loss_module, batch):
            if not torch.compiler.is_compiling():
                weight = batch.get("priority_weight", None)
                assert torch.equal(weight, self.drawn["priority_weight"]) if weighted else weight is None
                self.count[method.__name__] += 1
            return method(loss_module, batch)

        return call

    @torch.no_grad()
    def td_errors(self, batch):
        """What the loss must write to "td_error", with the networks of this moment."""
        loss_module, following = self.loss_module, batch["next"]
        if self.name == "dqn":
            network = loss_module.value_network
            with loss_module.value_network_params.to_module(network):
                chosen = network(batch.clone())["action_value"].gather(-1, batch["action"].unsqueeze(-1))
                best = network(following.clone())["action"].unsqueeze(-1)
            with loss_module.target_value_network_params.to_module(network):
                values = network(following.clone())["action_value"]
            self.count["other actions"] += int((values.argmax(-1, keepdim=True) != best).sum())
            target = following["reward"] + 0.99 * ~following["terminated"] * values.gather(-1, best)
            return (target - chosen).square()
        errors = []
        for parameters in loss_module.qvalue_network_params.unbind(0):
            with parameters.to_module(loss_module.qvalue_network):
                errors.append(following["reward"] - loss_module.qvalue_network(batch.clone())["state_action_value"])
        largest = torch.stack(errors).abs().amax(0)
        return largest if self.name == "sac" else largest.square()

    def watch_buffer(self):
        watched = self

        class Buffer(self.module.CompilableReplayBuffer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                if watched.buffer is None:  # the other one is for the actor's batches
                    watched.buffer = self

            def sample(self, *args, **kwargs):
                batch = super().sample(*args, **kwargs)
                if not torch.compiler.is_compiling():  # graphs do not count
                    watched.count["batches" if self is watched.buffer else "batches of the actor"] += 1
                    if self is watched.buffer and watched.name != "acer":
                        if watched.name != "dqn":  # then the targets are the rewards
                            batch["next", "terminated"].fill_(True)
                        watched.drawn, watched.expected = batch.clone(), watched.td_errors(batch)
                return batch

            def update_tensordict_priority(self, batch):
                if not torch.compiler.is_compiling():
                    watched.count["priority updates"] += 1
                    torch.testing.assert_close(batch["td_error"].flatten(), watched.expected.flatten())
                    assert torch.equal(batch["index"], watched.drawn["index"])
                super().update_tensordict_priority(batch)

        return Buffer

    def run(self, *words):
        return self.module.main(["--frames", str(FRAMES[self.name]), *words])


@pytest.fixture(params=RECIPES)
def recipe(request, monkeypatch):
    return Watched(request.param, monkeypatch)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_one_short_file_of_few_libraries(name):
    code = (FOLDER / f"{name}.py").read_text()
    nodes = list(ast.walk(ast.parse(code)))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    libraries = {module.partition(".")[0] for module in imported} - set(sys.stdlib_module_names)
    assert libraries <= {"torch", "torchrl", "tensordict", "gymnasium", "tqdm", "torchrl_replay_ext"}
    assert len([line for line in code.splitlines() if line.strip() and line.strip()[0] != "#"]) <= 170


def test_a_short_run_updates_the_networks_and_says_what_it_reached(recipe, capsys):
    result = recipe.run()
    name, count = recipe.name, recipe.count
    frames = FRAMES[name]
    assert len(recipe.buffer) == recipe.buffer.write_count == frames
    if name == "acer":
        # an update on the newest steps after each 40 frames, and replayed updates
        assert count["target steps"] == 3 + count["batches"] and count["batches"] > 0
        assert not count["priority updates"]
    else:
        assert count["target steps"] == TARGET_STEPS[name] and count["batches"] == BATCHES[name]
        assert count["priority updates"] == BATCHES[name]
        assert count["batches of the actor"] == (3 if name == "td3" else 0)
        stats = recipe.buffer.sampler.stats()
        assert stats["rejected_updates"] == 0 and stats["never_updated"] < 1
        assert all(count[method] for _, method, _ in LOSSES[name])
        assert count["other actions"] > 100 or name != "dqn"
    assert count["targets that moved"]
    learned = zip(recipe.before, recipe.loss_module.parameters(), strict=True)
    assert not any(torch.equal(before, after) for before, after in learned)
    said = re.fullmatch(LAST_LINE, capsys.readouterr().out.splitlines()[-1])
    assert said and float(said[2]) == pytest.approx(result, abs=0.06)
    assert said[3] == "1" and said[4] == str(frames)


def test_the_update_of_dqn_as_one_graph(monkeypatch):
    recipe = Watched("dqn", monkeypatch)
    recipe.run("--compile")
    assert recipe.count["target steps"] == 3
    stats = recipe.buffer.sampler.stats()
    assert stats["rejected_updates"] == 0 and stats["never_updated"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "torch"])
@pytest.mark.parametrize("name", RECIPES)
def test_updates_as_one_graph(name, how):
    """In processes of their own: --compile torch sets an option of torch."""
    command = [sys.executable, "-m", f"recipes.minimal.{name}", "--frames", "1200", "--compile", how]
    result = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, text=True, check=True)
    assert re.fullmatch(LAST_LINE, result.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_solves_its_task(name, tmp_path):
    """Run as a file from another folder, as a user would."""
    command = [sys.executable, FOLDER / f"{name}.py", "--compile"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = re.fullmatch(LAST_LINE, result.stdout.splitlines()[-1])
    assert said and float(said[2]) >= SOLVED[said[1]]
