"""A port on which nothing listens."""

import random
import socket

DRAWN = random.SystemRandom()


def free_port():
    """Below those that the kernel gives to others (32768 and more, on a Mac 49152): nobody else
    asks for it before it is used."""
    while True:
        port = DRAWN.randrange(10_000, 32_000)
        with socket.socket() as probe:
            # as servers do: one that has just closed it is no hindrance
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
