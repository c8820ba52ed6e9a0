"""Messages that take longer: a communicator whose messages arrive some time after they were sent."""

import time

import numpy as np

__all__ = ["late"]


def late(kind, delay):
    """A class of communicators whose messages take at least so long, which costs no processor.

    The time counts from the sender's call: with each message travels when it was sent, and the receiver waits until it
    is due. All ranks must have one clock, as processes of one machine have.

    Parameters
    ----------
    kind : type
        A class of `arrayopt.ranks.comm.Comm`.
    delay : callable
        The seconds that a message takes, from its number of bytes.
    """

    class Late(kind):
        processes = False  # whose memory is read without a message

        def allgather(self, sent, counts):
            wait = super().allgather(np.concatenate([_now(), sent]), [8 + count for count in counts])

            def finish():
                found = wait()
                _sleep([piece[:8] for r, piece in enumerate(found) if r != self.rank], sum(counts), delay)
                return [piece[8:] for piece in found]

            return finish

        def start_broadcast(self, pieces):
            stamps = [(root, _now()) for root in sorted({root for root, _ in pieces})]
            wait = super().start_broadcast([*pieces, *stamps])

            def finish():
                wait()
                others = [stamp for root, stamp in stamps if root != self.rank]
                _sleep(others, sum(piece.nbytes for _, piece in pieces), delay)

            return finish

        def start_alltoall(self, sent, counts, room, received):
            wait, stamps = super().start_alltoall(sent, counts, room, received), np.zeros(8 * self.size, np.uint8)
            eight = [8] * self.size
            wait_for_stamps = super().start_alltoall(np.tile(_now(), self.size), eight, stamps, eight)

            def finish():
                wait()
                wait_for_stamps()
                sources = [r for r, count in enumerate(received) if count and r != self.rank]
                _sleep([stamps[8 * r : 8 * r + 8] for r in sources], sum(received), delay)

            return finish

    return Late


def _now():
    """The time, as bytes of a message."""
    return np.array([time.monotonic()]).view(np.uint8)


def _sleep(stamps, size, delay):
    """Wait until the last of some messages is due."""
    if stamps:
        due = max(float(stamp.view(np.float64)[0]) for stamp in stamps) + delay(size)
        time.sleep(max(0.0, due - time.monotonic()))
