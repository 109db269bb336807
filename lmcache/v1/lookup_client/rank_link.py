"""A lookup client's connection to one rank."""

import zmq

from lmcache.logging import init_logger
from lmcache.v1.lookup_client.messages import NUMBER_BYTES, PING, RankAddress

logger = init_logger(__name__)

_PING_INTERVAL_SECONDS = 1.0
_PING_NUMBER = 0


class RankLink:
    """The socket to one rank's server, and whether it is worth waiting for.

        state     meaning                                               who may leave it
        trusted   nothing speaks against it: lookups wait for it        mark_silent
        suspect   it let a lookup wait in vain: lookups answer 0 at     any reply of it, also a
                  once, and ping it once a second                       late one

    Not synchronised: the client's lock guards it.

    Args:
        context: Of the client.
        address: The rank's.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: RankAddress) -> None:
        self.address = address
        self.is_trusted = True
        self._context = context
        self._pinged_s: float | None = None
        self._connect()

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Nothing is queued for a server that is not there: it would be answered much later, and
        # pin for a request that is long gone.
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        # Tells when a connection is lost: a request just sent may have been lost with it.
        self.losses: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"ipc://{self.address.path}")

    def reset(self) -> None:
        """Connect anew: an interrupt may have left half a message in the socket."""
        self.close()
        self._connect()

    def forget_losses(self) -> None:
        """Take note of the connections lost so far."""
        while self.losses.poll(0):
            self.losses.recv_multipart(zmq.NOBLOCK)

    def send(self, number: int, payload: bytes, wait_seconds: float) -> bool:
        """Send a request once the server is connected; False when it is not in time."""
        if not self.socket.poll(int(wait_seconds * 1000), zmq.POLLOUT):
            return False
        self.socket.send_multipart([number.to_bytes(NUMBER_BYTES, "big"), payload], zmq.NOBLOCK)
        return True

    def receive(self, number: int) -> bytes | None:
        """Return the reply numbered `number` if it is there; drops replies to older requests."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            self._trust()
            if len(frames) == 2 and int.from_bytes(frames[0], "big") == number:
                return frames[1]

    def mark_silent(self, timeout_ms: int) -> None:
        """Take note that the server did not answer in time."""
        if self.is_trusted:
            logger.warning(
                "the lookup server of rank %d (%s) did not answer within lookup_timeout_ms=%d: "
                "lookups find nothing until it does",
                self.address.rank,
                self.address.path,
                timeout_ms,
            )
        self.is_trusted = False

    def look_again(self, now_s: float) -> None:
        """See whether a suspect server is alive after all; ping it if it is time."""
        self.receive(_PING_NUMBER)
        is_time = self._pinged_s is None or now_s - self._pinged_s >= _PING_INTERVAL_SECONDS
        if not self.is_trusted and is_time and self.send(_PING_NUMBER, PING, 0):
            self._pinged_s = now_s

    def _trust(self) -> None:
        if not self.is_trusted:
            logger.info("the lookup server of rank %d answers again", self.address.rank)
        self.is_trusted = True
        self._pinged_s = None

    def close(self) -> None:
        """Close the socket."""
        self.socket.disable_monitor()
        self.losses.close(linger=0)
        self.socket.close(linger=0)
