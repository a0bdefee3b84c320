"""One attempt: form a round, start workers in it, watch them, stop them."""
