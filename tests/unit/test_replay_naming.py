"""Names towards the cache: tokens that share chunks as prompts share blocks, and image keys."""

import pytest
import torch

from benchmarks.replay.connector import ReplayConnector
from benchmarks.replay.metadata import make_metadata
from benchmarks.replay.naming import image_key, image_of, prompt_tokens
from benchmarks.replay.settings import ENGINE_TOKENS_PER_BLOCK
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.token_database import ChunkedTokenDatabase

BLOCK_BYTES = 4096


@pytest.fixture
def database() -> ChunkedTokenDatabase:
    config = LMCacheEngineConfig.from_defaults(chunk_size=ENGINE_TOKENS_PER_BLOCK)
    return ChunkedTokenDatabase(config, make_metadata("m", BLOCK_BYTES))


def test_block_is_one_chunk_and_equal_prefixes_share_theirs(database: ChunkedTokenDatabase) -> None:
    first = database.split(prompt_tokens((1, 2, 3))).hashes
    second = database.split(prompt_tokens((1, 2, 9, 3))).hashes
    assert (len(first), len(second)) == (3, 4)
    assert first[:2] == second[:2]
    assert not set(first[2:]) & set(second[2:])


def test_image_is_recognised_by_its_key_and_kv_is_not(database: ChunkedTokenDatabase) -> None:
    for image in (0, 1, 77, 10**9):
        assert image_of(image_key(image)) == image
    as_kv = database.make_keys([image_key(7).chunk_hash])
    assert as_kv != [image_key(7)]
    assert image_of(as_kv[0]) is None


def test_chunk_is_a_flat_row_of_the_blocks_bytes() -> None:
    metadata = make_metadata("m", BLOCK_BYTES)
    assert metadata.get_shapes() == metadata.get_shapes(ENGINE_TOKENS_PER_BLOCK)
    assert metadata.get_shapes() == [torch.Size((BLOCK_BYTES,))]
    assert metadata.get_dtypes() == [torch.uint8]
    assert metadata.get_num_groups() == 1
    assert (metadata.engine_id, metadata.served_model_name) == ("m", "m")


@pytest.mark.parametrize(("start", "end"), [(2, 6), (0, 8), (4, 6)])
def test_chunk_that_is_not_one_block_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {start} to {end} are not one block"):
        ReplayConnector(BLOCK_BYTES).batched_from_gpu(
            [torch.zeros(1)], [start], [end], prefix_ids=(1, 2, 3)
        )
