"""What the engine tells a serving engine that asked for KV events (`enable_kv_events`)."""

from dataclasses import dataclass


@dataclass
class CacheStoreEvent:
    """Chunks were stored.

    Attributes:
        block_hashes: Their chunk hashes, in prefix order.
        parent_block_hash: Hash of the chunk before the first; None at the start of a prompt.
        token_ids: The tokens of all of them.
        block_size: Tokens per chunk.
        lora_id: Number of the adapter; older form of `lora_name`.
        medium: Where they are ("cpu").
        lora_name: Name of the adapter.
    """

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


@dataclass
class CacheRemoveEvent:
    """Chunks that a `CacheStoreEvent` announced are gone.

    Attributes:
        block_hashes: Their chunk hashes.
        medium: Where they were ("cpu").
    """

    block_hashes: list[int | bytes]
    medium: str | None
