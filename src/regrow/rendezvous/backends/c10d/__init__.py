"""Rendezvous `c10d`: at a store server of regrow, or in a store of torch."""
