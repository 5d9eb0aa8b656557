"""Chain speculative sampling emits the target's distribution, whatever was drafted."""

import pytest
import torch

from serving.sglang_cpu.hooks import accept_chain, assign_slots, copy_kv, sample_chain

VOCAB, DRAFTS, RUNS = 6, 3, 40_000


def distributions(seed):
    g = torch.Generator().manual_seed(seed)
    target = torch.softmax(2 * torch.randn(DRAFTS + 1, VOCAB, generator=g), -1)
    draft = torch.softmax(2 * torch.randn(DRAFTS, VOCAB, generator=g), -1)
    return target, draft, g


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("one_hot", [False, True])
def test_the_first_emitted_token_is_distributed_as_the_targets(seed, one_hot):
    target, draft, g = distributions(seed)
    if one_hot:
        draft = torch.nn.functional.one_hot(draft.argmax(-1), VOCAB).float()
    drafts = torch.stack([torch.multinomial(q, RUNS, True, generator=g) for q in draft], 1)
    count, last = accept_chain(
        drafts,
        target.expand(RUNS, -1, -1),
        draft.expand(RUNS, -1, -1),
        torch.rand(RUNS, DRAFTS, generator=g),
        torch.rand(RUNS, generator=g),
    )
    first = torch.where(count > 0, drafts[:, 0], last)
    seen = torch.bincount(first, minlength=VOCAB) / RUNS
    assert (seen - target[0]).abs().max() < 4 * (0.25 / RUNS) ** 0.5


def test_equal_distributions_accept_everything_and_impossible_drafts_nothing():
    target, _, g = distributions(0)
    drafts = torch.stack([torch.multinomial(p, 100, True, generator=g) for p in target[:DRAFTS]], 1)
    coins, final = torch.rand(100, DRAFTS, generator=g), torch.rand(100, generator=g)
    batch = target.expand(100, -1, -1)
    assert accept_chain(drafts, batch, batch[:, :DRAFTS], coins, final)[0].eq(DRAFTS).all()
    barred = batch.clone()
    barred[:, 0].scatter_(-1, drafts[:, :1], 0.0)
    count, last = accept_chain(drafts, barred, torch.ones_like(barred[:, :DRAFTS]) / VOCAB, coins, final)
    assert count.eq(0).all()
    assert not last.eq(drafts[:, 0]).any()


def test_the_kernels_buffers_are_filled_as_sglang_reads_them():
    target = torch.zeros(1, 3, 4)
    target[0, 0, 1] = target[0, 1, 2] = target[0, 2, 3] = 1.0  # the target says 1, 2, 3
    candidates = torch.tensor([[0, 1, 3]])  # anchor, right, wrong
    predicts, index, count = torch.full((3,), -7), torch.full((1, 3), -7), torch.full((1,), -7)
    rows, nothing = torch.arange(3)[None], torch.empty(0)
    draft = torch.nn.functional.one_hot(candidates[:, 1:], 4).float()
    sample_chain(
        predicts, index, count, candidates, rows, nothing, nothing, torch.rand(1, 3), torch.rand(1), target, draft
    )
    assert count.tolist() == [1]
    assert index.tolist() == [[0, 1, -1]]
    assert predicts[:2].tolist() == [1, 2]


def test_slots_are_written_request_by_request():
    table = torch.zeros(3, 6, dtype=torch.int32)
    assign_slots(torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), torch.tensor([9, 8, 7]), 2)
    assert table.tolist() == [[7, 0, 0, 0, 0, 0], [0] * 6, [0, 9, 8, 0, 0, 0]]


def test_a_real_kv_move_is_refused_and_the_warm_up_is_not():
    same, other = torch.tensor([0, 0]), torch.tensor([1, 0])
    copy_kv(same, same, same, same, 1, 1, {})
    with pytest.raises(NotImplementedError):
        copy_kv(same, same, other, same, 1, 1, {})
