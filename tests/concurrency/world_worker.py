"""One rank of a world, driven by its parent: a line of JSON in, a line of JSON out.

Every rank keeps its own shard of the KV: same tokens, other bytes. There are two kinds of it: raw
blocks as ATOM hands them over, in small chunks, and vLLM's paged bf16 in chunks of 256 tokens.
"""

import json
import sys

import torch
from builders import CHUNK_TOKENS, make_config, make_metadata
from engine_builders import AtomMetadata, assert_nothing_held

from lmcache.utils import EngineType, mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.gpu_connector import CreateGPUConnector, RawBlockConnector
from lmcache.v1.lookup_client.factory import LookupClientFactory

CACHE_CHUNKS = 16


class RawKV:
    """Opaque blocks of 4 tokens, the last block first.

    Attributes:
        memory: The cache itself, [units, bytes]; `unit_tokens` tokens in each.
        order: The units of a prompt, head first.
    """

    chunk_tokens, unit_tokens, unit_bytes, chunk_bytes = CHUNK_TOKENS, 4, 96, 4096

    def __init__(self, rank, world_size):
        base = make_metadata(worker_id=rank, world_size=world_size, engine_id="world")
        self.metadata = AtomMetadata(base, self.unit_tokens, self.unit_bytes)
        num_blocks = CACHE_CHUNKS * self.chunk_tokens // self.unit_tokens
        self.memory = torch.zeros(num_blocks, self.unit_bytes, dtype=torch.uint8)
        self.order = torch.arange(num_blocks).flip(0)
        self.connector = RawBlockConnector([self.memory], self.unit_tokens)

    def keywords(self, num_tokens):
        return {"block_ids": self.order.tolist()}


class PagedKV:
    """Two layers of paged bf16 with K and V, the last slot first.

    Attributes: As of `RawKV`; `memory` is [layers, K and V, slots, bytes].
    """

    chunk_tokens, unit_tokens, chunk_bytes = 256, 1, 2 * 2 * 256 * 2 * 8 * 2
    num_layers, block_tokens, num_heads, head_size = 2, 16, 2, 8

    def __init__(self, rank, world_size):
        self.metadata = make_metadata(
            worker_id=rank,
            world_size=world_size,
            engine_id="world",
            chunk_size=self.chunk_tokens,
            kv_shape=(self.num_layers, 2, self.chunk_tokens, self.num_heads, self.head_size),
        )
        num_slots = CACHE_CHUNKS * self.chunk_tokens
        pages = (num_slots // self.block_tokens, self.block_tokens)
        shape = (2, *pages, self.num_heads, self.head_size)
        self.memory = torch.zeros(
            self.num_layers, 2, num_slots, self.num_heads * self.head_size * 2, dtype=torch.uint8
        )
        self.layers = [layer.view(torch.bfloat16).view(shape) for layer in self.memory]
        self.order = torch.arange(num_slots).flip(0)
        self.connector = CreateGPUConnector(make_config(), self.metadata, EngineType.VLLM)

    def keywords(self, num_tokens):
        return {"kvcaches": self.layers, "slot_mapping": self.order[:num_tokens]}


KINDS = {"raw": RawKV, "paged": PagedKV}


class Rank:
    """The worker: its KV, its engine, and the answers to its parent's commands."""

    def __init__(self, kind, rank, world_size, num_chunks):
        self.cache = KINDS[kind](rank, world_size)
        numbers = torch.Generator().manual_seed(rank)
        shape = self.cache.memory.shape
        self.kv = torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
        config = make_config(
            chunk_size=self.cache.chunk_tokens,
            max_local_cpu_size=num_chunks * self.cache.chunk_bytes / 2**30,
        )
        self.engine = LMCacheEngineBuilder.get_or_create(
            "rank",
            config,
            self.cache.metadata,
            self.cache.connector,
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self.engine.post_init()
        self.server = LookupClientFactory.create_lookup_server(self.engine, self.cache.metadata)

    def store(self, tokens, first=0):
        self.cache.memory.copy_(self.kv)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:first] = False
        self.engine.store(tokens, mask=mask, **self.cache.keywords(len(tokens)))

    def load(self, tokens):
        """Load into poisoned memory; [tokens loaded, are they right, is the rest untouched]."""
        memory, order = self.cache.memory, self.cache.order
        memory.fill_(0xEE)
        num_loaded = int(self.engine.retrieve(tokens, **self.cache.keywords(len(tokens))).sum())
        loaded, rest = order.split(
            [
                num_loaded // self.cache.unit_tokens,
                len(order) - num_loaded // self.cache.unit_tokens,
            ]
        )
        is_right = torch.equal(memory[..., loaded, :], self.kv[..., loaded, :])
        return [num_loaded, is_right, bool((memory[..., rest, :] == 0xEE).all())]

    def forget(self, tokens):
        return self.engine.clear(tokens)

    def unpin(self, lookup_id):
        self.engine.lookup_unpin(lookup_id)

    def finish(self):
        assert_nothing_held(self.engine)
        self.server.close()
        LMCacheEngineBuilder.destroy("rank")
        return self.cache.chunk_tokens


def main(kind, rank, world_size, num_chunks):
    worker = Rank(kind, rank, world_size, num_chunks)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, call)(*arguments)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
