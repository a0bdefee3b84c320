"""A process that has a monitor, as a wrapped rank has: run as a script, it does what it reads.

    python -I -S watched_rank.py NAME PACKET

It connects to the socket of that name, sends the packet, and says "ready". It reads `send TEXT`,
`close`, `connect` (again, with the same packet) or `dial` and `speak` for the two parts of that,
and says "done" after each; and `fork`, after which it says the pid of a child that holds the
connection until it is killed.
"""

import os
import signal
import socket
import sys


def dial() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect("\0" + sys.argv[1])
    return connection


def connect() -> socket.socket:
    connection = dial()
    connection.send(sys.argv[2].encode())
    return connection


def main() -> None:
    connection = connect()
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, text = line.rstrip("\n").partition(" ")
        if word == "send":
            connection.send(text.encode())
        elif word == "close":
            connection.close()
        elif word == "connect":
            connection = connect()
        elif word == "dial":
            connection = dial()
        elif word == "speak":
            connection.send(sys.argv[2].encode())
        elif word == "fork" and (child := os.fork()) == 0:
            signal.pause()
        print(child if word == "fork" else "done", flush=True)


if __name__ == "__main__":
    main()
