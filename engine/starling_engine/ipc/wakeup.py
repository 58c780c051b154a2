"""A wake-up call for a process that waits for messages."""

import os


class Wakeup:
    """Other threads call `set`; a poll on `fd` ends, and goes on ending at once until `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def __del__(self) -> None:
        os.close(self.fd)
