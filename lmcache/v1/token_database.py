"""Tokens → chunk ranges → chained chunk hashes → keys."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lmcache.logging import init_logger
from lmcache.v1.cache_key import CacheEngineKey, KeyFactory
from lmcache.v1.chunk_hash import BuiltinHasher, get_chunk_hasher
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_ids import TokenIds, check_tokens

logger = init_logger(__name__)

ChunkHash: TypeAlias = int | bytes
ProcessTokensResult: TypeAlias = tuple[int, int, CacheEngineKey | ChunkHash]

_DEFAULT_ALGORITHM = "sha256"
_DEFAULT_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a request, head first, those that its mask leaves out included.

    Attributes:
        hashes: One chunk hash each.
        starts, ends: Token positions.
        num_masked: How many of the first chunks the mask leaves out.
        num_tokens: Tokens of the request, those of an unfull tail included.
    """

    hashes: Sequence[ChunkHash]
    starts: list[int]
    ends: list[int]
    num_masked: int
    num_tokens: int

    @property
    def num_wanted_tokens(self) -> int:
        """Tokens that the mask does not leave out."""
        return self.num_tokens - (self.ends[self.num_masked - 1] if self.num_masked else 0)


class TokenDatabase(ABC):
    """Turns the tokens of a request into ranges and the keys their KV is stored under.

    Attributes:
        config: May be None: then the defaults, and a partial tail is a chunk.
        metadata: May be None where only hashes are asked for.
        save_only_first_rank: Keys carry world size 1, because all ranks hold the same KV (MLA).

    Threads: stateless after construction, safe from any thread.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
    ) -> None:
        """Choose the hash algorithm.

        Raises:
            ConfigError: `pre_caching_hash_algorithm` names none.
        """
        self.config = config
        self.metadata = metadata
        name = _DEFAULT_ALGORITHM if config is None else config.pre_caching_hash_algorithm
        self.hasher = get_chunk_hasher(name)
        self.save_only_first_rank = _saves_only_first_rank(config, metadata)
        _log_algorithm(config, self.hasher.name)

    @abstractmethod
    def process_tokens(
        self,
        tokens: TokenIds | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        make_key: bool = True,
        request_configs: Mapping[str, object] | None = None,
    ) -> Iterator[ProcessTokensResult]:
        """Generate (start, end, key or hash) of the chunks of a request.

        Args:
            tokens: [num_tokens] ids, list or integer tensor on any device.
            hashes: Chunk hashes, where `tokens` is None.
            offsets: Tokens of each of these chunks.
            mask: Bool, [num_tokens]; False only as a prefix made of whole chunks, which is hashed
                but not generated. Ignored with `hashes`.
            make_key: Give keys; otherwise hashes.
            request_configs: Options of the request; those that are tags become part of its keys.

        Raises:
            ValueError: On the first item, if an argument is missing, is no row of tokens, or the
                mask breaks its rule.
        """

    def make_keys(
        self, hashes: Sequence[ChunkHash], request_configs: Mapping[str, object] | None = None
    ) -> list[CacheEngineKey]:
        """Return the key of each chunk hash.

        Raises:
            ValueError: There is no metadata, or a tag of the request cannot be part of a key.
        """
        metadata = self.metadata
        if metadata is None:
            raise ValueError("Keys need metadata; give some or ask for hashes (make_key=False)")
        world_size = 1 if self.save_only_first_rank else metadata.world_size
        factory = KeyFactory(
            metadata.model_name, world_size, metadata.worker_id, metadata.kv_dtype, request_configs
        )
        return factory.make_many(hashes)

    def _hash_tokens(
        self,
        tokens: TokenIds,
        prefix_hash: int | None = None,
        extra_keys: Sequence[object] | None = None,
    ) -> int:
        """Return the hash of one chunk; upstream's name, which its users' tests call."""
        return self.hasher.hash_chunk(tokens, prefix_hash, extra_keys or ())


class ChunkedTokenDatabase(TokenDatabase):
    """Consecutive chunks of `chunk_size` tokens, each hash standing for its whole prefix.

    Attributes:
        chunk_size: Tokens per chunk.

    Source: upstream 0.5.6 v1/token_database.py, same ranges and keys; the algorithm named in the
    settings is the one used, and wrong arguments that passed there unseen are errors.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig | None = None,
        metadata: LMCacheMetadata | None = None,
    ) -> None:
        """See `TokenDatabase`."""
        super().__init__(config, metadata)
        self.chunk_size = _DEFAULT_CHUNK_TOKENS if config is None else config.chunk_size

    def process_tokens(
        self,
        tokens: TokenIds | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        make_key: bool = True,
        request_configs: Mapping[str, object] | None = None,
    ) -> Iterator[ProcessTokensResult]:
        """See `TokenDatabase.process_tokens`; a partial tail needs `save_unfull_chunk`."""
        chunks = self.split(tokens, hashes, offsets, mask)
        first = chunks.num_masked
        wanted = chunks.hashes[first:]
        items = self.make_keys(wanted, request_configs) if make_key else wanted
        yield from zip(chunks.starts[first:], chunks.ends[first:], items, strict=True)

    def split(
        self,
        tokens: TokenIds | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
    ) -> Chunks:
        """Return all chunks of a request; arguments as of `TokenDatabase.process_tokens`.

        Raises:
            ValueError: As `TokenDatabase.process_tokens`.
        """
        if tokens is None:
            if hashes is None:
                raise ValueError("Either tokens or hashes must be given")
            starts, ends = _ranges_of(hashes, offsets, self.chunk_size)
            return Chunks(hashes, starts, ends, 0, ends[-1] if ends else 0)
        check_tokens(tokens)
        num_masked = self._num_masked_tokens(mask, len(tokens)) // self.chunk_size
        num_tokens = self._num_chunked_tokens(len(tokens))
        starts = list(range(0, num_tokens, self.chunk_size))
        ends = [min(start + self.chunk_size, num_tokens) for start in starts]
        all_hashes = list(self.hasher.chain(tokens, self.chunk_size, num_tokens))
        return Chunks(all_hashes, starts, ends, min(num_masked, len(starts)), len(tokens))

    def _num_chunked_tokens(self, num_tokens: int) -> int:
        if self.config is None or self.config.save_unfull_chunk:
            return num_tokens
        return num_tokens - num_tokens % self.chunk_size

    def _num_masked_tokens(self, mask: torch.Tensor | None, num_tokens: int) -> int:
        if mask is None:
            return 0
        if not isinstance(mask, torch.Tensor) or mask.dim() != 1 or mask.is_meta:
            raise ValueError("The mask must be a bool tensor with one entry a token")
        if mask.numel() != num_tokens:
            raise ValueError(f"The mask has {mask.numel()} entries for {num_tokens} tokens")
        keeps = mask.to(torch.bool)
        num_masked = num_tokens - int(keeps.sum())
        if num_masked % self.chunk_size:
            raise ValueError(
                f"The number of Falses in the mask, {num_masked}, is not a multiple of the chunk "
                f"size, {self.chunk_size}"
            )
        if not bool(keeps[num_masked:].all()):
            raise ValueError(f"The mask's {num_masked} Falses are not its first entries")
        return num_masked


def _ranges_of(
    hashes: Sequence[ChunkHash], offsets: Sequence[int] | None, chunk_tokens: int
) -> tuple[list[int], list[int]]:
    if offsets is None:
        raise ValueError("Hashes need offsets: the tokens of each chunk")
    if len(offsets) != len(hashes):
        raise ValueError(f"{len(hashes)} hashes have {len(offsets)} offsets")
    starts, ends, position = [], [], 0
    for num_tokens in offsets:
        if not 0 < num_tokens <= chunk_tokens:
            raise ValueError(f"A chunk has 1 to {chunk_tokens} tokens, not {num_tokens}")
        starts.append(position)
        position += num_tokens
        ends.append(position)
    return starts, ends


def _saves_only_first_rank(
    config: LMCacheEngineConfig | None, metadata: LMCacheMetadata | None
) -> bool:
    if config is None or metadata is None or not metadata.use_mla:
        return False
    return bool(config.get_extra_config_value("save_only_first_rank", metadata.use_mla))


def _log_algorithm(config: LMCacheEngineConfig | None, name: str) -> None:
    logger.info("Chunk hash algorithm: %s", name)
    has_remote = config is not None and (config.remote_url or config.remote_storage_plugins)
    if has_remote and name != BuiltinHasher.name:
        logger.warning(
            "Chunks that LMCache 0.5.6 stored in the remote tier without vLLM are not found "
            "under pre_caching_hash_algorithm=%s; set it to builtin to share them",
            name,
        )
