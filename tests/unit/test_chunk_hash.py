"""Named hash algorithms: stable, distinct, the same for lists and tensors of any integer type."""

import hashlib
import itertools
import random
import struct
import subprocess
import sys

import cbor2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache.v1 import cbor
from lmcache.v1.chunk_hash import digest_bytes, get_chunk_hasher, hash_from_digest
from lmcache.v1.errors import ConfigError

NAMES = ("sha256", "sha256_cbor", "builtin")
SECURE_NAMES = ("sha256", "sha256_cbor")
TOKENS = [random.Random(7).randrange(152_000) for _ in range(100)]
INTEGERS = st.integers(-(2**63), 2**63 - 1)

HASH_IN_A_FRESH_PROCESS = """
from lmcache.v1.chunk_hash import get_chunk_hasher
hasher = get_chunk_hasher("{name}")
print(list(hasher.chain(list(range(64)), 16, 64)))
print(hasher.hash_chunk([1, 2], 5, {extra}))
"""


@pytest.fixture(params=NAMES)
def hasher(request):
    return get_chunk_hasher(request.param)


def chain(hasher, tokens, chunk_tokens=16):
    return list(hasher.chain(tokens, chunk_tokens, len(tokens)))


def test_an_unknown_algorithm_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'md5' is unknown; use one of sha256, ") as caught:
        get_chunk_hasher("md5")

    assert "builtin" in str(caught.value)


@pytest.mark.parametrize("name", SECURE_NAMES)
@pytest.mark.parametrize("extra", ["()", "('lora', b'x', None, 3, [1])"])
def test_hashes_are_equal_in_every_process(name, extra):
    code = HASH_IN_A_FRESH_PROCESS.format(name=name, extra=extra)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "4242", "random")
    }

    assert len(outputs) == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_a_list_and_a_tensor_of_any_integer_type_hash_alike(hasher, dtype):
    tokens = [token % 128 for token in TOKENS]

    expected = chain(hasher, tokens)

    assert chain(hasher, torch.tensor(tokens, dtype=dtype)) == expected
    assert chain(hasher, tuple(tokens)) == expected
    assert chain(hasher, torch.tensor(tokens, dtype=dtype).repeat_interleave(2)[::2]) == expected


def test_a_chain_is_its_chunks_hashed_one_after_the_other(hasher):
    parent, expected = None, []
    for start in range(0, len(TOKENS), 16):
        parent = hasher.hash_chunk(TOKENS[start : start + 16], parent)
        expected.append(parent)

    assert chain(hasher, TOKENS) == expected
    assert list(hasher.chain(TOKENS[32:], 16, 68, expected[1])) == expected[2:]


def test_a_chain_stops_where_it_is_told_to(hasher):
    full = chain(hasher, TOKENS)

    assert list(hasher.chain(TOKENS, 16, 96)) == full[:6]
    assert list(hasher.chain(TOKENS, 16, 0)) == []
    assert list(hasher.chain([], 16, 0)) == []
    assert list(hasher.chain(TOKENS, 16, 40))[:2] == full[:2]
    assert list(hasher.chain(TOKENS, 16, 40))[2] != full[2]


def test_every_token_changes_its_chunk_and_all_that_follow(hasher):
    changed = [*TOKENS[:20], TOKENS[20] + 1, *TOKENS[21:]]

    pairs = zip(chain(hasher, TOKENS), chain(hasher, changed), strict=True)
    assert [one == other for one, other in pairs] == [True] + 6 * [False]


def test_a_parent_of_another_algorithm_is_not_cut_to_fit():
    parents = (-1, -2, 5, 2**128 - 1, 2**128, 2**128 + 5, 2**256 + 5)
    hashes = {get_chunk_hasher("sha256").hash_chunk(TOKENS, parent) for parent in parents}

    assert len(hashes) == len(parents)


@pytest.mark.parametrize("name", SECURE_NAMES)
@pytest.mark.parametrize(("one", "other"), [(-1, -2), (12345, 12345 + 2**61 - 1), (0, 2**61 - 1)])
def test_parents_that_collide_under_builtin_give_different_hashes(name, one, other):
    hasher = get_chunk_hasher(name)

    assert hasher.hash_chunk(TOKENS, one) != hasher.hash_chunk(TOKENS, other)
    assert get_chunk_hasher("builtin").hash_chunk(TOKENS, one) == get_chunk_hasher(
        "builtin"
    ).hash_chunk(TOKENS, other)


def test_sha256_is_the_documented_construction():
    hasher = get_chunk_hasher("sha256")
    first = hashlib.sha256(bytes(16) + struct.pack("<3q", 1, 2, 3)).digest()[:16]
    second = hashlib.sha256(first + struct.pack("<2q", 4, -5)).digest()[:16]

    hashes = list(hasher.chain([1, 2, 3, 4, -5], 3, 5))

    assert hashes == [int.from_bytes(first, "big"), int.from_bytes(second, "big")]
    assert hasher.root == 0


def test_sha256_hashes_are_below_2_to_the_128_and_use_all_of_it():
    hashes = list(get_chunk_hasher("sha256").chain(list(range(2000)), 1, 2000))

    assert all(0 <= value < 2**128 for value in hashes)
    assert max(hashes) > 2**120


def test_extra_keys_and_tokens_cannot_be_mistaken_for_one_another():
    hasher = get_chunk_hasher("sha256")
    extras = [(), ("a",), ("a", "b"), ("ab",), (b"ab",), (1,), ("1",), (None,), (True,), ([1],)]
    token_rows = [[], [1], [1, 2], [0x61816161], [1, 0, 2, 1]]

    hashes = [hasher.hash_chunk(t, None, e) for t, e in itertools.product(token_rows, extras)]

    assert len(set(hashes)) == len(hashes)


def test_tokens_that_spell_an_extra_key_are_not_it():
    hasher = get_chunk_hasher("sha256")
    spelling = cbor.encode(["aaaaaa"])

    as_token = hasher.hash_chunk([1, int.from_bytes(spelling, "little", signed=True)])

    assert len(spelling) == 8
    assert as_token != hasher.hash_chunk([1], None, ("aaaaaa",))


def test_an_extra_key_that_differs_between_processes_is_refused_under_builtin():
    builtin = get_chunk_hasher("builtin")

    assert builtin.hash_chunk([1], 0, (7,)) == hash((0, (1,), (7,)))
    for key in ("lora", b"x", None):
        with pytest.raises(ValueError, match="another builtin hash in every process"):
            builtin.hash_chunk([1], 0, (key,))


@pytest.mark.parametrize("key", [1.5, object(), {"a": 1}, 2**64, -(2**64) - 1])
def test_an_extra_key_without_an_encoding_is_refused(key):
    with pytest.raises(ValueError, match="cannot be part of a chunk hash"):
        get_chunk_hasher("sha256").hash_chunk([1], 0, (key,))


@pytest.mark.parametrize(
    "tokens",
    ["text", b"bytes", {1, 2}, 7, [1.5], ["a"], [2**63]],
    ids=repr,
)
@pytest.mark.parametrize("name", SECURE_NAMES)
def test_what_is_no_row_of_token_ids_is_refused(name, tokens):
    with pytest.raises(ValueError, match="token"):
        get_chunk_hasher(name).hash_chunk(tokens)


@pytest.mark.parametrize(
    "tokens", [torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([True])]
)
def test_a_tensor_that_is_no_row_of_whole_numbers_is_refused(hasher, tokens):
    with pytest.raises(ValueError, match="Unsupported tokens"):
        hasher.hash_chunk(tokens)


@pytest.mark.parametrize("value", [0, 1, 2**64, 2**128 - 1, -1, -(2**63), -5])
def test_a_hash_survives_the_wire(value):
    digest = digest_bytes(value)

    assert hash_from_digest(digest) == value
    assert len(digest) == (16 if value >= 0 else 17)


def test_a_number_that_is_no_hash_is_refused_on_the_wire():
    with pytest.raises(ValueError, match="no chunk hash"):
        digest_bytes(2**128)
    with pytest.raises(ValueError, match="not 8"):
        hash_from_digest(bytes(8))


CBOR_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.binary() | st.text(),
    lambda item: st.lists(item, max_size=30),
    max_leaves=40,
)


@given(CBOR_VALUES)
def test_encoding_equals_canonical_cbor2(value):
    assert cbor.encode(value) == cbor2.dumps(value, canonical=True)


@given(st.lists(INTEGERS | st.integers(-300, 70_000), max_size=60))
def test_encoding_many_numbers_at_once_equals_encoding_each(numbers):
    expected = b"".join(cbor2.dumps(number, canonical=True) for number in numbers)

    assert cbor.encode_numbers(numbers) == expected
    assert cbor.encode_numbers(numbers) == expected


def test_known_numbers_are_forgotten_before_they_grow_without_bound():
    assert cbor.encode_numbers(range(300_000)).endswith(cbor2.dumps(299_999))
    assert len(cbor._KNOWN_NUMBERS) <= 1 << 18


@pytest.mark.parametrize("length", [23, 24, 255, 256, 65_535, 65_536])
def test_long_values_carry_their_length(length):
    for value in ("x" * length, b"x" * length, [0] * length):
        assert cbor.encode(value) == cbor2.dumps(value, canonical=True)
