"""Agentic sessions as a trace: shared system prompts, tool loops, sub-agents, compaction.

The shape follows what agent front ends do; its parameters are assumptions, not measurements. Only
token counts are simulated: a block gets a fresh id when it is filled, so two contexts share exactly
the whole blocks they had in common when they parted.
"""

import math
import random
from dataclasses import dataclass, field

from benchmarks.replay.requests import TraceRow
from benchmarks.replay.settings import TOKENS_PER_BLOCK


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of the generated sessions; times in seconds, medians of lognormal draws."""

    num_apps: int = 5
    system_prompt_tokens: tuple[int, int] = (6_000, 18_000)
    session_gap_s: float = 8.0
    mean_user_turns: float = 5.0
    mean_tool_calls: float = 4.0
    mean_agent_calls: float = 5.0
    tool_think_s: float = 6.0
    human_think_s: float = 110.0
    think_sigma: float = 1.0
    user_tokens: float = 150.0
    output_tokens: float = 250.0
    tool_tokens: float = 700.0
    token_sigma: float = 0.9
    task_tokens: float = 600.0
    seconds_per_output_token: float = 0.02
    sub_agent_share: float = 0.08
    fork_share: float = 0.30
    edit_share: float = 0.03
    compaction_tokens: int = 110_000
    summary_tokens: tuple[int, int] = (4_000, 8_000)


@dataclass
class _Context:
    """A conversation's tokens: ids of its filled blocks, and how full the last one is."""

    blocks: list[int] = field(default_factory=list)
    partial_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * TOKENS_PER_BLOCK + self.partial_tokens

    def copy(self) -> "_Context":
        return _Context(list(self.blocks), self.partial_tokens)


class SessionGenerator:
    """Draws sessions one after another; the same seed gives the same trace."""

    def __init__(self, seed: int, shape: Shape | None = None) -> None:
        self._shape = shape if shape is not None else Shape()
        self._random = random.Random(seed)
        self._next_id = 0
        self._rows: list[TraceRow] = []
        low, high = self._shape.system_prompt_tokens
        self._apps = [
            self._grown(_Context(), self._random.randint(low, high))
            for _ in range(self._shape.num_apps)
        ]

    def rows(self, num_sessions: int) -> list[TraceRow]:
        """Return the requests of `num_sessions` sessions, by time.

        Sessions start `session_gap_s` apart on average, so more sessions last longer rather than
        crowd.
        """
        start_s = 0.0
        for _ in range(num_sessions):
            start_s += self._random.expovariate(1 / self._shape.session_gap_s)
            self._run_session(start_s)
        return sorted(self._rows, key=lambda row: row.timestamp_ms)

    def _run_session(self, now_s: float) -> None:
        system = self._random.choice(self._apps)
        context = system.copy()
        for _ in range(self._geometric(self._shape.mean_user_turns)):
            before = context.copy()
            context, now_s = self._user_turn(system, context, now_s)
            now_s += self._lognormal(self._shape.human_think_s, self._shape.think_sigma)
            if self._random.random() < self._shape.edit_share:
                context = before
            context = self._compacted(system, context)

    def _user_turn(
        self, system: _Context, context: _Context, now_s: float
    ) -> tuple[_Context, float]:
        """One message of the human and the tool loop that answers it."""
        context = self._grown(context, self._tokens(self._shape.user_tokens))
        for call in range(self._geometric(self._shape.mean_tool_calls)):
            if call:
                now_s += self._lognormal(self._shape.tool_think_s, self._shape.think_sigma)
                context = self._grown(context, self._tokens(self._shape.tool_tokens))
            context = self._compacted(system, context)
            if self._random.random() < self._shape.sub_agent_share:
                now_s = self._sub_agent(system, context, now_s)
            context, now_s = self._request(context, now_s)
        return context, now_s

    def _sub_agent(self, system: _Context, parent: _Context, now_s: float) -> float:
        """A helper works while its parent waits; returns when it is done."""
        is_fork = self._random.random() < self._shape.fork_share
        context = self._grown(parent if is_fork else system, self._tokens(self._shape.task_tokens))
        for _ in range(self._geometric(self._shape.mean_agent_calls)):
            context, now_s = self._request(self._compacted(system, context), now_s)
            now_s += self._lognormal(self._shape.tool_think_s, self._shape.think_sigma)
            context = self._grown(context, self._tokens(self._shape.tool_tokens))
        return now_s

    def _request(self, context: _Context, now_s: float) -> tuple[_Context, float]:
        """Send the context; returns it with the answer appended, and when that is complete."""
        output_tokens = self._tokens(self._shape.output_tokens)
        hash_ids = list(context.blocks)
        if context.partial_tokens:
            hash_ids.append(self._fresh_id())
        self._rows.append(
            TraceRow(round(now_s * 1000), context.num_tokens, output_tokens, tuple(hash_ids))
        )
        done_s = now_s + output_tokens * self._shape.seconds_per_output_token
        return self._grown(context, output_tokens), done_s

    def _compacted(self, system: _Context, context: _Context) -> _Context:
        if context.num_tokens <= self._shape.compaction_tokens:
            return context
        return self._grown(system, self._random.randint(*self._shape.summary_tokens))

    def _grown(self, context: _Context, num_tokens: int) -> _Context:
        filled, partial_tokens = divmod(context.partial_tokens + num_tokens, TOKENS_PER_BLOCK)
        new_blocks = [self._fresh_id() for _ in range(filled)]
        return _Context(context.blocks + new_blocks, partial_tokens)

    def _fresh_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _geometric(self, mean: float) -> int:
        """Draw 1, 2, 3, ... with this mean."""
        return 1 + int(math.log(1.0 - self._random.random()) / math.log(1.0 - 1.0 / mean))

    def _tokens(self, median: float) -> int:
        return max(1, round(self._lognormal(median, self._shape.token_sigma)))

    def _lognormal(self, median: float, sigma: float) -> float:
        return self._random.lognormvariate(math.log(median), sigma)
