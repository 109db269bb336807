"""What blocks and images are called towards the cache: tokens for KV, keys for images."""

from collections.abc import Sequence

import torch

from benchmarks.replay.content import Kind, chunk_hash, kind_and_prefix
from benchmarks.replay.settings import ENGINE_TOKENS_PER_BLOCK
from lmcache.v1.cache_key import CacheEngineKey, KeyFactory

MODEL_NAME = "replay"
_IMAGE_MODEL_NAME = f"{MODEL_NAME}.state"
_IMAGE_KEYS = KeyFactory(_IMAGE_MODEL_NAME, 1, 0, torch.uint8)
_TOKEN_STEPS = torch.arange(ENGINE_TOKENS_PER_BLOCK, dtype=torch.int64)


def prompt_tokens(prefix_ids: Sequence[int]) -> torch.Tensor:
    """Return the tokens of a prompt, int64 [ENGINE_TOKENS_PER_BLOCK * num_blocks].

    Each block's tokens come from its prefix id alone, so prompts share the chunks of the engine's
    hash chain exactly as far as they share blocks.
    """
    firsts = torch.tensor(prefix_ids, dtype=torch.int64) * ENGINE_TOKENS_PER_BLOCK
    return (firsts[:, None] + _TOKEN_STEPS).flatten()


def image_key(image: int) -> CacheEngineKey:
    """Return the key of the state image at the boundary of a prefix; no KV key equals it."""
    return _IMAGE_KEYS.make(chunk_hash(Kind.IMAGE, image))


def image_of(key: CacheEngineKey) -> int | None:
    """Return the image that a key names, or None for a KV chunk."""
    if key.model_name != _IMAGE_MODEL_NAME:
        return None
    return kind_and_prefix(int(key.chunk_hash))[1]
