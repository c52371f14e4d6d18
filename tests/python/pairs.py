"""Combinations of parameters in which all values of any two parameters meet."""

import itertools


def pairs(**values):
    """The arguments of `pytest.mark.parametrize` for a subset of all combinations of values.

    Every two values of different parameters are together in at least one combination. The subset is that of a greedy
    search, so it is the same on every run.
    """
    combinations = list(itertools.product(*(range(len(some)) for some in values.values())))

    def meetings(combination):
        return set(itertools.combinations(enumerate(combination), 2))

    missing, chosen = set().union(*map(meetings, combinations)), []
    while missing:
        chosen.append(max(combinations, key=lambda combination: len(meetings(combination) & missing)))
        missing -= meetings(chosen[-1])
    lists = list(values.values())
    return ", ".join(values), [tuple(some[i] for some, i in zip(lists, one, strict=True)) for one in sorted(chosen)]
