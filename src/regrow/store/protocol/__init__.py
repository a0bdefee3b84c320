"""The protocol between client and server: frames, handshake, TLS, tokens, addresses."""
