"""One timer for all deadlines: each is told once, at its time, unless it ended before."""

import time

from patience import until

from hortus.deadlines import EARLY_S, Deadlines


async def test_each_is_told_once_in_time_and_the_discarded_are_not():
    told: dict[str, float] = {}
    deadlines: Deadlines[str] = Deadlines(lambda key: told.setdefault(key, time.monotonic()))
    begin = time.monotonic()
    for key, after_s in ("never", 3600.0), ("second", 0.06), ("gone", 0.02), ("first", 0.03), ("past", -1.0):
        deadlines.add(key, begin + after_s)
    deadlines.discard("gone")
    deadlines.discard("unknown")
    await until(lambda: len(told) == 3)
    assert set(told) == {"past", "first", "second"}
    assert told["first"] - begin >= 0.03 - EARLY_S
    assert told["second"] - begin >= 0.06 - EARLY_S
    assert len(deadlines) == 1
    deadlines.add("soon", time.monotonic() + 0.01)  # sooner than what the timer was set for
    await until(lambda: "soon" in told)


async def test_those_who_end_one_another_are_told_once():
    told = []
    deadlines: Deadlines[int] = Deadlines(lambda key: (told.append(key), deadlines.discard(1 - key)))
    for key in (0, 1):
        deadlines.add(key, time.monotonic())
    await until(lambda: not len(deadlines))
    assert told == [0]
