"""Runs a study: `python -m recipes.study study=<name>`, see recipes/studies/study.py."""

from recipes.common.cli import run_recipe

if __name__ == "__main__":
    run_recipe("study", "recipes.studies.study", "run_study")
