"""Training recipes: run them from the repository root, `python -m recipes.<name>`."""
