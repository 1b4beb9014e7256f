"""Recipes: run them from the repository root, `python -m recipes.<name>`. README.md is their index."""
