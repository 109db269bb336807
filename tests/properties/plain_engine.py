"""What an engine must do, on plain lists: which chunks are there, in which order, and pinned."""

NUM_CHUNKS = 6


def prefixes(word):
    """The chunks of a prompt, head first; each is named by the prompt that ends with it."""
    return [word[: end + 1] for end in range(len(word))]


class PlainEngine:
    """What must be true, written as plainly as can be.

    `order` lists resident chunks, coldest first. A copy has a number; a pin is on a copy, whose
    bytes stay taken after its chunk was removed.
    """

    def __init__(self):
        self.order = []
        self.copies = {}
        self.num_copies = 0
        self.pins = {}  # lookup id -> {chunk: number of the copy}

    def pinned(self):
        return {copy for pins in self.pins.values() for copy in pins.values()}

    def use(self, chunks):
        """Head first in, head youngest."""
        for chunk in reversed(chunks):
            self.order.remove(chunk)
            self.order.append(chunk)

    def drop(self, chunk):
        self.order.remove(chunk)
        del self.copies[chunk]

    def hit(self, word):
        found = []
        for chunk in prefixes(word):
            if chunk not in self.copies:
                break
            found.append(chunk)
        return found

    def make_room(self, protected, num_taken):
        """Whether one more chunk finds room beside `num_taken` new ones; evicts for it."""
        pinned = self.pinned()
        if len(set(self.copies.values()) | pinned) + num_taken < NUM_CHUNKS:
            return True
        for chunk in self.order:
            if chunk not in protected and self.copies[chunk] not in pinned:
                self.drop(chunk)
                return True
        return False

    def store(self, word, first, fail_at):
        """Return how many chunks are new; None when the copy failed."""
        kept, new = [], []
        for position, chunk in enumerate(prefixes(word)):
            if chunk in self.copies:
                kept.append(chunk)
            elif position >= first:
                leading = self.hit(word)
                if not self.make_room({*kept, *leading}, len(new)):
                    break
                kept.append(chunk)
                new.append(chunk)
        if fail_at is not None and fail_at < len(new):
            return None
        for chunk in new:
            self.num_copies += 1
            self.copies[chunk] = self.num_copies
            self.order.append(chunk)
        self.use(kept)
        return len(new)

    def lookup(self, word, lookup_id):
        found = self.hit(word)
        if lookup_id is not None and found:
            pins = self.pins.setdefault(lookup_id, {})
            self.use([chunk for chunk in found if chunk not in pins])
            pins.update({chunk: self.copies[chunk] for chunk in found})
        return found

    def clear(self):
        for chunk in list(self.order):
            if self.copies[chunk] not in self.pinned():
                self.drop(chunk)
