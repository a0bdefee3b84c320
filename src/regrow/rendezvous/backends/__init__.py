"""The rendezvous backends, named as in `--rdzv-backend`."""
