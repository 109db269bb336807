"""One rank of a world, driven by its parent: a line of JSON in, a line of JSON out.

Every rank keeps its own shard of the KV: same tokens, other bytes.
"""

import json
import sys

import torch
from builders import CHUNK_TOKENS, make_config, make_metadata
from engine_builders import AtomMetadata, assert_nothing_held

from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.gpu_connector import RawBlockConnector
from lmcache.v1.lookup_client.factory import LookupClientFactory

BLOCK_TOKENS, BLOCK_BYTES, NUM_BLOCKS = 4, 96, 64


class Rank:
    """The worker: its blocks, its engine, and the answers to its parent's commands."""

    def __init__(self, rank, world_size, num_chunks):
        numbers = torch.Generator().manual_seed(rank)
        shape = (NUM_BLOCKS, BLOCK_BYTES)
        self.kv = torch.randint(0, 256, shape, dtype=torch.uint8, generator=numbers)
        self.blocks = self.kv.clone()
        base = make_metadata(worker_id=rank, world_size=world_size, engine_id="world")
        self.metadata = AtomMetadata(base, BLOCK_TOKENS, BLOCK_BYTES)
        config = make_config(max_local_cpu_size=num_chunks * 4096 / 2**30)
        self.engine = LMCacheEngineBuilder.get_or_create(
            "rank",
            config,
            self.metadata,
            RawBlockConnector([self.blocks], BLOCK_TOKENS),
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self.engine.post_init()
        self.server = LookupClientFactory.create_lookup_server(self.engine, self.metadata)

    def store(self, tokens, first=0):
        self.blocks.copy_(self.kv)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:first] = False
        self.engine.store(tokens, mask=mask, block_ids=list(range(NUM_BLOCKS)))

    def load(self, tokens):
        """Load into poisoned blocks; [tokens loaded, are they right, is the rest untouched]."""
        self.blocks.fill_(0xEE)
        loaded = self.engine.retrieve(tokens, block_ids=list(range(NUM_BLOCKS)))
        count = int(loaded.sum()) // BLOCK_TOKENS
        is_right = torch.equal(self.blocks[:count], self.kv[:count])
        return [int(loaded.sum()), is_right, bool((self.blocks[count:] == 0xEE).all())]

    def forget(self, tokens):
        return self.engine.clear(tokens)

    def unpin(self, lookup_id):
        self.engine.lookup_unpin(lookup_id)

    def finish(self):
        assert_nothing_held(self.engine)
        self.server.close()
        LMCacheEngineBuilder.destroy("rank")
        return CHUNK_TOKENS


def main(rank, world_size, num_chunks):
    worker = Rank(rank, world_size, num_chunks)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, call)(*arguments)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
