"""Messages that take longer: a communicator whose calls end some time after they began."""

import time

__all__ = ["late"]


def late(kind, delay):
    """A class of communicators whose messages take at least so long, which costs no processor.

    Parameters
    ----------
    kind : type
        A class of `arrayopt.ranks.comm.Comm`.
    delay : callable
        The seconds between the beginning of a call and its end, from the number of bytes that it sends and receives
        here.
    """

    class Late(kind):
        def _later(self, start, size):
            due = time.monotonic() + delay(size)
            wait = start()

            def finish():
                found = wait()
                time.sleep(max(0.0, due - time.monotonic()))
                return found

            return finish

        def allgather(self, sent, counts):
            size = sum(counts)
            return self._later(lambda: super(Late, self).allgather(sent, counts), size)

        def broadcast(self, pieces):
            self.start_broadcast(pieces)()

        def start_broadcast(self, pieces):
            size = sum(piece.nbytes for _, piece in pieces)
            return self._later(lambda: super(Late, self).start_broadcast(pieces), size)

        def start_exchange(self, sent, received):
            size = sum(piece.nbytes for _, piece in (*sent, *received))
            return self._later(lambda: super(Late, self).start_exchange(sent, received), size)

        def start_add(self, values, counts):
            return self._later(lambda: super(Late, self).start_add(values, counts), values.nbytes)

    return Late
