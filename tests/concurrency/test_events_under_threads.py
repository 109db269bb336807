"""Eight threads at work: no event is missed, doubled or out of order; touch agrees with them."""

import random
import threading
from bisect import bisect_right

import pytest
from builders import CHUNK_BYTES, CPU, keys, put
from event_fakes import (
    CLOSED,
    LOST,
    STORED,
    BoundedPlugin,
    Mirror,
    Recorder,
    run_together,
)

from lmcache.v1.storage_backend.touch import TouchVerdict

NUM_THREADS = 8
NUM_ROUNDS = 300
KEYS = keys(24)
LOWER_TIERS = [{}, {"near": BoundedPlugin, "far": BoundedPlugin}]


def worker(sm, seed):
    """Stores, evicts, replaces, removes, touches, reads and clears."""

    def work():
        chance = random.Random(seed)
        for _ in range(NUM_ROUNDS):
            key, dice = chance.choice(KEYS), chance.random()
            if dice < 0.5:
                put(sm, key)
            elif dice < 0.6:
                put(sm, key, nbytes=CHUNK_BYTES // 2)
            elif dice < 0.75:
                sm.touch(chance.choices(KEYS, k=4))
            elif dice < 0.85:
                sm.remove(key)
            elif dice < 0.99:
                obj = sm.get(key)
                if obj is not None:
                    obj.ref_count_down()
            else:
                sm.clear()

    return work


def counted(works, when_all_are_done):
    """`works`, of which the last to end calls `when_all_are_done`."""
    lock, left = threading.Lock(), [len(works)]

    def wrap(work):
        def run():
            try:
                work()
            finally:
                with lock:
                    left[0] -= 1
                    if not left[0]:
                        when_all_are_done()

        return run

    return [wrap(work) for work in works]


class LosingConsumer:
    """Polls a small ring; after each LOST it starts anew from a snapshot."""

    def __init__(self, sm, capacity):
        self.sm = sm
        self.subscription = sm.subscribe(capacity=capacity)
        self.mirror = Mirror(sm.snapshot())
        self.heard = []
        self.producers_are_done = threading.Event()

    def work(self):
        while not self.producers_are_done.is_set():
            self.poll()
        self.poll()

    def poll(self):
        told = self.subscription.take()
        self.heard += told
        if told and told[0].kind is LOST:
            self.mirror = Mirror(self.sm.snapshot())
        later = [event for event in told if event.seq > self.mirror.seq]
        self.mirror.apply(event for event in later if event.kind is not LOST)


@pytest.mark.parametrize("tiers", LOWER_TIERS, ids=["one tier", "three tiers"])
def test_a_loser_hears_every_loss_once_and_finds_its_way_back(make_manager, tiers):
    sm = make_manager(num_chunks=8, tiers=tiers)
    start = sm.snapshot().seq
    consumer = LosingConsumer(sm, capacity=16)
    for key in KEYS:  # more than the ring holds: there is a loss, however threads interleave
        put(sm, key)
    producers = [worker(sm, seed) for seed in range(NUM_THREADS)]

    run_together([*counted(producers, consumer.producers_are_done.set), consumer.work])

    num_made = sm.snapshot().seq - start
    lost = [event for event in consumer.heard if event.kind is LOST]
    told = [event for event in consumer.heard if event.kind is not LOST]
    assert lost
    assert sum(event.num_lost for event in lost) + len(told) == num_made
    assert sum(event.num_lost for event in lost) == consumer.subscription.num_lost
    numbers = [event.seq for event in told]
    for event in lost:
        assert event.last_lost - event.first_lost + 1 == event.num_lost
        numbers += range(event.first_lost, event.last_lost + 1)
    assert sorted(numbers) == list(range(start + 1, start + 1 + num_made))
    order = [event.seq for event in consumer.heard]
    assert order == sorted(set(order))
    assert consumer.mirror.residents == sm.snapshot().residents


@pytest.mark.parametrize("tiers", LOWER_TIERS, ids=["one tier", "three tiers"])
def test_a_callback_hears_everything_in_order_and_its_replay_is_the_truth(make_manager, tiers):
    sm = make_manager(num_chunks=8, tiers=tiers)
    mirror, recorder = Mirror(sm.snapshot()), Recorder()
    sm.subscribe(recorder, capacity=1 << 20)

    run_together([worker(sm, seed) for seed in range(NUM_THREADS)])

    snapshot = sm.snapshot()
    recorder.wait_until(lambda events: events and events[-1].seq == snapshot.seq)
    mirror.apply(recorder.events)
    assert mirror.residents == snapshot.residents
    assert mirror.keys_in(CPU) == set(sm.local_cpu_backend.hot_cache)
    assert len(set(recorder.threads)) == 1
    sm.close()
    assert [e.kind for e in recorder.wait_for_close()].count(CLOSED) == 1


def test_a_callback_that_uses_the_cache_meets_eight_threads_that_do(make_manager):
    sm = make_manager(num_chunks=8)
    chance = random.Random(0)

    def react(events):
        sm.touch([event.key for event in events if event.key is not None])
        for event in events[:4]:
            if event.kind is not CLOSED and chance.random() < 0.2:
                put(sm, chance.choice(KEYS))
                sm.remove(event.key)

    recorder = Recorder(then=react)
    subscription = sm.subscribe(recorder)
    run_together([worker(sm, seed) for seed in range(NUM_THREADS)])
    sm.close()

    recorder.wait_for_close()
    assert subscription.callback_errors == 0


def test_subscriptions_that_come_and_go_hear_an_unbroken_piece(make_manager):
    sm = make_manager(num_chunks=8)
    done = threading.Event()
    pieces = []

    def come_and_go():
        while not done.is_set():
            with sm.subscribe() as subscription:
                snapshot = sm.snapshot()
                sm.touch(KEYS)
                pieces.append((snapshot, subscription.take(), sm.snapshot()))

    run_together(
        [*counted([worker(sm, seed) for seed in range(NUM_THREADS)], done.set), come_and_go]
    )

    assert pieces
    for snapshot, told, later in pieces:
        mirror = Mirror(snapshot)
        mirror.apply(event for event in told if event.seq > snapshot.seq)
        assert mirror.seq <= later.seq
        if mirror.seq == later.seq:
            assert mirror.residents == later.residents


def test_a_subscription_closed_by_one_thread_and_taken_by_another_never_fails(make_manager):
    sm = make_manager(num_chunks=8)
    subscriptions = [sm.subscribe() for _ in range(100)]
    heard = []

    def take():
        for subscription in subscriptions:
            heard.append(subscription.take())

    def close():
        for subscription in subscriptions:
            subscription.close()

    run_together([take, close, *[worker(sm, seed) for seed in range(2)]])

    for told in heard:
        numbers = [event.seq for event in told]
        assert numbers == sorted(set(numbers))
    assert all(subscription.take() == [] for subscription in subscriptions)


def test_a_manager_closed_while_threads_work_sends_each_subscriber_one_closed_at_the_end(
    make_manager,
):
    sm = make_manager(num_chunks=8)
    recorder, subscription = Recorder(), sm.subscribe()
    sm.subscribe(recorder)

    def touch():
        for _ in range(NUM_ROUNDS):
            sm.touch(KEYS)
            sm.remove(KEYS[0])

    for key in KEYS:
        put(sm, key)
    run_together([touch, touch, touch, sm.close, sm.close])

    told = subscription.take()
    assert [event.kind for event in told].count(CLOSED) == 1
    assert told[-1].kind is CLOSED
    assert recorder.wait_for_close() == told


# --- touch and events in one order -----------------------------------------------------------
class Log:
    """Who was resident where, by event number."""

    def __init__(self, events):
        self.changes = {}
        for event in events:
            numbers, states = self.changes.setdefault((event.key, event.tier), ([], []))
            numbers.append(event.seq)
            states.append(event.kind is STORED)

    def is_resident(self, key, tier, seq):
        numbers, states = self.changes.get((key, tier), ([], []))
        position = bisect_right(numbers, seq)
        return position > 0 and states[position - 1]


@pytest.mark.parametrize("move", ["touch", "demote"])
@pytest.mark.parametrize("tiers", LOWER_TIERS, ids=["one tier", "three tiers"])
def test_a_verdict_says_what_the_events_say_at_its_number(make_manager, tiers, move):
    sm = make_manager(num_chunks=8, tiers=tiers)
    names = [CPU, *tiers]
    subscription = sm.subscribe(capacity=1 << 20)
    asked = []

    def ask(seed):
        chance = random.Random(seed)
        call = sm.touch if move == "touch" else sm.demote

        def work():
            for _ in range(2 * NUM_ROUNDS):
                batch = chance.sample(KEYS, k=6)
                asked.append((batch, call(batch)))

        return work

    run_together([worker(sm, seed) for seed in range(6)] + [ask(seed) for seed in (100, 200)])

    log = Log(subscription.take())
    verdicts = set()
    assert len(asked) == 4 * NUM_ROUNDS
    for batch, result in asked:
        for key, verdict, location in zip(batch, result, result.locations, strict=True):
            holding = [name for name in names if log.is_resident(key, name, result.seq)]
            assert location == (holding[0] if holding else None)
            assert (verdict is TouchVerdict.REFRESHED) == (location == CPU)
            assert (verdict is TouchVerdict.GONE) == (location is None)
            verdicts.add(verdict)
    assert {TouchVerdict.REFRESHED, TouchVerdict.GONE} <= verdicts
