"""Another name of recipes.studies.curves, with the intervals of recipes.studies.intervals."""

from recipes.studies.curves import *  # noqa: F403
from recipes.studies.intervals import difference_interval as difference_interval
from recipes.studies.intervals import ratio_interval as ratio_interval
