"""Asynchronous operations in progress: their futures by type, status and id."""

import asyncio
import threading
from enum import Enum, auto
from typing import Any, TypeAlias

from lmcache.v1.errors import EventStateError

EventFuture: TypeAlias = "asyncio.Future[Any]"


class EventType(Enum):
    """What is being done."""

    LOADING = auto()


class EventStatus(Enum):
    """How far it is.

    | status    | meaning                              | left through                        |
    |-----------|--------------------------------------|-------------------------------------|
    | ONGOING   | added, not finished                  | `update_event_status`               |
    | DONE      | finished; its future may be taken    | `pop_event`, `update_event_status`  |
    | NOT_FOUND | answer for ids that are not here     | `add_event`                         |
    """

    ONGOING = auto()
    DONE = auto()
    NOT_FOUND = auto()


class EventManager:
    """Keeps one future per (type, id).

    Threads: every method is safe from any thread; one lock guards `events`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.events: dict[EventType, dict[EventStatus, dict[str, EventFuture]]] = {
            event_type: {status: {} for status in EventStatus} for event_type in EventType
        }

    def add_event(self, event_type: EventType, event_id: str, future: EventFuture) -> None:
        """Add an event as ONGOING; one of the same id and status is replaced."""
        with self.lock:
            self.events[event_type][EventStatus.ONGOING][event_id] = future

    def pop_event(self, event_type: EventType, event_id: str) -> EventFuture:
        """Remove a DONE event and return its future.

        Raises:
            EventStateError: There is no such event, or it is not DONE.
        """
        with self.lock:
            return self._done_events_locked(event_type, event_id).pop(event_id)

    def get_event_future(self, event_type: EventType, event_id: str) -> EventFuture:
        """Return the future of a DONE event, which stays.

        Raises:
            EventStateError: There is no such event, or it is not DONE.
        """
        with self.lock:
            return self._done_events_locked(event_type, event_id)[event_id]

    def update_event_status(
        self, event_type: EventType, event_id: str, status: EventStatus
    ) -> None:
        """Give an event another status.

        Raises:
            EventStateError: There is no such event.
        """
        with self.lock:
            by_status = self.events[event_type]
            for events in by_status.values():
                if event_id in events:
                    future = events.pop(event_id)
                    by_status[status][event_id] = future
                    return
        raise EventStateError(f"Event {event_id} of type {event_type} is not found")

    def get_event_status(self, event_type: EventType, event_id: str) -> EventStatus:
        """Return the status of an event, NOT_FOUND for an unknown id."""
        with self.lock:
            for status, events in self.events[event_type].items():
                if event_id in events:
                    return status
        return EventStatus.NOT_FOUND

    def get_events_count_by_status(self, event_type: EventType, status: EventStatus) -> int:
        """Return how many events of a type have a status; O(1)."""
        with self.lock:
            return len(self.events[event_type][status])

    def _done_events_locked(self, event_type: EventType, event_id: str) -> dict[str, EventFuture]:
        done = self.events[event_type][EventStatus.DONE]
        if event_id not in done:
            raise EventStateError(f"Event {event_id} of type {event_type} is not done")
        return done
