"""The rollout record: round trip, and refusal of everything else."""

import msgpack
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from adaflash.rollouts import Rollout, RolloutError, VersionSpan, unpack

tokens = st.integers(0, 2**31 - 1)


def record(**change):
    fields = dict(
        request_id="r1",
        target="t",
        versions=[VersionSpan(version="v1", start=0, end=4)],
        prompt_ids=[1, 2],
        output_ids=[3, 4, 5, 6],
        accepted=[2, 1],
        verified=[8, 8],
        temperature=0.0,
        top_p=1.0,
        top_k=1,
        finish_reason="stop",
        finished_at=1.5,
    )
    return Rollout(**(fields | change))


@given(st.lists(tokens, max_size=50), st.lists(st.integers(1, 16), max_size=20), st.text(max_size=20))
def test_a_record_survives_the_round_trip(prompt, accepted, domain):
    r = record(
        prompt_ids=prompt, output_ids=[7] * (1 + sum(accepted)), accepted=accepted, verified=[16] * len(accepted)
    )
    r = r.model_copy(update={"domain": domain})
    assert unpack(r.pack()) == r


def test_steps_that_do_not_add_up_to_the_output_are_refused():
    with pytest.raises(ValidationError, match="steps emitted 3 tokens but the output has 5"):
        record(output_ids=[1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        zstandard.compress(b"junk"),
        zstandard.compress(msgpack.packb([1, 2])),
        zstandard.compress(msgpack.packb({"schema_version": 1})),
        record().pack()[:-4],
    ],
)
def test_anything_else_is_a_rollout_error(data):
    with pytest.raises(RolloutError):
        unpack(data)


def test_a_record_of_a_newer_schema_is_refused():
    fields = msgpack.unpackb(zstandard.decompress(record().pack())) | {"schema_version": 2}
    with pytest.raises(RolloutError):
        unpack(zstandard.compress(msgpack.packb(fields)))


def test_errors_do_not_show_the_tokens():
    fields = msgpack.unpackb(zstandard.decompress(record(prompt_ids=[424242]).pack())) | {"accepted": b"\x01\x00"}
    with pytest.raises(RolloutError) as error:
        unpack(zstandard.compress(msgpack.packb(fields)))
    assert "424242" not in str(error.value)
