"""Decides the claims of the sources from the published runs, and makes the tables of the results page.

    python -m recipes.studies.claims            # writes both tables into recipes/results/README.md

recipes/results/claims.yaml lists the claims. The rule: a comparison is decided if its p value, corrected by Holm's
method for all comparisons of one source, is below 0.05. It then is "yes" if the difference has the direction that the
claim expects, and "no" if it has the other one. A claim that two variants are the same is "yes" if no run is censored
and the 95 % interval lies within a quarter of 1. Everything else is "inconclusive".
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from recipes.common.files import atomic_write, markdown
from recipes.studies import intervals
from recipes.studies.report import (
    Study,
    bound_of,
    censored_of,
    format_p_value,
    format_ratio,
    last_value,
    p_value_of,
    pool,
    read_study,
    steps_of,
)

RESULTS = Path(__file__).parents[1] / "results"
ALPHA = 0.05
SAME = (0.8, 1.25)
YES, NO, OPEN = "yes", "no", "inconclusive"


@cache
def _study(name: str) -> Study:
    return read_study(RESULTS / name)


@dataclass
class Comparison:
    """The comparison of a variant with another one, and what a claim expects of it.

    Args:
        name: its name in a row with several comparisons.
        pairs: numbers of (other, variant) for each seed, [n, 2].
        censored: whether these runs did not reach the threshold, [n, 2]; None: the numbers are last returns.
        expect: "less", "more" or "same"; None: an open question.
        number: the ratio that the source gives; NaN: none.
        spread: whether the standard deviations of last returns over the seeds are compared instead of their means.
    """

    name: str
    pairs: np.ndarray
    censored: np.ndarray | None
    expect: str | None
    number: float
    spread: bool = False
    adjusted: float = np.nan

    @property
    def p_value(self) -> float:
        """The p value, not corrected."""
        if self.spread:
            return intervals.spread_p_value(self.pairs)
        if self.censored is None:
            return intervals.paired_p_value(self.pairs[:, 1] - self.pairs[:, 0])
        return p_value_of(self.pairs, self.censored)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the ratio, or of the difference of last returns."""
        make = intervals.difference_interval if self.censored is None else intervals.ratio_interval
        return make(self.pairs[:, 1], self.pairs[:, 0])

    @property
    def verdict(self) -> str:
        """By the rule of this module."""
        if self.expect is None:
            return OPEN
        low, high = self.interval
        decided = self.adjusted < ALPHA
        if self.expect == "same":
            return NO if decided else YES if SAME[0] < low and high < SAME[1] and not bound_of(self.censored) else OPEN
        mean = np.std if self.spread else np.mean
        other, ours = mean(self.pairs if self.censored is None else np.log(self.pairs), axis=0)
        return OPEN if not decided else YES if (ours < other) == (self.expect == "less") else NO

    @property
    def text(self) -> str:
        """What was found."""
        if self.spread:
            found = "SD {1:.1f} against {0:.1f}".format(*self.pairs.std(0, ddof=1))
        elif self.censored is None:
            mean = (self.pairs[:, 1] - self.pairs[:, 0]).mean()
            form = "{:.2f}" if np.abs(self.pairs).max() < 10 else "{:.1f}"
            found = f"{form} [{form}, {form}]".format(mean, *self.interval)
        else:
            found = format_ratio(self.pairs, self.censored)
        (low, high), bound = self.interval, bound_of(self.censored)
        if (self.number < low and bound in ("", "≥")) or (self.number > high and bound in ("", "≤")):
            found += f", which excludes {self.number:g}"
        return f"{self.name}: {found}" if self.name else found


def compare(row: dict[str, Any]) -> Comparison:
    """The comparison that a row of claims.yaml describes; several studies are pooled."""
    study = pool([_study(name) for name in names_of(row)])
    study = replace(study, config=replace(study.config, baseline=row["than"]))
    where, spread, number = (row["env"], row["variant"]), bool(row.get("spread")), row.get("number", np.nan)
    if spread or row.get("last"):
        of, censored = partial(last_value, column=row.get("column", study.config.column)), None
    else:
        of, censored = steps_of, study.pairs(*where, censored_of)
    return Comparison(row.get("as", ""), study.pairs(*where, of), censored, row["expect"], number, spread)


def names_of(row: dict[str, Any]) -> list[str]:
    """The studies of a row of claims.yaml."""
    return [row["study"]] if isinstance(row["study"], str) else row["study"]


def decide(claims: Sequence[dict[str, Any]]) -> list[list[Comparison]]:
    """The comparisons of each claim, corrected for all comparisons of its source."""
    found = [[compare(row) for row in claim.get("compare", [])] for claim in claims]
    for source in {claim["source"] for claim in claims}:
        of = [each for claim, row in zip(claims, found, strict=True) if claim["source"] == source for each in row]
        of = [each for each in of if each.expect is not None]
        if of:
            p_values = np.nan_to_num([each.p_value for each in of], nan=1.0)
            for each, adjusted in zip(of, intervals.holm(p_values.tolist()), strict=True):
                each.adjusted = float(adjusted)
    return found


def verdict_of(comparisons: Sequence[Comparison]) -> str:
    """The verdicts of a claim: one word if all agree, else the names of those with each."""
    verdicts = [each.verdict for each in comparisons]
    if len({*verdicts}) == 1:
        return verdicts[0]
    of = {word: [str(i + 1) for i, each in enumerate(verdicts) if each == word] for word in (YES, NO, OPEN)}
    return "; ".join(f"{word}: {', '.join(numbers)}" for word, numbers in of.items() if numbers)


def claims_table(claims: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a row per claim."""
    lines = []
    for claim, comparisons in zip(claims, decide(claims), strict=True):
        if comparisons:
            texts = [f"({i + 1}) " * (len(comparisons) > 1) + each.text for i, each in enumerate(comparisons)]
            sizes = [len(each.pairs) for each in comparisons]
            seeds = ", ".join(str(size) for size, _ in groupby(sizes))
            smallest = min((each.adjusted for each in comparisons if not np.isnan(each.adjusted)), default=np.nan)
            cells, verdict = ("; ".join(texts), seeds, format_p_value(smallest)), verdict_of(comparisons)
            data = [f"{name}/table.md" for name in dict.fromkeys(chain(*map(names_of, claim["compare"])))]
        else:
            cells, verdict, data = (claim["found"], claim["seeds"], ""), claim["verdict"], claim.get("data", [])
        note = claim.get("note")
        titles = [Path(path).stem if path[0] == "." else Path(path).parent.name or Path(path).stem for path in data]
        links = ", ".join(f"[{title}]({path})" for title, path in zip(titles, data, strict=True))
        source = "our question" if claim["source"] == "ours" else claim["source"]
        verdict += f" ({note})" * bool(note)
        lines.append((f"{source}, {claim['where']}", claim["claim"], *cells, verdict, links))
    return markdown(("source", "claim", "found here", "seeds", "smallest p", "reproduced?", "data"), lines)


def aggregates_table(aggregates: Sequence[dict[str, Any]]) -> str:
    """A Markdown table with a row per comparison over several tasks."""
    lines = []
    for row in aggregates:
        found = [compare({"expect": None, **row, **task}) for task in row["tasks"]]
        tasks = {str(i): each.pairs for i, each in enumerate(found)}
        bound = bound_of(np.concatenate([each.censored for each in found if each.censored is not None]))
        of_tasks = [intervals.geometric_mean_ratio(pairs) for pairs in tasks.values()]
        ratio, share = intervals.aggregate_ratio(tasks), intervals.probability_of_improvement(tasks)
        sizes = sorted({len(pairs) for pairs in tasks.values()})
        lines.append(
            (
                row["as"],
                str(len(tasks)),
                " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1])))),
                "{} {:.2f} [{:.2f}, {:.2f}]".format(bound, *ratio).strip(),
                f"{min(of_tasks):.2f} to {max(of_tasks):.2f}",
                "{:.2f} [{:.2f}, {:.2f}]".format(*share),
            )
        )
    return markdown(("", "tasks", "seeds", "ratio of steps", "of each task", "probability of fewer steps"), lines)


def tables() -> dict[str, str]:
    """The tables by name."""
    config: Any = OmegaConf.to_container(OmegaConf.load(RESULTS / "claims.yaml"))
    return {"claims": claims_table(config["claims"]), "aggregates": aggregates_table(config["aggregates"])}


def inserted(page: str, made: dict[str, str]) -> str:
    """The page with each table between its two marks, <!-- begin NAME --> and <!-- end NAME -->."""
    for name, table in made.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Write the tables into the results page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    path = RESULTS / "README.md"
    page = inserted(path.read_text(encoding="utf-8"), tables())
    with atomic_write(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    print(f"tables written to {path}")


if __name__ == "__main__":
    main()
