"""Command line of `regrow run`: flags, parser, checks, devices, placement."""
