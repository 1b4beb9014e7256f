"""Plots learning curves and studies: `python -m recipes.plot`, see recipes/studies/plot.py."""

from recipes.studies.plot import main

if __name__ == "__main__":
    main()
