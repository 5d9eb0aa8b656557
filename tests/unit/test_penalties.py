"""Penalties inside a verify block are those of decoding token by token."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from serving.sglang_plugin.penalties import Penalties, penalised
from tests import reference

VOCABULARY, WIDTH, EOS = 12, 5, 3


def request(**params):
    defaults = dict(
        frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0, stop_token_ids=None
    )
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**(defaults | params)),
        output_ids=[],
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS),
    )


ASKED = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.4},
    {"min_new_tokens": 4},
    {"min_new_tokens": 6, "repetition_penalty": 0.8, "presence_penalty": 1.0},
]


def batch_of(*requests, extend=False, sampling=None):
    mode = SimpleNamespace(is_extend=lambda: extend)
    return SimpleNamespace(reqs=list(requests), forward_mode=mode, sampling_info=sampling)


@pytest.mark.parametrize("asked", ASKED, ids=lambda a: "-".join(a))
def test_every_row_of_a_block_sees_what_was_emitted_before_it(asked):
    torch.manual_seed(0)
    plain, asking = request(), request(**asked)
    batch = batch_of(plain, asking)
    chain = torch.randint(0, VOCABULARY, (2, WIDTH))
    p = Penalties(lambda: chain, VOCABULARY)
    with p.step(batch):
        pass
    first = torch.tensor([1, int(chain[1, 0])])
    p.prefilled(first)
    output = [int(first[1])]
    for accepted in (1, 3, 2):
        chain = torch.randint(0, VOCABULARY, (2, WIDTH))
        chain[1, 0] = output[-1]
        logits = torch.randn(2 * WIDTH, VOCABULARY)
        got = logits.clone()
        with p.step(batch):
            p.apply(got, WIDTH)
        assert torch.equal(got[:WIDTH], logits[:WIDTH]), "a request without penalties was touched"
        for row in range(WIDTH):
            before = output + chain[1, 1 : row + 1].tolist()
            want = reference.penalised(logits[WIDTH + row], before, asked, [EOS])
            torch.testing.assert_close(got[WIDTH + row], want, rtol=1e-5, atol=1e-5)
        emitted = torch.randint(0, VOCABULARY, (2, WIDTH))
        p.verified(emitted, torch.tensor([2, accepted]))
        output += emitted[1, :accepted].tolist()


@dataclass
class Sampling:
    """The fields of SGLang's SamplingBatchInfo that matter here."""

    temperatures: torch.Tensor
    penalizer_orchestrator: object = "its own"
    acc_additive_penalties: torch.Tensor | None = None
    acc_scaling_penalties: torch.Tensor | None = None


@pytest.mark.parametrize("asked", ASKED, ids=lambda a: "-".join(a))
def test_a_retracted_request_goes_on_from_what_it_had_emitted(asked):
    plain, r = request(), request(**asked)
    r.output_ids = [4, 4, 5]
    p = Penalties(lambda: torch.zeros(2, WIDTH, dtype=torch.long), VOCABULARY)
    stock = Sampling(torch.ones(2))
    batch = batch_of(plain, r, extend=True, sampling=stock)
    logits = torch.randn(2, VOCABULARY)
    with p.step(batch):
        info = batch.sampling_info
        assert info.penalizer_orchestrator is None
        got = logits + info.acc_additive_penalties
        got = torch.where(got < 0, got * info.acc_scaling_penalties, got / info.acc_scaling_penalties)
    assert batch.sampling_info is stock
    torch.testing.assert_close(got[0], logits[0])
    torch.testing.assert_close(got[1], reference.penalised(logits[1], [4, 4, 5], asked, [EOS]))
    p.prefilled(torch.tensor([1, 5]))
    assert r._adaflash_penalty.counts[[4, 5]].tolist() == [2, 2]
    assert int(r._adaflash_penalty.total) == 4


def test_a_request_that_was_prefilled_elsewhere_starts_from_what_the_host_knows():
    r = request(frequency_penalty=1.0)
    r.output_ids = [7]
    chain = torch.tensor([[7, 2, 2, 2, 2]])
    p = Penalties(lambda: chain, VOCABULARY)
    logits = torch.zeros(WIDTH, VOCABULARY)
    with p.step(batch_of(r)):
        p.apply(logits, WIDTH)
    assert logits[:, 7].tolist() == [-1] * WIDTH
    assert logits[:, 2].tolist() == [0, -1, -2, -3, -4]


def test_only_requests_that_ask_for_it_are_followed():
    assert not penalised(request())
    assert all(penalised(request(**a)) for a in ASKED)
    p = Penalties(lambda: torch.zeros(1, WIDTH), VOCABULARY)
    with p.step(batch_of(request())):
        assert not p.needed
