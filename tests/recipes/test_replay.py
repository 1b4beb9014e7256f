"""Samplers that give the actor batches of its own, in the recipes."""

import pytest
from omegaconf import OmegaConf

from recipes.common.files import CONF
from tests.recipes.runs import Recipe, composed, tiny

TINY = {"total_steps": 64, "batch_size": 16, "num_evaluations": 2, "hidden_sizes": "[16, 16]"}


@pytest.mark.parametrize(
    ("recipe", "sampler"),
    [
        ("td3", "sampler=dper"),
        ("td3", "sampler=dper_uniform"),
        ("sac", "sampler=dper"),
        ("td3", "+sampler.group_size=4 sampler=dper sampler.granularity=group"),
        ("sac", "sampler=dper sampler.critic={name:rank}"),
    ],
)
def test_the_actor_learns_from_batches_of_its_own(tmp_path, recipe, sampler):
    last = Recipe(recipe, tiny(recipe, **TINY)).run(tmp_path, *sampler.split())[-1]
    assert float(last["sampler/actor_score"]) <= float(last["sampler/actor_candidate_score"])
    assert ("sampler/max_priority" in last) == ("uniform" not in sampler)


@pytest.mark.parametrize("name", ["uniform", "reaper", "lap", "sset_per"])
def test_the_sampler_of_the_critic_has_the_settings_in_its_file(name):
    preset = OmegaConf.to_container(OmegaConf.load(CONF / "sampler" / f"{name}.yaml"))
    huber = ["td3.loss_function=smooth_l1"] * (name == "lap")
    events = "+env.events.fast={history: 5, eta: 0.5, above: 4.0}"
    for choice in (f"sampler.critic.name={name}", f"sampler.critic={{name: {name}}}"):
        config = composed("td3", "sampler=dper", choice, *huber, "env=halfcheetah", events)
        assert config.sampler["critic"] == preset


def test_options_of_the_critics_sampler_replace_those_in_its_file(tmp_path):
    words = ["sampler=dper", "sampler.critic.name=reaper", "+sampler.critic.beta.start=0.5", "+sampler.critic.eps=1e-3"]
    Recipe("td3", tiny("td3", **TINY)).run(tmp_path, *words)
    saved = OmegaConf.load(tmp_path / "config.yaml").sampler.critic
    assert saved == {"name": "reaper", "alpha": 0.4, "omega": 0.2, "beta": {"start": 0.5, "end": 1.0}, "eps": 1e-3}
