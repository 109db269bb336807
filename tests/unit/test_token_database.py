"""Chunk ranges, masks, hashes and keys of `ChunkedTokenDatabase`."""

import inspect
import logging

import pytest
import torch

from lmcache.v1.cache_key import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase

TOKENS = list(range(40))


def make_config(**settings):
    return LMCacheEngineConfig.from_defaults(chunk_size=16, **settings)


def make_metadata(**changes):
    fields = {
        "model_name": "m",
        "world_size": 2,
        "local_world_size": 2,
        "worker_id": 1,
        "local_worker_id": 1,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (2, 2, 16, 1, 8),
    }
    return LMCacheMetadata(**{**fields, **changes})


@pytest.fixture
def database():
    return ChunkedTokenDatabase(make_config(), make_metadata())


def mask_of(num_falses, num_tokens=40):
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[:num_falses] = False
    return mask


def ranges(chunks):
    return [(start, end) for start, end, _ in chunks]


def test_a_partial_tail_is_no_chunk_by_default(database):
    assert ranges(database.process_tokens(TOKENS)) == [(0, 16), (16, 32)]


def test_a_partial_tail_is_a_chunk_when_asked_for():
    database = ChunkedTokenDatabase(make_config(save_unfull_chunk=True), make_metadata())

    assert ranges(database.process_tokens(TOKENS)) == [(0, 16), (16, 32), (32, 40)]


def test_one_token_after_a_full_chunk_adds_nothing(database):
    chunk = list(database.process_tokens(TOKENS[:16]))

    assert list(database.process_tokens(TOKENS[:17])) == chunk


def test_without_config_chunks_have_256_tokens_and_a_tail():
    database = ChunkedTokenDatabase()

    assert ranges(database.process_tokens(list(range(300)), make_key=False)) == [
        (0, 256),
        (256, 300),
    ]


def test_the_result_is_a_generator(database):
    assert inspect.isgenerator(database.process_tokens(TOKENS))


def test_keys_carry_model_ranks_hash_and_dtype(database):
    hashes = [h for _, _, h in database.process_tokens(TOKENS, make_key=False)]
    keys = [key for _, _, key in database.process_tokens(TOKENS)]

    assert keys == [CacheEngineKey("m", 2, 1, h, torch.bfloat16) for h in hashes]


def test_tags_of_the_request_are_part_of_the_keys(database):
    plain = [key for _, _, key in database.process_tokens(TOKENS)]
    tagged = [
        key
        for _, _, key in database.process_tokens(TOKENS, request_configs={"lmcache.tag.user": "a"})
    ]

    assert [key.chunk_hash for key in tagged] == [key.chunk_hash for key in plain]
    assert not set(tagged) & set(plain)
    assert tagged[0].tags == (("user", "a"),)


def test_masked_chunks_are_hashed_but_not_given(database):
    everything = list(database.process_tokens(TOKENS))

    assert list(database.process_tokens(TOKENS, mask=mask_of(0))) == everything
    assert list(database.process_tokens(torch.tensor(TOKENS), mask=mask_of(16))) == everything[1:]
    assert list(database.process_tokens(TOKENS, mask=mask_of(32))) == []


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (mask_of(8), "8, is not a multiple of the chunk size, 16"),
        (torch.flip(mask_of(16), (0,)), "16 Falses are not its first"),
        (mask_of(16, num_tokens=48), "48 entries for 40 tokens"),
    ],
    ids=["inside a chunk", "not a prefix", "another length"],
)
def test_a_mask_that_breaks_its_rule_is_refused(database, mask, problem):
    with pytest.raises(ValueError, match=problem):
        list(database.process_tokens(TOKENS, mask=mask))


def test_given_hashes_become_ranges_by_their_offsets_and_ignore_the_mask(database):
    chunks = list(database.process_tokens(hashes=[5, -7], offsets=[16, 3], mask=mask_of(8)))

    assert ranges(chunks) == [(0, 16), (16, 19)]
    assert [key.chunk_hash for _, _, key in chunks] == [5, -7]


def test_hashes_may_be_bytes(database):
    digest = bytes(range(32))

    (chunk,) = database.process_tokens(hashes=[digest], offsets=[16])

    assert chunk[2].chunk_hash == digest
    assert CacheEngineKey.from_string(chunk[2].to_string()).to_string() == chunk[2].to_string()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "Either tokens or hashes"),
        ({"hashes": [1]}, "Hashes need offsets"),
        ({"hashes": [1, 2], "offsets": [16]}, "2 hashes have 1 offsets"),
        ({"tokens": "text"}, "Unsupported tokens type: str"),
    ],
)
def test_missing_or_mismatched_arguments_are_refused(database, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        list(database.process_tokens(**arguments))


def test_keys_without_metadata_are_refused():
    with pytest.raises(ValueError, match="need metadata"):
        list(ChunkedTokenDatabase(make_config()).process_tokens(TOKENS))


@pytest.mark.parametrize(
    ("use_mla", "extra", "world_size"),
    [
        (True, None, 1),
        (True, {"save_only_first_rank": False}, 2),
        (False, None, 2),
    ],
)
def test_keys_of_mla_models_do_not_depend_on_the_world_size(use_mla, extra, world_size):
    database = ChunkedTokenDatabase(make_config(extra_config=extra), make_metadata(use_mla=use_mla))

    assert {key.world_size for _, _, key in database.process_tokens(TOKENS)} == {world_size}


def test_two_databases_hash_alike_whatever_else_differs(database):
    other = ChunkedTokenDatabase(make_config(cache_policy="FIFO"), None)

    assert list(other.process_tokens(TOKENS, make_key=False)) == list(
        database.process_tokens(torch.tensor(TOKENS, dtype=torch.int32), make_key=False)
    )


@pytest.mark.parametrize(("algorithm", "warns"), [("sha256", True), ("builtin", False)])
def test_a_remote_tier_under_another_hash_than_0_5_6_says_so_at_start(algorithm, warns, caplog):
    ChunkedTokenDatabase(
        make_config(remote_url="redis://h:1", pre_caching_hash_algorithm=algorithm)
    )

    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("builtin" in text for text in warnings) == warns
