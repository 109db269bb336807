"""Replay: a small serving engine around the real storage manager, arm beside arm.

Real requests (a Mooncake-format trace, or generated agentic sessions) run through the real pool
with real, scaled-down bytes. KV blocks and state images share one pool; a state index answers state
hits and learns only what the arm tells it. Every loaded byte is compared with what its key demands.

Accounting: whole blocks of 512 tokens only; the image of a prompt's end sits at its last whole
block; a load that fails recomputes the whole prompt.

One request is one engine pass, at the trace's own time:

1. The engine hears: events since the last pass (arms with events), then verdicts of touches of the
   last pass.
2. KV lookup: the longest resident prefix, pinned, which refreshes it (every arm, as upstream).
3. Plan: the deepest boundary within that match whose image the index advertises. With touch, the
   image's hash is sent to the cache, at most once in 0.5 s. An image without evidence (store, load,
   verdict) within the verification window holds the request for one pass; a GONE verdict makes the
   index forget it, and the next lower boundary is tried. Arms with events never hold: their index
   is exact at this point.
4. Load: KV up to the boundary, then the image. Without touch the image is read by a path that moves
   nothing, since upstream's get refreshes nothing.
5. Store: KV blocks that are missing in one batch (resident ones beyond the match are refreshed, as
   duplicates are), then the images of the boundaries computed now, shallow first: every `interval`
   blocks and the end. An image that is resident is not stored again; with touch it is refreshed.

No request runs beside another one: nothing is pinned or held while a victim is sought.
"""
