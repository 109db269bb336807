"""The disk tier's queue: when what was put is done."""

import pytest
from builders import allocate, keys

from lmcache.v1.native import Pool
from lmcache.v1.storage_backend.disk.disk_chunk import chunk_of
from lmcache.v1.storage_backend.disk.write_queue import WriteQueue


@pytest.fixture
def chunk(make_manager):
    sm = make_manager()
    obj = allocate(sm)
    yield chunk_of(Pool(0), keys(1)[0], obj, 1)
    obj.ref_count_down()


def test_put_is_done_when_its_object_is_released_not_when_its_file_is_whole(chunk):
    queue = WriteQueue(1 << 20)
    queue.add(chunk)
    before_the_round = queue.mark()
    queue.begin_round()
    sources = queue.finish(chunk, True)
    assert not queue.is_done(before_the_round)
    for source in sources:
        source.ref_count_down()
    queue.end_round()
    assert queue.is_done(before_the_round)
    assert queue.is_done(queue.mark())


def test_put_does_not_wait_for_one_that_came_later(chunk):
    queue = WriteQueue(1 << 20)
    empty = queue.mark()
    queue.add(chunk)
    assert queue.is_done(empty) and not queue.is_done(queue.mark())
    queue.begin_round()
    assert queue.is_done(empty) and not queue.is_done(queue.mark())
    for source in queue.finish(chunk, True):
        source.ref_count_down()
    queue.end_round()
    assert queue.is_done(queue.mark())
