"""Another name of recipes.studies.curves."""

from recipes.studies.curves import *  # noqa: F403
