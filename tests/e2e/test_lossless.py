"""Whatever the drafter, the text is the target's: greedy token for token, sampled by distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e import checks
from tests.e2e.conftest import Fleet, text_prompts, walk_prompts
from tests.e2e.servers import Worker

TOKENS = 40
PROMPTS = [*walk_prompts(60), *text_prompts(40)]


def test_greedy_text_equals_plain_decoding_with_a_random_and_a_trained_drafter(fleet: Fleet, plain: Worker) -> None:
    want = plain.greedy(PROMPTS, TOKENS)
    for drafter in ("random", "good"):
        fleet.run(drafter)
        assert fleet.worker.greedy(PROMPTS, TOKENS) == want


def test_greedy_text_equals_plain_decoding_while_drafters_are_swapped(fleet: Fleet, plain: Worker) -> None:
    want = plain.greedy(PROMPTS, TOKENS)
    numbers = [fleet.publish(d) for d in ("good", "random", "weak", "good")]
    swaps, spanned = fleet.serve_during_swaps(PROMPTS, want, TOKENS, numbers)
    assert swaps >= 3
    assert spanned >= 1, "no request lived through a swap; the test proved nothing"


def test_requests_of_every_kind_answer_as_plain_ones(fleet: Fleet, plain: Worker) -> None:
    fleet.run("good")
    checks.everything(fleet.worker, plain)


def test_sampled_tokens_have_the_targets_distribution(fleet: Fleet, plain: Worker) -> None:
    fleet.run("good")
    checks.sampling_has_the_targets_distribution(fleet.worker, plain, 5000)


@pytest.mark.parametrize("verify", ["static", "shadow"])
@pytest.mark.parametrize("drafter", ["narrow", "wide"])
def test_other_widths_keep_the_text_and_the_distribution(
    start: Callable, plain: Worker, drafter: str, verify: str
) -> None:
    """Blocks of 2 and 16; adaptive ones are in `test_adaptive.py`."""
    with start(f"{verify}-{drafter}", drafter, verify) as other:
        checks.everything(other.worker, plain)
        checks.sampling_has_the_targets_distribution(other.worker, plain)
        checks.swaps_keep_the_text(other, plain, f"{drafter}-weak", drafter)
