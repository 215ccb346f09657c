"""Few cases that cover every pair of values of any two factors, instead of every combination."""

import itertools
import random


def all_pairs(**factors):
    """Returns dictionaries of one value for each factor; each pair of values occurs in one."""
    names = list(factors)
    uncovered = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    generator, cases = random.Random(0), []
    while uncovered:
        tries = []
        for _ in range(20):
            (a, i), (b, j) = generator.choice(sorted(uncovered))
            case = {a: i, b: j}
            for name in generator.sample(names, len(names)):
                if name not in case:
                    case[name] = max(
                        range(len(factors[name])),
                        key=lambda value, name=name: (
                            sum(
                                pair in uncovered for pair in _pairs_with(case, name, value, names)
                            ),
                            generator.random(),
                        ),
                    )
            covered = {pair for pair in _pairs(case, names) if pair in uncovered}
            tries.append((len(covered), len(tries), case, covered))
        _, _, case, covered = max(tries)
        uncovered -= covered
        cases.append({name: factors[name][case[name]] for name in names})
    return cases


def _pairs(case, names):
    return [((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2)]


def _pairs_with(case, name, value, names):
    order = names.index(name)
    for other, chosen in case.items():
        pair = ((name, value), (other, chosen))
        yield pair if order < names.index(other) else pair[::-1]


def text(case):
    """Returns a short name of a case, for test ids."""
    return "-".join(str(value).replace(" ", "") for value in case.values())
