"""A process with a monitor, like a wrapped rank: a script that follows the commands on its stdin.

    python -I -S watched_rank.py NAME PACKET

It connects to the socket with that name, sends the packet, and prints "ready". It prints "done"
after each command: `send TEXT`, `close`, `connect` (again, with the same packet), or the two parts
of `connect`, `dial` and `speak`. After `fork` it prints the pid of a child, which holds the
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
