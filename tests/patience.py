"""For tests whose claim is about time: a machine that stalls for a second must not fail them."""

import pytest

timed = pytest.mark.flaky(reruns=4, only_rerun=["AssertionError"])
"""What the code can do shows in the best of several tries; a stall of the machine only ever makes one worse."""
