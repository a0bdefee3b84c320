"""Command `regrow web [LOGDIR ...]`: show running and finished jobs as a page in a browser."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib.util import find_spec

from regrow.cli.args.which_job import add_library, library_of

PORT = 8450
"""The port that is tried first; a random one if it is in use."""


def main(arguments: Sequence[str]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        arguments: the arguments after `regrow web`.

    Raises:
        SystemExit: code 2 after it printed a mistake.
        RendezvousError: the job is not reached, or the token is missing or wrong.
    """
    parser = ArgumentParser(
        prog="regrow web",
        description="Show jobs as a page in a browser: running ones live, and the logs of those"
        " that have ended. The page changes nothing. Open the address that this command prints; it"
        " contains a token, without which no data is served.",
    )
    add_library(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, for this host only)",
    )
    parser.add_argument(
        "--port", type=int, help=f"port (default: {PORT}, or a free one if it is in use)"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="file with the token, as `regrow token FILE` makes it; default: a new token",
    )
    args = parser.parse_args(arguments)
    if any(find_spec(module) is None for module in ("starlette", "uvicorn")):
        parser.exit(
            2, "regrow web: starlette and uvicorn are missing: pip install starlette uvicorn\n"
        )
    token = _token(args.token_file)
    library = library_of(args, parser)
    from urllib.parse import quote

    from regrow.views.web.server import bind, serve

    try:
        if args.port is None:
            try:
                listener = bind(args.host, PORT)
            except OSError:
                listener = bind(args.host, 0)
        else:
            listener = bind(args.host, args.port)
    except (OSError, OverflowError) as error:
        parser.exit(2, f"regrow web: cannot listen on {args.host}:{args.port or PORT}: {error}\n")
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if address in ("0.0.0.0", "::"):
        shown = os.uname().nodename
    if not address.startswith("127.") and address != "::1":
        print(
            "regrow web: the page is not encrypted: anyone who can read the network's traffic can"
            " read the page and its token",
            file=sys.stderr,
        )
    print(f"regrow web: open http://{shown}:{port}/#token={quote(token)}", flush=True)
    serve(library, token, listener)


def _token(file: str | None) -> str:
    if file is None:
        from secrets import token_urlsafe

        return token_urlsafe(32)
    from regrow.store import StoreAuthError, read_token_file

    try:
        token = read_token_file(file).decode("ascii")
    except (OSError, StoreAuthError, UnicodeDecodeError) as error:
        print(f"regrow web: --token-file {file}: {error}", file=sys.stderr)
        sys.exit(2)
    return token
