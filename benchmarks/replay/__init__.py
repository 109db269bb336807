"""Replay: a small serving engine around the real cache engine, arm beside arm.

Real requests (a Mooncake-format trace, or generated agentic sessions) run through the real
`LMCacheEngine` with real, scaled-down bytes, asked through a real lookup server over ZMQ. KV blocks
and state images share one pool; a state index answers state hits and learns only what the arm tells
it. Every loaded byte is compared with what its prefix demands.

Accounting: whole blocks of 512 tokens only; the image of a prompt's end sits at its last whole
block; a load that fails recomputes the whole prompt. Towards the engine a block is one chunk of 4
tokens made from its prefix id: the engine's hash chain names it, and its bytes are `block_bytes`
whatever the tokens.

One request is one engine pass, at the trace's own time:

1. The engine hears: events since the last pass (arms with events), then verdicts of touches of the
   last pass.
2. KV lookup through the lookup client: the longest resident prefix, pinned for the request, which
   counts as one use of each block (every arm, as upstream).
3. Plan: the deepest boundary within that match whose image the index advertises. With touch, the
   image's hash is sent to the cache, at most once in 0.5 s. An image without evidence (store, load,
   verdict) within the verification window holds the request for one pass, in which it looks up
   again; a GONE verdict makes the index forget it, and the next lower boundary is tried. Arms with
   events never hold: their index is exact at this point.
4. Load: `retrieve` of the KV up to the boundary, then the image, which stays meanwhile. Without
   touch an image in the pool is read by a path that moves nothing, since upstream's get refreshes
   nothing there.
5. Compute, in steps of `prefill_blocks` or at once. Each step calls `store` with the prompt so far,
   the match and earlier steps masked: the engine copies what is missing, never evicts the prompt's
   own prefix for it, and refreshes the whole prefix, head youngest. Then the images of the step's
   boundaries, shallow first: every `interval` blocks and the end. An image that the pool holds is
   not stored again; with touch it is refreshed.
6. The pins are released.

With a disk tier every put goes to both tiers, and:

- a lookup takes the prefix of the pool, then what the disk holds behind it, and pins and uses each
  part where it found it;
- what is read from disk is a use there and is put back into the pool, by every arm, as upstream's
  get does; where the pool has no room for it beside what is pinned, the load fails with that cause;
- a touch moves an image in both orders; PRESENT says that only the disk has it, which is as good
  for a load, and the index goes on advertising it;
- an image that is on disk only is stored again when it is computed again: the disk has it already,
  and its copy in the pool comes back;
- an image has left when its last copy has: the index forgets it then, not before;
- a put is drained before the next step, and no larger than the disk tier takes at once. A chunk on
  its way to disk cannot be evicted from the pool, and what is too much at once is dropped, so
  otherwise the counts would depend on how fast the disk is.

Requests run one after another: the only pins are those of the request that runs.
"""
