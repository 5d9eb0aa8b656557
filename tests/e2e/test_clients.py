"""The official `openai` client through gateway and worker, and what is logged of its requests."""

from __future__ import annotations

import time

import httpx
import openai
import pytest

from adaflash.keys import Keys
from adaflash.rollouts import FIELD, Rollout, unpack
from tests import tiny
from tests.conftest import RedisServer
from tests.e2e.conftest import NAME, Fleet

MESSAGES = [{"role": "user", "content": "Say something, please."}]


@pytest.fixture
def client(gateway: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway}/v1", api_key="user-key", max_retries=0)


def rollouts(redis: RedisServer) -> list[Rollout]:
    return [unpack(f[FIELD]) for _, f in redis.client().xrange(Keys(NAME).rollouts)]


def wait_for_rollout(redis: RedisServer, domain: str) -> Rollout:
    deadline = time.monotonic() + 10
    while not (found := [r for r in rollouts(redis) if r.domain == domain]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found[-1]


def test_it_chats_streams_completes_and_lists_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    ask = dict(model=NAME, messages=MESSAGES, temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**ask)
    assert whole.usage.completion_tokens == 24
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.usage.completion_tokens for c in chunks if c.usage and not c.choices] == [24]
    assert len({c.id for c in chunks}) == 1
    done = client.completions.create(model=NAME, prompt="def f(", temperature=0, max_tokens=8)
    assert done.usage.completion_tokens == 8


def test_logprobs_have_one_entry_per_token(client: openai.OpenAI) -> None:
    r = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
    )
    assert len(r.choices[0].logprobs.content) == r.usage.completion_tokens == 12


def test_wrong_keys_and_wrong_requests_raise_the_clients_own_errors(gateway: str, client: openai.OpenAI) -> None:
    wrong = openai.OpenAI(base_url=f"{gateway}/v1", api_key="nope", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-3)


def test_a_rollout_holds_exactly_the_served_tokens(client: openai.OpenAI, fleet: Fleet) -> None:
    r = client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=30, extra_headers={"x-adaflash-domain": "exact"}
    )
    found = wait_for_rollout(fleet.redis, "exact")
    t = tiny.tokenizer()
    prompt = t.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert found.prompt_ids == prompt
    assert t.decode(found.output_ids, skip_special_tokens=True) == r.choices[0].message.content
    assert len(found.output_ids) == r.usage.completion_tokens
    assert sum(found.accepted) == len(found.output_ids) - 1
    assert set(found.verified) == {tiny.BLOCK}
    assert len(found.tenant) == 12 and found.finish_reason == "length"
    assert (found.versions[0].start, found.versions[-1].end) == (0, 30)


def test_a_request_that_ends_in_prefill_is_logged_without_steps(client: openai.OpenAI, fleet: Fleet) -> None:
    client.chat.completions.create(
        model=NAME, messages=MESSAGES, temperature=0, max_tokens=1, extra_headers={"x-adaflash-domain": "short"}
    )
    found = wait_for_rollout(fleet.redis, "short")
    assert (len(found.output_ids), found.accepted) == (1, [])


def test_opted_out_requests_are_not_logged(client: openai.OpenAI, fleet: Fleet) -> None:
    headers = {"x-adaflash-domain": "private"}
    client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=4, store=False, extra_headers=headers)
    client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=4, extra_headers={"x-adaflash-domain": "open"}
    )
    wait_for_rollout(fleet.redis, "open")
    assert not [r for r in rollouts(fleet.redis) if r.domain == "private"]


def test_the_workers_metrics_agree_with_its_rollouts(client: openai.OpenAI, fleet: Fleet) -> None:
    for _ in range(3):
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, temperature=0, max_tokens=20, extra_headers={"x-adaflash-domain": "counted"}
        )
    deadline = time.monotonic() + 10
    while len(mine := [r for r in rollouts(fleet.redis) if r.domain == "counted"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    page = httpx.get(f"{fleet.worker.url}/metrics").text
    value = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in page.splitlines()
        if "counted" in line and line[0] != "#"
    }
    assert value['adaflash_output_tokens_total{domain="counted"}'] == sum(sum(r.accepted) for r in mine)
    assert value['adaflash_verify_steps_total{domain="counted"}'] == sum(len(r.accepted) for r in mine)
    assert "adaflash_plugin_active 1.0" in page
