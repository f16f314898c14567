"""Retry-After: neither a minute at a server that is idle by then, nor a second at one that is busy for long."""

import pytest

from hortus.tulip.pace import Pace


@pytest.mark.parametrize(
    ("steps", "tokens", "seconds"),
    [
        ([], 10**6, 1.0),
        ([(4000, 1.0)] * 3, 100, 1.0),
        ([(4000, 1.0)] * 3, 20_000, 5.0),
        ([(4000, 1.0)] * 3, 10**9, 60.0),
        # Ten requests of some words, then bulk: the small steps tell 500 tokens/s of an engine that gives thousands.
        ([(4, 0.008)] * 10, 16_000, 5.0),
        ([(4, 0.008)] * 10 + [(4000, 1.0)], 16_000, 4.0),
        ([(4000, 1.0)] + [(4, 0.008)] * 63, 16_000, 4.0),
        # Long ago, another load.
        ([(4000, 0.1)] + [(4000, 1.0)] * 64, 16_000, 4.0),
        ([(100, 0.0)], 100, 1.0),
    ],
)
def test_the_best_of_the_latest_steps_counts(steps, tokens, seconds):
    pace = Pace(4096)
    for step in steps:
        pace.note(*step)
    assert pace.seconds(tokens) == pytest.approx(seconds)
